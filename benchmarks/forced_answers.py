"""Are forced answers worth their tokens? sc and Gambit on pawn, or on a benchmark, under hard budgets of tokens.

    python benchmarks/forced_answers.py --puzzles 100 --out benchmarks/results/forced_answers.json --seconds 900
    … --benchmark chains:16 --model DIR --scorer FILE --engine '{"engine": "vllm"}' --search '{"temperature": 0.8}'
    python benchmarks/forced_answers.py --count OUT/*.jsonl --out OUT.json       # rows of several engines together

A puzzle's budget is a share of the tokens that all C traces of self-consistency need for it. Compared are: answers that
are forced near the budget, none that are, and the same budget for fewer traces (C/2, C/4), which run to their ends more
often. Intervals are paired 95 % bootstraps over puzzles. Forced answers are also counted with less weight or none. The
searches that are done by `--seconds` are what is reported; the puzzles come in the order of the test split. Rows are
written beside the result (`.jsonl`), and a second call goes on where the first ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.bench.datasets import Item, benchmark_for
from gambit.config import registry
from gambit.results.record import SearchRecord, fold
from gambit.results.vote import count_votes
from gambit.stats import mean_interval, resamples
from gambit.tree import TraceState
from gambit.types import Problem

SHARES = (0.5, 0.7, 1.0)
POLICIES = ("sc", "gambit")
WEIGHTS = (1.0, 0.5, 0.0)  # of a forced answer
Asked = tuple[Item, dict[str, object]]  # a problem, and the options of its search


def variants(capacity: int) -> dict[str, dict[str, object]]:
    """Returns the ways to spend a budget, by name."""
    return {
        "none": {"capacity": capacity},
        "forced": {"capacity": capacity, "force_answers": "auto"},
        "C/2": {"capacity": capacity // 2},
        "C/4": {"capacity": capacity // 4},
    }


class Measure:
    """All searches of a few problems at a time."""

    def __init__(self, solver: Solver, capacity: int, search: dict[str, object]) -> None:
        self.solver, self.capacity, self.search = solver, capacity, search

    def searched(self, asked: Sequence[Asked]) -> Iterator[SearchRecord]:
        """Runs searches in one batch; yields their records in order."""
        logs: list[list[ev.Event]] = [[] for _ in asked]
        pending = [
            self.solver.submit(
                Problem(item.question, id=item.id), SearchConfig(own_noise=True, **self.search, **options),
                on_event=log.append,
            )
            for (item, options), log in zip(asked, logs, strict=True)
        ]  # fmt: skip
        for each, log in zip(pending, logs, strict=True):
            each.result()
            yield fold(log)

    def rows(self, items: Sequence[Item]) -> Iterator[dict[str, object]]:
        """Yields a row for each problem, policy, share and variant. The searches of a problem share random numbers."""
        whole = self.searched([(item, {"policy": "sc", "capacity": self.capacity}) for item in items])
        needed = [record.tokens.generated for record in whole]
        ways = variants(self.capacity)
        cases = [
            (item, tokens, policy, share, variant)
            for item, tokens in zip(items, needed, strict=True)
            for policy in POLICIES
            for share in SHARES
            for variant in ways
        ]
        asked = [
            (item, {**ways[variant], "policy": policy, "budget_tokens": round(share * tokens)})
            for item, tokens, policy, share, variant in cases
        ]
        for (item, tokens, _, share, variant), record in zip(cases, self.searched(asked), strict=True):
            yield self.row(record, item, tokens) | {"share": share, "variant": variant}

    def row(self, record: SearchRecord, item: Item, needed: int) -> dict[str, object]:
        voters = record.tree.voters()
        forced = [self.solver.grade(trace.answer, item.answer) for trace in voters if trace.num_given]
        own = [
            self.solver.grade(trace.answer, item.answer)
            for trace in voters
            if not trace.num_given and trace.answer is not None
        ]
        return {
            "puzzle": item.id,
            "capacity": self.capacity,
            "policy": record.started.policy,
            "right": right_by_weight(record, self.solver.equivalent, item.answer),
            "tokens": record.tokens.generated,
            "needed": needed,
            "completed": record.tree.count(TraceState.FINISHED),
            "forced": [len(forced), sum(forced)],
            "own": [len(own), sum(own)],
        }


def right_by_weight(record: SearchRecord, equivalent: Callable[[str, str], bool], gold: str) -> dict[str, bool]:
    """Returns whether the vote is right, by the weight of forced answers."""
    forced = {trace.id for trace in record.tree.traces if trace.num_given}
    found = {}
    for factor in WEIGHTS:
        ballots = [
            dataclasses.replace(each, weight=each.weight * (factor if each.trace in forced else 1.0))
            for each in record.ballots()
            if factor or each.trace not in forced
        ]
        answer = count_votes(ballots, record.vote_kind, equivalent).answer
        found[f"{factor:g}"] = answer is not None and equivalent(answer, gold)
    return found


def summary(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Returns shares of right answers and paired differences, over the puzzles for which every search was done."""
    capacity = rows[0]["capacity"]
    cells: defaultdict[tuple[str, float, str], dict[str, dict[str, object]]] = defaultdict(dict)
    for row in rows:
        cells[row["policy"], row["share"], row["variant"]][row["puzzle"]] = row
    numbers = sorted(set.intersection(*(set(cell) for cell in cells.values())))
    draws = resamples(len(numbers))

    def right(policy: str, share: float, variant: str, weight: str = "1") -> np.ndarray:
        return np.array([cells[policy, share, variant][n]["right"][weight] for n in numbers], float)

    def points(values: np.ndarray) -> list[float]:
        found = mean_interval(100 * values, draws)
        return [round(each, 1) for each in (found.value, found.low, found.high)]

    table = []
    for policy in POLICIES:
        for share in SHARES:
            forced = right(policy, share, "forced")
            mine = cells[policy, share, "forced"]
            counts = {name: [sum(mine[n][name][i] for n in numbers) for i in (0, 1)] for name in ("forced", "own")}
            shares = {f"right_{name}": round(100 * k / max(n, 1), 1) for name, (n, k) in counts.items()}
            table.append({
                "policy": policy,
                "share": share,
                "right": {name: points(right(policy, share, name)) for name in variants(capacity)},
                "forced_minus": {
                    name: points(forced - right(policy, share, name)) for name in variants(capacity) if name != "forced"
                },
                "right_by_weight": {f"{w:g}": points(right(policy, share, "forced", f"{w:g}")) for w in WEIGHTS},
                "forced_answers": counts["forced"][0],
                "own_answers": counts["own"][0],
                **shares,
            })  # fmt: skip
    below = [row for row in table if min(row["forced_minus"][name][0] for name in ("C/2", "C/4")) < 0]
    return {"puzzles": len(numbers), "capacity": capacity, "table": table, "is_never_below_fewer_traces": not below}


def read_rows(path: Path) -> list[dict[str, object]]:
    """Returns the rows of problems that were finished."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    each = len(POLICIES) * len(SHARES) * len(variants(1))
    counts = Counter(row["puzzle"] for row in rows)
    return [row for row in rows if counts[row["puzzle"]] == each]


def write(out: Path, rows: Sequence[dict[str, object]]) -> None:
    out.write_text(json.dumps(summary(rows), indent=1) + "\n", encoding="utf-8")


def problems_of(benchmark: str, count: int, shard: str) -> list[Item]:
    first, step = map(int, shard.split("/"))
    return list(islice(benchmark_for(benchmark).first(count), first - 1, None, step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--benchmark", default="pawn", help=f"{', '.join(registry.names('gambit.benchmarks'))}, …")
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--scorer", default="auto")
    parser.add_argument("--engine", type=json.loads, default={}, help="options of the engine, as JSON")
    parser.add_argument("--search", type=json.loads, default={}, help="options of all searches, as JSON")
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=2, help="problems: 24 searches each")
    parser.add_argument("--shard", default="1/1", help="as in 1/3: every third problem, from the first on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more puzzles after this long")
    parser.add_argument("--count", type=Path, nargs="+", help="only count these rows, of several calls")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.count:
        write(given.out, [row for path in given.count for row in read_rows(path)])
        return
    began, path = time.monotonic(), given.out.with_suffix(".jsonl")
    rows = read_rows(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = {row["puzzle"] for row in rows}
    items = [item for item in problems_of(given.benchmark, given.puzzles, given.shard) if item.id not in done]
    with Solver(given.model, scorer=given.scorer, **given.engine) as solver, path.open("a", encoding="utf-8") as file:
        measure = Measure(solver, given.capacity, given.search)
        for first in range(0, len(items), given.at_once):
            if time.monotonic() - began > given.seconds:
                break
            found = list(measure.rows(items[first : first + given.at_once]))
            file.write("".join(json.dumps(row) + "\n" for row in found))
            file.flush()
            rows += found
            write(given.out, rows)
            print(f"{len(done) + first + given.at_once} puzzles, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Are forced answers worth their tokens? sc and Gambit on pawn under hard budgets of tokens.

    python benchmarks/forced_answers.py --puzzles 100 --out benchmarks/results/forced_answers.json --seconds 900

A puzzle's budget is a share of the tokens that all C traces of self-consistency need for it. Compared are: answers that
are forced near the budget, none that are, and the same budget for fewer traces (C/2, C/4), which run to their ends more
often. Intervals are paired 95 % bootstraps over puzzles. Forced answers are also counted with less weight or none. The
searches that are done by `--seconds` are what is reported; the puzzles come in the order of the test split.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.results.record import SearchRecord, fold
from gambit.results.vote import count_votes
from gambit.stats import mean_interval, resamples
from gambit.tree import TraceState
from gambit.types import Problem

SHARES = (0.5, 0.7, 1.0)
POLICIES = ("sc", "gambit")
WEIGHTS = (1.0, 0.5, 0.0)  # of a forced answer
AT_ONCE = 2  # puzzles


def variants(capacity: int) -> dict[str, dict[str, object]]:
    """Returns the ways to spend a budget, by name."""
    return {
        "none": {"capacity": capacity},
        "forced": {"capacity": capacity, "force_answers": "auto"},
        "C/2": {"capacity": capacity // 2},
        "C/4": {"capacity": capacity // 4},
    }


def searched(solver: Solver, asked: Sequence[tuple[int, Puzzle, dict[str, object]]]) -> Iterator[SearchRecord]:
    """Runs searches in one batch; yields their records in order."""
    logs: list[list[ev.Event]] = [[] for _ in asked]
    pending = [
        solver.submit(
            Problem(puzzle.text, id=str(number)), SearchConfig(own_noise=True, **options), on_event=log.append
        )
        for (number, puzzle, options), log in zip(asked, logs, strict=True)
    ]
    for each, log in zip(pending, logs, strict=True):
        each.result()
        yield fold(log)


def right_by_weight(record: SearchRecord, gold: str) -> dict[str, bool]:
    """Returns whether the vote is right, by the weight of forced answers."""
    forced = {trace.id for trace in record.tree.traces if trace.num_given}
    found = {}
    for factor in WEIGHTS:
        ballots = [
            dataclasses.replace(each, weight=each.weight * (factor if each.trace in forced else 1.0))
            for each in record.ballots()
            if factor or each.trace not in forced
        ]
        found[f"{factor:g}"] = count_votes(ballots, record.vote_kind, str.__eq__).answer == gold
    return found


def measure(solver: Solver, puzzles: Sequence[Puzzle], first: int, capacity: int) -> Iterator[dict[str, object]]:
    """Yields a row for each puzzle, policy, share and variant. The searches of a puzzle share their random numbers."""
    numbered = list(enumerate(puzzles, start=first))
    whole = searched(solver, [(*each, {"policy": "sc", "capacity": capacity}) for each in numbered])
    needed = [record.tokens.generated for record in whole]
    cases = [
        (number, puzzle, tokens, policy, share, variant)
        for (number, puzzle), tokens in zip(numbered, needed, strict=True)
        for policy in POLICIES
        for share in SHARES
        for variant in variants(capacity)
    ]
    asked = [
        (number, puzzle, {**variants(capacity)[variant], "policy": policy, "budget_tokens": round(share * tokens)})
        for number, puzzle, tokens, policy, share, variant in cases
    ]
    for (number, puzzle, tokens, _, share, variant), record in zip(cases, searched(solver, asked), strict=True):
        yield row_of(record, puzzle, number, tokens) | {"share": share, "variant": variant}


def row_of(record: SearchRecord, puzzle: Puzzle, number: int, needed: int) -> dict[str, object]:
    gold, voters = str(puzzle.answer), record.tree.voters()
    forced = [trace.answer == gold for trace in voters if trace.num_given]
    own = [trace.answer == gold for trace in voters if not trace.num_given and trace.answer is not None]
    return {
        "puzzle": number,
        "policy": record.started.policy,
        "right": right_by_weight(record, gold),
        "tokens": record.tokens.generated,
        "needed": needed,
        "completed": record.tree.count(TraceState.FINISHED),
        "forced": [len(forced), sum(forced)],
        "own": [len(own), sum(own)],
    }


def summary(rows: Sequence[dict[str, object]], capacity: int) -> dict[str, object]:
    """Returns shares of right answers and paired differences, over the puzzles for which every search was done."""
    cells: defaultdict[tuple[str, float, str], dict[int, dict[str, object]]] = defaultdict(dict)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more puzzles after this long")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    began, rows = time.monotonic(), list[dict[str, object]]()
    puzzles = list(islice(generate(Split.TEST, seed=0), given.puzzles))
    with Solver("pawn") as solver:
        for first in range(0, len(puzzles), AT_ONCE):
            if time.monotonic() - began > given.seconds:
                break
            rows += measure(solver, puzzles[first : first + AT_ONCE], first, given.capacity)
            given.out.write_text(json.dumps(summary(rows, given.capacity), indent=1) + "\n", encoding="utf-8")
            print(f"{first + AT_ONCE} puzzles, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

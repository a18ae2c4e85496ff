"""Does the search pay? Gambit beside self-consistency on pawn's puzzles: same engine, pool, KV room and seeds.

    python benchmarks/pawn_search.py --out benchmarks/results/pawn_search.json     # minutes on a GPU
    python benchmarks/pawn_search.py --quick                                       # a taste, on a CPU
    python benchmarks/pawn_search.py --split dev --variant K8=swap_size:8 …        # to choose settings

Self-consistency is run once per seed and voted three ways (majority, score- and position-weighted): the same traces.
"sc, gambit's tokens" is its majority among the traces that were complete when it had spent what Gambit spent.
Intervals are 95 % bootstraps over puzzles, seeds averaged inside each puzzle.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gambit import SearchConfig, Solver
from gambit.core import events as ev
from gambit.core.problem import Problem
from gambit.core.tree import TraceState, TraceTree
from gambit.core.types import EndReason
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.results.record import SearchRecord, fold
from gambit.results.vote import VoteKind

RESAMPLES = 10_000


@dataclass
class Tally:
    """One method's figures, [puzzle][seed]."""

    right: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    completed: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def per_puzzle(self, name: str) -> np.ndarray:
        column = getattr(self, name)
        return np.array([np.mean(column[puzzle]) for puzzle in sorted(column)])

    def summary(self, resamples: np.ndarray) -> dict[str, object]:
        right = self.per_puzzle("right")
        return {
            "accuracy": float(right.mean()),
            "interval": interval(right, resamples),
            "tokens": float(self.per_puzzle("tokens").mean()),
            "completed": float(self.per_puzzle("completed").mean()),
        }


def interval(values: np.ndarray, resamples: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(values[resamples].mean(axis=1), [0.025, 0.975])]


def is_right(answer: str | None, puzzle: Puzzle) -> bool:
    return answer is not None and answer.strip().isdigit() and int(answer) == puzzle.answer


def voted(record: SearchRecord, kind: VoteKind) -> str | None:
    """What the same completed traces answer under another vote."""
    other = dataclasses.replace(record, started=dataclasses.replace(record.started, vote=kind.value))
    other.tree = record.tree
    return other.vote(lambda a, b: a == b).answer


def cut_to(record: SearchRecord, budget: int) -> SearchRecord:
    """The same run of self-consistency as a token budget would have ended it: only what was complete by then votes.

    All its traces run side by side, so that at step s a trace of length n has cost min(n, s) tokens.
    """
    tree = TraceTree(record.started.capacity, record.tree.aggregation)
    lengths = [trace.num_tokens for trace in record.tree.traces]
    last = max(s for s in range(max(lengths) + 1) if sum(min(n, s) for n in lengths) <= budget)
    for trace in record.tree.traces:
        tree.apply(ev.Created(0, trace.id))
        tree.apply(ev.Admitted(0, trace.id, 0, 0, 0))
    for trace in record.tree.traces:
        if trace.num_tokens <= last:
            tree.apply(ev.Finished(last, trace.id, EndReason.STOP, trace.answer, trace.own_tokens))
        else:
            tree.apply(ev.Cancelled(last, trace.id, trace.own_tokens[:last]))
    cut = dataclasses.replace(record)
    cut.tree = tree
    return cut


def run_policy(
    solver: Solver, puzzles: dict[str, Puzzle], config: SearchConfig, concurrency: int
) -> list[SearchRecord]:
    """Every puzzle searched once; gives the folded logs."""
    logs: dict[str, list[ev.Event]] = defaultdict(list)
    records = []
    problems = [Problem(puzzle.text, id=name) for name, puzzle in puzzles.items()]
    for result in solver.solve_many(
        problems, config, concurrency=concurrency, on_event=lambda name, event: logs[name].append(event)
    ):
        if result.error:
            raise SystemExit(f"{result.problem_id}: {result.error}")
        records.append(fold(logs.pop(result.problem_id)))
    return records


def note(tally: Tally, record: SearchRecord, right: bool) -> None:
    name = record.started.problem_id
    tally.right[name].append(right)
    tally.tokens[name].append(record.tokens.generated)
    tally.completed[name].append(record.counts.completed)


def score(
    tallies: dict[str, Tally],
    label: str,
    records: list[SearchRecord],
    puzzles: dict[str, Puzzle],
    plain: dict[str, SearchRecord],
) -> None:
    for record in records:
        puzzle = puzzles[record.started.problem_id]
        if label == "sc":
            plain[record.started.problem_id] = record
            for kind in (VoteKind.MAJORITY, VoteKind.SCORE, VoteKind.POSITION):
                name = "sc" if kind is VoteKind.MAJORITY else f"sc, {kind.value} vote"
                note(tallies[name], record, is_right(voted(record, kind), puzzle))
            done = list(record.tree.in_state(TraceState.FINISHED))
            hits = [is_right(trace.answer, puzzle) for trace in done]
            tallies["single trace"].right[record.started.problem_id].append(float(np.mean(hits)))
            lengths = [trace.num_tokens for trace in done]
            tallies["single trace"].tokens[record.started.problem_id].append(float(np.mean(lengths)))
            tallies["single trace"].completed[record.started.problem_id].append(1)
        else:
            note(tallies[label], record, is_right(voted(record, VoteKind(record.started.vote)), puzzle))
            if label == "gambit":
                same = cut_to(plain[record.started.problem_id], record.tokens.generated)
                note(tallies["sc, gambit's tokens"], same, is_right(voted(same, VoteKind.MAJORITY), puzzle))


def parse_variant(text: str) -> tuple[str, dict[str, object]]:
    """`name=swap_size:8,check_interval:12`"""
    name, _, rest = text.partition("=")
    pairs = (pair.partition(":") for pair in rest.split(",") if pair)
    return name, {key: json.loads(value) if value[:1] in "-0123456789tf" else value for key, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--split", choices=["test", "dev"], default="test")
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pool", type=int, default=64)
    parser.add_argument("--kv-budget-tokens", type=int, default=16_384, help="room per puzzle that runs")
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--variant", action="append", default=[], help="another gambit: name=option:value,…")
    parser.add_argument("--quick", action="store_true", help="12 puzzles, one seed, two at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.puzzles, options.seeds, options.concurrency = 12, 1, 2
    warnings.simplefilter("ignore")
    split = Split[options.split.upper()]
    source = itertools.islice(generate(split, seed=0), options.puzzles)
    puzzles = {f"{options.split}-{i:04d}": puzzle for i, puzzle in enumerate(source)}
    room = options.kv_budget_tokens * options.concurrency
    solver = Solver(options.model, device=options.device, dtype=options.dtype, kv_budget_tokens=room)
    methods = {"sc": {"policy": "sc"}, "gambit": {}, **dict(map(parse_variant, options.variant))}
    tallies: dict[str, Tally] = defaultdict(Tally)
    seconds: dict[str, float] = defaultdict(float)
    for seed in range(options.seeds):
        plain: dict[str, SearchRecord] = {}  # self-consistency's runs with this seed
        for label, changes in methods.items():
            began = time.perf_counter()
            config = SearchConfig(capacity=options.pool, seed=seed, **changes)
            records = run_policy(solver, puzzles, config, options.concurrency)
            seconds[label] += time.perf_counter() - began
            score(tallies, label, records, puzzles, plain)
            mine = tallies[label].per_puzzle
            print(f"seed {seed} {label:24} accuracy {mine('right').mean():.3f} tokens {mine('tokens').mean():7.0f} "
                  f"({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
    report = make_report(options, tallies, seconds, solver)
    print(json.dumps(report["methods"], indent=2))
    print(json.dumps(report["differences"], indent=2))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


def make_report(
    options: argparse.Namespace, tallies: dict[str, Tally], seconds: dict[str, float], solver: Solver
) -> dict[str, object]:
    resamples = np.random.default_rng(0).integers(0, options.puzzles, (RESAMPLES, options.puzzles))
    differences = {}
    for label in [name for name in tallies if not name.startswith(("sc", "single"))]:
        for base in ("sc", "sc, score vote", "sc, position vote", "sc, gambit's tokens"):
            gain = tallies[label].per_puzzle("right") - tallies[base].per_puzzle("right")
            differences[f"{label} - {base}"] = {"gain": float(gain.mean()), "interval": interval(gain, resamples)}
    info = dataclasses.asdict(solver.engine.info)
    info.pop("model")
    return {
        "options": {key: value for key, value in vars(options).items() if key not in ("out", "model")},
        "methods": {name: tally.summary(resamples) for name, tally in tallies.items()},
        "differences": differences,
        "seconds": dict(seconds),
        "engine": info,
    }


if __name__ == "__main__":
    main()

"""How well pawn's scorer ranks traces of held-out puzzles, beside a judge that knows each trace's exact state.

    python benchmarks/pawn_scorer.py [--puzzles 300] [--traces 32] [--out benchmarks/results/pawn_scorer.json]

The traces are self-consistency's, sampled and scored by the engine itself: what a search would have seen. At 25, 50, 75
and 100 % of its steps a trace has a score (the running mean). The figure is the chance that a correct trace of a puzzle
scores above a wrong one of the same puzzle, averaged over puzzles that have both. The judge's figure is the ceiling: it
scores a trace by the share of fresh rollouts of the generator, from that very state, that end right.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from gambit.pawn.scorer import within_puzzle_auc

from gambit import SearchConfig, Solver
from gambit.core import events as ev
from gambit.core.problem import Problem
from gambit.core.tree import TraceState
from gambit.pawn import Puzzle, Split, generate
from gambit.pawn.judge import FRACTIONS, judge
from gambit.results.record import SearchRecord, fold

RESAMPLES = 2000


class Watched:
    """One puzzle's run: its record and the scores of every trace in their order."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.scores: defaultdict[int, list[float]] = defaultdict(list)

    def add(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.Scored):
            for trace, score in zip(event.traces, event.scores, strict=True):
                self.scores[trace].append(score)

    def running_means(self, trace: int) -> list[float]:
        """At each share of the steps; a trace without a single step counts as 0, as in a vote."""
        scores = self.scores[trace] or [0.0]
        ends = [max(1, math.ceil(share * len(scores))) for share in FRACTIONS]
        return [float(np.mean(scores[:end])) for end in ends]


def sample(solver: Solver, puzzles: list[Puzzle], num_traces: int, concurrency: int, seed: int) -> list[Watched]:
    runs: dict[str, Watched] = defaultdict(Watched)
    problems = [Problem(puzzle.text, id=str(i)) for i, puzzle in enumerate(puzzles)]
    config = SearchConfig(policy="sc", capacity=num_traces, seed=seed)
    results = solver.solve_many(
        problems, config, concurrency=concurrency, on_event=lambda name, event: runs[name].add(event)
    )
    for done, _ in enumerate(results, start=1):
        print(f"\r{done}/{len(puzzles)} puzzles", end="", flush=True)
    print()
    return [runs[str(i)] for i in range(len(puzzles))]


def texts_of(solver: Solver, record: SearchRecord) -> list[str]:
    done = sorted(record.tree.in_state(TraceState.FINISHED), key=lambda trace: trace.id)
    return [solver.engine.tokenizer.decode(trace.own_tokens[:-1]) for trace in done]


def per_puzzle_auc(scores: torch.Tensor, is_correct: torch.Tensor) -> list[float]:
    """One figure per puzzle that has both outcomes."""
    both = [i for i, row in enumerate(is_correct) if row.any() and not row.all()]
    return [within_puzzle_auc(scores[i : i + 1], is_correct[i : i + 1]) for i in both]


def with_interval(values: list[float]) -> dict[str, object]:
    rng, found = np.random.default_rng(0), np.array(values)
    means = found[rng.integers(0, len(found), (RESAMPLES, len(found)))].mean(axis=1)
    return {"mean": float(found.mean()), "interval": [float(x) for x in np.quantile(means, [0.025, 0.975])]}


def measure(solver: Solver, puzzles: list[Puzzle], runs: list[Watched], num_rollouts: int) -> dict[str, object]:
    records = [fold(run.events) for run in runs]
    judgements = judge(puzzles, [texts_of(solver, r) for r in records], num_rollouts, os.cpu_count() or 1)
    traces = [sorted(t.id for t in record.tree.in_state(TraceState.FINISHED)) for record in records]
    answers = [[record.tree.traces[t].answer for t in ids] for record, ids in zip(records, traces, strict=True)]
    is_correct = torch.tensor([
        [answer == str(puzzle.answer) for answer in row] for puzzle, row in zip(puzzles, answers, strict=True)
    ])  # fmt: skip
    scores = torch.tensor([[run.running_means(t) for t in ids] for run, ids in zip(runs, traces, strict=True)])
    chances = torch.tensor([[judgement.chances for judgement in row] for row in judgements])
    auc, ceiling = {}, {}
    for i, share in enumerate(FRACTIONS):
        auc[str(share)] = with_interval(per_puzzle_auc(scores[..., i], is_correct))
        ceiling[str(share)] = with_interval(per_puzzle_auc(chances[..., i], is_correct))
    return {
        "pass_at_1": float(is_correct.float().mean()),
        "valid_format": float(np.mean([judgement.is_valid for row in judgements for judgement in row])),
        "auc": auc,
        "ceiling": ceiling,
        "share_of_ceiling": {q: (auc[q]["mean"] - 0.5) / (ceiling[q]["mean"] - 0.5) for q in auc},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--split", choices=["test", "dev"], default="test")
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--traces", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    puzzles = list(islice(generate(Split[options.split.upper()], options.seed), options.puzzles))
    with Solver(options.model, device=options.device) as solver:
        runs = sample(solver, puzzles, options.traces, options.concurrency, options.seed)
        report = measure(solver, puzzles, runs, options.rollouts)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "model")}
    text = json.dumps({"options": settings, **report}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

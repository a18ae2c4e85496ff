"""The same searches on one engine and spread over several under Ray: are their traces and votes the same, and how long
do they take?

    python benchmarks/spread_search.py --out benchmarks/results/spread_search.json               # a few minutes
    python benchmarks/spread_search.py --engine vllm --puzzles 3 --out benchmarks/results/spread_search_vllm.json

The bundled model; every engine has one thread. Each puzzle is searched in four ways: to its end, with a token budget,
until the vote is settled, and by self-consistency.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as Ray gives it to an engine with one core

from gambit.api import SearchConfig, SearchResult, Solver, SpreadSolver, spread_on_ray
from gambit.pawn.puzzles import random_puzzle

WAYS: Mapping[str, Mapping[str, object]] = {
    "to its end": {"islands": 8},
    "token budget": {"islands": 8, "budget_tokens": 2000},
    "consensus stop": {"islands": 8, "consensus_stop": 0.6, "vote": "majority"},
    "sc": {"policy": "sc"},
}


def searched(solver: Solver | SpreadSolver, questions: list[str], capacity: int) -> Iterator[tuple[str, SearchResult]]:
    for number, question in enumerate(questions):
        for way, options in WAYS.items():
            config = SearchConfig(capacity=capacity, seed=number, check_interval=5, warmup_tokens=8, **options)
            yield way, solver.solve(question, config)


def is_same(one: SearchResult, other: SearchResult) -> bool:
    """The same tree and votes; of the scores, which depend on the size of a batch in their last bits, nothing."""
    return _unscored(one) == _unscored(other)


def _unscored(result: SearchResult) -> tuple[object, ...]:
    traces = [dataclasses.replace(trace, score=None) for trace in result.traces]
    votes = [dataclasses.replace(entry, weight=0.0) for entry in result.votes]
    return result.tokens, result.counts, result.stop_reason, result.answer, votes, traces


def largest_difference(one: SearchResult, other: SearchResult) -> float:
    """Of the weights of two votes for the same answers."""
    return max((abs(a.weight - b.weight) for a, b in zip(one.votes, other.votes, strict=True)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--puzzles", type=int, default=10)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    questions = [random_puzzle(rng, 8).text for _ in range(options.puzzles)]
    engine = {"engine": options.engine, **({"kv_budget_tokens": 16_384} if options.engine == "vllm" else {})}
    with Solver("pawn", **engine) as solver:
        list(searched(solver, questions[:1], options.capacity))  # first passes allocate and compile
        alone = list(searched(solver, questions, options.capacity))
    with spread_on_ray("pawn", engines=options.engines, **engine) as spread:
        list(searched(spread, questions[:1], options.capacity))
        together = list(searched(spread, questions, options.capacity))
    pairs = [(way, one, other) for (way, one), (_, other) in zip(alone, together, strict=True)]
    report = {
        "engine": options.engine,
        "engines": options.engines,
        "puzzles": options.puzzles,
        "capacity": options.capacity,
        "ways": {
            way: {
                "same": sum(is_same(one, other) for each, one, other in pairs if each == way),
                "largest_difference_of_a_weight": max(
                    (
                        largest_difference(one, other)
                        for each, one, other in pairs
                        if each == way and is_same(one, other)
                    ),
                    default=None,
                ),
                "seconds_on_one": round(sum(one.seconds.total for each, one, _ in pairs if each == way), 2),
                "seconds_on_all": round(sum(other.seconds.total for each, _, other in pairs if each == way), 2),
            }
            for way in WAYS
        },
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

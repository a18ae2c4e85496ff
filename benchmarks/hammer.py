"""Two threads use one solver at random for a while: nothing may fail, and every answer is the one it would be alone.

    python benchmarks/hammer.py --out benchmarks/results/hammer.json        # a minute for each engine

The bundled model on the local engine and on vLLM. Each thread calls `solve`, `solve_many` to its end, or leaves
`solve_many` early, on random puzzles with random settings. Votes, tokens and counts are compared with those of the same
search by itself.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

from gambit.api import SearchConfig, SearchResult, Solver
from gambit.pawn import Level, Split, generate

PUZZLES = [puzzle.text for puzzle, _ in zip(generate(Split.DEV, 5, Level.EASY), range(6), strict=False)]
CONFIGS = [
    SearchConfig(capacity=8, seed=1),
    SearchConfig(capacity=6, islands=1, seed=2),
    SearchConfig(policy="sc", capacity=4, seed=3),
]
ENGINES = {"local": {}, "vllm": {"engine_options": {"max_model_len": 1024, "enable_chunked_prefill": False}}}


def facts(result: SearchResult) -> tuple[object, ...]:
    """What must be the same. Weights may differ by rounding: a product's sums depend on what else is in the batch."""
    votes = [(entry.answer, round(entry.weight, 3), entry.traces, entry.roots) for entry in result.votes]
    return result.answer, votes, result.tokens.generated, result.counts, result.error


class Hammer:
    """One thread's random calls, and what was wrong with their results."""

    def __init__(self, solver: Solver, expected: dict[tuple[int, int], tuple[object, ...]], seed: int) -> None:
        self.counts = {"solve": 0, "solve_many": 0, "left early": 0}
        self.wrong: list[str] = []
        self._solver = solver
        self._expected = expected
        self._rng = random.Random(seed)

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            kind = self._rng.choice(list(self.counts))
            try:
                self._call(kind)
            except Exception as error:
                self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.counts[kind] += 1

    def _call(self, kind: str) -> None:
        number = self._rng.randrange(len(CONFIGS))
        if kind == "solve":
            puzzle = self._rng.randrange(len(PUZZLES))
            self._check(puzzle, number, self._solver.solve(PUZZLES[puzzle], CONFIGS[number]))
            return
        order = self._rng.sample(range(len(PUZZLES)), 3)
        results = self._solver.solve_many([PUZZLES[puzzle] for puzzle in order], CONFIGS[number], concurrency=2)
        for result in results:
            self._check(order[int(result.problem_id)], number, result)
            if kind == "left early":
                break

    def _check(self, puzzle: int, number: int, result: SearchResult) -> None:
        if facts(result) != self._expected[puzzle, number]:
            self.wrong.append(f"puzzle {puzzle}, settings {number}: {result}")


def hammer(engine: str, seconds: float, num_threads: int) -> dict[str, object]:
    with Solver("pawn", engine=engine, **ENGINES[engine]) as solver:
        expected = {
            (puzzle, number): facts(solver.solve(text, config))
            for puzzle, text in enumerate(PUZZLES)
            for number, config in enumerate(CONFIGS)
        }
        hammers = [Hammer(solver, expected, seed) for seed in range(num_threads)]
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=each.run, args=(until,)) for each in hammers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        calls = {kind: sum(each.counts[kind] for each in hammers) for kind in hammers[0].counts}
        wrong = [line for each in hammers for line in each.wrong]
    print(f"{engine}: {calls}, {len(wrong)} wrong", *wrong[:5], sep="\n")
    return {"seconds": seconds, "threads": num_threads, "calls": calls, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    engines = [name for name in ENGINES if name != "vllm" or find_spec("vllm") is not None]
    report = {engine: hammer(engine, options.seconds, options.threads) for engine in engines}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Solves problems with a model of yours on vLLM in a given time, and counts what is right.

    pip install '.[vllm]' 'vllm==0.25.1'               # from a clone, on a machine with an NVIDIA GPU
    python examples/02_vllm.py Qwen/Qwen3-4B-Thinking-2507 problems.jsonl --minutes 20

A problem is a line such as {"question": "…", "answer": "…"}, with an "id" or without. For three reasoning models the
scorer that is published is fetched once; `gambit doctor MODEL` says what there is for yours. No GPU: `02_vllm.py pawn
puzzles.jsonl --engine local` runs the same on the bundled model.
"""

import argparse
import json
import time
from pathlib import Path

from gambit.api import Grader, Problem, SearchConfig, Solver

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("model")
parser.add_argument("problems", type=Path)
parser.add_argument("--engine", default="vllm")
parser.add_argument("--minutes", type=float, default=30.0, help="in all; then the votes so far count")
parser.add_argument("--capacity", type=int, help="places of the pool; by default as many traces as the GPU holds")
parser.add_argument("--out", type=Path, help="folder for logs, which `gambit view` and `gambit replay` read")


def main() -> None:
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.problems.read_text(encoding="utf-8").splitlines()]
    ids = [str(row.get("id", number)) for number, row in enumerate(rows, start=1)]
    answers = dict(zip(ids, (row["answer"] for row in rows), strict=True))
    problems = [Problem(row["question"], id=name) for name, row in zip(ids, rows, strict=True)]
    config, num_right = SearchConfig(capacity=args.capacity), 0
    with Solver(args.model, engine=args.engine) as solver, Grader() as grader:
        deadline = time.monotonic() + 60 * args.minutes
        is_over = lambda: time.monotonic() > deadline  # noqa: E731
        for result in solver.solve_many(problems, config, out_dir=args.out, should_stop=is_over):
            right = answers[result.problem_id]
            is_right = result.answer is not None and grader.equivalent(result.answer, right)
            num_right += is_right
            verdict = "right" if is_right else f"wrong, {right} expected"
            costs = f"{result.tokens.generated:,} tokens, {result.seconds.total:.0f} s"
            print(f"{result.problem_id}: {result.answer}, {verdict}; {result.counts.completed} traces, {costs}")
    print(f"{num_right} of {len(rows)} right")


if __name__ == "__main__":  # vLLM starts processes of its own on a GPU
    main()

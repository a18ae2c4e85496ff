"""Solves a file of problems side by side with asyncio, and goes on where it was stopped.

    python examples/08_batch_jsonl.py problems.jsonl answers.jsonl [--model MODEL]

A problem is a line such as {"id": "q1", "question": "…"}. Its answer is written as soon as it is there, so that a
second start solves what is left. Searches of several tasks run in one batch on one engine.
"""

import argparse
import asyncio
import json
from pathlib import Path

from gambit.api import AsyncSolver, GambitError, SearchConfig


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--at-once", type=int, default=4, help="problems that are searched at a time")
    args = parser.parse_args()

    problems = [json.loads(line) for line in args.problems.read_text(encoding="utf-8").splitlines()]
    args.answers.touch()
    done = {json.loads(line)["id"] for line in args.answers.read_text(encoding="utf-8").splitlines()}
    left = [problem for problem in problems if problem["id"] not in done]
    print(f"{len(left)} of {len(problems)} problems are left")

    places = asyncio.Semaphore(args.at_once)
    with args.answers.open("a", encoding="utf-8") as file:
        async with AsyncSolver(args.model, engine=args.engine) as solver, asyncio.TaskGroup() as tasks:

            async def solve(problem: dict[str, str]) -> None:
                async with places:
                    try:
                        result = await solver.solve(problem["question"], SearchConfig(capacity=16))
                    except GambitError as error:  # of this problem alone; it is tried again at the next start
                        print(f"{problem['id']}: {error}")
                        return
                answer = {"id": problem["id"], "answer": result.answer, "tokens": result.tokens.generated}
                print(json.dumps(answer), file=file, flush=True)
                print(f"{problem['id']}: {result.answer}")

            for problem in left:
                tasks.create_task(solve(problem))


asyncio.run(main())

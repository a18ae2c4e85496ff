"""Counts how often voting and Gambit solve the puzzle of the README and of `gambit demo`, over seeds.

    python benchmarks/picked_puzzle.py --seeds 10 --out benchmarks/results/picked_puzzle.json

The puzzle was picked because voting fails on it: averages are those of islands_noise.json. Plain traces are counted by
every vote that the README or docs speak of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.cli.demo import unseen_problem
from gambit.results.record import ballots_of, fold
from gambit.results.vote import VoteKind, count_votes

VOTES = ("majority", "score", "position")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    problem, gold = unseen_problem(None)
    rows = []
    with Solver("pawn") as solver:
        for seed in range(options.seeds):
            log: list[ev.Event] = []
            plain = SearchConfig(policy="sc", vote="score", seed=seed)  # keeps scores, for all votes
            solver.submit(problem, plain, on_event=log.append).result()
            tree = fold(log).tree
            votes = {kind: count_votes(ballots_of(tree, VoteKind(kind)), VoteKind(kind), str.__eq__) for kind in VOTES}
            found = solver.solve(problem, seed=seed)
            rows.append({
                "seed": seed, "gambit": found.answer, **{kind: vote.answer for kind, vote in votes.items()},
                "tokens": {"plain": fold(log).tokens.generated, "gambit": found.tokens.generated},
            })  # fmt: skip
            print(rows[-1], flush=True)
    right = {name: sum(row[name] == gold for row in rows) for name in ("gambit", *VOTES)}
    result = {"puzzle": problem.question, "answer": gold, "right": right, "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

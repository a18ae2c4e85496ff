"""Searches by a scorer of one's own, which nobody has judged, and lets it act all the same.

    python examples/05_own_scorer.py

A scorer that was never judged gets a pool of pairs (`islands` = half of `capacity`): each trace competes with one
other, so that a bad scorer costs little and a good one gains little. `islands` and `warmup_tokens` give it room, at
your own risk. `gambit scorer eval --write` judges a trained scorer (06_train_a_scorer.sh), and islands then follow from
its AUC.
"""

import torch

from gambit.api import ScorerInfo, SearchConfig, Solver, StatePosition, ThoughtBatch

PUZZLES = {
    "a = 23; b = 45; c = a * b; d = c - a; e = d * b; e?": "47",
    "a = 17; b = 61; c = a * b; d = c - a; e = d * b; f = e + c; g = f * d; h = g - e; h?": "25",
}


class Calm:
    """Prefers thoughts whose hidden state has a small norm. (An example, no advice: it does not find the trap.)"""

    info = ScorerInfo("calm", state_position=StatePosition.BEFORE, is_probability=False, ranks_within_run=True)

    def to(self, device: torch.device) -> "Calm":
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return -thoughts.states.float().norm(dim=-1)


SEARCHES = {
    "by itself": SearchConfig(capacity=32),
    "with room": SearchConfig(capacity=32, islands=4, warmup_tokens=12),
    "voting": SearchConfig(capacity=32, policy="sc"),
}

with Solver("pawn", engine="local", scorer=Calm()) as solver:
    for puzzle, right in PUZZLES.items():
        print(puzzle)
        for name, config in SEARCHES.items():
            result = solver.solve(puzzle, config)
            shares = {entry.answer: entry.traces / result.counts.completed for entry in result.votes}
            print(f"  {name:9}  answer {result.answer}; {shares.get(right, 0):.0%} of traces right ({right}); "
                  f"{result.counts.branched} branched")  # fmt: skip

"""Searches by a method of one's own: an object is enough, no package and no registration.

    python examples/04_own_policy.py

A policy is a pure function from the pool as it is to decisions. `docs/extending.md` has the whole protocol.
"""

from dataclasses import dataclass
from typing import ClassVar

from gambit.api import (
    Decision,
    OnPressure,
    PoolView,
    PressureAction,
    Prune,
    SearchConfig,
    Solver,
    VoteKind,
    Wake,
    top_up,
)

PUZZLES = {
    "a = 23; b = 45; c = a * b; d = c - a; e = d * b; e?": "47",
    "a = 3; b = 5; c = 9; d = b * c; e = d + a; e?": "48",
    "a = 17; b = 61; c = a * b; d = c - a; e = d * b; f = e + c; g = f * d; h = g - e; h?": "25",
}


@dataclass(frozen=True)
class Patient:
    """Samples like self-consistency, but prunes a trace once it is a margin below the best."""

    name: ClassVar[str] = "patient"
    default_vote: ClassVar[VoteKind] = VoteKind.SCORE
    num_traces: int
    capacity: int
    check_interval: int
    margin: float

    @property
    def wake(self) -> Wake:
        return Wake(every_steps=self.check_interval, on_completion=True)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        started = top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.PRUNE))
        scored = [trace for trace in view.traces if trace.score is not None]
        best = max((trace.score for trace in scored), default=0.0)
        return None, [*started, *(Prune(trace.id, "behind") for trace in scored if trace.score < best - self.margin)]


METHODS = {"voting": "sc", "patient": Patient(32, 32, check_interval=20, margin=0.5), "gambit": "gambit"}

with Solver("pawn", engine="local") as solver:
    for puzzle, right in PUZZLES.items():
        print(puzzle)
        for name, policy in METHODS.items():
            result = solver.solve(puzzle, SearchConfig(policy=policy, capacity=32))
            verdict = "right" if result.answer == right else "wrong"
            print(f"  {name:8} {result.answer}, {verdict}: {result.counts.pruned} traces pruned, "
                  f"{result.tokens.generated:,} tokens")  # fmt: skip

"""Best of N: independent traces, of which the one with the highest score answers; nothing is pruned or branched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gambit.config import SearchSettings
from gambit.search.policy import Decision, Needs, NoOptions, PoolView, Wake, top_up
from gambit.types import OnPressure, PressureAction
from gambit.vote import VoteKind


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Best-of-N by verifier score (Cobbe et al. 2021), the verifier being the search's own thought scorer.

    Ours: a trace's score is that of its thoughts (their mean, or as the scorer's checkpoint says), not of a separate
    model that reads the whole text; a trace without an answer cannot be the best.
    """

    name: ClassVar[str] = "best-of-n"
    default_vote: ClassVar[VoteKind] = VoteKind.BEST
    Options: ClassVar[type[NoOptions]] = NoOptions
    num_traces: int
    capacity: int

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> BestOfN:
        return cls(settings.num_traces, settings.capacity)

    @property
    def wake(self) -> Wake:
        return Wake(on_completion=True)

    @property
    def needs(self) -> Needs:
        return Needs(has_fixed_size=True)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        return None, top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.QUEUE))

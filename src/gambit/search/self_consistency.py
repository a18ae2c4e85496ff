"""Self-consistency: independent traces and an unweighted majority vote; nothing is pruned or branched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gambit.config import SearchSettings
from gambit.search.policy import Decision, PoolView, Start, Wake
from gambit.types import OnPressure, PressureAction
from gambit.vote import VoteKind


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """Wang et al. 2023. At most `capacity` traces run at once; under memory pressure the engine queues them."""

    name: ClassVar[str] = "sc"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    num_traces: int
    capacity: int

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> SelfConsistency:
        return cls(settings.num_traces, settings.capacity)

    @property
    def wake(self) -> Wake:
        return Wake(on_completion=True)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        count = min(self.capacity - len(view.traces), self.num_traces - view.num_created)
        return None, [Start(count, OnPressure(PressureAction.QUEUE))] if count > 0 else []

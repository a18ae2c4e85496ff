"""Self-consistency: independent traces and an unweighted majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, NoOptions, PoolView, Requirements, ScoreUse, SplitBy, Wake, top_up
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """Self-Consistency (Wang et al. 2023). At most `capacity` traces run at once; under memory pressure the engine
    queues and later recomputes them, as plain serving does."""

    name: ClassVar[str] = "sc"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    Options: ClassVar[type[NoOptions]] = NoOptions
    num_traces: int
    capacity: int

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings.num_traces, settings.capacity)

    @property
    def wake(self) -> Wake:
        return Wake(on_completion=True)

    @property
    def requirements(self) -> Requirements:
        return Requirements(scores=ScoreUse.NEVER, has_fixed_size=True, split_by=SplitBy.TRACES)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        return None, top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.QUEUE))

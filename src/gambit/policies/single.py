"""One plain sample: the floor of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, NoOptions, PoolView, Requirements, ScoreUse, Start, Wake
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction


@dataclass(frozen=True, slots=True)
class Single:
    """Plain sampling: one trace, whatever `capacity` and `num_traces` say, and its answer."""

    name: ClassVar[str] = "single"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    Options: ClassVar[type[NoOptions]] = NoOptions
    fixed_traces: ClassVar[int] = 1

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Single:
        return cls()

    @property
    def wake(self) -> Wake:
        return Wake()

    @property
    def requirements(self) -> Requirements:
        return Requirements(scores=ScoreUse.NEVER, has_fixed_size=True)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        return None, [] if view.num_created else [Start(1, OnPressure(PressureAction.QUEUE))]

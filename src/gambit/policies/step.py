"""STEP: independent traces; when memory runs out, the lowest-scoring one is pruned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, PoolView, Requirements, SplitBy, Wake, top_up
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction


class StepOptions(BaseModel):
    """Options of STEP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pruned_vote: bool = Field(
        False, description="let a pruned trace vote if its text already has an answer, as the public code does"
    )


@dataclass(frozen=True, slots=True)
class StepPruning:
    """STEP: memory-triggered pruning by hidden-state scores.

    A trace without a finished thought counts as 0 and goes first, then the lowest mean, the latest on a tie. What is
    pruned is gone: no ghost, no replacement, and nothing is ever queued again. The vote sums final mean scores.

    Ours: the paper lets completed traces vote, its public code also pruned ones that had boxed an answer by then;
    both are here (`pruned_vote`). STEP's own scorer reads the state of the boundary token; with another scorer the
    checkpoint says which state is read. Where `num_traces` is above `capacity`, the rest start as places become free.
    """

    name: ClassVar[str] = "step"
    default_vote: ClassVar[VoteKind] = VoteKind.SCORE
    Options: ClassVar[type[StepOptions]] = StepOptions
    num_traces: int
    capacity: int
    pruned_vote: bool = False

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> StepPruning:
        return cls(settings.num_traces, settings.capacity, settings.options_of(StepOptions).pruned_vote)

    @property
    def wake(self) -> Wake:
        return Wake(on_completion=True)

    @property
    def requirements(self) -> Requirements:
        return Requirements(has_fixed_size=True, pruned_answers=self.pruned_vote, split_by=SplitBy.TRACES)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        pressure = OnPressure(PressureAction.PRUNE, unscored_first=True)
        return None, top_up(view, self.capacity, self.num_traces, pressure)

"""What an engine gathers for one search while a step is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from gambit.types import Admission, Eviction, SearchStep, ThoughtScore, TraceEnd


@dataclass(slots=True)
class StepDraft:
    """A `SearchStep` in the making."""

    evicted: list[Eviction] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    num_generated: int = 0
    scored: list[ThoughtScore] = field(default_factory=list)
    finished: list[TraceEnd] = field(default_factory=list)

    def freeze(self) -> SearchStep:
        return SearchStep(
            tuple(self.evicted), tuple(self.admitted), self.num_generated, tuple(self.scored), tuple(self.finished)
        )

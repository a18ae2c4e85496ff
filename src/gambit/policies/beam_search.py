"""Beam search over thoughts, without lockstep: traces are compared as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.policies.base import Branch, Decision, PoolView, Prune, Requirements, ScoreUse, Start, TraceView, Wake
from gambit.results.vote import VoteKind
from gambit.tree import LIVE, TraceState
from gambit.types import OnPressure, PressureAction


class BeamOptions(CheckedModel):
    """Options of beam search and DVTS."""

    beam_width: int = Field(4, ge=1, description="traces that continue each one that is kept, itself included")


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search by a verifier (Snell et al. 2024): at every check the best `capacity / beam_width` traces are kept,
    and branches of them fill the pool.

    Ours: traces are compared every `check_interval` steps, wherever they are in a thought, not thought by thought. One
    without a score, or one that already writes its answer, is left alone.
    """

    name: ClassVar[str] = "beam-search"
    default_vote: ClassVar[VoteKind] = VoteKind.BEST
    requirements: ClassVar[Requirements] = Requirements(scores=ScoreUse.ROUNDS)
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.QUEUE)
    Options: ClassVar[type[BeamOptions]] = BeamOptions
    capacity: int
    num_traces: int
    check_interval: int
    beam_width: int

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        width = settings.options_of(BeamOptions).beam_width
        return cls(settings.capacity, settings.num_traces, settings.pool.check_interval, width)

    @property
    def wake(self) -> Wake:
        return Wake(every_steps=self.check_interval)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        if view.num_created == 0:
            return None, [Start(self.capacity, self.on_pressure)]
        return None, self.check(view)

    def check(self, view: PoolView) -> list[Decision]:
        """Returns the decisions of one check."""
        return self.narrowed(view.traces, keep=self.capacity // self.beam_width, places=self.capacity)

    def narrowed(self, traces: Sequence[TraceView], keep: int, places: int) -> list[Decision]:
        """Keeps the best of `traces` and fills their `places` with branches, one kept trace after the other."""
        ranked = sorted(filter(can_be_compared, traces), key=lambda trace: (-(trace.score or 0.0), trace.id))
        kept, rest = ranked[: max(1, keep)], ranked[max(1, keep) :]
        parents = sorted((trace for trace in kept if trace.state is TraceState.RUNNING), key=lambda trace: trace.id)
        vacancies = places - len(traces) + len(rest) if parents else 0
        decisions: list[Decision] = [Prune(trace.id, "narrowed") for trace in rest]
        for place in range(vacancies):
            parent = parents[place % len(parents)]
            decisions.append(Branch(parent.id, parent.num_tokens, self.on_pressure))
        return decisions


def can_be_compared(trace: TraceView) -> bool:
    """Returns True for a trace that thinks and has a score."""
    return trace.state in LIVE and trace.is_thinking and trace.score is not None

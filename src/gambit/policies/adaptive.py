"""Self-consistency in rounds that double, until the Beta posterior of the leading answer is high enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from typing import Annotated, ClassVar, Self

from pydantic import Field

from gambit.answers import canonical
from gambit.config.options import CheckedModel, Traces
from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, PoolView, Requirements, ScoreUse, Stop, Wake, top_up
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction


class AdaptiveOptions(CheckedModel):
    """Options of adaptive self-consistency."""

    first: Traces = Field(2, description="traces of the first round; every further one has as many as there are")
    confidence: Annotated[float, Field(gt=0.5, le=1)] = Field(
        0.95, description="probability that the leading answer stays ahead of the second one, at which the search ends"
    )


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Adaptive-Consistency (Aggarwal et al. 2023): independent traces until the leading answer is likely to stay.

    With v1 and v2 votes for the two leading answers, that likelihood is P(x > 1/2) under Beta(v1 + 1, v2 + 1). It is
    looked at whenever a trace completes; traces that still run are then cancelled. The state is the number of traces
    planned by now. Answers count as equal here if their spelling normalised is; the vote compares them by algebra.
    """

    name: ClassVar[str] = "adaptive"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    wake: ClassVar[Wake] = Wake(on_completion=True)
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.QUEUE)
    requirements: ClassVar[Requirements] = Requirements(scores=ScoreUse.NEVER, has_fixed_size=True)
    Options: ClassVar[type[AdaptiveOptions]] = AdaptiveOptions
    num_traces: int
    capacity: int
    options: AdaptiveOptions

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings.num_traces, settings.capacity, settings.options_of(AdaptiveOptions))

    def initial_state(self) -> int:
        return self.options.first

    def decide(self, state: int, view: PoolView) -> tuple[int, list[Decision]]:
        if posterior(trace.answer for trace in view.finished) >= self.options.confidence:
            return state, [Stop()]
        if view.num_created >= state and not view.traces:
            state = 2 * view.num_created
        return state, top_up(view, self.capacity, min(state, self.num_traces), self.on_pressure)


def posterior(answers: Iterable[str | None]) -> float:
    """Returns how likely the leading answer is to stay ahead; 0 with fewer than two answers."""
    counts = Counter(form for answer in answers if answer is not None and (form := canonical(answer)))
    if counts.total() < 2:
        return 0.0
    first, second, *_ = [*sorted(counts.values(), reverse=True), 0]
    # With whole numbers and at one half, the Beta distribution is the tail of a fair binomial one.
    num = first + second + 1
    return 1.0 - float(sum(comb(num, k) for k in range(second + 1)) / 2**num)

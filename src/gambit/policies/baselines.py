"""Sampling of independent traces: self-consistency, plain and adaptive, best-of-N, a single trace, and STEP."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from typing import Annotated, ClassVar, Self

from pydantic import Field

from gambit.answers import canonical
from gambit.config.options import CheckedModel, Traces
from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, Outcome, PoolView, Requirements, ScoreUse, SplitBy, Stop, Wake, top_up
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """Self-Consistency (Wang et al. 2023): independent traces and an unweighted majority vote.

    At most `capacity` traces run at once. Under memory pressure the engine queues and later recomputes them, as plain
    serving does.
    """

    name: ClassVar[str] = "sc"
    default_vote: ClassVar[VoteKind] = VoteKind.MAJORITY
    wake: ClassVar[Wake] = Wake(on_completion=True)
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.QUEUE)
    num_traces: int
    capacity: int

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings.num_traces, settings.capacity)

    @property
    def requirements(self) -> Requirements:
        return Requirements(scores=ScoreUse.NEVER, has_fixed_size=True, split_by=SplitBy.TRACES)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        return None, top_up(view, self.capacity, self.num_traces, self.on_pressure)


@dataclass(frozen=True, slots=True)
class BestOfN(SelfConsistency):
    """Best-of-N by verifier score (Cobbe et al. 2021), the verifier being the search's own thought scorer.

    Ours: a trace's score is that of its thoughts (their mean, or as the scorer's checkpoint defines it), not of a
    separate model that reads the whole text. A trace without an answer cannot be the best.
    """

    name: ClassVar[str] = "best-of-n"
    default_vote: ClassVar[VoteKind] = VoteKind.BEST


@dataclass(frozen=True, slots=True)
class Single(SelfConsistency):
    """Plain sampling: one trace, whatever `capacity` and `num_traces` are, and its answer."""

    name: ClassVar[str] = "single"
    wake: ClassVar[Wake] = Wake()
    fixed_traces: ClassVar[int] = 1

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(cls.fixed_traces, cls.fixed_traces)

    @property
    def requirements(self) -> Requirements:
        return Requirements(scores=ScoreUse.NEVER, has_fixed_size=True)


class StepOptions(CheckedModel):
    """Options of STEP."""

    pruned_vote: bool = Field(
        False, description="let a pruned trace vote if its text already has an answer, as the public code does"
    )


@dataclass(frozen=True, slots=True)
class StepPruning(SelfConsistency):
    """STEP: memory-triggered pruning by hidden-state scores.

    A trace without a finished thought counts as 0 and goes first, then the lowest mean, the latest on a tie. What is
    pruned is gone: no ghost, no replacement, and nothing is ever queued again. The vote sums final mean scores.

    Ours: the paper lets completed traces vote, its public code also pruned ones that had boxed an answer by then;
    both are here (`pruned_vote`). STEP's own scorer reads the state of the boundary token; with another scorer the
    checkpoint names the state that is read. If `num_traces` is above `capacity`, the rest start as places become free.
    """

    name: ClassVar[str] = "step"
    default_vote: ClassVar[VoteKind] = VoteKind.SCORE
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.PRUNE, unscored_first=True)
    Options: ClassVar[type[StepOptions]] = StepOptions
    pruned_vote: bool = False

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings.num_traces, settings.capacity, settings.options_of(StepOptions).pruned_vote)

    @property
    def requirements(self) -> Requirements:
        return Requirements(has_fixed_size=True, pruned_answers=self.pruned_vote, split_by=SplitBy.TRACES)

    @classmethod
    def idle(cls, options: StepOptions, outcome: Outcome) -> str | None:
        used = f"at most {outcome.kv_share:.0%} of the KV cache was seen in use (--kv-budget-tokens makes it smaller)"
        return None if outcome.num_pruned else f"it prunes when memory is short and never did: {used}"


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

"""DeepConf: traces that lose confidence are stopped inside the engine, the rest vote by their confidence."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, Discard, Outcome, PoolView, Requirements, ScoreUse, TraceView, Wake, top_up
from gambit.results.vote import VoteKind
from gambit.types import OnPressure, PressureAction, StopRule

ROUNDING = 1e-5  # relative; a confidence depends on what else is in the batch by less than that


class DeepConfOptions(CheckedModel):
    """Options of DeepConf."""

    warmup_traces: int = Field(16, ge=1, description="traces that run in full and set the threshold")
    window_tokens: int = Field(2048, ge=1, description="tokens in a group; short traces need a short one")
    percentile: float = Field(
        90.0, ge=0, le=100, description='of the warm-up\'s lowest groups; 90 is the paper\'s "low", 10 its "high"'
    )


@dataclass(frozen=True, slots=True)
class DeepConfState:
    """The threshold, once it is known, and how many traces were held against it."""

    threshold: float | None = None  # None during the warm-up
    num_judged: int = 0  # finished traces


@dataclass(frozen=True, slots=True)
class DeepConf:
    """DeepConf (Fu et al. 2025), online: a trace stops when its confidence falls below a threshold set by a warm-up.

    The first `warmup_traces` run in full; the threshold is the `percentile` of their lowest group confidences. Every
    later trace stops as soon as its window is full and its mean falls below it, and one that finishes below it has no
    vote; nor have warm-up traces below it. The vote weighs each trace by its lowest group.

    Ours: the confidence is computed where the logits are and the engine itself stops a trace, at the very token.
    Traces after the warm-up start together, not in batches. The paper's consensus stop is an option of every search
    (`consensus_stop`, 0.95 in the paper), off by default. A search that ends during the warm-up lets all that finished
    vote. The threshold is lowered by a hair, so that rounding does not decide between traces that are equally sure.
    """

    name: ClassVar[str] = "deepconf"
    default_vote: ClassVar[VoteKind] = VoteKind.LOWEST_CONFIDENCE
    wake: ClassVar[Wake] = Wake(on_completion=True)
    Options: ClassVar[type[DeepConfOptions]] = DeepConfOptions
    num_traces: int
    capacity: int
    options: DeepConfOptions = field(default_factory=DeepConfOptions)

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings.num_traces, settings.capacity, settings.options_of(DeepConfOptions))

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            scores=ScoreUse.NEVER,
            has_fixed_size=True,
            provisional_traces=self.num_warmup,
            confidence_window=self.options.window_tokens,
        )

    @classmethod
    def idle(cls, options: DeepConfOptions, outcome: Outcome) -> str | None:
        if outcome.num_roots <= options.warmup_traces:
            return f"its warm-up of {options.warmup_traces} traces was the whole pool (lower warmup_traces)"
        short = outcome.too_short(options.window_tokens, "window")
        return None if short is None else f"{short} and could not be stopped (lower window_tokens)"

    @property
    def num_warmup(self) -> int:
        return min(self.options.warmup_traces, self.num_traces)

    def initial_state(self) -> DeepConfState:
        return DeepConfState()

    def decide(self, state: DeepConfState, view: PoolView) -> tuple[DeepConfState, list[Decision]]:
        if state.threshold is None and len(view.finished) < self.num_warmup:
            return state, top_up(view, self.capacity, self.num_warmup, OnPressure(PressureAction.QUEUE))
        threshold = self.threshold(view.finished) if state.threshold is None else state.threshold
        judged = view.finished[state.num_judged :]
        dropped: list[Decision] = [Discard(t.id, f"below {threshold:.6g}") for t in judged if lowest(t) < threshold]
        rule = StopRule(self.options.window_tokens, threshold)
        started = top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.QUEUE), rule)
        return DeepConfState(threshold, len(view.finished)), dropped + started

    def threshold(self, warmup: tuple[TraceView, ...]) -> float:
        """Returns the percentile of the warm-up, interpolated: at 90 % of 16 values, between the 14th and the 15th."""
        exact = float(np.percentile([lowest(trace) for trace in warmup], self.options.percentile))
        return exact * (1 - ROUNDING)


def lowest(trace: TraceView) -> float:
    assert trace.confidence is not None, "confidence is required"
    return trace.confidence.lowest

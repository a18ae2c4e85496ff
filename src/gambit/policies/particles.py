"""Particle filtering over thoughts, without lockstep: traces are resampled by their scores."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.policies.base import Branch, Decision, PoolView, Prune, Requirements, ScoreUse, Start, Wake
from gambit.policies.beam_search import can_be_compared
from gambit.results.vote import VoteKind
from gambit.stats import Floats, drawn, log_odds
from gambit.tree import TraceState
from gambit.types import OnPressure, PressureAction


class ParticleOptions(CheckedModel):
    """Options of particle filtering."""

    temperature: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="above 1, scores count less")


@dataclass(frozen=True, slots=True)
class ParticleFiltering:
    """Particle filtering (Puri et al. 2025): at every check traces are drawn anew, each as often as its score deserves.

    The draw is systematic: of N traces one with the weight p is drawn N p times, rounded up or down. One that is not
    drawn is pruned, with the draw's effective sample size as the reason; one that is drawn more than once branches.
    Weights are softmax(log-odds of the score), or softmax(score) where scores are no chances. Ours: draws come every
    `check_interval` steps. A complete trace keeps its vote and is not drawn, nor is what `can_be_compared` leaves out.
    """

    name: ClassVar[str] = "particle-filtering"
    default_vote: ClassVar[VoteKind] = VoteKind.BEST
    requirements: ClassVar[Requirements] = Requirements(scores=ScoreUse.ROUNDS)
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.QUEUE)
    Options: ClassVar[type[ParticleOptions]] = ParticleOptions
    settings: SearchSettings
    temperature: float

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        return cls(settings, settings.options_of(ParticleOptions).temperature)

    @property
    def wake(self) -> Wake:
        return Wake(every_steps=self.settings.pool.check_interval)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        settings, traces = self.settings, list(filter(can_be_compared, view.traces))
        if view.num_created == 0:
            return None, [Start(settings.capacity, self.on_pressure)]
        vacancies = min(settings.capacity, settings.num_traces - len(view.finished)) - len(view.traces)
        decisions: list[Decision] = []
        if traces:
            weights = self.weights([trace.score or 0.0 for trace in traces])
            reason = f"not drawn: effective sample size {1 / np.sum(weights**2):.1f} of {len(traces)}"
            counts = drawn(weights, len(traces) + max(0, vacancies), self.offset(view.step))
            for trace, count in sorted(zip(traces, counts, strict=True), key=lambda each: each[1] > 0):  # prunes first
                branch = Branch(trace.id, trace.num_tokens, self.on_pressure)
                again = count - 1 if trace.state is TraceState.RUNNING else 0
                decisions += [branch] * again if count else [Prune(trace.id, reason)]
        return None, decisions

    def weights(self, scores: Sequence[float]) -> Floats:
        logits = np.array([log_odds(score) if self.settings.is_probability else score for score in scores])
        weights: Floats = np.exp((logits - logits.max()) / self.temperature)
        return weights / np.sum(weights)

    def offset(self, step: int) -> float:
        return random.Random(f"{self.settings.sampling.seed} {step}").random()

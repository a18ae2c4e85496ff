"""Beam search, DVTS and particle filtering over thoughts, without lockstep: traces are compared as they are."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.policies.base import Branch, Decision, PoolView, Prune, Requirements, ScoreUse, Start, TraceView, Wake
from gambit.results.vote import VoteKind
from gambit.stats import Floats, drawn, log_odds
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


@dataclass(frozen=True, slots=True)
class Dvts(BeamSearch):
    """Diverse verifier tree search (Beeching et al. 2024): `capacity / beam_width` trees, each of which keeps its best
    trace at every check and branches it.

    Ours: a tree begins with `beam_width` roots and is over when its share of `num_traces` is complete.
    """

    name: ClassVar[str] = "dvts"

    def check(self, view: PoolView) -> list[Decision]:
        num_trees = max(1, self.capacity // self.beam_width)
        members: defaultdict[int, list[TraceView]] = defaultdict(list)
        for trace in view.traces:
            members[trace.root % num_trees].append(trace)
        decisions: list[Decision] = []
        for tree, traces in members.items():
            done = sum(trace.root % num_trees == tree for trace in view.finished)
            missing = math.ceil((self.num_traces - tree) / num_trees) - done
            places = min(math.ceil((self.capacity - tree) / num_trees), missing)
            if missing > 0:
                decisions += self.narrowed(traces, keep=1, places=places)
            else:
                decisions += [Prune(trace.id, "tree complete") for trace in traces]
        return sorted(decisions, key=lambda decision: isinstance(decision, Branch))  # places first, then their traces


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

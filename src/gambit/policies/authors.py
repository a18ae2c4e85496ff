"""Gambit as its authors' public code decides: the same tournaments by other rules, which docs/differences.md lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.policies.base import Branch, Decision, PoolView, Prune, Requirements, ScoreUse, Start, TraceView, Wake
from gambit.policies.tournament import ParentChoice, by_lot
from gambit.results.vote import VoteKind
from gambit.tree import TraceState
from gambit.types import OnPressure, PressureAction


class AuthorsOptions(CheckedModel):
    """Options of the authors' rules."""

    parents: ParentChoice = Field(ParentChoice.SCORE, description="which traces branch: score (the best) or random")


@dataclass(frozen=True, slots=True)
class Rounds:
    """The count by which the authors' code knows that a tournament is due."""

    decisions: int = 0  # decode steps in which at least one trace got a score
    last: int | None = None  # the one of the last tournament


@dataclass(frozen=True, slots=True)
class AuthorsGambit:
    """Gambit by the rules of its authors' public code, to repeat what it does. `--compat authors` chooses it.

    Δ counts steps in which a thought is scored. The hard floor prunes at each of them. At capacity the worst are pruned
    whether or not another trace branches for them. A ghost among the best takes a place and gets no child.
    docs/differences.md compares both sets of rules.
    """

    name: ClassVar[str] = "gambit-authors"
    default_vote: ClassVar[VoteKind] = VoteKind.SCORE_OR_ONE
    wake: ClassVar[Wake] = Wake(on_boundary=True)
    requirements: ClassVar[Requirements] = Requirements(scores=ScoreUse.ROUNDS)
    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.GHOST, unscored_first=True)
    Options: ClassVar[type[AuthorsOptions]] = AuthorsOptions
    capacity: int  # C
    swap_size: int  # K
    check_interval: int  # Δ
    warmup_tokens: int  # w
    hard_floor: float | None = None  # δ
    parents: ParentChoice = ParentChoice.SCORE
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
        pool = settings.pool
        return cls(
            settings.capacity, pool.swap_size, pool.check_interval, pool.warmup_tokens, settings.hard_floor,
            settings.options_of(AuthorsOptions).parents, settings.sampling.seed,
        )  # fmt: skip

    def initial_state(self) -> Rounds:
        return Rounds()

    def decide(self, state: Rounds, view: PoolView) -> tuple[Rounds, list[Decision]]:
        if view.num_created == 0:
            return state, [Start(self.capacity, self.on_pressure)]
        now = state.decisions + 1
        scored = [trace for trace in view.traces if trace.score is not None]
        doomed = [trace for trace in scored if self.is_below_floor(trace)]
        decisions: list[Decision] = [Prune(trace.id, "floor") for trace in doomed]
        if state.last is None:
            is_due = any(self.is_warm(trace) for trace in scored)
        else:
            is_due = now - state.last >= self.check_interval
        if not is_due:
            return Rounds(now, state.last), decisions
        left = [trace for trace in scored if trace not in doomed]
        return Rounds(now, now), decisions + self.tournament(left, len(view.traces) - len(doomed), now)

    def tournament(self, scored: Sequence[TraceView], num_active: int, now: int) -> list[Decision]:
        """Ranks the scored traces. `num_active` counts those without a score too, which are neither pruned nor branch.

        A pool below its capacity is filled. A full one loses its worst, half of the scored traces at most.
        """
        ranked = sorted(scored, key=lambda trace: (-_score(trace), trace.id))
        vacancies = self.capacity - num_active
        count = vacancies if vacancies > 0 else min(self.swap_size, len(ranked) // 2)
        victims = [] if vacancies > 0 else ranked[len(ranked) - count :]
        warm = [trace for trace in ranked[: len(ranked) - len(victims)] if self.is_warm(trace)]
        if self.parents is ParentChoice.RANDOM:
            warm = by_lot(warm, self.seed, now)
        decisions: list[Decision] = [Prune(trace.id, "tournament") for trace in victims]
        # A ghost has been chosen like the others. Its place stays empty until the next tournament.
        running = [trace for trace in warm[:count] if trace.state is TraceState.RUNNING]
        return decisions + [Branch(trace.id, trace.num_tokens, self.on_pressure) for trace in running]

    def is_warm(self, trace: TraceView) -> bool:
        return trace.num_generated >= self.warmup_tokens

    def is_below_floor(self, trace: TraceView) -> bool:
        return self.hard_floor is not None and self.is_warm(trace) and _score(trace) < self.hard_floor


def _score(trace: TraceView) -> float:
    assert trace.score is not None, "only scored traces are ranked"
    return trace.score

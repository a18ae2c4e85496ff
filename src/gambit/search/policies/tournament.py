"""Gambit's own policy: thought-level beam search by tournaments (Algorithm 1); it ranks and touches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gambit.config.options import BranchPoint
from gambit.config.presets import SearchSettings
from gambit.core.tree import TraceState
from gambit.core.types import OnPressure, PressureAction
from gambit.results.vote import VoteKind
from gambit.search.policies.base import Branch, Decision, Evict, NoOptions, PoolView, Prune, Start, TraceView, Wake

FLOOR_STEPS = 8  # scored thoughts before the hard floor may act: a mean of fewer says little


class Ranked(NamedTuple):
    """A trace with the score it is ranked by."""

    trace: TraceView
    score: float


@dataclass(frozen=True, slots=True)
class Tournament:
    """Gambit: thought-level beam search. Every `check_interval` decode steps, under capacity the best traces fill it up
    by branching (Case 1), at capacity the worst `swap_size` make room for branches of the best (Case 2).

    Ghosts count and may be pruned. Its settings are those of every search; docs/how-it-works.md has the points that
    the paper leaves open.
    """

    name: ClassVar[str] = "gambit"
    default_vote: ClassVar[VoteKind] = VoteKind.SCORE
    Options: ClassVar[type[NoOptions]] = NoOptions  # capacity, swap_size, … belong to every search
    capacity: int
    swap_size: int
    check_interval: int
    warmup_tokens: int
    hard_floor: float | None
    ghost_parents: bool = False
    branch_point: BranchPoint = BranchPoint.LAST_TOKEN

    on_pressure: ClassVar[OnPressure] = OnPressure(PressureAction.GHOST)

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Tournament:
        return cls(
            settings.capacity,
            settings.swap_size,
            settings.check_interval,
            settings.warmup_tokens,
            settings.hard_floor,
            settings.ghost_parents,
            settings.branch_point,
        )

    @property
    def wake(self) -> Wake:
        return Wake(every_steps=self.check_interval)

    def initial_state(self) -> None:
        return None

    def decide(self, state: None, view: PoolView) -> tuple[None, list[Decision]]:
        if view.num_created == 0:
            return None, [Start(self.capacity, self.on_pressure)]
        ranking = self.rank(view)
        parents = [entry for entry in ranking if self.can_parent(entry.trace)]
        vacant = self.capacity - len(view.traces)
        round_ = self.fill(parents, vacant) if vacant > 0 else self.swap(ranking, parents)
        return None, round_ + self.below_floor(ranking, round_)

    def rank(self, view: PoolView) -> list[Ranked]:
        """Best first, ties by id. A trace without a thought is not ranked, until its warm-up is over: then it is 0."""
        scored = [Ranked(t, t.score) for t in view.traces if t.score is not None]
        silent = [Ranked(t, 0.0) for t in view.traces if t.score is None and t.num_generated >= self.warmup_tokens]
        return sorted(scored + silent, key=lambda entry: (-entry.score, entry.trace.id))

    def can_parent(self, trace: TraceView) -> bool:
        has_room = trace.state is TraceState.RUNNING or (self.ghost_parents and trace.state is TraceState.GHOST)
        return has_room and trace.is_thinking and trace.num_generated >= self.warmup_tokens

    def fill(self, parents: list[Ranked], vacant: int) -> list[Decision]:
        """Case 1, under capacity: one child for each of the best, as many as there are places."""
        return [self.branch(parent.trace) for parent in parents[:vacant]]

    def swap(self, ranking: list[Ranked], parents: list[Ranked]) -> list[Decision]:
        """Case 2, at capacity: best parent against worst victim; a pair that would not gain is dropped."""
        chosen = parents[: self.swap_size]
        chosen_ids = {parent.trace.id for parent in chosen}
        victims = [entry for entry in reversed(ranking) if entry.trace.id not in chosen_ids]
        pairs = [(p.trace, v.trace) for p, v in zip(chosen, victims, strict=False) if p.score > v.score]
        # All prunes first: the pool must never hold more than its capacity, not even between two decisions.
        prunes: list[Decision] = [Prune(victim.id, "tournament") for _, victim in pairs]
        return prunes + [self.branch(parent) for parent, _ in pairs]

    def branch(self, parent: TraceView) -> Branch:
        at_boundary = self.branch_point is BranchPoint.LAST_BOUNDARY
        return Branch(parent.id, parent.boundary_tokens if at_boundary else parent.num_tokens, self.on_pressure)

    def below_floor(self, ranking: list[Ranked], round_: list[Decision]) -> list[Decision]:
        """Hard floor δ: hopeless traces give up their memory; the best running one stays, an empty pool being mute."""
        if self.hard_floor is None:
            return []
        pruned = {decision.trace for decision in round_ if isinstance(decision, Prune)}
        running = [e for e in ranking if e.trace.state is TraceState.RUNNING and e.trace.id not in pruned]
        return [
            Evict(entry.trace.id, "floor")
            for entry in running[1:]
            if entry.score < self.hard_floor and entry.trace.num_scored >= FLOOR_STEPS
        ]

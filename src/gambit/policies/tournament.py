"""Gambit's own policy: thought-level beam search by tournaments (Algorithm 1 of the paper), on one or more islands."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gambit.config.options import BranchPoint
from gambit.config.presets import SearchSettings
from gambit.config.trust import Doubt
from gambit.policies.base import (
    Branch,
    Decision,
    Evict,
    NoOptions,
    PoolView,
    Prune,
    Requirements,
    ScoreSpread,
    ScoreUse,
    SplitBy,
    SplitIslands,
    Start,
    TraceView,
    Wake,
)
from gambit.policies.islands import Islands
from gambit.results.vote import VoteKind
from gambit.stats import log_odds
from gambit.tree import LIVE, TraceState
from gambit.types import OnPressure, PressureAction

FLOOR_STEPS = 8  # scored thoughts before the hard floor may act: a mean of fewer says little


@dataclass(frozen=True, slots=True)
class Margin:
    """How clearly a parent must lead the trace that gives way to its child.

    A branch is no independent voter. Where scores say little, most leads are noise: swaps by them cost the pool its
    variety and bring nothing for it.
    """

    least: float = 0.0
    in_log_odds: bool = False  # a lead from 0.01 to 0.07 is then as clear as one from 0.5 to 0.88

    def is_led(self, parent: float, victim: float) -> bool:
        if self.least == 0 or parent <= victim:
            return parent > victim
        lead = log_odds(parent) - log_odds(victim) if self.in_log_odds else parent - victim
        return lead >= self.least


class Ranked(NamedTuple):
    """A trace with the score it is ranked by."""

    trace: TraceView
    score: float


@dataclass(frozen=True, slots=True)
class Tournament:
    """Gambit: thought-level beam search. Every `check_interval` decode steps, under capacity the best traces fill it up
    by branching (Case 1), at capacity the worst `swap_size` make room for branches of the best (Case 2).

    With several `islands` each root and its descendants compete with those of their own island alone, so that a
    scorer's mistake cannot take over the whole pool; all islands vote together. One island is the paper's method.
    An island is over when its share of `num_traces` is complete. Where the scorer turns out to be less than its figures
    promise, islands are split into smaller ones, once or more often (`doubt`); the state is then the policy in force.

    Ghosts count and may be pruned. Its settings are those of every search; docs/how-it-works.md has the points that
    the paper leaves open.
    """

    name: ClassVar[str] = "gambit"
    # With later thoughts heavier: 0.6 points (0.1 to 1.1) above the plain score on pawn, 2.6 (1.3 to 3.9) with a worse
    # scorer, never below it on an LLM (benchmarks/results/islands_noise.json, islands_settings.json).
    default_vote: ClassVar[VoteKind] = VoteKind.POSITION
    Options: ClassVar[type[NoOptions]] = NoOptions  # capacity, swap_size, … belong to every search
    islands: Islands
    swap_size: int
    check_interval: int
    warmup_tokens: int
    hard_floor: float | None
    ghost_parents: bool = False
    branch_point: BranchPoint = BranchPoint.LAST_TOKEN
    doubt: Doubt | None = None
    margin: Margin = Margin()

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Tournament:
        return cls(
            Islands.of(settings),
            settings.swap_size,
            settings.check_interval,
            settings.warmup_tokens,
            settings.hard_floor,
            settings.ghost_parents,
            settings.branch_point,
            settings.doubt,
            Margin(settings.swap_margin, in_log_odds=settings.is_probability),
        )

    @property
    def has_one_island(self) -> bool:
        return self.islands.count == 1

    @property
    def on_pressure(self) -> OnPressure:
        return OnPressure(PressureAction.GHOST, spares_islands=not self.has_one_island)

    @property
    def wake(self) -> Wake:
        # A completion may end an island; one that is never split ends with the search.
        may_end = not self.has_one_island or self.doubt is not None
        return Wake(every_steps=self.check_interval, on_completion=may_end)

    @property
    def requirements(self) -> Requirements:
        # A completed island is over, whatever its scores.
        return Requirements(scores=ScoreUse.ROUNDS, split_by=SplitBy.ISLANDS)

    @property
    def swaps_per_island(self) -> int:
        """K is the pool's; every island swaps at least one."""
        return max(1, round(self.swap_size / self.islands.count))

    def initial_state(self) -> None:
        return None

    def decide(self, state: Tournament | None, view: PoolView) -> tuple[Tournament | None, list[Decision]]:
        in_force, is_round = state or self, view.step % self.check_interval == 0
        if is_round and view.spread is not None and (split := in_force.doubted(view.spread)) is not None:
            return in_force.after(split), [split]
        return state, in_force.decide_all(view, is_round=is_round)

    def doubted(self, spread: ScoreSpread) -> SplitIslands | None:
        """Where the pool's scores lie too far apart for islands as large as these: smaller ones."""
        if self.doubt is None or (auc := self.doubt.auc_at(*spread)) == self.doubt.auc:
            return None
        pool = self.doubt.pool_at(auc)
        if pool.islands <= self.islands.count:
            return None
        why = (
            f"the scorer's AUC at half-way was {self.doubt.auc:.2f}, but its scores lie further apart here than where "
            f"it was judged, which leaves about {auc:.2f}"
        )
        return SplitIslands(pool.islands, pool.swap_size, pool.warmup_tokens, why)

    def after(self, split: SplitIslands) -> Tournament:
        islands = dataclasses.replace(self.islands, count=split.islands)
        return dataclasses.replace(self, islands=islands, swap_size=split.swap_size, warmup_tokens=split.warmup_tokens)

    def decide_all(self, view: PoolView, *, is_round: bool) -> list[Decision]:
        members: dict[int, list[TraceView]] = {island: [] for island in self.islands}
        for trace in view.traces:
            members[trace.island].append(trace)
        completed = Counter(trace.island for trace in view.finished)
        surplus = [trace for island in self.islands for trace in self.surplus(island, members[island])]
        for trace in surplus:
            members[trace.island].remove(trace)
        has_begun = {island: bool(members[island] or completed[island]) for island in self.islands}
        return [
            *(Prune(trace.id, "split") for trace in surplus),
            *(
                decision
                for island in self.open_islands(has_begun, view)
                for decision in self.decide_island(island, members[island], completed[island], is_round=is_round)
            ),
        ]

    def open_islands(self, has_begun: Mapping[int, bool], view: PoolView) -> Iterator[int]:
        """Those that have begun, and of the others, in their order, as many as the traces planned by now fill."""
        planned = view.most(self.islands.num_wanted)
        planned -= sum(self.islands.share(island) for island in self.islands if has_begun[island])
        for island in self.islands:
            if has_begun[island]:
                yield island
            elif planned > 0:
                planned -= self.islands.share(island)
                yield island

    def surplus(self, island: int, traces: list[TraceView]) -> list[TraceView]:
        """The worst of an island that a split left with more traces than places: another was left with fewer."""
        excess = len(traces) - self.islands.places(island)
        by_score = sorted(traces, key=lambda trace: (math.inf if trace.score is None else trace.score, -trace.id))
        return by_score[: max(0, excess)]

    def decide_island(
        self, island: int, traces: list[TraceView], num_completed: int, *, is_round: bool
    ) -> list[Decision]:
        """`traces`: the island's active ones, by id."""
        live = [trace for trace in traces if trace.state in LIVE]
        missing = self.islands.share(island) - num_completed
        if missing <= 0:
            return [Prune(trace.id, "island complete") for trace in live]
        vacancies = self.vacancies(island, traces, missing - len(live))
        is_new = not traces and not num_completed
        if is_new or (not live and not self.has_one_island):  # the paper's pool is over when nothing runs
            return [Start(vacancies, self.on_pressure, island=island)] if vacancies > 0 else []
        return self.tournament(traces, vacancies) if is_round else []

    def vacancies(self, island: int, traces: list[TraceView], unassigned: int) -> int:
        """Places to fill; `unassigned`: traces yet to be completed for which nothing runs.

        The paper's pool is kept full to its end. An island runs no more traces than it has to complete.
        """
        free = self.islands.places(island) - len(traces)
        return free if self.has_one_island else min(free, unassigned)

    def tournament(self, traces: list[TraceView], vacancies: int) -> list[Decision]:
        ranking = self.rank(traces)
        parents = [entry for entry in ranking if self.can_parent(entry.trace)]
        round_ = self.fill(parents, vacancies) if vacancies > 0 else self.swap(ranking, parents)
        return round_ + self.below_floor(ranking, round_)

    def rank(self, traces: list[TraceView]) -> list[Ranked]:
        """Best first, ties by id. A trace without a thought is not ranked, until its warm-up is over: then it is 0."""
        scored = [Ranked(t, t.score) for t in traces if t.score is not None]
        silent = [Ranked(t, 0.0) for t in traces if t.score is None and t.num_generated >= self.warmup_tokens]
        return sorted(scored + silent, key=lambda entry: (-entry.score, entry.trace.id))

    def can_parent(self, trace: TraceView) -> bool:
        is_there = trace.state is TraceState.RUNNING or (self.ghost_parents and trace.state is TraceState.GHOST)
        return is_there and trace.is_thinking and trace.num_generated >= self.warmup_tokens

    def fill(self, parents: list[Ranked], vacancies: int) -> list[Decision]:
        """Case 1, under capacity: one child for each of the best, as many as there are places."""
        return [self.branch(parent.trace) for parent in parents[:vacancies]]

    def swap(self, ranking: list[Ranked], parents: list[Ranked]) -> list[Decision]:
        """Case 2, at capacity: best parent against worst victim; a pair that would not gain is dropped."""
        chosen = parents[: self.swaps_per_island]
        chosen_ids = {parent.trace.id for parent in chosen}
        victims = [entry for entry in reversed(ranking) if entry.trace.id not in chosen_ids]
        pairs = [
            (p.trace, v.trace) for p, v in zip(chosen, victims, strict=False) if self.margin.is_led(p.score, v.score)
        ]
        # All prunes first: the pool must never hold more than its capacity, not even between two decisions.
        prunes: list[Decision] = [Prune(victim.id, "tournament") for _, victim in pairs]
        return prunes + [self.branch(parent) for parent, _ in pairs]

    def branch(self, parent: TraceView) -> Branch:
        at_boundary = self.branch_point is BranchPoint.LAST_BOUNDARY
        return Branch(parent.id, parent.boundary_tokens if at_boundary else parent.num_tokens, self.on_pressure)

    def below_floor(self, ranking: list[Ranked], round_: list[Decision]) -> list[Decision]:
        """Hard floor δ: hopeless traces give up their memory; the best running one stays, so that one always runs."""
        if self.hard_floor is None:
            return []
        pruned = {decision.trace for decision in round_ if isinstance(decision, Prune)}
        running = [e for e in ranking if e.trace.state is TraceState.RUNNING and e.trace.id not in pruned]
        return [
            Evict(entry.trace.id, "floor")
            for entry in running[1:]
            if entry.score < self.hard_floor and entry.trace.num_scored >= FLOOR_STEPS
        ]

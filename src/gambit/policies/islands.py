"""Gambit: a pool of islands, each with tournaments of its own. With one island it is the paper's method."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchPart, SearchSettings
from gambit.policies.base import Decision, PoolView, Prune, Requirements, ScoreUse, SplitBy, Start, TraceView, Wake
from gambit.policies.doubt import Doubting
from gambit.policies.tournament import ParentChoice, Tournament
from gambit.results.vote import VoteKind
from gambit.tree import LIVE
from gambit.types import OnPressure, PoolSettings, PressureAction


class Views(StrEnum):
    """The traces that tournaments see when the KV cache is full."""

    DECOUPLED = "decoupled"  # ghosts too, so that memory does not change the competition
    COUPLED = "coupled"  # an ablation: a trace that loses its memory leaves the pool, which is then filled up


class GambitOptions(CheckedModel):
    """Ablations: what tournaments do without scores, and without ghosts."""

    parents: ParentChoice = Field(ParentChoice.SCORE, description="which traces branch: score (the best) or random")
    views: Views = Field(Views.DECOUPLED, description="decoupled: evicted traces keep their places; coupled: none does")


@dataclass(frozen=True, slots=True)
class Gambit:
    """Gambit: thought-level beam search. Every `check_interval` decode steps, under capacity the best traces fill it up
    by branching (Case 1), at capacity the worst `swap_size` make room for branches of the best (Case 2).

    With several `islands` each root and its descendants compete with those of their own island alone, so that a
    scorer's mistake cannot take over the whole pool; all islands vote together. One island is the paper's method.
    An island is over when its share of `num_traces` is complete. If the scorer turns out to be less than its figures
    promise, islands are split into smaller ones, once or more often (`doubt`).
    """

    name: ClassVar[str] = "gambit"
    # With later thoughts heavier: 0.6 points (0.1 to 1.1) above the plain score on pawn, 2.6 (1.3 to 3.9) with a worse
    # scorer, never below it on an LLM (benchmarks/results/islands_noise.json, islands_settings.json).
    default_vote: ClassVar[VoteKind] = VoteKind.POSITION
    Options: ClassVar[type[GambitOptions]] = GambitOptions
    islands: Islands
    tournament: Tournament  # of one island

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Gambit | Doubting:
        pool, own = settings.pool, settings.options_of(GambitOptions)
        action = PressureAction.PRUNE if own.views is Views.COUPLED else PressureAction.GHOST
        tournament = Tournament(
            settings.capacity, pool.swap_size, pool.check_interval, pool.warmup_tokens, margin=pool.swap_margin,
            in_log_odds=settings.is_probability, hard_floor=settings.hard_floor, ghost_parents=settings.ghost_parents,
            branch_point=settings.branch_point, on_pressure=OnPressure(action),
            lot=settings.sampling.seed if own.parents is ParentChoice.RANDOM else None,
        )  # fmt: skip
        policy = cls(Islands.of(settings), tournament).with_pool(pool)
        return policy if settings.doubt is None else Doubting(policy, settings.doubt)

    def with_pool(self, pool: PoolSettings) -> Gambit:
        """Returns the policy with as many islands as `pool` has. Its K is that of all islands; each swaps at least one.

        Under memory pressure the largest of several islands gives way first.
        """
        return Gambit(
            dataclasses.replace(self.islands, count=pool.islands),
            dataclasses.replace(
                self.tournament,
                swap_size=max(1, round(pool.swap_size / pool.islands)),
                warmup_tokens=pool.warmup_tokens,
                on_pressure=dataclasses.replace(self.tournament.on_pressure, spares_islands=pool.islands > 1),
            ),
        )

    @property
    def wake(self) -> Wake:
        # A completion may end one of several islands; a single one ends with the search.
        return Wake(every_steps=self.tournament.check_interval, on_completion=self.islands.count > 1)

    @property
    def requirements(self) -> Requirements:
        # A completed island is over, whatever its scores.
        return Requirements(scores=ScoreUse.ROUNDS, split_by=SplitBy.ISLANDS)

    def initial_state(self) -> None:
        return None

    def decide(self, state: object, view: PoolView) -> tuple[object, list[Decision]]:
        return state, self.tournament.decide(view) if self.islands.count == 1 else self.on_islands(view)

    def on_islands(self, view: PoolView) -> list[Decision]:
        """Decides for every island that has begun or may begin now, after what a split left over has been pruned."""
        members: dict[int, list[TraceView]] = {island: [] for island in self.islands}
        for trace in view.traces:
            members[trace.island].append(trace)
        completed = Counter(trace.island for trace in view.finished)
        surplus = [trace for island in self.islands for trace in self.surplus(island, members[island])]
        for trace in surplus:
            members[trace.island].remove(trace)
        has_begun = {island: bool(members[island] or completed[island]) for island in self.islands}
        decisions: list[Decision] = [Prune(trace.id, "split") for trace in surplus]
        for island in self.open_islands(has_begun, view):
            decisions += self.on_island(island, members[island], completed[island], view.step)
        return decisions

    def open_islands(self, has_begun: Mapping[int, bool], view: PoolView) -> Iterator[int]:
        """Yields islands that have begun, and of the others, in order, as many as the traces planned by now fill."""
        planned = view.most(self.islands.num_wanted)
        planned -= sum(self.islands.share(island) for island in self.islands if has_begun[island])
        for island in self.islands:
            if has_begun[island]:
                yield island
            elif planned > 0:
                planned -= self.islands.share(island)
                yield island

    def surplus(self, island: int, traces: Sequence[TraceView]) -> list[TraceView]:
        """Returns the worst of an island that a split left with more traces than places."""
        excess = len(traces) - self.islands.places(island)
        by_score = sorted(traces, key=lambda trace: (math.inf if trace.score is None else trace.score, -trace.id))
        return by_score[: max(0, excess)]

    def on_island(self, island: int, traces: Sequence[TraceView], num_completed: int, step: int) -> list[Decision]:
        """Decides for the active traces of an island. It runs no more of them than it has still to complete."""
        live = [trace for trace in traces if trace.state in LIVE]
        missing = self.islands.share(island) - num_completed
        if missing <= 0:
            return [Prune(trace.id, "island complete") for trace in live]
        vacancies = min(self.islands.places(island) - len(traces), missing - len(live))
        if not live:
            return [Start(vacancies, self.tournament.on_pressure, island=island)] if vacancies > 0 else []
        return self.tournament.tournament(traces, vacancies, step) if self.tournament.is_due(step) else []


@dataclass(frozen=True, slots=True)
class Islands:
    """The division of a pool: places, traces to complete and random numbers of each island.

    An island shares the engine and the vote with the others, and nothing else. As many islands as places are
    self-consistency.
    """

    count: int
    capacity: int
    num_traces: int
    played: range | None = None  # those searched here; None: all
    first_noise: int = 0

    @classmethod
    def of(cls, settings: SearchSettings) -> Islands:
        share = settings.part or SearchPart()
        return cls(settings.pool.islands, settings.capacity, settings.num_traces, share.islands, share.first_trace)

    def __iter__(self) -> Iterator[int]:
        """Yields the islands that are searched here."""
        return iter(range(self.count) if self.played is None else self.played)

    def places(self, island: int) -> int:
        """Returns how many of its traces are in the pool at most; islands differ by at most one."""
        return _share(self.capacity, self.count, island)

    def share(self, island: int) -> int:
        """Returns how many traces it has to complete."""
        return _share(self.num_traces, self.count, island)

    def noise_id(self, island: int, ordinal: int) -> int:
        """Returns the random numbers of an island's next trace: the same whatever happens on other islands.

        With one island these are the traces' ids, and with a root on each too.
        """
        return self.first_noise + island + self.count * ordinal

    @property
    def num_wanted(self) -> int:
        """Traces that have to be completed here."""
        return sum(map(self.share, self))

    def are_complete(self, completed: Iterable[int]) -> bool:
        """Returns True if each has its share; `completed` are the islands of the completed traces, one entry each."""
        counts = Counter(completed)
        return all(counts[island] >= self.share(island) for island in self)


def _share(total: int, count: int, index: int) -> int:
    return total // count + (index < total % count)

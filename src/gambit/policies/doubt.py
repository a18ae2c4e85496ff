"""Doubt: Gambit's policy turns to smaller islands if its scorer does less than its figures promise."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.config.trust import FEWEST_TRACES, THOUGHTS, Doubt, spread_of
from gambit.policies.base import Decision, PoolView, Requirements, SplitIslands, Wake
from gambit.tree import TraceTree
from gambit.types import PoolSettings

if TYPE_CHECKING:
    from gambit.policies.islands import Gambit

Scores = Sequence[Sequence[float]]  # of the first thoughts of each root


@dataclass(frozen=True, slots=True)
class Doubting:
    """A wrapper that looks, before each tournament, at how far the scores of the pool's roots lie apart.

    If that is much further than when the scorer was judged, the islands are divided, and the policy for these is
    in force from then on: it is the state.
    """

    name: ClassVar[str] = "gambit"
    policy: Gambit
    doubt: Doubt

    @property
    def wake(self) -> Wake:
        return dataclasses.replace(self.policy.wake, on_completion=True)  # which may end an island after a split

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(self.policy.requirements, first_scores=THOUGHTS[-1])

    def initial_state(self) -> Gambit:
        return self.policy

    def decide(self, policy: Gambit, view: PoolView) -> tuple[Gambit, list[Decision]]:
        if policy.tournament.is_due(view.step):
            pool = fallback(self.doubt, view.first_scores, policy.islands.count)
            if pool is not None:
                return policy.with_pool(pool), [SplitIslands(pool)]
        return policy, policy.decide(None, view)[1]


def fallback(doubt: Doubt, scores: Scores, num_islands: int) -> PoolSettings | None:
    """Returns the pool to turn to, with its reason; None if scores lie no further apart than they may."""
    found = spread_in(doubt, scores)
    if found is None or (auc := doubt.auc_at(*found)) == doubt.auc:
        return None
    pool = next((pool for from_auc, pool in doubt.pools if auc >= from_auc), doubt.pools[-1][1])
    if pool.islands <= num_islands:
        return None
    why = (
        f"the scorer's AUC at half-way was {doubt.auc:.2f}, but its scores lie further apart here than where "
        f"it was judged, which leaves about {auc:.2f}"
    )
    return dataclasses.replace(pool, why=why)


def spread_in(doubt: Doubt, scores: Scores) -> tuple[int, float] | None:
    """Returns a number of thoughts and how far roots lie apart after so many; None while too few have scores.

    It is the largest number that half of the roots have; the others, pruned or slow, are left out.
    """
    enough = max(FEWEST_TRACES, -(-len(scores) // 2))
    for count in reversed(THOUGHTS):
        ready = [[doubt.scale(score) for score in known[:count]] for known in scores if len(known) >= count]
        if len(ready) >= enough:
            return count, spread_of(ready)
    return None


class FirstScores:
    """The scores of each root's first thoughts; branches would only repeat those of the chosen."""

    def __init__(self, most: int, tree: TraceTree) -> None:
        self._most = most
        self._tree = tree
        self._scores: defaultdict[int, list[float]] = defaultdict(list)  # by root

    def note(self, event: ev.Event) -> None:
        if not isinstance(event, ev.Scored | ev.Verified):
            return
        for trace, score in zip(event.traces, event.scores, strict=True):
            if self._tree.traces[trace].parent is None and len(self._scores[trace]) < self._most:
                self._scores[trace].append(score)

    def all(self) -> tuple[tuple[float, ...], ...]:
        """Returns the scores of every root that has one."""
        return tuple(map(tuple, self._scores.values()))


class DoubtWatch:
    """Finds out if the scores of a spread search lie so far apart that its scorer should be trusted less."""

    def __init__(self, doubt: Doubt, settings: SearchSettings, tree: TraceTree) -> None:
        self.finding: str | None = None
        self._doubt = doubt
        self._pool = settings.pool
        self._scores = FirstScores(THOUGHTS[-1], tree)

    def note(self, event: ev.Event) -> None:
        self._scores.note(event)
        is_round = isinstance(event, ev.Sample) and event.step % self._pool.check_interval == 0
        if not is_round or self.finding is not None:
            return
        pool = fallback(self._doubt, self._scores.all(), self._pool.islands)
        if pool is not None:
            self.finding = (
                f"{pool.why}: on one engine the search would have gone on with {pool.islands} islands; spread over "
                f"several it keeps its {self._pool.islands}, so that --islands {pool.islands} is safer here"
            )

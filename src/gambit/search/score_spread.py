"""The scores of a search's roots, from which a policy sees how far they lie apart."""

from __future__ import annotations

from collections import defaultdict

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.config.trust import THOUGHTS, Doubt
from gambit.policies.doubt import fallback
from gambit.tree import TraceTree


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
    """Sees whether the scores of a whole search lie so far apart that its scorer should not be trusted as much."""

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

"""How far the scores of a search's roots lie apart: what its scorer does here, against where it was judged."""

from __future__ import annotations

from collections import defaultdict

from gambit.config.trust import FEWEST_TRACES, THOUGHTS, Doubt, spread_of
from gambit.core import events as ev
from gambit.core.tree import TraceTree
from gambit.search.policies.base import ScoreSpread


class SpreadMeter:
    """Keeps the scores of the roots' first thoughts; branches would only repeat those of the chosen."""

    def __init__(self, doubt: Doubt) -> None:
        self._doubt = doubt
        self._scores: defaultdict[int, list[float]] = defaultdict(list)  # by root

    def note(self, event: ev.Scored | ev.Verified, tree: TraceTree) -> None:
        for trace, score in zip(event.traces, event.scores, strict=True):
            if tree.traces[trace].parent is None and len(known := self._scores[trace]) < THOUGHTS[-1]:
                known.append(self._doubt.scale(score))

    def found(self) -> ScoreSpread | None:
        """After as many thoughts as half of the roots have; the others, pruned or slow, are left out."""
        enough = max(FEWEST_TRACES, -(-len(self._scores) // 2))
        for count in reversed(THOUGHTS):
            ready = [known[:count] for known in self._scores.values() if len(known) >= count]
            if len(ready) >= enough:
                return ScoreSpread(count, spread_of(ready))
        return None

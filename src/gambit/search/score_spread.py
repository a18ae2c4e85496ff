"""How far the scores of a search's roots lie apart: what its scorer does here, against where it was judged."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.config.trust import FEWEST_TRACES, THOUGHTS, Doubt, spread_of
from gambit.policies.base import ScoreSpread
from gambit.policies.tournament import Tournament
from gambit.tree import TraceTree


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


class DoubtWatch:
    """Sees whether the scores of a whole search lie so far apart that its scorer should not be trusted as much."""

    def __init__(self, doubt: Doubt, settings: SearchSettings) -> None:
        self.finding: str | None = None
        self._meter = SpreadMeter(doubt)
        self._policy = Tournament.from_settings(dataclasses.replace(settings, doubt=doubt))

    def note(self, event: ev.Event, tree: TraceTree) -> None:
        if isinstance(event, ev.Scored | ev.Verified):
            self._meter.note(event, tree)
        is_round = isinstance(event, ev.Sample) and event.step % self._policy.check_interval == 0
        if not is_round or self.finding is not None or (spread := self._meter.found()) is None:
            return
        if (split := self._policy.doubted(spread)) is not None:
            self.finding = (
                f"{split.why}: on one engine the search would have gone on with {split.islands} islands; spread over "
                f"several it keeps its {self._policy.islands.count}, so that --islands {split.islands} is safer here"
            )

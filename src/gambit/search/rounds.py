"""The rounds of a search: how many traces may have begun, and whether the vote needs more."""

from __future__ import annotations

import time
from collections.abc import Callable

from gambit.config.presets import SearchSettings
from gambit.policies.base import Requirements
from gambit.results.record import Equivalent, SearchRecord
from gambit.search.consensus import CHECK_SECONDS, is_over
from gambit.search.judging import TraceJudge
from gambit.search.limits import SearchLimits


class Rounds:
    """Watches over the vote. A search without `first_traces` has one round, which the vote may cut short."""

    def __init__(
        self,
        settings: SearchSettings,
        record: SearchRecord,
        requirements: Requirements,
        judge: TraceJudge,
        limits: SearchLimits,
        equivalent_until: Callable[[float], Equivalent],
    ) -> None:
        self.is_settled = False
        self.num_planned = settings.first_traces  # traces that may have begun by now; None: all
        self._settings = settings
        self._record = record
        self._requirements = requirements
        self._judge = judge
        self._limits = limits
        self._equivalent_until = equivalent_until
        self._has_news = False  # a trace has ended since the vote was looked at, or has got its score

    def note(self, has_finished: bool) -> None:
        self._has_news |= has_finished

    @property
    def must_wait(self) -> bool:
        """Whether the verifier has yet to read what decides about a next round."""
        is_open = self._is_between and self._votes_by_verifier and not self._limits.is_time_up
        return is_open and not self._judge.has_all_scores

    def look(self, at: int, *, is_check: bool) -> None:
        """Whether the vote is settled, if it is time to look. `is_check`: a check interval is over.

        The engine stands still while one of its searches waits for its verifier. While traces run, the vote is
        therefore looked at in checks alone, by scores that a check's lag has given time to come.
        """
        consensus = self._settings.consensus
        if consensus is None or self._settings.part is not None:  # of a part others vote too
            return
        if not self._has_news or not (self._is_between or is_check or not self._votes_by_verifier):
            return
        if self._votes_by_verifier:
            self._judge.collect(at, self._limits.search_deadline, with_latest=self._is_between)
        self._has_news = self._votes_by_verifier and self._judge.awaits_votes
        equivalent = self._equivalent_until(time.monotonic() + CHECK_SECONDS)
        self.is_settled = is_over(
            consensus, self._record, self._requirements, equivalent, is_probability=self._settings.is_probability
        )

    def plan_next(self) -> bool:
        """Let as many roots begin again as there are, if it is time to."""
        if not self._is_between or self.is_settled:
            return False
        self.num_planned = 2 * self._num_roots
        return True

    @property
    def _is_between(self) -> bool:
        """Nothing of the search runs, and whether there are more traces is for the vote to say."""
        if self.num_planned is None or self._record.tree.num_live or self._limits.has_enough_traces:
            return False
        return self._num_roots < self._settings.num_traces

    @property
    def _num_roots(self) -> int:
        return sum(trace.parent is None for trace in self._record.tree.traces)

    @property
    def _votes_by_verifier(self) -> bool:
        return self._judge.has_verifier and self._record.vote_kind.needs_scores

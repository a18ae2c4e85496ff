"""When a search is over: enough traces are complete, none is left, its vote is settled, or a budget is used up."""

from __future__ import annotations

import math
import time

from gambit.config.presets import SearchSettings
from gambit.policies.islands import Islands
from gambit.tree import TraceState, TraceTree
from gambit.types import StopReason

VOTE_SHARE, MAX_VOTE_SECONDS = 0.1, 5.0  # of a time budget, kept for the vote


def until_vote(budget_seconds: float) -> float:
    """Seconds of a time budget in which traces may run."""
    return budget_seconds - min(VOTE_SHARE * budget_seconds, MAX_VOTE_SECONDS)


class SearchLimits:
    """The target and the budgets of one search, and its clock."""

    def __init__(self, settings: SearchSettings, islands: Islands, tree: TraceTree) -> None:
        self._settings = settings
        self.islands = islands
        self._tree = tree
        self._num_wanted = islands.num_wanted
        self._began = time.monotonic()

    def start_clock(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._began

    @property
    def search_deadline(self) -> float:
        """On the monotonic clock: then traces stop, and the rest of the time is for the vote."""
        return self._began + self._seconds_to_search

    @property
    def vote_deadline(self) -> float:
        budget = self._settings.budget_seconds
        return math.inf if budget is None else self._began + budget

    @property
    def _seconds_to_search(self) -> float:
        budget = self._settings.budget_seconds
        return math.inf if budget is None else until_vote(budget)

    @property
    def has_enough_traces(self) -> bool:
        """Whether as many are complete as were asked for, on every island."""
        if self._tree.count(TraceState.FINISHED) < self._num_wanted:
            return False
        return self.islands.are_complete(trace.island for trace in self._tree.in_state(TraceState.FINISHED))

    def due_reason(self, num_generated: int, *, is_settled: bool) -> StopReason | None:
        """Why the search must stop now; None where it goes on. `is_settled`: its vote cannot change any more.

        A part of a search ends with its own traces: whoever has all parts watches over budgets and the vote.
        """
        if self._settings.part is not None:
            return self.end_of_traces
        if (reason := self.reason_in_pool(num_generated, is_settled=is_settled)) is not None:
            return reason
        return StopReason.BUDGET_SECONDS if self.is_time_up else None

    def reason_in_pool(self, num_generated: int, *, is_settled: bool) -> StopReason | None:
        """As `due_reason`, whatever the time: the same in every run with the same seed."""
        settings, tree = self._settings, self._tree
        completed = tree.count(TraceState.FINISHED)
        if settings.budget_traces is not None and completed >= settings.budget_traces:
            return StopReason.BUDGET_TRACES
        if is_settled and not self.has_enough_traces:
            return StopReason.CONSENSUS
        if (reason := self.end_of_traces) is not None:
            return reason
        # The cap is never passed: a step that might generate more than what is left is not taken.
        if settings.budget_tokens is not None and num_generated + tree.num_live > settings.budget_tokens:
            return StopReason.BUDGET_TOKENS
        return None

    @property
    def is_time_up(self) -> bool:
        return self.seconds >= self._seconds_to_search

    @property
    def end_of_traces(self) -> StopReason | None:
        """Enough traces are complete, or none is left."""
        if self.has_enough_traces:
            return StopReason.COMPLETED
        return StopReason.EXHAUSTED if self._tree.num_live == 0 else None

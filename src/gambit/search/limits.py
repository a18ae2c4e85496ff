"""Ends a search: enough traces are complete, none is left, its vote is settled, or a budget is used up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gambit.answers import Equivalent
from gambit.config.presets import SearchSettings
from gambit.policies.base import Requirements
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord
from gambit.results.vote import Consensus, is_settled
from gambit.search.scores import Scores
from gambit.tree import TraceState, TraceTree
from gambit.types import StopReason

CHECK_SECONDS = 0.5  # the longest that a look at the vote may hold up the engine
# If weights are chances, an answer that no trace has given yet counts half of a trace that is certainly right: four
# traces that agree and are all likely wrong settle nothing.
UNSEEN = 0.5
VOTE_SHARE, MAX_VOTE_SECONDS = 0.1, 5.0  # of a time budget, kept for the vote


def until_vote(budget_seconds: float) -> float:
    """Returns the seconds of a time budget in which traces may run."""
    return budget_seconds - min(VOTE_SHARE * budget_seconds, MAX_VOTE_SECONDS)


class SearchLimits:
    """The target and the budgets of one search, and its clock."""

    def __init__(self, settings: SearchSettings, islands: Islands, tree: TraceTree) -> None:
        self.islands = islands
        self._settings = settings
        self._tree = tree
        self._num_wanted = islands.num_wanted
        self.closing: StopReason | None = None  # the budget near which the last answers are written; no trace begins
        self.start_clock()

    def start_clock(self) -> None:
        budget = self._settings.budget_seconds
        self._began = time.monotonic()
        # On the monotonic clock: when traces stop, and when the vote has to be there.
        self.search_deadline = math.inf if budget is None else self._began + until_vote(budget)
        self.vote_deadline = math.inf if budget is None else self._began + budget

    @property
    def seconds(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._began

    @property
    def seconds_left(self) -> float:
        """Seconds until traces stop."""
        return self.search_deadline - time.monotonic()

    @property
    def is_time_up(self) -> bool:
        return time.monotonic() >= self.search_deadline

    @property
    def has_enough_traces(self) -> bool:
        """Returns True if the requested number of traces is complete, on every island."""
        if self._tree.count(TraceState.FINISHED) < self._num_wanted:
            return False
        return self.islands.are_complete(trace.island for trace in self._tree.in_state(TraceState.FINISHED))

    def due_reason(self, num_generated: int, *, is_settled: bool) -> StopReason | None:
        """Returns why the search must stop now, None if it goes on. `is_settled`: its vote cannot change any more.

        A part of a search ends with its own traces: the budgets and the vote are the whole's.
        """
        if self._settings.part is not None:
            return self._end_of_traces(self._tree.num_live)
        if (reason := self.reason_in_pool(num_generated, is_settled=is_settled)) is not None:
            return reason
        return StopReason.BUDGET_SECONDS if self.is_time_up else None

    def reason_in_pool(self, num_generated: int, *, is_settled: bool) -> StopReason | None:
        """Returns the same as `due_reason`, whatever the time: it is equal in every run with the same seed."""
        settings, num_live = self._settings, self._tree.num_live
        if settings.budget_traces is not None and self._tree.count(TraceState.FINISHED) >= settings.budget_traces:
            return StopReason.BUDGET_TRACES
        if is_settled and not self.has_enough_traces:
            return StopReason.CONSENSUS
        if (reason := self._end_of_traces(num_live)) is not None:
            return reason
        # The cap is never passed: a step that might generate more than what is left is not taken.
        if settings.budget_tokens is not None and num_generated + num_live > settings.budget_tokens:
            return StopReason.BUDGET_TOKENS
        return None

    def _end_of_traces(self, num_live: int) -> StopReason | None:
        if self.has_enough_traces:
            return StopReason.COMPLETED
        return None if num_live else self.closing or StopReason.EXHAUSTED


@dataclass(slots=True)
class VoteWatch:
    """Looks at the vote while traces run. A search without `first_traces` has one round, which it may cut short."""

    settings: SearchSettings
    record: SearchRecord
    requirements: Requirements
    scores: Scores
    limits: SearchLimits
    equivalent_until: Callable[[float], Equivalent]
    num_planned: int | None = field(init=False)  # traces that may have begun by now; None: all
    is_settled: bool = False
    has_news: bool = False  # a trace has ended since the vote was looked at, or has got its score

    def __post_init__(self) -> None:
        self.num_planned = self.settings.first_traces

    @property
    def must_wait(self) -> bool:
        """Returns True while the verifier has yet to read what decides about a next round."""
        is_open = self.is_between and self.votes_by_verifier and not self.limits.is_time_up
        return is_open and not self.scores.have_come

    def look(self, at: int, *, is_check: bool) -> None:
        """Finds out if the vote is settled, when it is time to look. `is_check`: a check interval is over.

        The engine stands still while one of its searches waits for its verifier. While traces run, the vote is
        therefore looked at in checks alone, by scores that a check's lag has given time to come.
        """
        consensus = self.settings.consensus
        if consensus is None or not self.has_news:
            return
        if self.votes_by_verifier:
            if not self.is_between and not is_check:
                return
            self.scores.collect(at, self.limits.search_deadline, with_latest=self.is_between)
        self.has_news = self.votes_by_verifier and self.scores.are_owed_to_votes
        equivalent = self.equivalent_until(time.monotonic() + CHECK_SECONDS)
        is_probability = self.settings.is_probability
        self.is_settled = is_over(consensus, self.record, self.requirements, equivalent, is_probability=is_probability)

    def plan_next(self) -> bool:
        """Lets as many roots begin again as there are, if it is time to."""
        if not self.is_between or self.is_settled:
            return False
        self.num_planned = 2 * self.num_roots
        return True

    @property
    def is_between(self) -> bool:
        """Returns True while nothing of the search runs, and the vote decides if there are more traces."""
        if self.num_planned is None or self.record.tree.num_live or self.limits.has_enough_traces:
            return False
        return self.num_roots < self.settings.num_traces

    @property
    def num_roots(self) -> int:
        return sum(trace.parent is None for trace in self.record.tree.traces)

    @property
    def votes_by_verifier(self) -> bool:
        return self.scores.are_late and self.record.vote_kind.needs_scores


def is_over(
    consensus: Consensus,
    record: SearchRecord,
    requirements: Requirements,
    equivalent: Equivalent,
    *,
    is_probability: bool,
) -> bool:
    """Returns True if the vote needs no more traces. `is_probability`: scores are chances."""
    least = consensus.min_traces if consensus.fraction is not None else 0
    if record.tree.count(TraceState.FINISHED) < max(least, requirements.provisional_traces):
        return False
    vote = record.vote(equivalent)
    unseen = UNSEEN if is_probability and record.vote_kind.sums_scores else 0.0
    return is_settled(consensus, record.vote_kind, record.ballots(), vote, most_to_come(record, requirements), unseen)


def most_to_come(record: SearchRecord, requirements: Requirements) -> int:
    """Returns how many more traces can still vote."""
    tree, num_traces = record.tree, record.started.num_traces
    if requirements.has_fixed_size:
        return num_traces - tree.count(TraceState.FINISHED) - tree.count(TraceState.PRUNED) + tree.num_forced
    # All of the pool may complete in the very step that reaches the target.
    return num_traces - tree.count(TraceState.FINISHED) - 1 + tree.capacity

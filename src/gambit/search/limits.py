"""Ends a search: enough traces are complete, none is left, its vote is settled, a budget is used up; forces answers."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gambit.answers import Equivalent
from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, Force, Prune, Requirements
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord
from gambit.results.vote import is_settled
from gambit.search.pool import can_force
from gambit.search.scores import Scores
from gambit.tree import LIVE, TraceState, TraceTree
from gambit.types import Forcing, Progress, StopReason, TokensOf

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
        if self.settings.consensus is None or not self.has_news:
            return
        if self.votes_by_verifier:
            if not self.is_between and not is_check:
                return
            self.scores.collect(at, self.limits.search_deadline, with_latest=self.is_between)
        self.has_news = self.votes_by_verifier and self.scores.are_owed_to_votes
        equivalent = self.equivalent_until(time.monotonic() + CHECK_SECONDS)
        self.is_settled = is_over(self.settings, self.record, self.requirements, equivalent)

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


def is_over(settings: SearchSettings, record: SearchRecord, requirements: Requirements, equivalent: Equivalent) -> bool:
    """Returns True if the vote needs no more traces."""
    consensus = settings.consensus
    if consensus is None:
        return False
    least = consensus.min_traces if consensus.fraction is not None else 0
    if record.tree.count(TraceState.FINISHED) < max(least, requirements.provisional_traces):
        return False
    vote = record.vote(equivalent)
    unseen = UNSEEN if settings.is_probability and record.vote_kind.sums_scores else 0.0
    return is_settled(consensus, record.vote_kind, record.ballots(), vote, most_to_come(record, requirements), unseen)


def most_to_come(record: SearchRecord, requirements: Requirements) -> int:
    """Returns how many more traces can still vote."""
    tree, num_traces = record.tree, record.started.num_traces
    if requirements.has_fixed_size:
        return num_traces - tree.count(TraceState.FINISHED) - tree.count(TraceState.PRUNED) + tree.num_forced
    # All of the pool may complete in the very step that reaches the target.
    return num_traces - tree.count(TraceState.FINISHED) - 1 + tree.capacity


LOOP_INTERVAL = 64  # steps between two searches for loops
LOOP_WINDOW = 1024  # tokens at the end of a trace that are looked at
LOOP_REPEATS = 4  # of a passage in a row, at least
LOOP_TOKENS = 200  # of all repeats together, at least: shorter ones are tables, rulers and long numbers
MORE_SECONDS = 1.5  # factor: a step may take longer than those so far, since given tokens have to be read


def loop_period(tokens: Sequence[int]) -> int | None:
    """Returns the length of the passage that a trace keeps repeating at its end; None if it does not."""
    tail = np.asarray(tokens[-LOOP_WINDOW:], np.int64)
    if len(tail) < LOOP_TOKENS:
        return None
    distances = len(tail) - 1 - np.flatnonzero(tail[:-1] == tail[-1])[::-1]
    for period in distances[distances <= len(tail) // LOOP_REPEATS].tolist():
        length = max(LOOP_REPEATS * period, LOOP_TOKENS)
        if np.array_equal(tail[-length:-period], tail[len(tail) - length + period :]):
            return int(period)
    return None


class Forcer:
    """The forced answers of one search: near the limits of traces and near its budgets."""

    def __init__(self, settings: SearchSettings, limits: SearchLimits, tree: TraceTree) -> None:
        self._settings = settings
        self._forcing = settings.forcing
        self._limits = limits
        self._tree = tree
        self._next_step = 0  # before it no trace meets a limit of its own
        self._first: tuple[int, float] | None = None  # step and seconds from which the pace is measured

    def look_again(self) -> None:
        """Has the traces looked at in the next step, since new ones may be longer than all others."""
        self._next_step = 0

    def is_due(self, at: int, num_generated: int) -> bool:
        """Returns True if a trace may have to answer now. The first budget that is near closes the search."""
        forcing = self._forcing
        if forcing is None or self._limits.closing is not None:
            return False
        if not forcing.is_auto and forcing.thinking_tokens is None:
            return False
        if forcing.is_auto and self._settings.part is None:  # the budgets of a part are the whole's
            self._limits.closing = self._near_budget(forcing, at, num_generated)
        return self._limits.closing is not None or at >= self._next_step

    def _near_budget(self, forcing: Forcing, at: int, num_generated: int) -> StopReason | None:
        """Returns the budget that leaves just enough for answers of all running traces."""
        num_running, budget = self._tree.count(TraceState.RUNNING), self._settings.budget_tokens
        if not num_running:
            return None
        if budget is not None and budget - num_generated < num_running * (forcing.answer_tokens + 2):
            return StopReason.BUDGET_TOKENS
        self._first = self._first or (at, self._limits.seconds)  # prompts have been computed by then
        steps, seconds = at - self._first[0], self._limits.seconds - self._first[1]
        needed = seconds / max(steps, 1) * (forcing.answer_tokens + 2) * MORE_SECONDS
        return StopReason.BUDGET_SECONDS if self._limits.seconds_left < needed else None

    def looping(self, progress: Mapping[int, Progress], tokens_of: TokensOf) -> dict[int, bool]:
        """Returns the running traces that repeat themselves, with True for those that are forced to answer."""
        is_auto, found = self._forcing is not None and self._forcing.is_auto, {}
        for trace, each in sorted(progress.items()):
            known = self._tree.traces[trace]
            if known.state is TraceState.RUNNING and each.num_tokens >= LOOP_TOKENS:
                tail = tokens_of(trace, max(each.num_tokens - LOOP_WINDOW, 0))
                if loop_period(tail) is not None:
                    found[trace] = is_auto and each.is_thinking and can_force(known)
        return found

    def decide(self, at: int, progress: Mapping[int, Progress], limit_of: Callable[[int], int]) -> list[Decision]:
        """Returns the answers that are due now; where the search closes, all others end. `limit_of`: by live trace."""
        assert self._forcing is not None
        if self._limits.closing is not None:
            live = sorted(trace.id for state in LIVE for trace in self._tree.in_state(state))
            waiting = [trace for trace in live if self._tree.traces[trace].state is TraceState.WAITING]
            ends: list[Decision] = [Prune(trace, str(self._limits.closing)) for trace in waiting]
            return ends + [
                Force(trace, str(self._limits.closing))
                for trace in live
                if progress[trace].is_thinking and can_force(self._tree.traces[trace])
            ]
        found = list[Decision]()
        slack = [self._left(0, 0, self._settings.max_new_tokens)[0]]  # of a trace that begins with the next step
        for trace, each in sorted(progress.items()):
            if each.is_thinking and not self._tree.traces[trace].num_given:
                left, force = self._left(trace, each.num_tokens, limit_of(trace))
                found += [force] if left <= 0 else []
                slack.append(left)
        self._next_step = at + max(1, min(slack))
        return found

    def _left(self, trace: int, num_tokens: int, most: int) -> tuple[int, Force]:
        """Returns how many tokens a thinking trace has left, and how it goes on then."""
        forcing = self._forcing
        assert forcing is not None
        room = most - len(forcing.answer) - forcing.answer_tokens if forcing.is_auto else most
        if forcing.thinking_tokens is not None and forcing.thinking_tokens < room:
            end = Force(trace, "thinking", forcing.end_of_thought, most)
            return forcing.thinking_tokens - num_tokens, end
        return room - num_tokens, Force(trace, "length")

"""Finds the traces that must write their answers now, and those that repeat themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gambit.config.presets import SearchSettings
from gambit.policies.base import Decision, Force, Prune
from gambit.search.limits import SearchLimits
from gambit.search.pool import can_force
from gambit.tree import LIVE, TraceState, TraceTree
from gambit.types import Forcing, Progress, StopReason

LOOP_INTERVAL = 64  # steps between two searches for loops
LOOP_WINDOW = 1024  # tokens at the end of a trace that are looked at
LOOP_REPEATS = 4  # of a passage in a row, at least
LOOP_TOKENS = 200  # of all repeats together, at least: shorter ones are tables, rulers and long numbers
TokensOf = Callable[[int, int], Sequence[int]]  # those of a live trace from a position on
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
        """Returns the answers that are due now; where the search closes, all others end.

        `limit_of`: the most tokens of a live trace.
        """
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

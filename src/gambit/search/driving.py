"""Drives a search whose parts run on several engines: budgets, the vote's end and time hold over all of them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from gambit.errors import EngineError
from gambit.results.result import SearchResult
from gambit.search.merging import MergedSearch, PartNews
from gambit.search.reporting import Tell
from gambit.types import StopReason

POLL_SECONDS = 0.2  # between two looks at whether somebody wants to stop


class RunningPart(Protocol):
    """A part of a search on its engine."""

    def allow(self, step: int | None) -> None:
        """It may go on up to this step; None: to its end."""

    def stop(self) -> None:
        """End it soon; a second call does nothing."""


class EngineDiedError(EngineError):
    """The engine of a part died: the search may be begun anew."""


StartPart: TypeAlias = Callable[[Tell, int | None], RunningPart]  # whom to tell, and the first allowed step


def run_parts(merged: MergedSearch, starts: Sequence[StartPart], should_stop: Callable[[], bool]) -> SearchResult:
    """Run all parts to the end of the whole."""
    news: queue.SimpleQueue[tuple[int, PartNews]] = queue.SimpleQueue()
    merged.begin()
    allowed = merged.allowed_step
    running: list[RunningPart] = []
    try:
        for index, start in enumerate(starts):
            running.append(start(partial(_put, news, index), allowed))
        return _drive(merged, running, news, should_stop)
    finally:
        _stop(running)


def _put(news: queue.SimpleQueue[tuple[int, PartNews]], index: int, item: PartNews) -> None:
    news.put((index, item))


def _drive(
    merged: MergedSearch,
    running: Sequence[RunningPart],
    news: queue.SimpleQueue[tuple[int, PartNews]],
    should_stop: Callable[[], bool],
) -> SearchResult:
    reason: StopReason | None = None
    error: str | None = None
    allowed = merged.allowed_step
    while not merged.is_over:
        for index, item in _arrived(news):
            if item.is_engines:
                raise EngineDiedError(item.error)
            merged.take(index, item)
            error = error or item.error
        merged.advance()
        reason = reason or _reason_outside(merged, error, should_stop)
        if reason is not None or merged.due is not None:
            _stop(running)
        elif merged.allowed_step != allowed:
            allowed = merged.allowed_step
            for part in running:
                part.allow(allowed)
    return merged.finish(reason, error)


def _arrived(news: queue.SimpleQueue[tuple[int, PartNews]]) -> list[tuple[int, PartNews]]:
    """All there is; waits a while for the first."""
    found = []
    try:
        found.append(news.get(timeout=POLL_SECONDS))
        while True:
            found.append(news.get_nowait())
    except queue.Empty:
        return found


def _reason_outside(merged: MergedSearch, error: str | None, should_stop: Callable[[], bool]) -> StopReason | None:
    """To end the search for something that is not in its traces."""
    if error is not None:
        return StopReason.FAILED
    if should_stop():
        return StopReason.INTERRUPTED
    return StopReason.BUDGET_SECONDS if merged.limits.is_time_up else None


def _stop(running: Sequence[RunningPart]) -> None:
    for part in running:
        part.stop()

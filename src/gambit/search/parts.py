"""Parts of a search on different engines: how it is split, and a part as it runs and reports."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from gambit import events as ev
from gambit.answers import Extractor
from gambit.config.options import SearchConfig
from gambit.config.presets import SearchPart, SearchSettings
from gambit.errors import UserError
from gambit.policies.base import SplitBy
from gambit.search.host import SearchTicket
from gambit.types import Problem


@dataclass(frozen=True, slots=True)
class PartOrder:
    """A part for a solver to run."""

    problem: Problem
    config: SearchConfig
    settings: SearchSettings  # of the part; those of the whole were resolved once for all engines
    allowed_step: int | None  # up to which it may go before it hears more; None: to its end
    extractor: Extractor | None = None


@dataclass(frozen=True, slots=True)
class PartNews:
    """Everything a part has done since its last report."""

    step: int  # up to which the events are complete
    events: tuple[ev.Event, ...]
    is_over: bool = False
    error: str | None = None  # what ended it
    is_engines: bool = False  # its engine is gone, and with it whatever was not reported


Tell: TypeAlias = Callable[[PartNews], None]


class PartHandle(Protocol):
    """A part that runs, perhaps in another process. Calls come from any thread."""

    def allow(self, step: int | None) -> None:
        """Lets it go on up to a step; None: to its end."""

    def stop(self) -> None:
        """Ends it within two engine steps; a second call does nothing."""


class RunningPart:
    """A part on the thread of its engine.

    It reports every check interval, at the end of a trace, which may settle the vote, and when it has to wait. Its last
    report comes when it has left the engine.
    """

    def __init__(self, tell: Tell, settings: SearchSettings, allowed_step: int | None) -> None:
        self.settings = settings
        self._tell = tell
        self._allowed = allowed_step
        self._changed = threading.Condition()
        self._ticket: SearchTicket | None = None
        self._events: list[ev.Event] = []
        self._step = -1
        self._is_news = False

    def follow(self, ticket: SearchTicket) -> None:
        """Reports the end of the search that was handed in."""
        self._ticket = ticket
        ticket.result.add_done_callback(lambda done: self._report(is_over=True, error=_words(done.exception())))

    def allow(self, step: int | None) -> None:
        """Lets it go on up to a step; None: to its end."""
        with self._changed:
            self._allowed = step
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends it within two engine steps; a second call does nothing."""
        assert self._ticket is not None
        self._ticket.cancel()
        self.allow(None)

    # -- callbacks of the search -------------------------------------------------------------------------------

    def on_event(self, event: ev.Event) -> None:
        """Takes an event of the search."""
        self._events.append(event)
        self._is_news |= isinstance(event, ev.Finished)
        if isinstance(event, ev.Stopped):
            self._step = event.step

    def after_step(self, step: int) -> None:
        """Reports if it is time to, and waits where the part may not go on yet."""
        self._step = step
        if self._is_news or step % self.settings.pool.check_interval == 0 or self._is_held(step):
            self._report()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held(step))

    def _is_held(self, step: int) -> bool:
        allowed = self._allowed
        return allowed is not None and step >= allowed

    def _report(self, *, is_over: bool = False, error: str | None = None) -> None:
        events, self._events, self._is_news = tuple(self._events), [], False
        self._tell(PartNews(self._step, events, is_over, error))


def _words(error: BaseException | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__


# -- splitting -------------------------------------------------------------------------------------------------


def split(settings: SearchSettings, split_by: SplitBy, num_engines: int) -> tuple[SearchSettings, ...]:
    """Returns the settings of each part; one part, the whole search, where there is nothing to split."""
    if settings.first_traces is not None:  # whether there are more is for the vote, which no part has
        raise UserError("first_traces: a search that is spread over engines begins with all its traces; leave it out, "
                        "or search on one engine")  # fmt: skip
    pieces = {SplitBy.ISLANDS: settings.pool.islands, SplitBy.TRACES: min(settings.capacity, settings.num_traces)}
    count = min(num_engines, pieces.get(split_by, 1))
    if count <= 1:
        return (dataclasses.replace(settings, part=SearchPart()),)
    if split_by is SplitBy.ISLANDS:
        # A search on one engine may divide its islands, by the scores of all; those of a part are not all.
        steady = dataclasses.replace(settings, doubt=None)
        return tuple(
            dataclasses.replace(steady, part=SearchPart(islands)) for islands in ranges(settings.pool.islands, count)
        )
    return tuple(_some_traces(settings, count))


def _some_traces(settings: SearchSettings, count: int) -> Iterator[SearchSettings]:
    """Yields settings for independent traces: each part has some of their numbers and some of the places."""
    shares = zip(ranges(settings.num_traces, count), ranges(settings.capacity, count), strict=True)
    for traces, places in shares:
        part = SearchPart(first_trace=traces.start)
        pool = dataclasses.replace(settings.pool, swap_size=min(settings.pool.swap_size, len(places)))
        yield dataclasses.replace(settings, capacity=len(places), num_traces=len(traces), pool=pool, part=part)


def ranges(total: int, count: int) -> list[range]:
    """Splits numbers into neighbours, in parts that differ by at most one."""
    starts = [total * index // count for index in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]

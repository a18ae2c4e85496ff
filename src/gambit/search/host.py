"""A thread that owns an engine and runs all searches on it in one batch."""

import atexit
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from gambit.engines.base import Engine
from gambit.errors import DeadEngineError, UserError, named
from gambit.results.result import SearchResult
from gambit.search.loop import Search, SearchBatch
from gambit.types import StopReason

Make: TypeAlias = Callable[[], Search]  # called on the engine's thread


@dataclass(slots=True, eq=False)
class SearchTicket:
    """A submitted search, in this process or another: its result to come, and the way to call it off.

    The result raises what the engine raised, or what ended this search alone (`failed_alone`).
    """

    should_stop: Callable[[], bool] = lambda: False
    may_wait: bool = True  # for room on the engine
    on_cancel: Callable[[], None] = lambda: None  # for an engine in another process, which does not see this object
    result: Future[SearchResult] = field(default_factory=Future)
    failed_alone: bool = False
    is_abandoned: bool = False  # its result is not awaited
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ends it within two engine steps, with the best vote so far."""
        self.is_cancelled.set()
        self.on_cancel()

    def abandon(self) -> None:
        """Cancels a search whose vote is not read: comparing its answers must not hold up the votes of others."""
        self.is_abandoned = True
        self.cancel()


class SearchHost:
    """Starts an engine on a thread of its own and runs searches on it as they come, while it has room for their traces.

    One thread, because an engine's calls come from one, and thread pools and inference modes belong to a thread.
    Votes are taken on a second one: comparing answers must not hold up the engine.
    """

    def __init__(self, start: Callable[[], Engine]) -> None:
        self._inbox: queue.SimpleQueue[tuple[SearchTicket, Make] | None] = queue.SimpleQueue()
        self._line: deque[tuple[SearchTicket, Make]] = deque()  # taken in, not begun
        self._tickets: dict[Search, SearchTicket] = {}
        self._process = os.getpid()
        self._own_threads: set[int] = set()  # that of the engine and that of votes
        self._voting = ThreadPoolExecutor(
            1, "gambit-votes", initializer=lambda: self._own_threads.add(threading.get_ident())
        )
        self._is_closed = False
        self._closing = threading.Lock()
        started: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(start, started), name="gambit-engine", daemon=True)
        self._thread.start()
        self.engine = started.result()
        atexit.register(self.close)  # a daemon inside native code must not outlive the interpreter

    def submit(
        self, make: Make, should_stop: Callable[[], bool] = lambda: False, *, may_wait: bool = True
    ) -> SearchTicket:
        """Submits a search, which joins those that run. `make` and callbacks are called on the engine's thread.

        Raises where the result could never come: in a forked process, which has no thread of an engine, and in a
        callback, for whose end the engine waits.
        """
        if os.getpid() != self._process:
            raise UserError(
                "this solver belongs to the process that made it: make a solver in each process, and start processes "
                "of multiprocessing with 'spawn' instead of 'fork'"
            )
        if threading.get_ident() in self._own_threads:
            raise UserError(
                "a callback of this solver began another search on it, and both would wait for ever: begin it once "
                "the callback has returned, or on a solver of its own"
            )
        ticket = SearchTicket(should_stop, may_wait)
        with self._closing:
            if self._is_closed:
                raise UserError("this solver is closed: make a new one")
            self._inbox.put((ticket, make))
        return ticket

    def close(self) -> None:
        """Cancels what runs, closes the engine and ends the thread, once."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._inbox.put(None)
        atexit.unregister(self.close)
        if threading.get_ident() not in self._own_threads:
            self._thread.join()
            self._voting.shutdown()

    # -- on the engine's thread --------------------------------------------------------------------------------

    def _run(self, start: Callable[[], Engine], started: Future[Engine]) -> None:
        self._own_threads.add(threading.get_ident())
        try:
            engine = start()
        except BaseException as error:
            started.set_exception(error)
            return
        batch = SearchBatch(engine)
        started.set_result(engine)
        while self._take_in(batch):
            self._step(batch)
        self._finish(batch.stop_all(StopReason.INTERRUPTED))
        engine.close()

    def _take_in(self, batch: SearchBatch) -> bool:
        """Takes in submitted searches; waits for one if there is nothing to step; returns False at the end."""
        is_open = True
        with suppress(queue.Empty):
            while is_open:
                submitted = self._inbox.get(block=not batch.running and not self._line)
                is_open = submitted is not None
                if submitted is not None:
                    self._line.append(submitted)
        if self._line:
            self._begin_some(batch, is_end=not is_open)
        return is_open

    def _begin_some(self, batch: SearchBatch, *, is_end: bool) -> None:
        """Begins searches that others wait for or that need only their end, and others while there is room.

        At the end all begin, and are stopped at once: every caller gets a result.
        """
        for ticket, make in list(self._line):
            if is_end or not ticket.may_wait or ticket.is_cancelled.is_set():
                self._line.remove((ticket, make))
                self._begin(batch, ticket, make)
        while self._line and batch.has_room:
            self._begin(batch, *self._line.popleft())

    def _begin(self, batch: SearchBatch, ticket: SearchTicket, make: Make) -> None:
        try:
            search = make()
        except BaseException as error:
            ticket.failed_alone = True
            ticket.result.set_exception(error)
            return
        self._tickets[search] = ticket
        self._finish(batch.add(search))

    def _step(self, batch: SearchBatch) -> None:
        self._finish(batch.stop([search for search in batch.running.values() if self._is_unwanted(search)]))
        if not batch.running:
            return
        try:
            self._finish(batch.step())
        except BaseException as error:
            self._finish(batch.stop_all(StopReason.FAILED, named(error)), error)

    def _is_unwanted(self, search: Search) -> bool:
        ticket = self._tickets[search]
        try:
            return ticket.is_cancelled.is_set() or ticket.should_stop()
        except Exception as error:  # the caller's own function
            search.failure = error
            return True

    def _finish(self, stopped: list[Search], error: BaseException | None = None) -> None:
        for search in stopped:
            self._voting.submit(_conclude, self._tickets.pop(search), search, error)


def _conclude(ticket: SearchTicket, search: Search, error: BaseException | None) -> None:
    """Takes the vote and settles the ticket. Every log gets its end, whatever went wrong before."""
    try:
        result = search.conclude(is_hurried=ticket.is_abandoned)
    except BaseException as failure:
        search.failure = search.failure or failure
    error, is_own = error or search.failure, error is None and search.failure is not None
    ticket.failed_alone = is_own and not isinstance(error, DeadEngineError)
    if error is not None:
        ticket.result.set_exception(error)
    else:
        ticket.result.set_result(result)

"""The solver for asyncio: `await` a result, iterate over the events of a search, cancel by cancelling the task."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from gambit import events as ev
from gambit.answers import Extractor
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.models.files import BUNDLED
from gambit.results.result import SearchResult
from gambit.scorers.base import Scorer
from gambit.search.host import SearchTicket
from gambit.solver import PendingSearch, Solver
from gambit.solver.builder import with_fields
from gambit.types import ChatMessage, Problem


class AsyncSolver:
    """A `Solver` for asyncio. Searches of several tasks run in one batch; the event loop is not held up.

    >>> async with AsyncSolver("pawn") as solver:
    ...     result = await solver.solve("a = 17; b = 61; c = a + b; c?")

    A cancelled task takes its search off the engine within two steps; `asyncio.timeout` and task groups work as they do
    everywhere.
    """

    def __init__(self, model: str = BUNDLED, *, scorer: str | Scorer = "auto", **engine_options: object) -> None:
        """Takes the arguments of `Solver`; the model is loaded by `start`, or by `async with`."""
        self._options = {"model": model, "scorer": scorer, **engine_options}
        self._solver: Solver | None = None

    async def start(self) -> Self:
        """Loads the model on a thread; a second call does nothing."""
        if self._solver is None:
            self._solver = await asyncio.to_thread(lambda: Solver(**self._options))  # type: ignore[arg-type]
        return self

    @property
    def solver(self) -> Solver:
        if self._solver is None:
            raise UserError("this solver has not loaded its model yet: `await solver.start()`, or use `async with`")
        return self._solver

    async def solve(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        **fields: object,
    ) -> SearchResult:
        """Searches one problem to its end."""
        pending = self.solver.submit(problem, with_fields(config, fields), out_dir=out_dir, extractor=extractor)
        return await result_of(pending)

    def stream(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        **fields: object,
    ) -> "SearchStream":
        """Begins a search and returns an iterator over its events; its `result` is set when the iteration has ended."""
        stream = SearchStream(asyncio.get_running_loop())
        stream.pending = self.solver.submit(
            problem, with_fields(config, fields), out_dir=out_dir, extractor=extractor, on_event=stream.push
        )
        return stream

    async def close(self) -> None:
        """Ends what runs and releases memory and processes."""
        if self._solver is not None:
            await asyncio.to_thread(self._solver.close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class SearchStream:
    """The events of one search. Leaving the iteration early ends the search."""

    pending: PendingSearch

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.result: SearchResult | None = None
        self._loop = loop
        self._events: deque[ev.Event] = deque()
        self._has_news = asyncio.Event()

    def push(self, event: ev.Event) -> None:
        """Adds an event, on the engine's thread; the loop is woken once for all the events that it finds then."""
        self._events.append(event)
        if len(self._events) == 1:
            self._loop.call_soon_threadsafe(self._has_news.set)

    async def __aiter__(self) -> AsyncIterator[ev.Event]:
        ending = asyncio.ensure_future(result_of(self.pending))
        ending.add_done_callback(lambda _: self._has_news.set())
        try:
            while not ending.done():
                await self._has_news.wait()
                self._has_news.clear()
                while self._events:
                    yield self._events.popleft()
            self.result = ending.result()
        finally:
            ending.cancel()


class AwaitedSearch(Protocol):
    """A submitted search, in this process or another."""

    @property
    def ticket(self) -> SearchTicket: ...

    def result(self) -> SearchResult: ...

    def abandon(self) -> None: ...


async def result_of(pending: AwaitedSearch) -> SearchResult:
    """Returns the result of a submitted search; cancelling this ends the search."""
    done = asyncio.wrap_future(pending.ticket.result)
    try:
        await asyncio.shield(done)  # the ticket is the engine's: only that may settle it
    except asyncio.CancelledError:
        pending.ticket.abandon()
        done.add_done_callback(_retrieved)
        pending.ticket.result.add_done_callback(lambda _: pending.abandon())
        raise
    except Exception:
        pass  # `result` raises it, after closing the log
    return await asyncio.to_thread(pending.result)


def _retrieved(done: asyncio.Future[SearchResult]) -> None:
    """Retrieves the exception so asyncio does not log it as unhandled."""
    if not done.cancelled():
        done.exception()

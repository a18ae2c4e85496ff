"""A search that was asked for, until its caller has its result."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gambit import events as ev
from gambit.answers import Extractor
from gambit.config.options import SearchConfig
from gambit.config.presets import SearchSettings
from gambit.results.record import SearchRecord, SearchResult
from gambit.search.host import SearchTicket
from gambit.search.lengths import LengthHistory
from gambit.search.loop import Search
from gambit.search.reporting import PartReporter
from gambit.storage.run_folder import EventCallback, EventSink, check_writable
from gambit.types import ChatMessage, Problem


@dataclass(frozen=True, slots=True)
class PartRequest:
    """What a part of a search has of the whole: its settings, resolved once for all, and whom it tells."""

    settings: SearchSettings
    reporter: PartReporter


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What a caller asked for."""

    problem: Problem
    config: SearchConfig
    out_dir: Path | None
    extractor: Extractor | None
    on_event: EventCallback | None
    concurrency: int = 1
    must_log: bool = True  # False: tried before, so that a folder that has become unwritable costs the log alone
    part: PartRequest | None = None  # of a search that is spread over several engines; None: all of it

    def failed(self, error: Exception) -> SearchResult:
        """The result of a search that an error ended before it had one."""
        return SearchResult.failed(self.problem.id, self.config.policy, self.config.seed, str(error))


def request_of(
    problem: str | Sequence[ChatMessage] | Problem,
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: Callable[[ev.Event], None] | None,
) -> SearchRequest:
    """Of one problem, from the arguments of a solver's call."""
    problem = problem if isinstance(problem, Problem) else Problem(problem)
    callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
    return SearchRequest(
        problem, config or SearchConfig(), None if out_dir is None else Path(out_dir), extractor, callback
    )


def requests_of(
    problems: Iterable[str | Problem],
    config: SearchConfig | None,
    out_dir: Path | str | None,
    extractor: Extractor | None,
    on_event: EventCallback | None,
    concurrency: int = 1,
) -> Iterator[SearchRequest]:
    """Of many problems, each with a folder of its own in `out_dir`."""
    asked, folder = config or SearchConfig(), None if out_dir is None else Path(out_dir)
    if folder is not None:
        check_writable(folder)

    def request(number: int, given: str | Problem) -> SearchRequest:
        problem = given if isinstance(given, Problem) else Problem(given, id=str(number))
        own_folder = None if folder is None else folder / problem.id
        return SearchRequest(problem, asked, own_folder, extractor, on_event, concurrency, must_log=False)

    return itertools.starmap(request, enumerate(problems))


@dataclass(frozen=True, slots=True)
class PreparedSearch:
    """A search, ready to begin, with its log."""

    search: Search
    sink: EventSink
    news: tuple[str, ...]  # notes that nobody was told before
    notes: tuple[str, ...]
    thinks: bool


@dataclass(slots=True, eq=False)
class PendingSearch:
    """A search that was handed in, until its caller has its result."""

    request: SearchRequest
    history: LengthHistory
    ticket: SearchTicket = field(init=False)
    run: PreparedSearch | None = None  # once the engine's thread has taken it in

    def cancel(self) -> None:
        """End it within two engine steps, with the best vote so far."""
        self.ticket.cancel()

    @property
    def has_begun(self) -> bool:
        return self.run is not None

    @property
    def record(self) -> SearchRecord:
        """What its events say; it changes on the engine's thread until the search has ended."""
        assert self.run is not None, "the search has not begun"
        return self.run.search.record

    @property
    def notes(self) -> tuple[str, ...]:
        """Every warning about this search, those that an earlier one got too."""
        return () if self.run is None else self.run.notes

    @property
    def thinks(self) -> bool:
        """Whether its traces begin inside a think block."""
        return self.run is not None and self.run.thinks

    def live_tokens(self, trace: int, start: int = 0) -> Sequence[int]:
        """What a live trace has said so far; to be called from `on_event`, on the engine's thread."""
        assert self.run is not None, "the search has not begun"
        return self.run.search.tokens_of(trace, start)

    def result(self) -> SearchResult:
        """Waits for it; an interrupted wait ends the search first, so that its log has an end."""
        try:
            return self._finished(self.ticket.result.result())
        except BaseException:
            self.abandon()
            raise

    def result_or_error(self) -> SearchResult:
        """What went wrong in this search alone is in its result."""
        try:
            return self.result()
        except Exception as error:
            if not self.ticket.failed_alone:
                raise
            return self._failed(error)

    def abandon(self) -> None:
        """End it, and wait for that."""
        self.ticket.cancel()
        self.ticket.result.exception()
        if self.run is not None:
            self.run.sink.close()

    def _finished(self, result: SearchResult) -> SearchResult:
        assert self.run is not None
        news = self.run.news
        if not self.request.problem.prefix_tokens:  # the rest of a trace says little about the length of one
            news += self.history.remember(self.run.search.record)
        return self.run.sink.finish(dataclasses.replace(result, warnings=news))

    def _failed(self, error: Exception) -> SearchResult:
        if self.run is not None and self.run.search.result is not None:
            return self._finished(self.run.search.result)
        return self.request.failed(error)

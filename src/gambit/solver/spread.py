"""One search wider than an engine: its islands run on several, and all of their traces vote together."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from gambit import events as ev
from gambit.answers import Extractor, Grader
from gambit.config.options import SearchConfig
from gambit.config.presets import SearchSettings
from gambit.errors import EngineError, GambitError, UserError, WarnOnce
from gambit.policies.base import SplitBy
from gambit.results.result import SearchResult
from gambit.search.parts import EngineDiedError, MergedSearch, PartHandle, Report, split
from gambit.solver.builder import LengthHistory, SearchPlan, SearchRequest, request_of, requests_of
from gambit.storage.run_folder import EventCallback, EventSink
from gambit.types import ChatMessage, Problem

MOST_DEATHS = 2  # of engines, by one search


class PartEngine(Protocol):
    """A solver for parts of searches, perhaps in another process."""

    def plan(self, request: SearchRequest, history: LengthHistory, num_engines: int) -> SearchPlan:
        """Returns the settings that the whole of a search would have."""

    def start_part(
        self, request: SearchRequest, settings: SearchSettings, report: Report, allowed_step: int | None
    ) -> PartHandle:
        """Starts a part of a search, which may take steps up to the allowed one."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of a trace, without the token that ended it."""


class SpreadSolver(AbstractContextManager["SpreadSolver"]):
    """Searches each problem on several engines at once; a `Solver` to its callers.

    >>> with Solver() as first, Solver() as second:
    ...     SpreadSolver([first, second]).solve("a = 17; b = 61; c = a + b; c?").answer

    Every engine runs some of the islands, or some of the traces of a method whose traces are independent. The same
    seed gives the same traces and votes as on one engine with the memory of all. `close` leaves the engines open.
    """

    def __init__(self, engines: Sequence[PartEngine]) -> None:
        if not engines:
            raise UserError("a search needs at least one engine")
        self._engines = tuple(engines)
        self._history = LengthHistory()
        self._grader = Grader()
        self._warnings = WarnOnce()

    def solve(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **fields: object,
    ) -> SearchResult:
        """Searches as `Solver.solve` does; callbacks are called on the caller's thread."""
        result = self._search(request_of(problem, config, out_dir, extractor, on_event, fields), should_stop)
        if result.error is not None:
            raise EngineError(result.error)
        return result

    def solve_many(
        self,
        problems: Iterable[str | Problem],
        config: SearchConfig | None = None,
        *,
        concurrency: int = 1,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: EventCallback | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        **fields: object,
    ) -> Iterator[SearchResult]:
        """Searches as `Solver.solve_many` does, one problem after the other: each has all engines."""
        if concurrency != 1:
            raise UserError(f"concurrency {concurrency}: a search that is spread over all engines runs alone")
        for request in requests_of(problems, config, out_dir, extractor, on_event, fields=fields):
            if should_stop():
                return
            try:
                yield self._search(request, should_stop)
            except UserError as error:
                yield request.failed(error)

    def equivalent(self, first: str, second: str) -> bool:
        return self._grader.equivalent(first, second)

    def grade(self, answer: str | None, gold: str) -> bool:
        return self._grader.grade(answer, gold)

    def close(self) -> None:
        self._grader.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- one search --------------------------------------------------------------------------------------------

    def _search(self, request: SearchRequest, should_stop: Callable[[], bool]) -> SearchResult:
        """Searches once more after the loss of an engine, on the one that takes its place; gives up after two."""
        for num_lost in itertools.count(1):
            sink = EventSink(request.problem.id, request.out_dir, request.on_event, must_log=request.must_log)
            try:
                return self._attempt(request, sink, should_stop)
            except EngineDiedError as error:
                if num_lost == MOST_DEATHS:
                    return request.failed(error)
                sink.discard()
            finally:
                sink.close()
        raise AssertionError

    def _attempt(self, request: SearchRequest, sink: EventSink, should_stop: Callable[[], bool]) -> SearchResult:
        num_engines = len(self._engines)
        bare = dataclasses.replace(request, out_dir=None, on_event=None)  # the driver alone writes
        plan = self._engines[0].plan(bare, self._history, num_engines)
        parts = split(plan.settings, plan.requirements.split_by, num_engines)
        whole = plan.settings if len(parts) == 1 else dataclasses.replace(plan.settings, doubt=None)
        environment = {**plan.header.environment, "engines": len(parts)}
        header = dataclasses.replace(plan.header, settings=whole.to_json(), environment=environment)
        merged = MergedSearch(header, plan.settings, plan.requirements, len(parts), sink.write, self._grader.for_vote)
        starts = [partial(engine.start_part, bare, part) for engine, part in zip(self._engines, parts, strict=False)]
        result = merged.run(starts, should_stop)
        news = () if request.problem.prefix_tokens else self._history.remember(merged.record, request.config)
        notes = (*plan.notes, *self._idle(plan, len(parts)), *filter(None, [merged.note]))
        text = None
        with suppress(GambitError):  # an engine that has died since
            text = merged.record.winning_text(result.votes, self._engines[0].text_of)
        told = (*self._warnings.warn(notes), *news, *result.vote_warnings)
        return sink.finish(dataclasses.replace(result, warnings=told, text=text))

    def _idle(self, plan: SearchPlan, num_parts: int) -> list[str]:
        """Returns a note if some engines have nothing to do."""
        if num_parts == len(self._engines):
            return []
        settings, found = plan.settings, f"of {len(self._engines)} engines {num_parts} can be used"
        if plan.requirements.split_by is SplitBy.NOTHING:
            return [f"{found}: by this method ({settings.policy}) or scorer a trace depends on all others"]
        islands = f"{settings.pool.islands} island{'s' * (settings.pool.islands > 1)}"
        return [f"{found}: there are {islands} and {settings.num_traces} traces; give more --islands"]

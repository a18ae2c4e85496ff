"""One search wider than an engine: its islands run on several, and all of their traces vote together."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from gambit.config.options import SearchConfig
from gambit.config.presets import SearchSettings
from gambit.core import events as ev
from gambit.core.errors import EngineError, GambitWarning, UserError
from gambit.core.problem import ChatMessage, Problem
from gambit.results.record import SearchResult
from gambit.search.lengths import LengthHistory
from gambit.search.merging import MergedSearch
from gambit.search.parts import split
from gambit.search.reporting import ReportTimes, Tell
from gambit.search.spreading import RunningPart, run_parts
from gambit.solver.builder import SearchPlan
from gambit.solver.part import PartOrder
from gambit.storage.run_folder import EventCallback, EventSink, check_writable
from gambit.text.answers import Extractor, Grader


class PartEngine(Protocol):
    """A solver as far as a spread search needs it; it may be in another process."""

    def plan(
        self, problem: Problem, config: SearchConfig, history: LengthHistory, num_engines: int = 1
    ) -> SearchPlan: ...

    def start_part(self, order: PartOrder, tell: Tell) -> RunningPart: ...


class SpreadSolver:
    """Searches each problem on several engines at once; a `Solver` to its callers.

    >>> with Solver() as first, Solver() as second:
    ...     SpreadSolver([first, second]).solve("a = 17; b = 61; c = a + b; c?").answer

    Every engine runs some of the islands, or some of the traces of a method whose traces are independent. The same
    seed gives the same traces and votes as on one engine with the memory of all. The engines stay their owner's.
    """

    def __init__(self, engines: Sequence[PartEngine]) -> None:
        if not engines:
            raise UserError("a search needs at least one engine")
        self._engines = tuple(engines)
        self._history = LengthHistory()
        self._grader = Grader()
        self._said: set[str] = set()

    def solve(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> SearchResult:
        """As `Solver.solve`; callbacks are called on the caller's thread."""
        problem = problem if isinstance(problem, Problem) else Problem(problem)
        callback: EventCallback | None = None if on_event is None else lambda _, event: on_event(event)
        sink = EventSink(problem.id, None if out_dir is None else Path(out_dir), callback)
        result = self._search(problem, config or SearchConfig(), sink, extractor, should_stop)
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
    ) -> Iterator[SearchResult]:
        """As `Solver.solve_many`, one problem after the other: each has all engines."""
        if concurrency != 1:
            raise UserError(f"concurrency {concurrency}: a search that is spread over all engines runs alone")
        folder = None if out_dir is None else Path(out_dir)
        if folder is not None:
            check_writable(folder)
        asked = config or SearchConfig()
        for number, item in enumerate(problems):
            if should_stop():
                return
            problem = item if isinstance(item, Problem) else Problem(item, id=str(number))
            own_folder = None if folder is None else folder / problem.id
            sink = EventSink(problem.id, own_folder, on_event, must_log=False)
            try:
                yield self._search(problem, asked, sink, extractor, should_stop)
            except UserError as error:
                yield SearchResult.failed(problem.id, asked.policy, asked.seed, str(error))

    def equivalent(self, first: str, second: str) -> bool:
        """Whether two answers are equal, as the votes decide it."""
        return self._grader.equivalent(first, second)

    def grade(self, answer: str | None, gold: str) -> bool:
        """Whether an answer is right; no answer is wrong."""
        return self._grader.grade(answer, gold)

    def close(self) -> None:
        self._grader.close()

    def __enter__(self) -> SpreadSolver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- one search --------------------------------------------------------------------------------------------

    def _search(
        self,
        problem: Problem,
        config: SearchConfig,
        sink: EventSink,
        extractor: Extractor | None,
        should_stop: Callable[[], bool],
    ) -> SearchResult:
        try:
            plan = self._engines[0].plan(problem, config, self._history, len(self._engines))
            parts = split(plan.settings, plan.requirements.split_by, len(self._engines))
            news = tuple(note for note in (*plan.notes, *self._idle(plan, len(parts))) if self._is_news(note))
            merged = MergedSearch(
                _with_engines(plan.header, len(parts)),
                plan.settings,
                plan.requirements,
                len(parts),
                sink.write,
                self._grader.for_vote,
            )
            times = _report_times(plan)
            starts = [
                partial(_start, engine, problem, config, settings, times, extractor)
                for engine, settings in zip(self._engines, parts, strict=False)
            ]
            result = run_parts(merged, starts, should_stop)
        except BaseException:
            sink.close()
            raise
        if not problem.prefix_tokens:
            self._history.remember(merged.record)
        return _kept(result, sink, news)

    def _idle(self, plan: SearchPlan, num_parts: int) -> list[str]:
        if num_parts == len(self._engines):
            return []
        what = f"{plan.settings.islands} island{'s' * (plan.settings.islands > 1)}"
        return [
            f"of {len(self._engines)} engines {num_parts} can be used: {plan.settings.policy} with {what} and "
            f"{plan.settings.num_traces} traces has no more parts that do not depend on each other; give more --islands"
        ]

    def _is_news(self, note: str) -> bool:
        """Each warning is said once."""
        if note in self._said:
            return False
        self._said.add(note)
        warnings.warn(note, GambitWarning, stacklevel=5)
        return True


def _start(
    engine: PartEngine,
    problem: Problem,
    config: SearchConfig,
    settings: SearchSettings,
    times: ReportTimes,
    extractor: Extractor | None,
    tell: Tell,
    allowed_step: int | None,
) -> RunningPart:
    return engine.start_part(PartOrder(problem, config, settings, times, allowed_step, extractor), tell)


def _report_times(plan: SearchPlan) -> ReportTimes:
    settings = plan.settings
    return ReportTimes(settings.check_interval, settings.consensus is not None or settings.budget_traces is not None)


def _with_engines(header: ev.RunStarted, num_engines: int) -> ev.RunStarted:
    return dataclasses.replace(header, environment={**header.environment, "engines": num_engines})


def _kept(result: SearchResult, sink: EventSink, news: tuple[str, ...]) -> SearchResult:
    """With its file beside the log."""
    result = dataclasses.replace(result, warnings=news, out_dir=sink.folder)
    failure = sink.finish(result)
    return result if failure is None else dataclasses.replace(result, warnings=(*news, failure), log_error=failure)

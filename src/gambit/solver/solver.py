"""The solver, and a search that was submitted to it, until its caller has the result."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from gambit import events as ev
from gambit.answers import Extractor
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.config.presets import SearchSettings, resolved_capacity
from gambit.engines.base import Engine
from gambit.errors import UserError
from gambit.models import files as models
from gambit.results.record import SearchRecord
from gambit.results.result import SearchResult
from gambit.scorers.base import Scorer
from gambit.scorers.choice import warn_of_other_weights
from gambit.search.choice import with_fixed_pool
from gambit.search.host import SearchTicket
from gambit.search.loop import Search
from gambit.search.parts import PartHandle, Report, RunningPart
from gambit.solver.builder import (
    LengthHistory,
    PreparedSearch,
    SearchBuilder,
    SearchPlan,
    SearchRequest,
    SolverParts,
    request_of,
    requests_of,
)
from gambit.storage.run_folder import EventCallback
from gambit.text.tokenizers import Tokenizer
from gambit.types import ChatMessage, Problem
from gambit.verifiers.base import Verifier


@dataclass(slots=True, eq=False)
class PendingSearch:
    """A submitted search, until its caller has the result."""

    request: SearchRequest
    history: LengthHistory
    ticket: SearchTicket = field(init=False)
    run: PreparedSearch | None = None  # set when the engine's thread begins it

    def cancel(self) -> None:
        """Ends it within two engine steps, with the best vote so far."""
        self.ticket.cancel()

    @property
    def has_begun(self) -> bool:
        return self.run is not None

    @property
    def record(self) -> SearchRecord:
        """Its tree and counts; they change on the engine's thread until the search has ended."""
        return self._begun.search.record

    @property
    def notes(self) -> tuple[str, ...]:
        """Every warning about this search, also those that an earlier search had."""
        return () if self.run is None else self.run.plan.notes

    @property
    def thinks(self) -> bool:
        """True once it has begun, if its traces begin inside a think block."""
        return self.run is not None and self.run.plan.thinks

    def live_tokens(self, trace: int, start: int = 0) -> Sequence[int]:
        """Returns the tokens of a live trace so far; to be called from `on_event`, on the engine's thread."""
        return self._begun.search.pool.tokens_of(trace, start)

    def result(self) -> SearchResult:
        """Waits for it; an interrupted wait ends the search first, so that its log has an end."""
        try:
            return self._finished(self.ticket.result.result())
        except BaseException:
            self.abandon()
            raise

    def result_or_error(self) -> SearchResult:
        """Waits as `result` does; an error of this search alone is in its result."""
        try:
            return self.result()
        except Exception as error:
            if not self.ticket.failed_alone:
                raise
            if self.run is not None and self.run.search.result is not None:
                return self._finished(self.run.search.result)
            return self.request.failed(error)

    def abandon(self) -> None:
        """Ends it, and waits for the end."""
        self.ticket.cancel()
        self.ticket.result.exception()
        if self.run is not None:
            self.run.sink.close()

    def _finished(self, result: SearchResult) -> SearchResult:
        run = self._begun
        news, record = run.news, run.search.record
        if not self.request.problem.prefix_tokens:  # the length of a rest is no length of a trace
            news += self.history.remember(record, self.request.config)
        news += result.vote_warnings
        text = record.winning_text(result.votes, run.text_of)
        return run.sink.finish(dataclasses.replace(result, warnings=news, text=text))

    @property
    def _begun(self) -> PreparedSearch:
        assert self.run is not None, "the search has not begun"
        return self.run


class Solver(AbstractContextManager["Solver"]):
    """Holds one model on one engine and searches with it, any number of times.

    >>> solver = Solver()  # the bundled model
    >>> solver.solve("a = 17; b = 61; c = a + b; c?").answer
    """

    def __init__(
        self, model: str = models.BUNDLED, *, scorer: str | Scorer | Verifier = "auto", **engine_options: object
    ) -> None:
        """`engine_options` are the other fields of `EngineConfig`: engine, device, dtype, kv_budget_tokens, …

        A scorer looks at the model's hidden states. A verifier (an object, or `verifier:…`) reads its thoughts.
        """
        named = scorer if isinstance(scorer, str) else "custom"
        config = build(EngineConfig, {"model": model, "scorer": named, **engine_options})
        self._parts = SolverParts(config, scorer)
        self._builder = SearchBuilder(self._parts)
        if not config.any_weights:
            warn_of_other_weights(self._parts.scorer.info, self._parts.source, model)

    @property
    def config(self) -> EngineConfig:
        """The options it was made with."""
        return self._parts.config

    @property
    def engine(self) -> Engine:
        """Read-only: the engine's methods may only be called on the solver's own thread."""
        return self._parts.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._parts.engine.tokenizer

    @property
    def most_traces(self) -> int | None:
        """The number of traces that can run at a time; None: as many as the KV cache holds."""
        return self._parts.engine.info.most_traces

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
        """Searches one problem to its end. With `out_dir`, the event log and the result are written there.

        `fields` are those of `SearchConfig`: `solve(problem, capacity=16, seed=1)`.
        Calls from several threads run in one batch. Callbacks are called on the solver's own thread.
        """
        request = request_of(problem, config, out_dir, extractor, on_event, fields)
        return self._submit(request, should_stop).result()

    def submit(
        self,
        problem: str | Sequence[ChatMessage] | Problem,
        config: SearchConfig | None = None,
        *,
        out_dir: Path | str | None = None,
        extractor: Extractor | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
        **fields: object,
    ) -> PendingSearch:
        """Begins a search beside those that run, and returns at once; `AsyncSolver` and `gambit serve` build on it."""
        return self._submit(request_of(problem, config, out_dir, extractor, on_event, fields), lambda: False)

    def check_question(self, question: str) -> None:
        """Refuses, before a search begins, a question that a bundled model was not made for."""
        self._parts.check_question(question)

    def check_schema(self, schema: str) -> None:
        """Refuses, before a search begins, a schema to which the engine does not hold answers; may take a second."""
        self._parts.check_schema(schema)

    def capacity_of(self, config: SearchConfig) -> int:
        """Returns how many traces a search runs at a time."""
        return resolved_capacity(with_fixed_pool(config), self._parts.defaults)

    @property
    def think_end(self) -> int | None:
        """The token that ends the model's thinking; None if it has none."""
        return self._parts.rule.think_end

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of a trace, without the token that ended it."""
        return self._parts.text_of(tokens)

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
        """Searches problems, up to `concurrency` at a time in one batch, and yields results as they finish.

        A search begins when the engine has a place for a trace of it, so that `concurrency` may be large.
        A problem that cannot be searched has a result with `error` set; the others go on. Leaving the iteration
        early ends the searches that run.
        """
        if concurrency < 1:
            raise UserError(f"concurrency {concurrency}: at least one problem must run at a time")
        coming = requests_of(problems, config, out_dir, extractor, on_event, concurrency, fields)
        pending: list[PendingSearch] = []
        try:
            while True:
                while len(pending) < concurrency and not should_stop() and (request := next(coming, None)) is not None:
                    pending.append(self._submit(request, should_stop))
                if not pending:
                    return
                wait([each.ticket.result for each in pending], return_when=FIRST_COMPLETED)
                for done in [each for each in pending if each.ticket.result.done()]:
                    pending.remove(done)
                    yield done.result_or_error()
        finally:
            for left in pending:
                left.abandon()

    def plan(self, request: SearchRequest, history: LengthHistory, num_engines: int) -> SearchPlan:
        """Returns the settings that a search would have; for `SpreadSolver`."""
        return self._builder.plan(request, history, num_engines)

    def start_part(
        self, request: SearchRequest, settings: SearchSettings, report: Report, allowed_step: int | None
    ) -> PartHandle:
        """Runs a part of a search that is spread over several solvers; for `SpreadSolver`."""
        part = RunningPart(settings, report, allowed_step)
        own = dataclasses.replace(request, on_event=lambda _, event: part.on_event(event), part=part)
        part.follow(self._submit(own, lambda: False).ticket)
        return PartHandle(part.allow, part.stop)

    def equivalent(self, first: str, second: str) -> bool:
        """Returns True if two answers are equal, as votes decide it; comparisons are remembered."""
        return self._parts.grader.equivalent(first, second)

    def grade(self, answer: str | None, gold: str) -> bool:
        """Returns True if an answer is right; no answer is wrong."""
        return self._parts.grader.grade(answer, gold)

    def close(self) -> None:
        """Ends what runs and releases memory and processes; a second call does nothing."""
        self._parts.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, request: SearchRequest, should_stop: Callable[[], bool]) -> PendingSearch:
        if request.config.json_schema is not None:
            self.check_schema(request.config.json_schema)
        pending = PendingSearch(request, self._builder.history)

        def make() -> Search:
            pending.run = self._builder.build(request)
            return pending.run.search

        # The parts of one search wait for each other: if they waited for room too, two searches could block each other.
        pending.ticket = self._parts.host.submit(make, should_stop, may_wait=request.part is None)
        return pending

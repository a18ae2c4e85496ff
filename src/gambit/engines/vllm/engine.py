"""The engine protocol over vLLM's engine core: submits traces, keeps their tokens, turns reports into steps."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol, TypeVar

import numpy as np

from gambit.engines.base import EngineInfo, SearchSpec, check_prompt
from gambit.engines.sampling import noise_keys
from gambit.engines.vllm.messages import CloseSearch, Message, Regroup, SetScores, StepReport, TraceTask
from gambit.errors import EngineError, first_line
from gambit.scorers.memory import lost_history
from gambit.text.boundary import THINKING, advance, boundaries
from gambit.text.tokenizers import Tokenizer
from gambit.types import (
    Eviction,
    PressureAction,
    Progress,
    SearchStep,
    StepBatch,
    StepSeconds,
    TraceKey,
    TraceSpec,
)

_DETECTOR_MEMORY = 3  # tokens after which the thought detector no longer depends on what came before them
_STUCK_STEPS = 100  # steps in which no waiting trace was admitted although nothing runs
T = TypeVar("T")


class Core(Protocol):
    """The calls of this engine into vLLM's engine core."""

    def add(
        self, task: TraceTask, request_id: str, tokens: list[int], max_tokens: int, stop_ids: list[int]
    ) -> None: ...

    def send(self, message: Message) -> None:
        """Sends the scheduler a message that is about no new trace."""

    def abort(self, request_ids: list[str]) -> None: ...

    def step(self) -> StepReport | None:
        """The next report; None when there is none yet: asynchronous scheduling fills its pipeline first."""

    def close(self) -> None: ...


@dataclass(slots=True)
class SubmittedSearch:
    """One search on this engine."""

    spec: SearchSpec
    traces: dict[int, SubmittedTrace] = field(default_factory=dict)
    is_known: bool = False  # to the scheduler, with its first trace
    kept: dict[int, str] = field(default_factory=dict)  # requests of ended traces whose histories are kept


class VllmEngine:
    """Runs the traces of all open searches in vLLM's continuous batch."""

    def __init__(self, core: Core, info: EngineInfo, tokenizer: Tokenizer, *, remembers: bool = False) -> None:
        """`remembers`: the scorer has histories; the scheduler learns when one is no longer needed."""
        self.seconds_waiting = 0.0  # so far, of vLLM's core for its device; above 0 the core's own work costs no time
        self._core = core
        self._info = info
        self._tokenizer = tokenizer
        self._searches: dict[int, SubmittedSearch] = {}
        self._live: dict[str, SubmittedTrace] = {}
        self._columns = TokenColumns()
        self._remembers = remembers
        self._dropped: list[str] = []  # requests whose aborts are still to be sent
        self._num_requests = 0
        self._num_stuck = 0
        self._held: StepReport | None = None  # fetched, not yet read
        self._late: list[tuple[int, Eviction]] = []  # by search: queued traces whose last token came with the news
        self._failure: EngineError | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        assert spec.search not in self._searches and spec.prompt
        check_prompt(self._info, len(spec.prompt))
        self._searches[spec.search] = SubmittedSearch(spec)

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        self._submit_all(specs, [self._history_of(self._searches[spec.key.search], spec) for spec in specs])

    def submit_checks(self, specs: Sequence[TraceSpec]) -> None:
        """Traces of the self-check: the worker also reports which tokens their states would make."""
        self._submit_all(specs, [None] * len(specs), is_check=True)

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        traces = {key: self._searches[key.search].traces[key.trace] for key in keys}
        for trace in traces.values():
            self._drop(trace)
        self._send_aborts()
        return {key: tuple(trace.tokens) for key, trace in traces.items()}

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        if scores:
            self._send(SetScores(self._by_request(scores)))

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        if islands:
            self._send(Regroup(self._by_request(islands)))

    def _by_request(self, values: Mapping[TraceKey, T]) -> dict[str, T]:
        return {self._searches[key.search].traces[key.trace].request: value for key, value in values.items()}

    def _send(self, message: Message) -> None:
        self._guarded(lambda: self._core.send(message))

    def progress(self, search: int) -> Mapping[int, Progress]:
        traces = self._searches[search].traces
        return {i: Progress(len(t.tokens), t.is_thinking_at(len(t.tokens))) for i, t in traces.items()}

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return self._searches[key.search].traces[key.trace].tokens[start:]

    def close_search(self, search: int) -> None:
        self.stop([TraceKey(search, trace) for trace in self._searches[search].traces])
        if self._searches.pop(search).is_known and self._failure is None:
            self._send(CloseSearch(search))

    def close(self) -> None:
        self._searches.clear()
        self._live.clear()
        self._core.close()

    def _submit_all(
        self, specs: Sequence[TraceSpec], histories: Sequence[str | None], *, is_check: bool = False
    ) -> None:
        keys = noise_keys((spec.sampling.seed for spec in specs), (spec.noise for spec in specs)).tolist()
        followers = reversed(range(len(specs)))
        for spec, history_of, noise_key, to_come in zip(specs, histories, keys, followers, strict=True):
            self._submit(spec, history_of, noise_key, to_come, is_check=is_check)

    def _submit(
        self, spec: TraceSpec, history_of: str | None, noise_key: int, followers: int, *, is_check: bool
    ) -> None:
        search = self._searches[spec.key.search]
        if not search.is_known:
            self._send(replace(search.spec, prompt=()))
            search.is_known = True
        trace = self._child(search, spec) if spec.parent is not None else self._detached(search, spec)
        task = self._task(search, trace, history_of, noise_key, followers, is_check=is_check)
        tokens = [*search.spec.prompt, *trace.tokens]
        left = spec.max_new_tokens - spec.inherited
        self._guarded(lambda: self._core.add(task, trace.request, tokens, left, sorted(search.spec.stop_ids)))
        search.traces[spec.key.trace] = self._live[trace.request] = trace

    def _task(
        self,
        search: SubmittedSearch,
        trace: SubmittedTrace,
        history_of: str | None,
        noise_key: int,
        followers: int,
        *,
        is_check: bool,
    ) -> TraceTask:
        spec = trace.spec
        flags, is_pending = self._detector(search, trace)
        return TraceTask(
            replace(spec, prefix=()),
            prompt_tokens=len(search.spec.prompt),
            flags=flags,
            is_pending=is_pending,
            noise_key=noise_key,
            parent=search.traces[spec.parent.trace].request if spec.parent is not None else None,
            history_of=history_of,
            confidence_window=spec.stop_rule.window_tokens if spec.stop_rule else search.spec.confidence_window,
            embedding_size=search.spec.embedding_size,
            is_check=is_check,
            followers=followers,
        )

    def _history_of(self, search: SubmittedSearch, spec: TraceSpec) -> str | None:
        """Returns the request whose first thoughts are also this trace's; refuses an unknown one before any is sent."""
        if not self._remembers or not spec.score.count:
            return None
        source = spec.parent or spec.history_of
        requests = search.kept | {number: trace.request for number, trace in search.traces.items()}
        if source is None or source.trace not in requests:
            raise lost_history(spec.key, source, spec.score.count)
        return requests[source.trace]

    def _child(self, search: SubmittedSearch, spec: TraceSpec) -> SubmittedTrace:
        assert spec.parent is not None
        parent = search.traces[spec.parent.trace]
        assert spec.inherited <= len(parent.tokens)
        is_done = not parent.is_thinking_at(spec.inherited)
        return SubmittedTrace(
            spec,
            self._next_request(),
            parent.tokens[: spec.inherited],
            self._columns,
            min(parent.scored_length, spec.inherited),
            parent.thinking_length if is_done else None,
        )

    def _detached(self, search: SubmittedSearch, spec: TraceSpec) -> SubmittedTrace:
        """A root, or a child whose parent is no longer here."""
        assert len(spec.prefix) == spec.inherited
        thinking_length = None if search.spec.rule.start & THINKING else 0
        return SubmittedTrace(spec, self._next_request(), packed(spec.prefix), self._columns, 0, thinking_length)

    def _next_request(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)

    def _detector(self, search: SubmittedSearch, trace: SubmittedTrace) -> tuple[int, bool]:
        """The detector's state after the inherited tokens, and whether the last of them ends an unscored thought."""
        rule, tokens = search.spec.rule, trace.tokens
        if trace.spec.parent is None:
            ends, flags = boundaries(rule, tokens)
            is_new = len(ends) > trace.spec.score.count
            return flags, bool(ends) and ends[-1] == len(tokens) - 1 and is_new
        # Traces get long and branches are many: only the last few tokens are read again.
        is_short = len(tokens) <= _DETECTOR_MEMORY
        flags = rule.start if is_short else THINKING * trace.is_thinking_at(len(tokens))
        is_boundary = False
        for token in tokens[-_DETECTOR_MEMORY:]:
            flags, is_boundary = advance(rule, flags, token)
        return flags, is_boundary and trace.scored_length < len(tokens)

    def _drop(self, trace: SubmittedTrace) -> None:
        search, number = self._searches[trace.spec.key.search], trace.spec.key.trace
        self._columns.forget_rows()
        del self._live[trace.request]
        del search.traces[number]
        self._dropped.append(trace.request)
        if self._remembers and search.spec.keeps_histories:
            search.kept[number] = trace.request

    def _send_aborts(self) -> None:
        """Abort the dropped requests; those that ended by themselves too, whose histories were kept for branches."""
        dropped, self._dropped = self._dropped, []
        if dropped and self._failure is None:
            self._guarded(lambda: self._core.abort(dropped))

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> StepBatch:
        if not self._live:
            return StepBatch({}, 0, self._info.kv_capacity_tokens, StepSeconds())
        began = time.perf_counter()
        report, searches = self.step_report()
        elsewhere = report.seconds_scheduling + report.seconds_scoring
        seconds = StepSeconds(
            engine=max(time.perf_counter() - began - elsewhere, 0.0),
            scoring=report.seconds_scoring,
            scheduling=report.seconds_scheduling,
        )
        self.seconds_waiting += report.seconds_waiting
        used = report.kv_used_blocks * self._info.block_tokens
        return StepBatch(searches, used, self._info.kv_capacity_tokens, seconds)

    def step_report(self) -> tuple[StepReport, dict[int, SearchStep]]:
        """One step, and what vLLM's scheduler said about it."""
        report = self._next_report()
        return report, self._read(report)

    def _next_report(self) -> StepReport:
        """Fetches the next engine step in which a trace got a token or lost its place.

        A prompt may be computed in several, and asynchronous scheduling admits a trace one step before its first
        token: such steps are joined to the one that follows.
        """
        report, self._held = self._held or self._fetch(), None
        while not report.rows and not any(step.evicted or step.finished for step in report.searches.values()):
            following = self._fetch()
            if any(step.evicted for step in following.searches.values()):
                self._held = following  # an admission must be read before the eviction of the same trace
                break
            for search, step in report.searches.items():
                following.of(search).admitted[:0] = step.admitted
            report = following
        return report

    def _fetch(self) -> StepReport:
        while (report := self._guarded(self._core.step)) is None:
            pass
        if report.failure is not None:
            self._fail(EngineError(report.failure))
        self._num_stuck = self._num_stuck + 1 if report.is_empty and not report.num_running else 0
        if self._num_stuck > _STUCK_STEPS:
            raise EngineError(f"a KV budget of {self._info.kv_capacity_tokens} tokens cannot hold a waiting trace: "
                              "raise --kv-budget-tokens or run fewer searches at once")  # fmt: skip
        return report

    def _read(self, report: StepReport) -> dict[int, SearchStep]:
        """Completes a report's events with the tokens that are known here, in the order in which they happened.

        Traces that were stopped in the meantime are left out.
        """
        self._put_off_queueing(report)
        steps = {number: step for number, step in report.searches.items() if number in self._searches}
        for number, step in steps.items():
            self._read_evictions(self._searches[number], step)
        if report.rows:
            for number, count in self._columns.add(report.rows, report.tokens, self._live).items():
                steps.setdefault(number, SearchStep()).num_generated = count
        for request in report.stopped_thinking:
            if (trace := self._live.get(request)) is not None:
                trace.thinking_length = len(trace.tokens)
        for number, step in steps.items():
            self._read_thoughts(self._searches[number], step)
            self._read_ends(self._searches[number], step)
        if self._remembers:
            self._send_aborts()
        self._dropped.clear()
        return {number: step for number, step in steps.items() if step != SearchStep()}

    def _put_off_queueing(self, report: StepReport) -> None:
        """Reads the tokens of a queued trace first: asynchronous scheduling queues it while one is under way."""
        late, self._late = self._late, []
        for number, step in report.searches.items():
            for lost in list(step.evicted):
                if lost.action is PressureAction.QUEUE and self._speaks(TraceKey(number, lost.trace), report):
                    step.evicted.remove(lost)
                    self._late.append((number, lost))
        for number, lost in reversed(late):
            report.of(number).evicted.insert(0, lost)

    def _speaks(self, key: TraceKey, report: StepReport) -> bool:
        search = self._searches.get(key.search)
        trace = None if search is None else search.traces.get(key.trace)
        return trace is not None and trace.request in report.rows

    def _read_evictions(self, search: SubmittedSearch, step: SearchStep) -> None:
        lost, step.evicted = [each for each in step.evicted if each.trace in search.traces], []
        for each in lost:
            trace, is_queued = search.traces[each.trace], each.action is PressureAction.QUEUE
            tokens = () if is_queued else tuple(trace.tokens)
            step.evicted.append(replace(each, num_tokens=len(trace.tokens), tokens=tokens))
            if not is_queued:
                self._drop(trace)
        step.admitted = [each for each in step.admitted if each.trace in search.traces]

    def _read_thoughts(self, search: SubmittedSearch, step: SearchStep) -> None:
        step.scored = [each for each in step.scored if each.trace in search.traces]
        for thought in step.scored:
            search.traces[thought.trace].scored_length = thought.num_tokens

    def _read_ends(self, search: SubmittedSearch, step: SearchStep) -> None:
        ended = sorted((each for each in step.finished if each.trace in search.traces), key=lambda end: end.trace)
        step.finished = [replace(each, tokens=tuple(search.traces[each.trace].tokens)) for each in ended]
        for each in ended:
            self._drop(search.traces[each.trace])

    # -- failures ----------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[[], T]) -> T:
        """A call into vLLM. An error there ends this engine; traces keep the tokens known here."""
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EngineError(f"vLLM failed: {first_line(error)}"), error)

    def _fail(self, failure: EngineError, cause: Exception | None = None) -> NoReturn:
        self._failure = failure
        raise failure from cause


# -- traces and their tokens -----------------------------------------------------------------------------------------
#
# The same traces get a token in step after step, so tokens are kept by step, as they arrive. They are sorted into
# traces when they are read or the batch changes: a step in which nothing else happens costs no work per trace.


_MOST_STEPS = 64  # kept at most: lists of tokens take more memory than the traces' arrays


class TokenColumns:
    """Tokens that have arrived and are not yet sorted into traces."""

    def __init__(self) -> None:
        self._rows: list[str] = []  # requests, as the reports name them
        self._places: list[int] = []  # of those that live
        self._said: list[array[int]] = []
        self._counts: Counter[int] = Counter()  # of rows, by search
        self._steps: list[list[int]] = []

    def add(self, rows: list[str], tokens: list[int], live: Mapping[str, SubmittedTrace]) -> Mapping[int, int]:
        """Add one token for each row whose trace is live; returns how many there are of each search."""
        if rows != self._rows:
            self.forget_rows()
            self._places = [place for place, request in enumerate(rows) if request in live]
            traces = [live[rows[place]] for place in self._places]
            self._rows, self._said = rows, [trace.said for trace in traces]
            self._counts = Counter(trace.spec.key.search for trace in traces)
        self._steps.append(tokens)
        if len(self._steps) >= _MOST_STEPS:
            self.settle()
        return self._counts

    def settle(self) -> None:
        """Sort what has arrived into traces."""
        if not self._steps:
            return
        columns = np.ascontiguousarray(np.array(self._steps, np.int32)[:, self._places].T)
        self._steps = []
        for said, column in zip(self._said, columns, strict=True):
            said.frombytes(column.tobytes())

    def forget_rows(self) -> None:
        """Before a trace of the batch goes: the next report's rows are looked up again."""
        self.settle()
        self._rows = []


@dataclass(slots=True, eq=False)
class SubmittedTrace:
    """A trace that runs or waits, as the front knows it."""

    spec: TraceSpec
    request: str
    said: array[int]  # without what lies in `columns`: read `tokens`
    columns: TokenColumns
    scored_length: int  # at the boundary of its last scored thought
    thinking_length: int | None = None  # at the token that closed its think block

    @property
    def tokens(self) -> array[int]:
        """All it generated or inherited."""
        self.columns.settle()
        return self.said

    def is_thinking_at(self, length: int) -> bool:
        return self.thinking_length is None or length < self.thinking_length


def packed(tokens: Iterable[int]) -> array[int]:
    """A trace's tokens take four bytes each instead of forty."""
    return array("i", tokens)

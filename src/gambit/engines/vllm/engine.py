"""The engine protocol over vLLM's engine core: submits traces, keeps their tokens, turns reports into steps."""

import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from gambit.engines.base import EngineInfo, SearchSpec, check_prompt
from gambit.engines.sampling import noise_keys
from gambit.engines.vllm.messages import CloseSearch, Regroup, SetScores, StepReport, TraceTask
from gambit.engines.vllm.schemas import SchemaChecker
from gambit.errors import DeadEngineError, EngineError, GambitNote, first_line
from gambit.scorers.memory import lost_history
from gambit.text.boundary import THINKING, advance, boundaries
from gambit.text.tokenizers import Tokenizer
from gambit.types import Eviction, PressureAction, Progress, SearchStep, StepBatch, StepSeconds, TraceKey, TraceSpec

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.core import VllmCore

_DETECTOR_MEMORY = 3  # tokens after which the thought detector no longer depends on what came before them
_STUCK_STEPS = 100  # steps in which no waiting trace was admitted although nothing runs
_MOST_COLUMNS = 64  # kept unsorted at most: lists of tokens take more memory than the traces' arrays
T = TypeVar("T")


class TokenColumns:
    """Tokens that have arrived and are not yet sorted into traces.

    The same traces get a token in step after step, so tokens are kept by step, as they arrive. They are sorted into
    traces when they are read or the batch changes. A step in which nothing else happens costs no work per trace.
    """

    def __init__(self) -> None:
        self._rows: list[str] = []  # requests, as the reports name them
        self._places: list[int] = []  # of those that live
        self._arrays: list[array[int]] = []  # their traces' tokens
        self._counts: Counter[int] = Counter()  # of rows, by search
        self._steps: list[list[int]] = []

    def add(self, rows: list[str], tokens: list[int], live: Mapping[str, "SubmittedTrace"]) -> Mapping[int, int]:
        """Adds one token for each row whose trace is live; returns how many there are of each search."""
        if rows != self._rows:
            self.forget_rows()
            self._places = [place for place, request in enumerate(rows) if request in live]
            traces = [live[rows[place]] for place in self._places]
            self._rows, self._arrays = rows, [trace.sorted_tokens for trace in traces]
            self._counts = Counter(trace.spec.key.search for trace in traces)
        self._steps.append(tokens)
        if len(self._steps) >= _MOST_COLUMNS:
            self.settle()
        return self._counts

    def settle(self) -> None:
        """Sorts what has arrived into traces."""
        if not self._steps:
            return
        columns = np.ascontiguousarray(np.array(self._steps, np.int32)[:, self._places].T)
        self._steps = []
        for tokens, column in zip(self._arrays, columns, strict=True):
            tokens.frombytes(column.tobytes())

    def forget_rows(self) -> None:
        """Has the next report's rows looked up again, since a trace of the batch goes."""
        self.settle()
        self._rows = []


@dataclass(slots=True, eq=False)
class SubmittedTrace:
    """A trace that runs or waits, as the front knows it."""

    spec: TraceSpec
    request: str
    sorted_tokens: "array[int]"  # without what lies in `columns`: read `tokens`
    columns: TokenColumns
    scored_length: int = 0  # at the boundary of its last scored thought
    thinking_length: int | None = None  # at the token that closed its think block

    @property
    def tokens(self) -> "array[int]":
        """All it generated or inherited, four bytes a token."""
        self.columns.settle()
        return self.sorted_tokens

    def is_thinking_at(self, length: int) -> bool:
        return self.thinking_length is None or length < self.thinking_length


@dataclass(slots=True)
class SubmittedSearch:
    """One search on this engine."""

    spec: SearchSpec
    traces: dict[int, SubmittedTrace] = field(default_factory=dict)
    is_known: bool = False  # to the scheduler, with its first trace
    kept: dict[int, str] = field(default_factory=dict)  # requests of ended traces whose histories are kept


class VllmEngine:
    """Runs the traces of all open searches in vLLM's continuous batch."""

    schemas: SchemaChecker | None = None  # set at the start

    def __init__(self, core: "VllmCore", info: EngineInfo, tokenizer: Tokenizer, *, remembers: bool = False) -> None:
        """`remembers`: the scorer has histories; the scheduler is informed when one is no longer needed."""
        self.info = info
        self.tokenizer = tokenizer
        self.seconds_waiting = 0.0  # so far, of vLLM's core for its device; above 0 the core's own work costs no time
        self._core = core
        self._searches: dict[int, SubmittedSearch] = {}
        self._live: dict[str, SubmittedTrace] = {}  # by request
        self._columns = TokenColumns()
        self._remembers = remembers
        self._dropped: list[str] = []  # requests whose aborts are still to be sent
        self._num_requests = 0
        self._num_stuck = 0
        self._has_noted = False  # that short cuts are not taken
        self._held: StepReport | None = None  # fetched, not yet read
        self._late: list[tuple[int, Eviction]] = []  # by search: queued traces whose last token came in the same report
        self._failure: DeadEngineError | None = None

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        assert spec.search not in self._searches and spec.prompt
        check_prompt(self.info, len(spec.prompt))
        self._searches[spec.search] = SubmittedSearch(spec)

    def submit(self, specs: Sequence[TraceSpec], *, is_check: bool = False) -> None:
        """Queues traces. `is_check`: of the self-check; the worker also reports which tokens their states would make.

        Unknown histories are refused before anything is sent.
        """
        histories = [None if is_check else self._history_of(spec) for spec in specs]
        keys = noise_keys((spec.sampling.seed for spec in specs), (spec.noise for spec in specs)).tolist()
        for place, (spec, history_of, noise_key) in enumerate(zip(specs, histories, keys, strict=True), 1):
            search = self._searches[spec.key.search]
            if not search.is_known:
                self._guarded(self._core.send, replace(search.spec, prompt=()))
                search.is_known = True
            trace = self._new_trace(search, spec)
            flags, is_pending = self._detector(search, trace)
            task = TraceTask(
                replace(spec, prefix=()),
                prompt_tokens=len(search.spec.prompt),
                flags=flags,
                is_pending=is_pending,
                noise_key=noise_key,
                parent=None if spec.parent is None else search.traces[spec.parent.trace].request,
                history_of=history_of,
                confidence_window=spec.stop_rule.window_tokens if spec.stop_rule else search.spec.confidence_window,
                embedding_size=search.spec.embedding_size,
                lora=search.spec.lora,
                is_check=is_check,
                followers=len(specs) - place,
            )
            tokens = [*search.spec.prompt, *trace.tokens]
            left = spec.max_new_tokens - spec.first_length
            self._guarded(self._core.add, task, trace.request, tokens, left, sorted(search.spec.stop_ids))
            search.traces[spec.key.trace] = self._live[trace.request] = trace

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        traces = {key: self._searches[key.search].traces[key.trace] for key in keys}
        for trace in traces.values():
            self._drop(trace)
        self._send_aborts()
        return {key: tuple(trace.tokens) for key, trace in traces.items()}

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        if scores:
            self._guarded(self._core.send, SetScores(self._by_request(scores)))

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        if islands:
            self._guarded(self._core.send, Regroup(self._by_request(islands)))

    def _by_request(self, values: Mapping[TraceKey, T]) -> dict[str, T]:
        return {self._searches[key.search].traces[key.trace].request: value for key, value in values.items()}

    def progress(self, search: int) -> Mapping[int, Progress]:
        traces = self._searches[search].traces
        return {i: Progress(len(t.tokens), t.is_thinking_at(len(t.tokens))) for i, t in traces.items()}

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return self._searches[key.search].traces[key.trace].tokens[start:]

    def close_search(self, search: int) -> None:
        self.stop([TraceKey(search, trace) for trace in self._searches[search].traces])
        if self._searches.pop(search).is_known and self._failure is None:
            self._guarded(self._core.send, CloseSearch(search))

    def check_schema(self, schema: str) -> None:
        """Raises UserError for a schema to which answers cannot be held; any thread may call it."""
        assert self.schemas is not None
        self.schemas.check(schema)

    def close(self) -> None:
        if self.schemas is not None:
            self.schemas.close()
        self._searches.clear()
        self._live.clear()
        self._core.close()

    def _history_of(self, spec: TraceSpec) -> str | None:
        """Returns the request whose first thoughts are also this trace's; raises where it is not known."""
        if not self._remembers or not spec.score.count:
            return None
        search, source = self._searches[spec.key.search], spec.parent or spec.history_of
        requests = search.kept | {number: trace.request for number, trace in search.traces.items()}
        if source is None or source.trace not in requests:
            raise lost_history(spec.key, source, spec.score.count)
        return requests[source.trace]

    def _new_trace(self, search: SubmittedSearch, spec: TraceSpec) -> SubmittedTrace:
        """Returns a trace with its inherited tokens, which a root, or a child of an ended trace, has in its prefix."""
        self._num_requests += 1
        request = str(self._num_requests)
        if spec.parent is None:
            assert len(spec.prefix) == spec.inherited
            thinking_length = None if search.spec.rule.start & THINKING else 0
            prefix = array("i", (*spec.prefix, *spec.given))
            thinking_length = spec.inherited if spec.given else thinking_length
            return SubmittedTrace(spec, request, prefix, self._columns, thinking_length=thinking_length)
        parent = search.traces[spec.parent.trace]
        assert spec.inherited <= len(parent.tokens)
        is_thinking = parent.is_thinking_at(spec.inherited)
        return SubmittedTrace(
            spec,
            request,
            parent.tokens[: spec.inherited] + array("i", spec.given),
            self._columns,
            min(parent.scored_length, spec.inherited),
            (spec.inherited if spec.given else None) if is_thinking else parent.thinking_length,
        )

    def _detector(self, search: SubmittedSearch, trace: SubmittedTrace) -> tuple[int, bool]:
        """Returns the detector's state after the inherited tokens; True if the last one ends an unscored thought."""
        rule, tokens = search.spec.rule, trace.tokens
        if trace.spec.given:
            return 0, False  # no longer thinking
        if trace.spec.parent is None:
            ends, flags = boundaries(rule, tokens)
            is_new = len(ends) > trace.spec.score.count
            return flags, bool(ends) and ends[-1] == len(tokens) - 1 and is_new
        # Traces get long and branches are many: only the last few tokens are read again.
        is_short = len(tokens) <= _DETECTOR_MEMORY
        flags = rule.start if is_short else THINKING * trace.is_thinking_at(len(tokens))
        is_boundary = False
        for length, token in enumerate(tokens[-_DETECTOR_MEMORY:], max(len(tokens) - _DETECTOR_MEMORY, 0) + 1):
            flags, is_boundary = advance(rule, flags, token, length)
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
        """Aborts the dropped requests; those that ended by themselves too, whose histories were kept for branches."""
        dropped, self._dropped = self._dropped, []
        if dropped and self._failure is None:
            self._guarded(self._core.abort, dropped)

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> StepBatch:
        if not self._live:
            return StepBatch({}, 0, self.info.kv_capacity_tokens, StepSeconds())
        began = time.perf_counter()
        report, searches = self.step_report()
        elsewhere = report.seconds_scheduling + report.seconds_scoring
        seconds = StepSeconds(
            engine=max(time.perf_counter() - began - elsewhere, 0.0),
            scoring=report.seconds_scoring,
            scheduling=report.seconds_scheduling,
        )
        self.seconds_waiting += report.seconds_waiting
        used = report.kv_used_blocks * self.info.block_tokens
        return StepBatch(searches, used, self.info.kv_capacity_tokens, seconds)

    def step_report(self) -> tuple[StepReport, dict[int, SearchStep]]:
        """Returns the report of the next step in which a trace got a token or lost its place, and its events.

        A prompt may be computed in several steps, and asynchronous scheduling admits a trace one step before its first
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
        return report, self._read(report)

    def _fetch(self) -> StepReport:
        while (report := self._guarded(self._core.step)) is None:
            pass
        if report.failure is not None:
            self._fail(report.failure)
        if report.why_plain is not None and not self._has_noted:
            self._has_noted = True
            warnings.warn(
                f"decode steps and branches take vLLM's own path: {report.why_plain}", GambitNote, stacklevel=2
            )
        self._num_stuck = self._num_stuck + 1 if report.is_empty and not report.num_running else 0
        if self._num_stuck > _STUCK_STEPS:
            raise EngineError(f"a KV budget of {self.info.kv_capacity_tokens} tokens cannot hold a waiting trace: "
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
            traces = self._searches[number].traces
            step.scored = [each for each in step.scored if each.trace in traces]
            for thought in step.scored:
                traces[thought.trace].scored_length = thought.num_tokens
            ended = sorted((each for each in step.finished if each.trace in traces), key=lambda end: end.trace)
            step.finished = [replace(each, tokens=tuple(traces[each.trace].tokens)) for each in ended]
            for each in ended:
                self._drop(traces[each.trace])
        if self._remembers:
            self._send_aborts()
        self._dropped.clear()
        return {number: step for number, step in steps.items() if step != SearchStep()}

    def _put_off_queueing(self, report: StepReport) -> None:
        """Puts off the queueing of traces that have a token in the same report: that token must be read first.

        Asynchronous scheduling queues a trace while one of its tokens is under way.
        """
        late, self._late = self._late, []
        for number, step in report.searches.items():
            traces = self._searches[number].traces if number in self._searches else {}
            for lost in list(step.evicted):
                is_queued = lost.action is PressureAction.QUEUE and lost.trace in traces
                if is_queued and traces[lost.trace].request in report.rows:
                    step.evicted.remove(lost)
                    self._late.append((number, lost))
        for number, lost in reversed(late):
            report.of(number).evicted.insert(0, lost)

    def _read_evictions(self, search: SubmittedSearch, step: SearchStep) -> None:
        lost, step.evicted = [each for each in step.evicted if each.trace in search.traces], []
        for each in lost:
            trace, is_queued = search.traces[each.trace], each.action is PressureAction.QUEUE
            tokens = () if is_queued else tuple(trace.tokens)
            step.evicted.append(replace(each, num_tokens=len(trace.tokens), tokens=tokens))
            if not is_queued:
                self._drop(trace)
        step.admitted = [each for each in step.admitted if each.trace in search.traces]

    # -- failures ----------------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., T], *args: Any) -> T:
        """Calls into vLLM. An error there ends this engine; traces keep the tokens known here."""
        if self._failure is not None:
            raise self._failure
        try:
            return call(*args)
        except Exception as error:
            self._fail(f"vLLM failed: {first_line(error)}", error)

    def _fail(self, reason: str, cause: Exception | None = None) -> NoReturn:
        self._failure = DeadEngineError(reason)
        raise self._failure from cause

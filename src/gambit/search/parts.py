"""One search in parts on different engines: how it is split, how a part runs, and how the parts become one again.

All parts count the same decode steps, so that the whole is what one engine would have recorded step by step. It is
decided at each step, from all of its traces, if it has to stop. What a part has done beyond that step does not count.
"""

import dataclasses
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.config.presets import SearchPart, SearchSettings
from gambit.errors import EngineError, UserError, named
from gambit.policies.base import Requirements, SplitBy
from gambit.policies.doubt import DoubtWatch
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord, voted
from gambit.results.result import SearchResult
from gambit.search.host import SearchTicket
from gambit.search.limits import CHECK_SECONDS, SearchLimits, is_over
from gambit.tree import LIVE, Trace, TraceState
from gambit.types import StopReason

POLL_SECONDS = 0.2  # between two looks at whether to stop
# The phases of an engine step in their order; first come events of earlier steps.
LATE, LOSS, SCORES, ENDS, DECISIONS = range(5)
OF_PART = ev.Sample | ev.Stopped | ev.Waited | ev.VerifierTotals  # of which the whole makes its own
ENDED = ev.Finished | ev.Pruned | ev.Evicted | ev.Cancelled
Kept = TypeVar("Kept", ev.Sample, ev.Stopped, ev.Waited, ev.VerifierTotals)


# -- splitting -------------------------------------------------------------------------------------------------


def split(settings: SearchSettings, split_by: SplitBy, num_engines: int) -> tuple[SearchSettings, ...]:
    """Returns the settings of each part; one part, the whole search, where there is nothing to split."""
    if settings.first_traces is not None:  # whether there are more is for the vote, which no part has
        raise UserError("first_traces: a search that is spread over engines begins with all its traces; leave it out, "
                        "or search on one engine")  # fmt: skip
    num_islands, pool = settings.pool.islands, settings.pool
    pieces = {SplitBy.ISLANDS: num_islands, SplitBy.TRACES: min(settings.capacity, settings.num_traces)}
    count = min(num_engines, pieces.get(split_by, 1))
    if count <= 1:
        return (dataclasses.replace(settings, part=SearchPart()),)
    if split_by is SplitBy.ISLANDS:
        # A search on one engine may divide its islands, by the scores of all; those of a part are not all.
        steady = dataclasses.replace(settings, doubt=None)
        return tuple(dataclasses.replace(steady, part=SearchPart(islands)) for islands in ranges(num_islands, count))
    return tuple(  # of independent traces: each part has some of their numbers and some of the places
        dataclasses.replace(
            settings,
            capacity=len(places),
            num_traces=len(traces),
            pool=dataclasses.replace(pool, swap_size=min(pool.swap_size, len(places))),
            part=SearchPart(first_trace=traces.start),
        )
        for traces, places in zip(ranges(settings.num_traces, count), ranges(settings.capacity, count), strict=True)
    )


def ranges(total: int, count: int) -> list[range]:
    """Splits numbers into neighbours, in ranges that differ in length by at most one."""
    starts = [total * index // count for index in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]


# -- on an engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartNews:
    """The report of a part on everything since its last one."""

    step: int  # up to which the events are complete
    events: tuple[ev.Event, ...]
    is_over: bool = False
    error: str | None = None  # what ended it
    is_engines: bool = False  # its engine is gone, and with it whatever was not reported


Report: TypeAlias = Callable[[PartNews], None]


@dataclass(frozen=True, slots=True)
class PartHandle:
    """A part that runs, perhaps in another process. Calls come from any thread."""

    allow: Callable[[int | None], None]  # lets it go on up to a step; None: to its end
    stop: Callable[[], None]  # ends it within two engine steps; a second call does nothing


StartPart: TypeAlias = Callable[[Report, int | None], PartHandle]  # the second: the last step that it may take


class RunningPart:
    """A part on the thread of its engine.

    It reports every check interval, at the end of a trace, which may settle the vote, and when it has to wait. Its last
    report comes when it has left the engine.
    """

    def __init__(self, settings: SearchSettings, report: Report, allowed_step: int | None) -> None:
        self.settings = settings
        self._send = report
        self._allowed = allowed_step  # the last step that it may take for now; None: any
        self._changed = threading.Condition()
        self._ticket: SearchTicket | None = None
        self._events: list[ev.Event] = []
        self._step = -1
        self._is_news = False

    def follow(self, ticket: SearchTicket) -> None:
        """Will report the end of the search with this ticket."""
        self._ticket = ticket

        def end(done: Future[SearchResult]) -> None:
            error = done.exception()
            self._report(is_over=True, error=None if error is None else named(error))

        ticket.result.add_done_callback(end)

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
        self._events.append(event)
        self._is_news |= isinstance(event, ev.Finished)
        if isinstance(event, ev.Stopped):
            self._step = event.step

    def after_step(self, step: int) -> None:
        """Reports if it is time to, and waits until the part may go on."""
        self._step = step

        def may_go_on() -> bool:
            return self._allowed is None or step < self._allowed

        if self._is_news or step % self.settings.pool.check_interval == 0 or not may_go_on():
            self._report()
        with self._changed:
            self._changed.wait_for(may_go_on)

    def _report(self, *, is_over: bool = False, error: str | None = None) -> None:
        events, self._events, self._is_news = tuple(self._events), [], False
        self._send(PartNews(self._step, events, is_over, error))


# -- the whole --------------------------------------------------------------------------------------------------


class EngineDiedError(EngineError):
    """The engine of a part died: the search may be begun anew."""


@dataclass(slots=True, eq=False)
class _PartLog:
    """The events of one part, and how much of them is merged."""

    coming: deque[ev.Event] = field(default_factory=deque)
    ids: dict[int, int] = field(default_factory=dict)  # from its traces to those of the whole
    step: int = -1
    is_over: bool = False
    kept: dict[type, ev.Event] = field(default_factory=dict)  # the last of each kind of `OF_PART`

    def take(self, step: int) -> Iterator[ev.Event]:
        """Yields what it did until the end of a step."""
        while self.coming and _step_of(self.coming[0]) <= step:
            yield self.coming.popleft()

    def own_tokens(self, trace: int) -> tuple[int, ...]:
        """Returns the tokens of a trace that was live at the last merged step; none if its engine died before."""
        ends = (event for event in self.coming if isinstance(event, ENDED))
        return next((event.tokens for event in ends if event.trace == trace), ())

    def rows(self, traces: Sequence[int], *columns: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Returns the rows of merged traces in a table, with their numbers in the whole."""
        return [(self.ids[trace], *rest) for trace, *rest in zip(traces, *columns, strict=True) if trace in self.ids]


class MergedSearch:
    """A search whose parts run elsewhere. Calls come from one thread."""

    def __init__(
        self,
        started: ev.RunStarted,
        settings: SearchSettings,
        requirements: Requirements,
        num_parts: int,
        on_event: Callable[[ev.Event], None],
        equivalent_until: Callable[[float], Equivalent],
    ) -> None:
        self.record = SearchRecord(started)
        self._limits = SearchLimits(settings, Islands.of(settings), self.record.tree)
        self._due: StopReason | None = None  # at the last merged step
        self._step = -1  # merged
        self._settings = settings
        self._requirements = requirements
        self._parts = [_PartLog() for _ in range(num_parts)]
        self._news: queue.SimpleQueue[tuple[_PartLog, PartNews]] = queue.SimpleQueue()
        self._on_event = on_event
        self._equivalent_until = equivalent_until
        # By its doubt one engine would divide the islands; those on several stay, which leaves a note.
        doubt = settings.doubt if num_parts > 1 else None
        self._watch = None if doubt is None else DoubtWatch(doubt, settings, self.record.tree)
        self._num_generated = 0

    @property
    def note(self) -> str | None:
        """The reason for which one engine would have gone on with smaller islands; None if there is none."""
        return None if self._watch is None else self._watch.finding

    # -- the parts as they run ---------------------------------------------------------------------------------

    def run(self, starts: Sequence[StartPart], should_stop: Callable[[], bool]) -> SearchResult:
        """Runs all parts to the end of the whole."""
        running: list[PartHandle] = []
        self._limits.start_clock()
        self._on_event(self.record.started)
        try:
            for log, start in zip(self._parts, starts, strict=True):
                running.append(start(partial(self._receive, log), self._allowed_step))
            return self._finish(*self._follow(running, should_stop))
        finally:
            for part in running:
                part.stop()

    def _receive(self, log: _PartLog, item: PartNews) -> None:
        self._news.put((log, item))

    def _follow(
        self, running: Sequence[PartHandle], should_stop: Callable[[], bool]
    ) -> tuple[StopReason | None, str | None]:
        """Merges the news of all parts to their end; returns why they were stopped, if they were, and their error."""
        reason: StopReason | None = None
        error: str | None = None
        allowed = self._allowed_step
        while not all(log.is_over for log in self._parts):
            new_error = self._take_news()
            error = error or new_error
            self._advance()
            if reason is None and error is not None:
                reason = StopReason.FAILED
            elif reason is None and should_stop():
                reason = StopReason.INTERRUPTED
            elif reason is None and self._limits.is_time_up:
                reason = StopReason.BUDGET_SECONDS
            if reason is not None or self._due is not None:
                for part in running:
                    part.stop()
            elif self._allowed_step != allowed:
                allowed = self._allowed_step
                for part in running:
                    part.allow(allowed)
        return reason, error

    def _take_news(self) -> str | None:
        """Takes the next report, which may have an error; returns None, too, if none comes for a while."""
        try:
            log, item = self._news.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None
        if item.is_engines:
            raise EngineDiedError(item.error)
        log.coming.extend(item.events)
        log.step, log.is_over = max(log.step, item.step), item.is_over
        return item.error

    @property
    def _allowed_step(self) -> int | None:
        """The step to which parts may go without passing the token budget, whatever their traces do; None: any."""
        budget = self._settings.budget_tokens
        if budget is None:
            return None
        sure = (budget - self._num_generated) // self._settings.capacity
        # The next step is within the budget even if more of its places were taken: otherwise the search were due.
        return max(self._step, 0) + max(sure, int(self._step >= 0))

    # -- one step ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Merges the steps that all parts have done, up to the one at which the search is due to stop."""
        going = [part.step for part in self._parts if not part.is_over]
        last = min(going) if going else max(part.step for part in self._parts)
        while self._due is None and self._step < last:
            self._step += 1
            self._merge(self._step)

    def _merge(self, step: int) -> None:
        phases = self._by_phase(step)
        for part, event in chain(phases[LATE], phases[LOSS]):
            self._apply(part, event)
        self._num_generated += self.record.tree.count(TraceState.RUNNING)
        if phases[SCORES]:
            self._emit(_joined([self._renamed(part, event) for part, event in phases[SCORES]]))
        for part, event in chain(phases[ENDS], phases[DECISIONS]):
            self._apply(part, event)
        if any(sample.step == step for sample in self._last(ev.Sample)):
            self._emit(self._sample())
        if not any(end.reason in (StopReason.INTERRUPTED, StopReason.FAILED) for end in self._last(ev.Stopped)):
            is_settled = bool(phases[ENDS]) and self._is_settled()
            self._due = self._limits.reason_in_pool(self._num_generated, is_settled=is_settled)

    def _by_phase(self, step: int) -> list[list[tuple[_PartLog, ev.Event]]]:
        """Sorts the events of a step; each part's own order is kept, and lower islands come first, as on one engine."""
        phases: list[list[tuple[_PartLog, ev.Event]]] = [[] for _ in range(DECISIONS + 1)]
        for part in self._parts:
            phase = LOSS
            for event in part.take(step):
                if _step_of(event) < step:
                    phases[LATE].append((part, event))
                    continue
                phase = max(phase, _phase_of(event))
                phases[phase].append((part, event))
        return phases

    def _apply(self, part: _PartLog, event: ev.Event) -> None:
        if isinstance(event, OF_PART):
            part.kept[type(event)] = event
        elif isinstance(event, ev.IslandsSplit):
            assert len(self._parts) == 1, "islands that are divided among engines stay as they are"
            self._limits.islands = dataclasses.replace(self._limits.islands, count=event.islands)
            self._emit(event)
        elif not isinstance(event, ev.RunStarted):
            self._emit(self._renamed(part, event))

    def _renamed(self, part: _PartLog, event: ev.Event) -> ev.Event:
        """Returns an event with the traces' numbers in the whole search."""
        if isinstance(event, ev.Created | ev.Branched | ev.Forced):
            part.ids[event.trace] = len(self.record.tree.traces)
        if isinstance(event, ev.Scored | ev.Verified):
            return dataclasses.replace(event, traces=tuple(part.ids[trace] for trace in event.traces))
        assert not isinstance(event, OF_PART | ev.RunStarted | ev.Voted | ev.IslandsSplit)
        if isinstance(event, ev.Branched | ev.Forced):
            event = dataclasses.replace(event, parent=part.ids[event.parent])
        return dataclasses.replace(event, trace=part.ids[event.trace])

    def _emit(self, event: ev.Event) -> None:
        self.record.apply(event)
        if self._watch is not None:
            self._watch.note(event)
        self._on_event(event)

    def _is_settled(self) -> bool:
        """Returns whether the vote cannot change any more."""
        equivalent = self._equivalent_until(time.monotonic() + CHECK_SECONDS)
        return is_over(self._settings, self.record, self._requirements, equivalent)

    def _last(self, kind: type[Kept]) -> list[Kept]:
        """Returns the last event of a kind of each part that has one."""
        found = [part.kept.get(kind) for part in self._parts]
        return [event for event in found if isinstance(event, kind)]

    def _sample(self, **changes: float) -> ev.Sample:
        """Sums up the memory of all engines; the times are those of the slowest, since they work side by side."""
        tree, samples = self.record.tree, self._last(ev.Sample)
        return dataclasses.replace(
            max(samples, key=lambda sample: sample.seconds_total),
            step=max(self._step, 0),
            running=tree.count(TraceState.RUNNING),
            waiting=tree.count(TraceState.WAITING),
            ghosts=tree.count(TraceState.GHOST),
            completed=tree.count(TraceState.FINISHED),
            generated=self._num_generated,
            kv_used_tokens=sum(sample.kv_used_tokens for sample in samples),
            kv_capacity_tokens=sum(sample.kv_capacity_tokens for sample in samples),
            **changes,
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def _finish(self, reason: StopReason | None, error: str | None) -> SearchResult:
        """Ends the log and takes the vote. `reason`: why the parts were stopped, if it is not in their traces."""
        at = max(self._step, 0)
        self._cancel_live()
        if self._last(ev.Sample):
            self._emit(self._sample(seconds_total=self._limits.seconds))
        for part in self._parts:
            part.kept |= {
                type(event): event for event in part.coming if isinstance(event, ev.Waited | ev.VerifierTotals)
            }
        if (waited := self._waited()) is not None:
            self._emit(waited)
        of_parts = [end.reason for end in self._last(ev.Stopped)] or [StopReason.FAILED]
        self._emit(ev.Stopped(at, self._due or reason or of_parts[0]))
        for scores in self._late_scores():
            self._emit(scores)
        if totals := self._last(ev.VerifierTotals):
            self._emit(_sum_of(totals, at))
        vote = self.record.vote(self._equivalent_until(self._limits.vote_deadline))
        self._emit(voted(vote))
        return dataclasses.replace(self.record.result(vote), error=error)

    def _cancel_live(self) -> None:
        """Ends what ran on in its part after the end of the whole, with the tokens that it had by then."""
        tree = self.record.tree
        owners = {whole: (part, own) for part in self._parts for own, whole in part.ids.items()}
        for trace in sorted((t for state in LIVE for t in tree.in_state(state)), key=lambda trace: trace.id):
            part, own_id = owners[trace.id]
            tokens = part.own_tokens(own_id)[: _length_at(trace, self._step)]
            self._emit(ev.Cancelled(self._step, trace.id, tokens))

    def _waited(self) -> ev.Waited | None:
        found = [(part, part.kept.get(ev.Waited)) for part in self._parts]
        tables = [part.rows(w.traces, w.steps, w.seconds) for part, w in found if isinstance(w, ev.Waited)]
        rows = sorted(chain.from_iterable(tables))
        return ev.Waited(self._step, *zip(*rows, strict=True)) if rows else None

    def _late_scores(self) -> Iterator[ev.Verified]:
        """Yields the scores of completed traces that came after the end, for the vote."""
        traces = self.record.tree.traces
        for part in self._parts:
            for event in part.coming:
                if isinstance(event, ev.Verified):
                    found = part.rows(
                        event.traces, event.scores, event.num_tokens, event.ended_steps, event.engine_scores
                    )
                    rows = [row for row in found if traces[row[0]].state is TraceState.FINISHED]
                    if rows:
                        yield ev.Verified(max(self._step, 0), *zip(*rows, strict=True))


def _step_of(event: ev.Event) -> int:
    """Returns the step of an event; the header comes before everything."""
    return -1 if isinstance(event, ev.RunStarted | ev.Voted) else event.step


def _phase_of(event: ev.Event) -> int:
    """Returns the phase of the engine step in which an event arises."""
    is_pressure = isinstance(event, ev.Evicted | ev.Pruned) and event.reason == "pressure"
    if is_pressure or isinstance(event, ev.Queued | ev.Admitted):
        return LOSS
    if isinstance(event, ev.Scored):
        return SCORES
    return ENDS if isinstance(event, ev.Finished) else DECISIONS


def _length_at(trace: Trace, step: int) -> int:
    """Returns the number of a live trace's own tokens at the end of a step: one for every step in which it ran."""
    before = trace.queued_tokens[-1] if trace.queued_tokens else trace.num_given
    return before + (step + 1 - trace.admitted_steps[-1] if trace.state is TraceState.RUNNING else 0)


def _joined(scored: Sequence[ev.Event]) -> ev.Scored:
    """Joins the thoughts of one step, whichever engines they ended on."""
    events = [event for event in scored if isinstance(event, ev.Scored)]
    columns = [(event.traces, event.scores, event.num_tokens) for event in events]
    traces, scores, lengths = (tuple(chain.from_iterable(column)) for column in zip(*columns, strict=True))
    return ev.Scored(events[0].step, traces, scores, lengths)


def _sum_of(totals: Sequence[ev.VerifierTotals], step: int) -> ev.VerifierTotals:
    """Sums up verifiers that work side by side; the search stood still as long as the slowest part."""
    summed = {name: sum(getattr(each, name) for each in totals)
              for name in ("thoughts", "needed", "in_time", "tokens", "seconds")}  # fmt: skip
    slowest = {name: max(getattr(each, name) for each in totals) for name in ("seconds_waited", "seconds_for_vote")}
    lost = next((each.lost for each in totals if each.lost), None)
    return dataclasses.replace(totals[0], step=step, lost=lost, **summed, **slowest)

"""The parts of one search, which run on different engines, made one again: one tree, one log, one vote.

All parts count the same decode steps, so that the whole is what one engine would have recorded step by step. Whether it
has to stop is decided here at each step, from all of its traces: what a part has done beyond that step does not count.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias, TypeVar

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.config.presets import SearchSettings
from gambit.config.trust import Doubt
from gambit.errors import EngineError
from gambit.policies.base import Requirements
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord, voted
from gambit.results.result import SearchResult
from gambit.search.limits import CHECK_SECONDS, SearchLimits, is_over
from gambit.search.parts import PartHandle, PartNews, Tell
from gambit.search.score_spread import DoubtWatch
from gambit.tree import LIVE, Trace, TraceState
from gambit.types import StopReason

POLL_SECONDS = 0.2  # between two looks at whether to stop
# What an engine step brings, in this order; first come events of earlier steps.
LATE, LOSS, SCORES, ENDS, DECISIONS = range(5)
OF_PART = ev.Sample | ev.Stopped | ev.Waited | ev.VerifierTotals  # of which the whole makes its own
ENDED = ev.Finished | ev.Pruned | ev.Evicted | ev.Cancelled
StartPart: TypeAlias = Callable[[Tell, int | None], PartHandle]  # the receiver of news, and the first allowed step
Kept = TypeVar("Kept", ev.Sample, ev.Stopped, ev.Waited, ev.VerifierTotals)


class EngineDiedError(EngineError):
    """The engine of a part died: the search may be begun anew."""


@dataclass(slots=True, eq=False)
class _PartLog:
    """The events of one part, and how much of them is merged."""

    coming: deque[ev.Event] = field(default_factory=deque)
    ids: dict[int, int] = field(default_factory=dict)  # its traces' -> the whole's
    step: int = -1
    is_over: bool = False
    kept: dict[type, ev.Event] = field(default_factory=dict)  # the last of each kind

    def take(self, step: int) -> Iterator[ev.Event]:
        """Yields what it did until the end of a step."""
        while self.coming and _step_of(self.coming[0]) <= step:
            yield self.coming.popleft()

    def own_tokens(self, trace: int) -> tuple[int, ...]:
        """Returns the tokens of a trace that was live at the last merged step; none if its engine died before."""
        ends = (
            event for event in self.coming if isinstance(event, ev.Finished | ev.Pruned | ev.Evicted | ev.Cancelled)
        )
        return next((event.tokens for event in ends if event.trace == trace), ())


_Inbox: TypeAlias = "queue.SimpleQueue[tuple[_PartLog, PartNews]]"


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
        doubt: Doubt | None = None,
    ) -> None:
        """`doubt`: would let one engine divide the islands; those on several stay, which leaves a note."""
        self.record = SearchRecord(started)
        self.limits = SearchLimits(settings, Islands.of(settings), self.record.tree)
        self.due: StopReason | None = None  # at the last merged step
        self.step = -1  # merged
        self._settings = settings
        self._requirements = requirements
        self._parts = [_PartLog() for _ in range(num_parts)]
        self._on_event = on_event
        self._equivalent_until = equivalent_until
        self._watch = None if doubt is None or num_parts == 1 else DoubtWatch(doubt, settings, self.record.tree)
        self._num_generated = 0

    # -- the parts as they run ---------------------------------------------------------------------------------

    def run(self, starts: Sequence[StartPart], should_stop: Callable[[], bool]) -> SearchResult:
        """Runs all parts to the end of the whole."""
        news: _Inbox = queue.SimpleQueue()
        running: list[PartHandle] = []
        self.limits.start_clock()
        self._on_event(self.record.started)
        try:
            for log, start in zip(self._parts, starts, strict=True):
                running.append(start(partial(_put, news, log), self.allowed_step))
            return self._finish(*self._follow(running, news, should_stop))
        finally:
            for part in running:
                part.stop()

    def _follow(
        self, running: Sequence[PartHandle], news: _Inbox, should_stop: Callable[[], bool]
    ) -> tuple[StopReason | None, str | None]:
        """Merges the news of all parts to their end; returns why they were called off, if they were."""
        reason: StopReason | None = None
        error: str | None = None
        allowed = self.allowed_step
        while not all(log.is_over for log in self._parts):
            for log, item in _arrived(news):
                if item.is_engines:
                    raise EngineDiedError(item.error)
                log.coming.extend(item.events)
                log.step, log.is_over = max(log.step, item.step), item.is_over
                error = error or item.error
            self._advance()
            reason = reason or self._reason_outside(error, should_stop)
            if reason is not None or self.due is not None:
                for part in running:
                    part.stop()
            elif self.allowed_step != allowed:
                allowed = self.allowed_step
                for part in running:
                    part.allow(allowed)
        return reason, error

    def _reason_outside(self, error: str | None, should_stop: Callable[[], bool]) -> StopReason | None:
        """Returns a reason to end the search that is not in its traces."""
        if error is not None:
            return StopReason.FAILED
        if should_stop():
            return StopReason.INTERRUPTED
        return StopReason.BUDGET_SECONDS if self.limits.is_time_up else None

    @property
    def allowed_step(self) -> int | None:
        """The step to which parts may go without passing the token budget, whatever their traces do; None: any."""
        budget = self._settings.budget_tokens
        if budget is None:
            return None
        sure = (budget - self._num_generated) // self._settings.capacity
        # The next step is within the budget even if more of its places were taken: otherwise the search were due.
        return max(self.step, 0) + max(sure, int(self.step >= 0))

    @property
    def note(self) -> str | None:
        """The reason for which one engine would have gone on with smaller islands; None if there is none."""
        return None if self._watch is None else self._watch.finding

    # -- one step ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Merges the steps that all parts have done, up to the one at which the search is due to stop."""
        going = [part.step for part in self._parts if not part.is_over]
        last = min(going) if going else max(part.step for part in self._parts)
        while self.due is None and self.step < last:
            self.step += 1
            self._merge(self.step)

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
            has_finished = any(isinstance(event, ev.Finished) for _, event in phases[ENDS])
            self.due = self.limits.reason_in_pool(self._num_generated, is_settled=has_finished and self._is_settled())

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
            self.limits.islands = dataclasses.replace(self.limits.islands, count=event.islands)
            self._emit(event)
        elif not isinstance(event, ev.RunStarted):
            self._emit(self._renamed(part, event))

    def _renamed(self, part: _PartLog, event: ev.Event) -> ev.Event:
        """Returns an event with the traces' numbers in the whole search."""
        if isinstance(event, ev.Created | ev.Branched):
            part.ids[event.trace] = len(self.record.tree.traces)
        if isinstance(event, ev.Scored | ev.Verified):
            return dataclasses.replace(event, traces=tuple(part.ids[trace] for trace in event.traces))
        assert not isinstance(event, OF_PART | ev.RunStarted | ev.Voted | ev.IslandsSplit)
        if isinstance(event, ev.Branched):
            event = dataclasses.replace(event, parent=part.ids[event.parent])
        return dataclasses.replace(event, trace=part.ids[event.trace])

    def _emit(self, event: ev.Event) -> None:
        self.record.apply(event)
        if self._watch is not None:
            self._watch.note(event)
        self._on_event(event)

    def _is_settled(self) -> bool:
        """Returns whether the vote cannot change any more."""
        consensus, is_probability = self._settings.consensus, self._settings.is_probability
        if consensus is None:
            return False
        equivalent = self._equivalent_until(time.monotonic() + CHECK_SECONDS)
        return is_over(consensus, self.record, self._requirements, equivalent, is_probability=is_probability)

    def _last(self, kind: type[Kept]) -> list[Kept]:
        """Returns the last event of a kind of each part that has one."""
        found = [part.kept.get(kind) for part in self._parts]
        return [event for event in found if isinstance(event, kind)]

    def _sample(self, **changes: float) -> ev.Sample:
        """Sums up the memory of all engines; the times are those of the slowest, since they work side by side."""
        tree, samples = self.record.tree, self._last(ev.Sample)
        return dataclasses.replace(
            max(samples, key=lambda sample: sample.seconds_total),
            step=max(self.step, 0),
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
        """Ends the log and takes the vote. `reason`: why the parts were called off, unless by their own traces."""
        at = max(self.step, 0)
        self._cancel_live()
        if self._last(ev.Sample):
            self._emit(self._sample(seconds_total=self.limits.seconds))
        for part in self._parts:
            part.kept |= {
                type(event): event for event in part.coming if isinstance(event, ev.Waited | ev.VerifierTotals)
            }
        if (waited := self._waited()) is not None:
            self._emit(waited)
        of_parts = [end.reason for end in self._last(ev.Stopped)] or [StopReason.FAILED]
        self._emit(ev.Stopped(at, self.due or reason or of_parts[0]))
        for scores in self._late_scores():
            self._emit(scores)
        if totals := self._last(ev.VerifierTotals):
            self._emit(_sum_of(totals, at))
        vote = self.record.vote(self._equivalent_until(self.limits.vote_deadline))
        self._emit(voted(vote))
        return dataclasses.replace(self.record.result(vote), error=error)

    def _cancel_live(self) -> None:
        """Ends what ran on until its part heard of the end, with the tokens it had by then."""
        tree = self.record.tree
        owners = {whole: (part, own) for part in self._parts for own, whole in part.ids.items()}
        for trace in sorted((t for state in LIVE for t in tree.in_state(state)), key=lambda trace: trace.id):
            part, own_id = owners[trace.id]
            tokens = part.own_tokens(own_id)[: _length_at(trace, self.step)]
            self._emit(ev.Cancelled(self.step, trace.id, tokens))

    def _waited(self) -> ev.Waited | None:
        rows = sorted(
            (part.ids[trace], steps, seconds)
            for part in self._parts
            if isinstance(w := part.kept.get(ev.Waited), ev.Waited)
            for trace, steps, seconds in zip(w.traces, w.steps, w.seconds, strict=True)
            if trace in part.ids
        )
        return ev.Waited(self.step, *zip(*rows, strict=True)) if rows else None

    def _late_scores(self) -> Iterator[ev.Verified]:
        """Yields the scores of completed traces that came after the end, for the vote."""
        traces = self.record.tree.traces
        for part in self._parts:
            for event in part.coming:
                if not isinstance(event, ev.Verified):
                    continue
                columns = (event.traces, event.scores, event.num_tokens, event.ended_steps, event.engine_scores)
                rows = [
                    (part.ids[trace], *rest)
                    for trace, *rest in zip(*columns, strict=True)
                    if trace in part.ids and traces[part.ids[trace]].state is TraceState.FINISHED
                ]
                if rows:
                    yield ev.Verified(max(self.step, 0), *zip(*rows, strict=True))


def _put(news: _Inbox, log: _PartLog, item: PartNews) -> None:
    news.put((log, item))


def _arrived(news: _Inbox) -> list[tuple[_PartLog, PartNews]]:
    """Returns all news; waits a while for the first."""
    found = []
    try:
        found.append(news.get(timeout=POLL_SECONDS))
        while True:
            found.append(news.get_nowait())
    except queue.Empty:
        return found


def _step_of(event: ev.Event) -> int:
    """Returns the step of an event; the header comes before everything."""
    return -1 if isinstance(event, ev.RunStarted | ev.Voted) else event.step


def _phase_of(event: ev.Event) -> int:
    is_pressure = isinstance(event, ev.Evicted | ev.Pruned) and event.reason == "pressure"
    if is_pressure or isinstance(event, ev.Queued | ev.Admitted):
        return LOSS
    if isinstance(event, ev.Scored):
        return SCORES
    return ENDS if isinstance(event, ev.Finished) else DECISIONS


def _length_at(trace: Trace, step: int) -> int:
    """Returns the number of a live trace's own tokens at the end of a step: one for every step in which it ran."""
    before = trace.queued_tokens[-1] if trace.queued_tokens else 0
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

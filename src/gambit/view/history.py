"""A replayed event log over time: when thoughts ended, who waited, when traces left the pool."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import add

from gambit import events as ev
from gambit.results.record import SearchRecord, extended, fold
from gambit.tree import TraceState


@dataclass(slots=True)
class TraceHistory:
    """One trace over time; thoughts are parallel lists, and those inherited are only counted."""

    num_inherited_thoughts: int = 0
    thought_steps: list[int] = field(default_factory=list)
    thought_scores: list[float] = field(default_factory=list)
    thought_tokens: list[int] = field(default_factory=list)  # length of the trace at the thought's boundary
    waits: list[tuple[int, int | None]] = field(default_factory=list)  # from step, to step or None: it still waits
    left_step: int | None = None  # when it gave its place in the pool back
    reason: str = ""  # why it was pruned, evicted or finished


@dataclass(slots=True)
class History:
    """A replayed run: its record, and what the tree of that does not keep."""

    record: SearchRecord
    traces: list[TraceHistory]
    samples: list[ev.Sample]
    last_step: int


@dataclass(slots=True)
class _Watch:
    """Notes what events say over time while they pass by."""

    traces: list[TraceHistory] = field(default_factory=list)
    samples: list[ev.Sample] = field(default_factory=list)
    last_step: int = 0

    def passing(self, events: Iterable[ev.Event]) -> Iterator[ev.Event]:
        for event in events:
            yield event  # first: it is the reader who finds out whether it can follow the ones before
            _remember(self.traces, event)
            if isinstance(event, ev.Sample):
                self.samples.append(event)
            if not isinstance(event, ev.RunStarted | ev.Voted):
                self.last_step = max(self.last_step, event.step)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool from one step on."""

    step: int
    running: int
    waiting: int
    ghosts: int
    completed: int


def follow(events: Iterable[ev.Event], log: object = "the log") -> History:
    """The history of a whole log, or of as much as a kill left of it."""
    watch = _Watch()
    return _history(fold(watch.passing(events), log), watch)


def _history(record: SearchRecord, watch: _Watch) -> History:
    for trace, past in zip(record.tree.traces, watch.traces, strict=True):
        past.num_inherited_thoughts = trace.score.count - len(past.thought_scores)
    return History(record, watch.traces, watch.samples, watch.last_step)


class GrowingHistory:
    """The history of a search that still runs, event by event."""

    def __init__(self) -> None:
        self._watch = _Watch()
        self._record: SearchRecord | None = None

    def add(self, events: Iterable[ev.Event]) -> None:
        for event in self._watch.passing(events):
            self._record = extended(self._record, event)

    def history(self) -> History | None:
        """So far; None before the first event."""
        return None if self._record is None else _history(self._record, self._watch)


def _remember(traces: list[TraceHistory], event: ev.Event) -> None:
    if isinstance(event, ev.Created | ev.Branched):
        traces.append(TraceHistory(waits=[(event.step, None)]))
    elif isinstance(event, ev.Queued):
        traces[event.trace].waits.append((event.step, None))
    elif isinstance(event, ev.Admitted):
        _end_wait(traces[event.trace], event.step, was_long=event.waited_steps > 0)
    elif isinstance(event, ev.Scored | ev.Verified):
        for trace_id, score, num_tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
            history = traces[trace_id]
            history.thought_steps.append(event.step)
            history.thought_scores.append(score)
            history.thought_tokens.append(num_tokens)
    elif isinstance(event, ev.Pruned | ev.Evicted | ev.Finished):
        traces[event.trace].reason = str(event.reason)
        _leave(traces[event.trace], event)
    elif isinstance(event, ev.Cancelled):
        _leave(traces[event.trace], event)


def _leave(history: TraceHistory, event: ev.Pruned | ev.Evicted | ev.Finished | ev.Cancelled) -> None:
    _end_wait(history, event.step)
    if not isinstance(event, ev.Evicted):  # a ghost keeps its place
        history.left_step = event.step


def _end_wait(history: TraceHistory, step: int, *, was_long: bool = True) -> None:
    """A trace that is admitted with the next engine step did not wait."""
    if history.waits and history.waits[-1][1] is None:
        begin, _ = history.waits.pop()
        if was_long and step > begin:
            history.waits.append((begin, step))


def pool_sizes(history: History) -> list[PoolSize]:
    """The pool wherever it changed; made from whole lives, because only these tell who really waited."""
    changes: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])  # step -> running, waiting, ghosts, completed

    def count(column: int, begin: int, end: int | None) -> None:
        changes[begin][column] += 1
        changes[history.last_step + 1 if end is None else end][column] -= 1

    for trace, past in zip(history.record.tree.traces, history.traces, strict=True):
        count(0, trace.created_step, trace.ended_step)
        for begin, end in past.waits:
            count(0, end if end is not None else history.last_step + 1, begin)  # not running meanwhile
            count(1, begin, end)
        if trace.was_evicted and trace.ended_step is not None:
            count(2, trace.ended_step, past.left_step)
        if trace.state is TraceState.FINISHED and trace.ended_step is not None:
            count(3, trace.ended_step, None)
    steps = [0, *(step for step in sorted(changes) if 0 < step <= history.last_step and any(changes[step]))]
    pools = itertools.accumulate((changes[step] for step in steps), lambda pool, change: [*map(add, pool, change)])
    return [PoolSize(step, *pool) for step, pool in zip(steps, pools, strict=True)]

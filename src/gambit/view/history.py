"""A replayed event log over time: when thoughts ended, who waited, when traces left the pool."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.results.record import SearchRecord, extended, fold


@dataclass(slots=True)
class TraceHistory:
    """One trace over time; parallel lists hold its own thoughts."""

    thought_steps: list[int] = field(default_factory=list)
    thought_scores: list[float] = field(default_factory=list)
    thought_tokens: list[int] = field(default_factory=list)  # length of the trace at the thought's boundary
    waits: list[tuple[int, int | None]] = field(default_factory=list)  # from step, to step or None: it still waits
    left_step: int | None = None  # when it gave its place in the pool back
    reason: str = ""  # why it was pruned, evicted or finished


class History:
    """A run over time, event by event: its record, and what the tree of that does not keep."""

    def __init__(self) -> None:
        self.traces: list[TraceHistory] = []
        self.samples: list[ev.Sample] = []
        self.last_step = 0
        self._record: SearchRecord | None = None

    @property
    def has_begun(self) -> bool:
        return self._record is not None

    @property
    def record(self) -> SearchRecord:
        assert self._record is not None, "the history has no event yet"
        return self._record

    def add(self, event: ev.Event) -> None:
        """Takes the next event of a search that still runs."""
        self._record = extended(self._record, event)
        self._note(event)

    def read(self, events: Iterable[ev.Event], log: object) -> None:
        """Takes a whole log, or as much as a kill left of it."""
        self._record = fold(events, log, lambda _, event: self._note(event))

    def _note(self, event: ev.Event) -> None:
        _remember(self.traces, event)
        if isinstance(event, ev.Sample):
            self.samples.append(event)
        if not isinstance(event, ev.RunStarted | ev.Voted):
            self.last_step = max(self.last_step, event.step)


def follow(events: Iterable[ev.Event], log: object = "the log") -> History:
    """Returns the history of a whole log."""
    history = History()
    history.read(events, log)
    return history


def _remember(traces: list[TraceHistory], event: ev.Event) -> None:
    if isinstance(event, ev.Created | ev.Branched | ev.Forced):
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
    """Ends the last wait; a trace that is admitted with the next engine step did not wait."""
    if history.waits and history.waits[-1][1] is None:
        begin, _ = history.waits.pop()
        if was_long and step > begin:
            history.waits.append((begin, step))

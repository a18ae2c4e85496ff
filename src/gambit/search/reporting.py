"""How a part of a search, on the thread of its engine, talks with whoever puts the parts together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gambit import events as ev
from gambit.search.merging import PartNews

Tell = Callable[[PartNews], None]


@dataclass(frozen=True, slots=True)
class ReportTimes:
    """When a part tells what it did, besides at its end and whenever it has to wait."""

    every_steps: int
    at_completions: bool  # the end of a trace may settle the vote, or use up the budget of traces


class StepGate:
    """Lets a part go on up to a step; its engine's thread waits there for more. From any thread."""

    def __init__(self, allowed_step: int | None) -> None:
        self._allowed = allowed_step
        self._changed = threading.Condition()

    def allow(self, step: int | None) -> None:
        """None: to its end."""
        with self._changed:
            self._allowed = step
            self._changed.notify_all()

    def is_shut(self, step: int) -> bool:
        allowed = self._allowed
        return allowed is not None and step >= allowed

    def wait(self, step: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_shut(step))


class PartReporter:
    """Collects the events of a part and tells them now and then."""

    def __init__(self, tell: Tell, times: ReportTimes, gate: StepGate) -> None:
        self._tell = tell
        self._times = times
        self._gate = gate
        self._events: list[ev.Event] = []
        self._step = -1
        self._has_completed = False

    def on_event(self, event: ev.Event) -> None:
        self._events.append(event)
        self._has_completed |= isinstance(event, ev.Finished)
        if isinstance(event, ev.Stopped):
            self._step = event.step

    def after_step(self, step: int) -> None:
        """Waits where the part may not go on yet."""
        self._step = step
        is_due = step % self._times.every_steps == 0 or (self._has_completed and self._times.at_completions)
        if is_due or self._gate.is_shut(step):
            self._send()
        self._gate.wait(step)

    def end(self, error: str | None = None) -> None:
        """Nothing more comes."""
        self._send(is_over=True, error=error)

    def _send(self, *, is_over: bool = False, error: str | None = None) -> None:
        events, self._events, self._has_completed = tuple(self._events), [], False
        self._tell(PartNews(self._step, events, is_over, error))

"""How long each trace waited for KV blocks, in steps and in seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gambit import events as ev


@dataclass(slots=True)
class WaitLedger:
    """Follows traces that wait; `total` is known for each once it was admitted, for the rest at the end."""

    since: dict[int, tuple[int, float]] = field(default_factory=dict)  # trace -> step and time
    total: dict[int, tuple[int, float]] = field(default_factory=dict)

    def begin(self, trace: int, step: int) -> None:
        self.since[trace] = (step, time.monotonic())

    def admit(self, trace: int, waited_steps: int) -> None:
        _, began = self.since.pop(trace)
        self._add(trace, waited_steps, began)

    def give_up(self, trace: int, step: int) -> None:
        """A trace that ended before it got its blocks; nothing for one that was not waiting."""
        if trace in self.since:
            since, began = self.since.pop(trace)
            self._add(trace, step - since, began)

    def _add(self, trace: int, steps: int, began: float) -> None:
        if steps <= 0:  # got its blocks in the next step, as every trace at the start
            return
        steps_before, seconds_before = self.total.get(trace, (0, 0.0))
        self.total[trace] = (steps_before + steps, seconds_before + time.monotonic() - began)

    def event(self, step: int) -> ev.Waited | None:
        """What the log says at the end; nothing where nobody waited."""
        if not self.total:
            return None
        traces = tuple(sorted(self.total))
        steps, seconds = zip(*(self.total[trace] for trace in traces), strict=True)
        return ev.Waited(step, traces, steps, seconds)

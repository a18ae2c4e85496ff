"""Whose turn it is: searches wait in one line per key, and the key that runs least goes first."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gambit.serve.errors import ApiError
from gambit.serve.settings import ApiKey

MOST_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class QueueTicket:
    """One search in the line, then among those that run."""

    key: ApiKey
    num_traces: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionQueue:
    """Admits searches while fewer than `max_running` run, with `max_traces` traces in all; the rest wait.

    A search that alone is larger than `max_traces` runs alone. Nobody overtakes whoever's turn it is, so that a large
    search is not passed by small ones for ever.
    """

    def __init__(self, max_running: int, max_traces: int, max_waiting: int) -> None:
        self.running: set[QueueTicket] = set()
        self._lines: dict[str, deque[QueueTicket]] = {}  # by key
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # by key
        self._max_running = max_running
        self._max_traces = max_traces
        self._max_waiting = max_waiting
        self._seconds: deque[float] = deque([1.0], maxlen=32)  # that recent searches took

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def num_traces(self) -> int:
        return sum(ticket.num_traces for ticket in self.running)

    def join(self, key: ApiKey, num_traces: int) -> QueueTicket:
        """Queue up; refused with 429 where the line is full. Await `turn`, then `leave`."""
        ticket = QueueTicket(key, num_traces)
        line = self._lines.setdefault(key.name, deque())
        line.append(ticket)
        self._admit()
        if not ticket.turn.done() and self._is_full(key, line):
            self.leave(ticket)
            raise self._too_many()
        return ticket

    def leave(self, ticket: QueueTicket, seconds: float | None = None) -> None:
        """It has ended, or wants its turn no more; a second call does nothing."""
        line = self._lines.get(ticket.key.name, ())
        if ticket in line:
            line.remove(ticket)  # type: ignore[union-attr] # an empty tuple holds no ticket
        self.running.discard(ticket)
        if seconds is not None:
            self._seconds.append(seconds)
        self._admit()

    def _is_full(self, key: ApiKey, line: deque[QueueTicket]) -> bool:
        own = key.limits.max_waiting
        return self.num_waiting > self._max_waiting or (own is not None and len(line) > own)

    def _too_many(self) -> ApiError:
        mean = sum(self._seconds) / len(self._seconds)
        wait = math.ceil(mean * (self.num_waiting + 1) / max(len(self.running), 1))
        seconds = min(max(wait, 1), MOST_RETRY_SECONDS)
        return ApiError(
            429,
            f"{len(self.running)} searches run and {self.num_waiting} wait: try again in {seconds} s",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )

    def _admit(self) -> None:
        while (line := self._next_line()) is not None and self._fits(line[0]):
            ticket = line.popleft()
            self._num_turns += 1
            self._last_turns[ticket.key.name] = self._num_turns
            if not ticket.turn.done():  # else nobody waits for it any more
                self.running.add(ticket)
                ticket.turn.set_result(None)
        self._lines = {name: line for name, line in self._lines.items() if line}

    def _next_line(self) -> deque[QueueTicket] | None:
        """Of the key with the fewest running traces, the one that waited longest for a turn on a tie."""
        traces = Counter[str]()
        for ticket in self.running:
            traces[ticket.key.name] += ticket.num_traces

        def urgency(line: deque[QueueTicket]) -> tuple[int, int]:
            name = line[0].key.name
            return traces[name], self._last_turns.get(name, 0)

        return min(self._open_lines(), key=urgency, default=None)

    def _open_lines(self) -> Iterable[deque[QueueTicket]]:
        """Lines of keys that may run one more."""
        searches = Counter(ticket.key.name for ticket in self.running)
        for name, line in self._lines.items():
            own = line[0].key.limits.max_running if line else None
            if line and (own is None or searches[name] < own):
                yield line

    def _fits(self, ticket: QueueTicket) -> bool:
        if len(self.running) >= self._max_running:
            return False
        return not self.running or self.num_traces + ticket.num_traces <= self._max_traces

"""A search while it runs: its log in memory, notes of its progress, and bells for readers that wait."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from gambit import events as ev
from gambit.events import Chain
from gambit.results.record import SearchRecord
from gambit.text.boundary import THINK_END, THINK_START

SECONDS_BETWEEN_NOTES = 1.0
MOST_THOUGHT_TOKENS = 400  # read back to find where a thought began
MOST_THOUGHT_LENGTH = 600  # characters of a note
MOST_ANSWERS = 4


TextOf = Callable[[int, int, int], str]  # of a live trace, from a token to another


class Bell:
    """Wakes coroutines that listen on the event loop; any thread may ring."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def listen(self) -> asyncio.Future[None]:
        """Returns a future of the next ring. Listening before looking at the state misses nothing."""
        heard: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(heard)
        return heard

    def ring(self) -> None:
        """Wakes all listeners; called on the loop's own thread."""
        waiting, self._waiting = self._waiting, []
        for heard in waiting:
            if not heard.done():
                heard.set_result(None)

    def ring_from_thread(self) -> None:
        if self._waiting:
            with suppress(RuntimeError):  # the loop has ended, and with it all listeners
                self._loop.call_soon_threadsafe(self.ring)


async def heard_within(heard: asyncio.Future[None], seconds: float) -> bool:
    done, _ = await asyncio.wait({heard}, timeout=seconds)
    heard.cancel()
    return bool(done)


class MemoryLog:
    """An event log in memory, line by line as on disk; compressed once the search has ended."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._lines: list[str] = []
        self._packed: bytes | None = None
        self._num_characters = 0

    def write(self, event: ev.Event) -> None:
        line = self._chain.link(ev.to_json(event))
        self._num_characters += len(line)
        self._lines.append(line)

    def lines(self, start: int = 0) -> Sequence[str]:
        """Returns the lines from one on, as many as there are by now; sealing may go on beside it."""
        lines, packed = self._lines, self._packed  # in this order: sealing sets the second before the first
        if packed is None:
            return lines[start:]
        return zlib.decompress(packed).decode().split("\n")[start:]

    def seal(self) -> None:
        """Compresses the log of a search that is over."""
        if self._packed is None and self._lines:
            self._packed = zlib.compress("\n".join(self._lines).encode(), 1)
            self._lines = []

    @property
    def num_bytes(self) -> int:
        return self._num_characters if self._packed is None else len(self._packed)


class Commentary:
    """Writes notes about a running search: the newest thought of a leading trace, and the answers so far.

    The engine's thread makes all calls; readers on other threads may read `notes` meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.notes: list[str] = []
        self._clock = clock
        self._last = -SECONDS_BETWEEN_NOTES
        self._answers: Counter[str] = Counter()
        self._num_completed = 0

    def follow(self, event: ev.Event, record: SearchRecord, text_of: TextOf) -> bool:
        """Takes an event; returns whether it led to a note."""
        if isinstance(event, ev.Finished):
            self._num_completed += 1
            if event.answer is not None:
                self._answers[event.answer] += 1
        if not isinstance(event, ev.Scored | ev.Finished) or self._clock() - self._last < SECONDS_BETWEEN_NOTES:
            return False
        note = self._thought(event, record, text_of) if isinstance(event, ev.Scored) else self._votes()
        if note is None:
            return False
        self._last = self._clock()
        self.notes.append(note)
        return True

    def _thought(self, event: ev.Scored, record: SearchRecord, text_of: TextOf) -> str | None:
        """Returns the new thought of the trace with the best score, among those that ended a thought in this step."""
        tree = record.tree
        leader = max(event.traces, key=lambda trace: tree.score_of(tree.traces[trace]) or 0.0)
        length = event.num_tokens[event.traces.index(leader)]
        try:
            text = text_of(leader, max(length - MOST_THOUGHT_TOKENS, 0), length)
        except LookupError:  # it ended with this very step
            return None
        thought = _last_thought(text)
        score = tree.score_of(tree.traces[leader])
        return f"[trace {leader}, score {score:.2f}{self._standing()}] {thought}\n" if thought else None

    def _votes(self) -> str | None:
        return f"[{self._standing().removeprefix('; ')}]\n" if self._num_completed else None

    def _standing(self) -> str:
        if not self._num_completed:
            return ""
        answers = ", ".join(f"{answer} ×{count}" for answer, count in self._answers.most_common(MOST_ANSWERS))
        return f"; {self._num_completed} complete{': ' + answers if answers else ''}"


def _last_thought(text: str) -> str:
    thought = text.strip().rpartition("\n\n")[2]
    for tag in (THINK_START, THINK_END):
        thought = thought.replace(tag, "").strip()
    return thought[-MOST_THOUGHT_LENGTH:]

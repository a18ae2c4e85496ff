"""Work of a pool of engines, and the place of each engine: what runs there, and what it has done and suffered."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from gambit.cluster.actor import NEWS_SECONDS, EngineReport, Job

Handle: TypeAlias = Any  # Ray's, which mypy cannot follow: of an actor
Ref: TypeAlias = Any  # of a value to come
MOST_FAILED_STARTS = 3  # of an engine, one after the other
Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class TokensSoFar:
    """News of a job that generates."""

    generated: int


@dataclass(frozen=True, slots=True)
class Work(Generic[Tag]):
    """A job, and what the driver knows it by."""

    job: Job[Any, object] = field(repr=False)
    tag: Tag
    batch: object = None  # jobs that share an engine at the same time have the same
    news_seconds: float = NEWS_SECONDS  # between two messages of what it tells


@dataclass(frozen=True, slots=True)
class WorkEnd(Generic[Tag]):
    """Work that is over: its value, or why there is none."""

    tag: Tag
    engine: int
    value: object = None
    error: str | None = None


class EngineState(StrEnum):
    WAITING = "waiting"  # for its turn to start
    STARTING = "starting"  # or for room on a machine
    READY = "ready"
    LOST = "lost"  # could not be started again


@dataclass(slots=True, eq=False)
class Attempt(Generic[Tag]):
    """Work on its way to its end, through as many engines as it takes."""

    work: Work[Tag]
    number: int = -1  # of the job that runs it now
    num_deaths: int = 0  # of engines
    generated: int = 0

    @property
    def must_be_alone(self) -> bool:
        """What ran when an engine died is tried by itself, to know which of several it was."""
        return self.num_deaths > 0


@dataclass(slots=True, eq=False)
class EngineSlot(Generic[Tag]):
    """The place of one engine: the process that fills it now, and what the place has seen."""

    number: int
    state: EngineState = EngineState.WAITING
    node: str = ""
    pid: int = 0
    num_deaths: int = 0
    num_done: int = 0
    actor: Handle = None
    starting: Ref = None
    running: dict[Any, Attempt[Tag]] = field(default_factory=dict)  # by the stream of its messages
    _failed_starts: int = 0  # in a row
    _tokens: int = 0  # of what is done
    _busy_seconds: float = 0.0
    _busy_since: float = 0.0

    @property
    def place(self) -> str:
        return f" on {self.node}" if self.node else ""

    @property
    def tokens_per_second(self) -> float:
        """While it had work."""
        seconds = self._busy_seconds + (time.monotonic() - self._busy_since if self.running else 0.0)
        tokens = self._tokens + sum(attempt.generated for attempt in self.running.values())
        return tokens / seconds if seconds else 0.0

    def can_take(self, attempt: Attempt[Tag], most: int) -> bool:
        if self.state is not EngineState.READY or len(self.running) >= most:
            return False
        if not self.running:
            return True
        beside = next(iter(self.running.values()))
        is_lonely = attempt.must_be_alone or beside.must_be_alone
        return not is_lonely and beside.work.batch == attempt.work.batch

    def start(self, actor: Handle) -> None:
        self.actor, self.starting, self.state = actor, actor.ping.remote(), EngineState.STARTING

    def started(self, report: EngineReport) -> None:
        self.state, self.starting, self._failed_starts = EngineState.READY, None, 0
        self.node, self.pid = report.node, report.pid

    def begin(self, attempt: Attempt[Tag], number: int) -> None:
        if not self.running:
            self._busy_since = time.monotonic()
        attempt.number = number
        work = attempt.work
        stream = self.actor.run.options(num_returns="streaming").remote(number, work.job, work.news_seconds)
        self.running[stream] = attempt

    def end(self, stream: object) -> None:
        self.num_done += 1
        self._tokens += self.running.pop(stream).generated
        if not self.running:
            self._busy_seconds += time.monotonic() - self._busy_since

    def died(self) -> None:
        if self.running:
            self._busy_seconds += time.monotonic() - self._busy_since
        if self.state is EngineState.STARTING:
            self._failed_starts += 1
        is_hopeless = self._failed_starts >= MOST_FAILED_STARTS
        self.state = EngineState.LOST if is_hopeless else EngineState.WAITING
        self.num_deaths += 1
        self.actor, self.starting = None, None
        self.running.clear()

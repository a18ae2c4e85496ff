"""The process of one engine: makes it from a description, runs jobs on it and streams their messages to the driver."""

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from gambit.errors import GambitWarning, UserError

NEWS_SECONDS = 5.0  # between two messages of a running job: each is work for the driver
MOST_JOBS = 1024  # side by side; threads are made as they are needed


class Closable(Protocol):
    """An engine, with everything that belongs to it."""

    def close(self) -> None: ...


Engine = TypeVar("Engine", bound=Closable)
Value = TypeVar("Value")
Make: TypeAlias = Callable[[], Engine]  # picklable; called in the engine's process
Job: TypeAlias = Callable[[Engine, "JobDesk"], Value]  # picklable, as are its value and the items that it sends


@dataclass(slots=True, eq=False)
class JobDesk:
    """Carries items from a running job to the driver, and the driver's stop and words to the job."""

    on_stop: Callable[[], None] = lambda: None
    on_word: Callable[[Any], None] = lambda word: None
    has_urgent: threading.Event = field(default_factory=threading.Event)
    _items: deque[object] = field(default_factory=deque)
    _is_stopped: threading.Event = field(default_factory=threading.Event)

    def send(self, item: object, *, at_once: bool = False) -> None:
        """Sends an item with the next message, or at once; any thread may call it."""
        self._items.append(item)
        if at_once:
            self.has_urgent.set()

    def should_stop(self) -> bool:
        """Returns whether the driver has stopped the job."""
        return self._is_stopped.is_set()

    def listen(self, on_stop: Callable[[], None], on_word: Callable[[Any], None] = lambda word: None) -> None:
        """Sets the callbacks for a stop and for the driver's words; they are called on another thread."""
        self.on_stop, self.on_word = on_stop, on_word
        if self.should_stop():
            on_stop()

    def stop(self) -> None:
        """Stops the job soon; called by the actor."""
        self._is_stopped.set()
        self.on_stop()

    def take(self, seconds: float) -> list[object]:
        """Returns the items since the last call, at the latest after so many seconds; called by the actor."""
        self.has_urgent.wait(seconds)
        self.has_urgent.clear()
        return [self._items.popleft() for _ in range(len(self._items))]


@dataclass(frozen=True, slots=True)
class Done(Generic[Value]):
    """The value of a finished job."""

    value: Value


@dataclass(frozen=True, slots=True)
class Failed:
    """The exception of a job in words, since the driver may lack its library; or the death of the engine."""

    reason: str
    is_users: bool = False  # a UserError: no engine would do better


JobEnd: TypeAlias = Done[Any] | Failed


@dataclass(frozen=True, slots=True)
class EngineReport:
    """An engine that is ready for work."""

    pid: int
    node: str
    warnings: tuple[str, ...]  # of its start


class EngineActor(Generic[Engine]):
    """A Ray actor once `ray.remote` wraps it; plain Python otherwise.

    Jobs run side by side, each call of `run` in a thread of Ray's, so that `stop` and `ping` get through meanwhile.
    """

    def __init__(self, make: Make[Engine], node: str = "") -> None:
        self._node = node
        self._desks: dict[int, JobDesk] = {}
        self._jobs = ThreadPoolExecutor(MOST_JOBS, thread_name_prefix="gambit-job")
        self._engine: Engine | None = None
        self._failure: Failed | None = None
        self._is_closed = threading.Event()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", GambitWarning)
            try:
                self._engine = make()
            except Exception as error:  # returned by `ping`: Ray would wrap it in its own words
                self._failure = _failed(error)
        self._warnings = tuple(str(each.message) for each in caught)

    def ping(self) -> EngineReport | Failed:
        """Returns a report once the engine is loaded, or why it could not be."""
        if self._failure is not None:
            return self._failure
        if not self._node:
            import ray

            self._node = str(ray.util.get_node_ip_address())
        return EngineReport(os.getpid(), self._node, self._warnings)

    def live(self) -> None:
        """Returns once the engine is closed. The driver waits for it, and learns at once if the process dies."""
        self._is_closed.wait()

    def call(self, function: Callable[[Engine], Value]) -> Value:
        """Calls a quick function with the engine; returns and raises what it does."""
        return function(self._loaded)

    def run(
        self, number: int, job: Job[Engine, object], news_seconds: float = NEWS_SECONDS
    ) -> Iterator[list[object] | JobEnd]:
        """Runs a job, which `stop` and `post` know by the driver's number; yields its items, and then its end."""
        desk = self._desk_of(number)
        work = self._jobs.submit(job, self._loaded, desk)
        work.add_done_callback(lambda _: desk.has_urgent.set())
        try:
            is_over = False
            while not is_over:
                is_over = work.done()
                if items := desk.take(0 if is_over else news_seconds):
                    yield items
            yield _end_of(work)
        finally:
            desk.stop()
            del self._desks[number]

    def post(self, number: int, word: object) -> None:
        """Passes a word to a running job."""
        if (desk := self._desks.get(number)) is not None:
            desk.on_word(word)

    def stop(self, number: int | None = None) -> None:
        """Stops one job soon, or all; also one that has not begun, since this call may overtake that of `run`."""
        for desk in list(self._desks.values()) if number is None else [self._desk_of(number)]:
            desk.stop()

    def close(self) -> None:
        """Ends all jobs and closes the engine."""
        self._is_closed.set()
        self.stop()
        self._jobs.shutdown()
        if self._engine is not None:
            self._engine.close()

    def _desk_of(self, number: int) -> JobDesk:
        return self._desks.setdefault(number, JobDesk())

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None, "it failed to start, as `ping` reports"
        return self._engine


def _end_of(work: Future[object]) -> JobEnd:
    error = work.exception()
    return Done(work.result()) if error is None else _failed(error)


def _failed(error: BaseException) -> Failed:
    words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Failed(words, isinstance(error, UserError))

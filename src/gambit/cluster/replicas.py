"""Engines that are always there: each in a process of its own under Ray, started again whenever it dies.

Unlike a pool's, their work is begun from any thread and at any time, and several jobs talk with the driver meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

from gambit.cluster.actor import (
    NEWS_SECONDS,
    Done,
    Engine,
    EngineActor,
    EngineReport,
    Job,
    JobDesk,
    Make,
    News,
    Raised,
)
from gambit.cluster.plan import EngineNeeds
from gambit.cluster.pool import CLOSE_SECONDS
from gambit.cluster.slots import MOST_FAILED_STARTS, EngineState, Handle
from gambit.errors import EngineError, GambitWarning, UserError, first_line

T = TypeVar("T")
CONTROL_CALLS = 4  # that an engine answers beside its jobs, one of them to see that it lives
WAIT_SECONDS = 1.0  # at a time, so that signals are heard on every platform


@dataclass(frozen=True, slots=True)
class Died:
    """The engine of a job is gone, or of no use any more."""

    reason: str


def vigil(engine: object, desk: JobDesk) -> None:
    """A job that ends with its engine: whoever listens learns of its death at once."""
    is_over = threading.Event()
    desk.listen(is_over.set)
    is_over.wait()


@dataclass(slots=True, eq=False)
class RemoteJob:
    """A job on a replica; `stop` and `say` may come from any thread, also after its end."""

    actor: Handle
    number: int
    _is_stopped: bool = False

    def stop(self) -> None:
        """End it soon; a second call does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            self.actor.stop.remote(self.number)

    def say(self, word: object) -> None:
        self.actor.say.remote(self.number, word)


@dataclass(slots=True, eq=False)
class Replica(Generic[Engine]):
    """The place of one engine."""

    number: int
    state: EngineState = EngineState.STARTING
    node: str = ""
    pid: int = 0
    num_deaths: int = 0
    actor: Handle = None
    jobs: dict[int, RemoteJob] = field(default_factory=dict)
    is_suspect: bool = False  # one of its jobs says that it is dead, and its keeper has not noticed yet
    failed_starts: int = 0  # in a row
    last_words: str = ""

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY and not self.is_suspect


class ReplicaSet(Generic[Engine]):
    """A fixed number of replicas, made from one description. Calls come from any thread."""

    def __init__(self, make: Make[Engine], count: int, needs: EngineNeeds, *, jobs_per_replica: int = 1) -> None:
        import ray

        self._ray = ray
        self._make = make
        self._options = {
            "num_cpus": needs.cpus, "num_gpus": needs.gpus, "max_concurrency": jobs_per_replica + CONTROL_CALLS,
        }  # fmt: skip
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._starting = threading.Lock() if needs.shares_a_gpu else None  # each takes its part of what is free
        self._is_closed = False
        self._user_error: str | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_lost: Callable[[EngineError], None] = lambda error: None
        self.replicas = tuple(Replica[Engine](number) for number in range(count))
        self._keepers = [threading.Thread(target=self._keep, args=(each,), daemon=True) for each in self.replicas]
        for keeper in self._keepers:
            keeper.start()

    # -- what a driver asks for --------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until all are ready; raises where one cannot be."""
        with self._changed:
            while not all(replica.is_ready for replica in self.replicas):
                self._check()
                self._changed.wait(WAIT_SECONDS)

    def wait_for_one(self) -> None:
        """Until searches can begin."""
        with self._changed:
            while not any(replica.is_ready for replica in self.replicas):
                if all(replica.state is EngineState.LOST for replica in self.replicas):
                    self._check()
                self._changed.wait(WAIT_SECONDS)

    def ask(self, replica: Replica[Engine], question: Callable[[Engine], T]) -> T:
        """Something that is known at once; raises what `question` raises."""
        try:
            answer: T = self._ray.get(replica.actor.ask.remote(question))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else EngineError(first_line(error))) from error
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"engine {replica.number} died: {first_line(error)}") from error
        return answer

    def run(
        self,
        replica: Replica[Engine],
        job: Job[Engine, Any],
        on_item: Callable[[Any], None],
        on_end: Callable[[Done[Any] | Raised | Died], None],
        news_seconds: float = NEWS_SECONDS,
    ) -> RemoteJob:
        """Begin a job; both callbacks are called on a thread of its own, `on_end` once."""
        number, actor = next(self._numbers), replica.actor
        remote = RemoteJob(actor, number)
        replica.jobs[number] = remote
        stream = actor.run.options(num_returns="streaming").remote(number, job, news_seconds)
        threading.Thread(target=self._follow, args=(replica, remote, stream, on_item, on_end), daemon=True).start()
        return remote

    def discard(self, replica: Replica[Engine], actor: Handle) -> None:
        """End the process of an engine that is of no use any more; a new one takes its place."""
        if replica.actor is actor:
            self._ray.kill(actor)

    def listen(self, on_change: Callable[[], None], on_lost: Callable[[EngineError], None]) -> None:
        """What to do when a replica is ready, and when none can be started any more; on a thread of this set's."""
        self._on_change, self._on_lost = on_change, on_lost

    def close(self) -> None:
        """Engines give back their memory; those that do not answer in time are killed."""
        with self._changed:
            self._is_closed = True
        ends = [replica.actor.close.remote() for replica in self.replicas if replica.is_ready]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for replica in self.replicas:
            if replica.actor is not None:
                self._ray.kill(replica.actor)
        for keeper in self._keepers:
            keeper.join(CLOSE_SECONDS)

    def __enter__(self) -> ReplicaSet[Engine]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- jobs --------------------------------------------------------------------------------------------------

    def _follow(
        self,
        replica: Replica[Engine],
        remote: RemoteJob,
        stream: Any,
        on_item: Callable[[Any], None],
        on_end: Callable[[Done[Any] | Raised | Died], None],
    ) -> None:
        end: Done[Any] | Raised | Died = Died("it ended without a word")
        try:
            for reference in stream:
                message = self._ray.get(reference)
                if not isinstance(message, News):
                    end = message
                    break
                for item in message.items:
                    on_item(item)
        except self._ray.exceptions.RayError as error:
            end = Died(first_line(error))
        except Exception as error:  # of a callback: no engine would do better
            remote.stop()
            end = Raised(f"{type(error).__name__}: {error}", is_users=True)
        if isinstance(end, Died) and replica.actor is remote.actor:
            replica.is_suspect = True  # before it looks idle, and draws the next jobs
        replica.jobs.pop(remote.number, None)
        on_end(end)

    # -- engines -----------------------------------------------------------------------------------------------

    def _keep(self, replica: Replica[Engine]) -> None:
        """Start an engine, and again whenever it has died."""
        while not self._is_closed and replica.state is not EngineState.LOST:
            try:
                self._live(replica)
            except self._ray.exceptions.RayError as error:
                self._note_death(replica, first_line(error))
            except EngineError as error:
                self._note_death(replica, str(error))
        if all(each.state is EngineState.LOST for each in self.replicas):
            self._on_lost(self._lost_error())

    def _live(self, replica: Replica[Engine]) -> None:
        if self._starting is None:
            report = self._start(replica)
        else:
            with self._starting:
                report = self._start(replica)
        for sentence in report.warnings if replica.number == 0 else ():
            warnings.warn(sentence, GambitWarning, stacklevel=2)
        watch = replica.actor.run.options(num_returns="streaming").remote(next(self._numbers), vigil)
        with self._changed:
            replica.state, replica.failed_starts, replica.is_suspect = EngineState.READY, 0, False
            replica.node, replica.pid = report.node, report.pid
            self._changed.notify_all()
        self._on_change()
        for reference in watch:
            self._ray.get(reference)
        raise EngineError("it was closed")

    def _start(self, replica: Replica[Engine]) -> EngineReport:
        replica.actor = self._ray.remote(EngineActor).options(**self._options).remote(self._make)
        report = self._ray.get(replica.actor.ping.remote())
        if isinstance(report, Raised):
            self._user_error = report.reason if report.is_users else None
            raise EngineError(report.reason)
        assert isinstance(report, EngineReport)
        return report

    def _note_death(self, replica: Replica[Engine], reason: str) -> None:
        if self._is_closed:
            return
        with self._changed:
            if replica.state is EngineState.STARTING:
                replica.failed_starts += 1
            replica.last_words = reason
            is_hopeless = self._user_error is not None or replica.failed_starts >= MOST_FAILED_STARTS
            replica.state = EngineState.LOST if is_hopeless else EngineState.STARTING
            replica.num_deaths += 1
            self._changed.notify_all()
        if self._user_error is None:
            warnings.warn(f"engine {replica.number} died: {reason}", GambitWarning, stacklevel=2)

    def _check(self) -> None:
        if self._user_error is not None:
            raise UserError(self._user_error)
        if any(replica.state is EngineState.LOST for replica in self.replicas):
            raise self._lost_error()

    def _lost_error(self) -> EngineError:
        reason = next((each.last_words for each in self.replicas if each.state is EngineState.LOST), "")
        return EngineError(f"an engine could not be started {MOST_FAILED_STARTS} times in a row; it said: {reason}")

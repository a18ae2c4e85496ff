"""Engines under Ray, each in a process of its own and started again when it dies."""

import itertools
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

from gambit import events as ev
from gambit.cluster.actor import NEWS_SECONDS, Done, Engine, EngineActor, EngineReport, Failed, Job, JobEnd, Make
from gambit.cluster.plan import EngineNeeds
from gambit.errors import EngineError, GambitWarning, UserError, WarnOnce, first_line

Handle: TypeAlias = Any  # Ray's of an actor, which mypy cannot follow
T = TypeVar("T")
MOST_FAILED_STARTS = 3  # of an engine, one after the other
CONTROL_CALLS = 4  # that an engine answers beside its jobs, one of them for as long as it lives
POLL_SECONDS = 0.2  # between two looks at whether to stop
CLOSE_SECONDS = 20.0
PATIENCE_SECONDS = 60.0  # until a warning that no engine has found room yet


class EngineState(StrEnum):
    STARTING = "starting"  # or waiting for room on a machine
    READY = "ready"
    LOST = "lost"  # could not be started again


@dataclass(slots=True, eq=False)
class RemoteJob:
    """A job on an engine; `stop` and `post` may come from any thread, also after its end."""

    actor: Handle
    number: int
    generated: int = 0  # tokens, by the last sample that it sent
    _is_stopped: bool = False

    def stop(self) -> None:
        """Ends it soon; a second call does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            self.actor.stop.remote(self.number)

    def post(self, word: object) -> None:
        self.actor.post.remote(self.number, word)


@dataclass(slots=True, eq=False)
class EngineSlot:
    """The place of one engine: the process that fills it now, and counts over all that have filled it."""

    number: int
    state: EngineState = EngineState.STARTING
    node: str = ""
    pid: int = 0
    num_deaths: int = 0
    num_done: int = 0
    actor: Handle = None
    jobs: list[RemoteJob] = field(default_factory=list)
    last_words: str = ""
    failed_starts: int = 0  # in a row
    tokens: int = 0  # of jobs that are over
    busy_seconds: float = 0.0
    busy_since: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def place(self) -> str:
        return f" on {self.node}" if self.node else ""

    @property
    def tokens_per_second(self) -> float:
        """The rate while it had work."""
        jobs = list(self.jobs)
        seconds = self.busy_seconds + (time.monotonic() - self.busy_since if jobs else 0.0)
        return (self.tokens + sum(job.generated for job in jobs)) / seconds if seconds else 0.0

    def add(self, job: RemoteJob) -> None:
        if not self.jobs:
            self.busy_since = time.monotonic()
        self.jobs.append(job)

    def remove(self, job: RemoteJob, *, is_done: bool) -> None:
        self.jobs.remove(job)
        if not self.jobs:
            self.busy_seconds += time.monotonic() - self.busy_since
        if is_done:
            self.num_done += 1
            self.tokens += job.generated


class EnginePool(Generic[Engine], AbstractContextManager["EnginePool[Engine]"]):
    """A fixed number of engines, made from one description. Calls come from any thread."""

    def __init__(self, make: Make[Engine], num_engines: int, needs: EngineNeeds, *, jobs_per_engine: int = 1) -> None:
        import ray

        self._ray = ray
        self._make = make
        self.most_jobs = jobs_per_engine  # of each engine
        self._needs = needs
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._starting = threading.Semaphore(1 if needs.shares_a_gpu else num_engines)  # each takes what it finds free
        self._is_closed = False
        self._has_complained = False
        self._user_error: str | None = None
        self._on_change: Callable[[], None] = lambda: None
        self._on_lost: Callable[[EngineError], None] = lambda error: None
        self.warnings_given = WarnOnce()
        self.slots = [EngineSlot(number) for number in range(num_engines)]
        self._keepers = [threading.Thread(target=self._keep, args=(slot,), daemon=True) for slot in self.slots]
        for keeper in self._keepers:
            keeper.start()

    # -- the engines -------------------------------------------------------------------------------------------

    def wait(self, num_ready: int | None = None, should_stop: Callable[[], bool] = lambda: False) -> list[EngineSlot]:
        """Waits until so many engines are ready, by default all, and returns the ready ones.

        Returns none if `should_stop` came first; raises if so many cannot be started.
        """
        needed = len(self.slots) if num_ready is None else num_ready
        with self._changed:
            while not should_stop():
                self.check(needed)
                ready = [slot for slot in self.slots if slot.is_ready]
                if len(ready) >= needed:
                    return ready
                self._changed.wait(POLL_SECONDS)  # signals are then heard on every platform
        return []

    def listen(self, on_change: Callable[[], None], on_lost: Callable[[EngineError], None]) -> None:
        """Sets callbacks for an engine that is ready, and for the loss of all; called on a thread of the pool."""
        self._on_change, self._on_lost = on_change, on_lost

    def close(self) -> None:
        """Lets engines release their memory, and kills those that do not do so in time."""
        with self._changed:
            self._is_closed = True
        if ends := [slot.actor.close.remote() for slot in self.slots if slot.is_ready]:
            self._ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for slot in self.slots:
            if (actor := slot.actor) is not None:
                self._ray.kill(actor)
        for keeper in self._keepers:
            keeper.join(CLOSE_SECONDS)

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- calls and single jobs ---------------------------------------------------------------------------------

    def call(self, slot: EngineSlot, function: Callable[[Engine], T]) -> T:
        """Calls a quick function with an engine, in its process; returns and raises what it does."""
        try:
            value: T = self._ray.get(self._actor_of(slot).call.remote(function))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else EngineError(first_line(error))) from error
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"engine {slot.number} died: {first_line(error)}") from error
        return value

    def call_one(self, function: Callable[[Engine], T], should_stop: Callable[[], bool] = lambda: False) -> T | None:
        """Calls a quick function with the first engine that is ready; returns None if `should_stop` came first."""
        while ready := self.wait(1, should_stop):
            slot, actor = ready[0], ready[0].actor
            try:
                return self.call(slot, function)
            except EngineError as error:
                self._lose(slot, actor, str(error))
        return None

    def begin(
        self,
        slot: EngineSlot,
        job: Job[Engine, Any],
        on_item: Callable[[Any], None],
        on_end: Callable[[JobEnd], None],
        news_seconds: float = NEWS_SECONDS,
    ) -> RemoteJob:
        """Begins a job on an engine; both callbacks are called on a thread of its own, `on_end` once."""
        with self._changed:
            actor = self._actor_of(slot)
            remote = RemoteJob(actor, next(self._numbers))
            slot.add(remote)
        stream = actor.run.options(num_returns="streaming").remote(remote.number, job, news_seconds)

        def follow() -> None:
            end = self._end_of(remote, stream, on_item)
            is_lost = isinstance(end, Failed) and not end.is_users
            if isinstance(end, Failed) and is_lost:  # also after an error in the job: the engine's state is unknown
                self._lose(slot, actor, end.reason)
            with self._changed:
                slot.remove(remote, is_done=not is_lost)
            on_end(end)

        threading.Thread(target=follow, daemon=True).start()
        return remote

    def _actor_of(self, slot: EngineSlot) -> Handle:
        if slot.actor is None:
            raise EngineError(f"engine {slot.number} died: {slot.last_words}")
        return slot.actor

    def _end_of(self, remote: RemoteJob, stream: Any, on_item: Callable[[Any], None]) -> JobEnd:
        """Passes the items of a job on until its end, which it returns."""
        try:
            for message in map(self._ray.get, stream):
                if isinstance(message, Done | Failed):
                    return message
                for item in message:
                    if isinstance(item, ev.Sample):
                        remote.generated = item.generated
                    on_item(item)
        except self._ray.exceptions.RayError as error:
            return Failed(first_line(error))
        except Exception as error:  # of a callback: no engine would do better
            remote.stop()
            return Failed(f"{type(error).__name__}: {error}", is_users=True)
        return Failed("its stream ended without a result")

    # -- life and death ----------------------------------------------------------------------------------------

    def _keep(self, slot: EngineSlot) -> None:
        """Starts an engine, and again whenever it has died."""
        while not self._is_closed and slot.state is not EngineState.LOST:
            try:
                with self._starting:
                    report = self._start(slot)
                life = slot.actor.live.remote()
                with self._changed:
                    self.warnings_given.warn(report.warnings)
                    slot.state, slot.failed_starts, slot.node, slot.pid = EngineState.READY, 0, report.node, report.pid
                    self._changed.notify_all()
                self._on_change()
                self._ray.get(life)  # returns when the pool is closed, raises when the engine dies
            except (self._ray.exceptions.RayError, EngineError) as error:
                self._lose(slot, slot.actor, _reason(error))
        if all(each.state is EngineState.LOST for each in self.slots):
            self._on_lost(self._lost_error())

    def _start(self, slot: EngineSlot) -> EngineReport:
        remote = self._ray.remote(EngineActor).options(
            num_cpus=self._needs.cpus, num_gpus=self._needs.gpus, max_concurrency=self.most_jobs + CONTROL_CALLS
        )
        with self._changed:
            if self._is_closed:
                raise EngineError("it was closed")
            slot.actor = remote.remote(self._make)
        answer = slot.actor.ping.remote()
        if not self._ray.wait([answer], timeout=PATIENCE_SECONDS)[0]:
            self._complain_of_no_room()
        report: EngineReport | Failed = self._ray.get(answer)
        if isinstance(report, Failed):
            self._user_error = report.reason if report.is_users else None
            raise EngineError(report.reason)
        return report

    def _lose(self, slot: EngineSlot, actor: Handle, reason: str) -> None:
        """Counts a death once, from whichever thread it is reported first, and makes room for a new engine."""
        with self._changed:
            if self._is_closed or actor is None or slot.actor is not actor:
                return
            if slot.state is EngineState.STARTING:
                slot.failed_starts += 1
            is_hopeless = self._user_error is not None or slot.failed_starts >= MOST_FAILED_STARTS
            slot.state = EngineState.LOST if is_hopeless else EngineState.STARTING
            slot.actor, slot.last_words, slot.num_deaths = None, reason, slot.num_deaths + 1
            self._changed.notify_all()
        self._ray.kill(actor)
        if self._user_error is None:
            warnings.warn(f"engine {slot.number}{slot.place} died: {reason}", GambitWarning, stacklevel=2)

    def check(self, needed: int = 1) -> None:
        """Raises if fewer than `needed` engines are left to be ready: the starts of the others have failed for good."""
        if self._user_error is not None:
            raise UserError(self._user_error)
        if sum(slot.state is not EngineState.LOST for slot in self.slots) < needed:
            raise self._lost_error()

    def _lost_error(self) -> EngineError:
        reason = next((slot.last_words for slot in self.slots if slot.state is EngineState.LOST), "")
        return EngineError(
            f"an engine could not be started {MOST_FAILED_STARTS} times in a row; the last reason: {reason}"
        )

    def _complain_of_no_room(self) -> None:
        with self._changed:
            if self._has_complained or any(slot.is_ready for slot in self.slots):
                return
            self._has_complained = True
        free = self._ray.available_resources()
        warnings.warn(
            f"no engine is ready yet: each needs {self._needs.cpus:g} CPUs and {self._needs.gpus:g} GPUs on one "
            f"machine, and {free.get('CPU', 0):g} and {free.get('GPU', 0):g} are free in the cluster; waiting",
            GambitWarning,
            stacklevel=2,
        )


def _reason(error: BaseException) -> str:
    """Returns Ray's account of a death in a line; where something was raised, that is in the last one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]

"""Hands work to engines as they become free, and outlives the death of any of them.

The driver starts engines itself, and a new one in the place of one that died, on whatever machine has room. Work that
was under way when its engine died is done again; work that has cost two engines their life is given up.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from gambit.cluster.actor import Done, Engine, EngineActor, Make, News, Raised
from gambit.cluster.plan import EngineNeeds
from gambit.cluster.slots import (
    MOST_FAILED_STARTS,
    Attempt,
    EngineSlot,
    EngineState,
    Handle,
    Tag,
    TokensSoFar,
    Work,
    WorkEnd,
)
from gambit.errors import EngineError, GambitWarning, ToldOnce, UserError

MOST_DEATHS = 2  # of engines, by one piece of work
POLL_SECONDS = 0.2  # between two looks at whether to stop
CLOSE_SECONDS = 20.0
PATIENCE_SECONDS = 60.0  # until the user is told that no engine has found room yet
CONTROL_CALLS = 2  # that an engine answers beside its jobs
T = TypeVar("T")


class _Backlog(Generic[Tag]):
    """Work that waits: what has to be done again first, then what comes, asked for one by one."""

    def __init__(self, work: Iterable[Work[Tag]]) -> None:
        self._coming = iter(work)
        self._next: deque[Attempt[Tag]] = deque()

    def peek(self) -> Attempt[Tag] | None:
        if not self._next:
            self._next.extend(Attempt(work) for work in itertools.islice(self._coming, 1))
        return self._next[0] if self._next else None

    def take(self) -> Attempt[Tag]:
        return self._next.popleft()

    def put_back(self, attempt: Attempt[Tag]) -> None:
        self._next.appendleft(attempt)


class EnginePool(Generic[Engine]):
    """Engines under Ray, made from one description. The calls of a pool come from one thread."""

    def __init__(self, make: Make[Engine], num_engines: int, needs: EngineNeeds, *, jobs_per_engine: int = 1) -> None:
        import ray

        self._ray = ray
        self._make = make
        self._most = jobs_per_engine
        self._needs = needs
        self._numbers = itertools.count()
        self._began = time.monotonic()
        self._has_complained = False
        self.told = ToldOnce()
        self.slots: list[EngineSlot[Any]] = [EngineSlot(number) for number in range(num_engines)]
        self._start_waiting()

    # -- what a driver asks for --------------------------------------------------------------------------------

    def ask(self, question: Callable[[Engine], T], should_stop: Callable[[], bool] = lambda: False) -> T | None:
        """Put a question to the first engine that is ready; None where the wait was called off."""
        nothing = _Backlog[object]([])
        while not should_stop():
            for slot in self.slots:
                if slot.state is EngineState.READY:
                    try:
                        answer: T = self._ray.get(slot.actor.ask.remote(question))
                        return answer
                    except self._ray.exceptions.RayActorError as error:
                        self._died(slot, _reason(error), nothing)
            self._await_messages(nothing, _unheard)
        return None

    def run(
        self,
        work: Iterable[Work[Tag]],
        *,
        jobs_per_engine: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_news: Callable[[Tag, object], None] = lambda tag, item: None,
    ) -> Iterator[WorkEnd[Tag]]:
        """Do all work and give it back as it ends, in any order.

        `work` is asked for its next piece when an engine is free for it. Once `should_stop`, no more is begun and what
        runs is told to end; it still comes back, unless its engine dies. `jobs_per_engine`: at most the pool's.
        """
        most = min(jobs_per_engine or self._most, self._most)
        backlog = _Backlog(work)
        is_stopping = False
        try:
            while True:
                if not is_stopping and should_stop():
                    is_stopping = True
                    self.stop()
                if not is_stopping:
                    self._hand_out(backlog, most)
                if not self._is_busy and (is_stopping or backlog.peek() is None):
                    return
                yield from self._await_messages(backlog, on_news)
        finally:
            self._abandon()

    def stop(self, tag: object = None) -> None:
        """Ask running jobs to end soon: that of a tag, or all."""
        for slot in self.slots:
            for attempt in slot.running.values():
                if tag is None or attempt.work.tag == tag:
                    slot.actor.stop.remote(attempt.number)

    def close(self) -> None:
        """Engines give back their memory; those that do not answer in time are killed."""
        ends = [slot.actor.close.remote() for slot in self.slots if slot.state is EngineState.READY]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=CLOSE_SECONDS)
        for slot in self.slots:
            if slot.actor is not None:
                self._ray.kill(slot.actor)
        self.slots.clear()

    def __enter__(self) -> EnginePool[Engine]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- work --------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return any(slot.running for slot in self.slots)

    def _hand_out(self, backlog: _Backlog[Tag], most: int) -> None:
        """The least busy engine first, so that none has two jobs while another has none."""
        while attempt := backlog.peek():
            fit = [slot for slot in self.slots if slot.can_take(attempt, most)]
            if not fit:
                return
            slot = min(fit, key=lambda slot: len(slot.running))
            slot.begin(backlog.take(), next(self._numbers))

    def _await_messages(self, backlog: _Backlog[Tag], on_news: Callable[[Tag, object], None]) -> list[WorkEnd[Tag]]:
        """What has ended since; waits a moment where there is no message at all."""
        found: list[WorkEnd[Tag]] = []
        for sender in self._heard():
            for slot in self.slots:
                if sender is slot.starting:
                    found += self._started(slot, backlog)
                elif sender in slot.running:
                    found += self._heard_of(slot, sender, backlog, on_news)
        self._complain_of_no_room()
        return found

    def _heard(self) -> list[Any]:
        waiting = [slot.starting for slot in self.slots if slot.starting is not None]
        waiting += [stream for slot in self.slots for stream in slot.running]
        if not waiting:
            time.sleep(POLL_SECONDS)
            return []
        ready, _ = self._ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        if ready and len(waiting) > 1:  # those that spoke at the same time
            ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        return list(ready)

    def _heard_of(
        self, slot: EngineSlot[Tag], stream: Any, backlog: _Backlog[Tag], on_news: Callable[[Tag, object], None]
    ) -> list[WorkEnd[Tag]]:
        attempt = slot.running[stream]
        try:
            message = self._ray.get(next(stream))
        except (StopIteration, self._ray.exceptions.RayError) as error:
            return self._died(slot, _reason(error), backlog)
        if isinstance(message, News):
            for item in message.items:
                if isinstance(item, TokensSoFar):
                    attempt.generated = item.generated
                on_news(attempt.work.tag, item)
            return []
        if isinstance(message, Raised) and not message.is_users:
            return self._died(slot, message.reason, backlog)  # who knows what state it left the engine in
        slot.end(stream)
        if isinstance(message, Raised):
            return [WorkEnd(attempt.work.tag, slot.number, error=message.reason)]
        assert isinstance(message, Done)
        return [WorkEnd(attempt.work.tag, slot.number, message.value)]

    def _abandon(self) -> None:
        """What still runs when nobody listens any more."""
        self.stop()
        for slot in self.slots:
            for stream in list(slot.running):
                slot.end(stream)

    # -- engines -----------------------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Those that share a GPU load one after the other: each takes its part of what it finds free."""
        for slot in self.slots:
            is_alone = not self._needs.shares_a_gpu or all(other.starting is None for other in self.slots)
            if slot.state is EngineState.WAITING and is_alone:
                slot.start(self._new_actor())

    def _new_actor(self) -> Handle:
        needs = self._needs
        remote = self._ray.remote(EngineActor).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, max_concurrency=self._most + CONTROL_CALLS
        )
        return remote.remote(self._make)

    def _started(self, slot: EngineSlot[Tag], backlog: _Backlog[Tag]) -> list[WorkEnd[Tag]]:
        try:
            report = self._ray.get(slot.starting)
        except self._ray.exceptions.RayError as error:
            return self._died(slot, _reason(error), backlog)
        if isinstance(report, Raised):
            if report.is_users:
                raise UserError(report.reason)
            return self._died(slot, report.reason, backlog)
        self.told.tell(report.warnings)
        slot.started(report)
        self._start_waiting()
        return []

    def _died(self, slot: EngineSlot[Tag], reason: str, backlog: _Backlog[Tag]) -> list[WorkEnd[Tag]]:
        """A new one takes its place; its work is done again, or given up."""
        lost = list(slot.running.values())
        if slot.actor is not None:
            self._ray.kill(slot.actor)
        slot.died()
        warnings.warn(f"engine {slot.number}{slot.place} died: {reason}", GambitWarning, stacklevel=2)
        if all(each.state is EngineState.LOST for each in self.slots):
            raise EngineError(
                f"no engine could be started {MOST_FAILED_STARTS} times in a row; the last said: {reason}"
            )
        self._start_waiting()
        return [outcome for attempt in reversed(lost) for outcome in self._again(attempt, slot, reason, backlog)]

    def _again(
        self, attempt: Attempt[Tag], slot: EngineSlot[Tag], reason: str, backlog: _Backlog[Tag]
    ) -> Iterator[WorkEnd[Tag]]:
        attempt.num_deaths += 1
        attempt.generated = 0
        if attempt.num_deaths < MOST_DEATHS:
            backlog.put_back(attempt)
        else:
            error = f"its engine died {MOST_DEATHS} times over it, the last time with: {reason}"
            yield WorkEnd(attempt.work.tag, slot.number, error=error)

    def _complain_of_no_room(self) -> None:
        is_late = time.monotonic() - self._began > PATIENCE_SECONDS
        if self._has_complained or not is_late or any(slot.state is EngineState.READY for slot in self.slots):
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
    """What Ray says of a death, in a line; where something was raised, that is in the last one."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0]


def _unheard(tag: object, item: object) -> None:
    """For a wait in which no job runs."""

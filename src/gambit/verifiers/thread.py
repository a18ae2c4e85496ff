"""A thread that owns a verifier and reads for all searches: what waits is read together."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from gambit.errors import EngineError
from gambit.verifiers.base import ThoughtReading, Verifier, VerifierInfo

MAX_BATCH = 512  # readings in one call: the first of a queue need not wait for the last


@dataclass(frozen=True, slots=True)
class TimedScore:
    """A score, with its share of what the batch cost."""

    score: float | None  # None: the reading is too long
    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Order:
    reading: ThoughtReading
    score: Future[TimedScore] = field(default_factory=Future)


class VerifierThread:
    """Starts a verifier on a thread of its own; readings come from any thread and are answered in their order.

    A verifier that fails is not asked again: what waits and what comes later gets the error.
    """

    def __init__(self, start: Callable[[], Verifier]) -> None:
        self._inbox: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._failure: EngineError | None = None
        self._started: Future[Verifier] = Future()
        self._thread = threading.Thread(target=self._run, args=(start,), name="gambit-verifier", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has started; raises why it could not."""
        self._started.result()

    @property
    def verifier(self) -> Verifier:
        """Its calls belong to the thread."""
        return self._started.result()

    @property
    def info(self) -> VerifierInfo:
        return self.verifier.info

    def submit(self, reading: ThoughtReading) -> Future[TimedScore]:
        """A reading that is cancelled before its turn is not read."""
        order = _Order(reading)
        self._inbox.put(order)
        return order.score

    def close(self) -> None:
        """Drop what waits and end the thread; a second call does nothing."""
        self._inbox.put(None)
        self._thread.join()

    # -- on the thread -----------------------------------------------------------------------------------------

    def _run(self, start: Callable[[], Verifier]) -> None:
        try:
            verifier = start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(verifier)
        while self._serve(verifier):
            pass
        verifier.close()

    def _serve(self, verifier: Verifier) -> bool:
        """One batch; False at the end."""
        orders, is_over = self._take()
        if orders:
            self._answer(verifier, orders)
        return not is_over

    def _take(self) -> tuple[list[_Order], bool]:
        """At least one, and what else waits."""
        orders, item = [], self._inbox.get()
        while item is not None:
            if item.score.set_running_or_notify_cancel():
                orders.append(item)
            if len(orders) == MAX_BATCH:
                break
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
        return orders, item is None

    def _answer(self, verifier: Verifier, orders: Sequence[_Order]) -> None:
        began = time.perf_counter()
        try:
            if self._failure is not None:
                raise self._failure
            found = verifier.read([order.reading for order in orders])
            assert len(found) == len(orders), f"{len(found)} scores of {len(orders)} readings"
        except BaseException as error:
            self._fail(error, orders)
            return
        counts = [0 if each is None else each.num_tokens for each in found]
        shares = counts if any(counts) else [1] * len(counts)
        seconds = (time.perf_counter() - began) / sum(shares)
        for order, each, count, share in zip(orders, found, counts, shares, strict=True):
            order.score.set_result(TimedScore(None if each is None else each.score, count, seconds * share))

    def _fail(self, error: BaseException, orders: Sequence[_Order]) -> None:
        if self._failure is None:
            reason = str(error).strip() or type(error).__name__
            self._failure = EngineError(f"the verifier {self.info.name} failed: {reason}")
            self._failure.__cause__ = error
        for order in orders:
            order.score.set_exception(self._failure)

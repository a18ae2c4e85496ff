"""The protocol of verifiers that read thoughts (questions, readings, scores), and the thread that owns a verifier."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from gambit.config.trust import ScorerTrust
from gambit.errors import EngineError
from gambit.types import Aggregation, ChatMessage


class ReadingKey(NamedTuple):
    """The address of a reading: the trace, and how many of its tokens were read."""

    search: int
    trace: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """The problem of a search: as chat turns, for verifiers with their own format, and as the generator's tokens."""

    messages: tuple[ChatMessage, ...]  # the system prompt is left out: it instructs the generator
    prompt_tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        """Returns the turns of the user, joined."""
        return "\n\n".join(message["content"] for message in self.messages if message["role"] == "user")


@dataclass(frozen=True, slots=True)
class ThoughtReading:
    """One finished thought with everything before it.

    A trace is read at the end of each thought, that is up to and with the boundary token. It is read once more at its
    own end (without its stop token), if anything follows its last thought.
    """

    key: ReadingKey
    question: Question
    tokens: tuple[int, ...]  # of the trace, inherited ones included, up to the end of the newest thought
    ends: tuple[int, ...]  # how many of `tokens` each of its thoughts ends after; the last is len(tokens)
    thoughts: tuple[str, ...]  # their texts, as many as `ends`


class ReadingScore(NamedTuple):
    """The score of one reading, and its cost."""

    score: float  # of the newest thought, higher is better
    num_tokens: int  # that were computed for it; those taken from a cache are not


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """The description of a verifier and of its scores."""

    name: str  # the model, as the user named it
    format: str  # the family, as `--scorer verifier:FORMAT:FOLDER` names it
    runs_on: str  # transformers, vllm, http
    device: str
    is_probability: bool = True
    aggregation: Aggregation = Aggregation.LAST  # each score is about all thoughts so far
    context_tokens: int | None = None  # the longest reading, where it is known
    trust: ScorerTrust | None = None  # None: it was never evaluated


@runtime_checkable
class Verifier(Protocol):
    """A verifier. Calls come from one thread; a reading's score depends on that reading alone."""

    @property
    def info(self) -> VerifierInfo:
        """Returns its description."""

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        """Returns one score per reading, in their order; None for a reading longer than its context.

        Readings of one trace may be in the same call.
        """

    def close(self) -> None:
        """Frees memory and ends processes."""


MAX_BATCH = 512  # readings in one call: the first of a queue need not wait for the last


@dataclass(frozen=True, slots=True)
class TimedScore:
    """A score with its share of the batch's cost."""

    score: float | None  # None: the reading is too long
    num_tokens: int = 0
    seconds: float = 0.0


Order = tuple[ThoughtReading, "Future[TimedScore]"]


class VerifierThread:
    """A verifier with a thread of its own, which starts it and reads; submitted from any thread, read in order.

    A verifier that fails is not called again: readings that wait and those that come later get the error.
    """

    def __init__(self, start: Callable[[], Verifier]) -> None:
        self._inbox: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._failure: EngineError | None = None
        self._started: Future[Verifier] = Future()
        self._thread = threading.Thread(target=self._run, args=(start,), name="gambit-verifier", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once the verifier has started; raises what kept it from starting."""
        self._started.result()

    @property
    def verifier(self) -> Verifier:
        """Returns the verifier, whose calls belong to the thread."""
        return self._started.result()

    @property
    def info(self) -> VerifierInfo:
        return self.verifier.info

    def submit(self, reading: ThoughtReading) -> Future[TimedScore]:
        """Returns the score to come. A reading that is cancelled before its turn is not read."""
        score: Future[TimedScore] = Future()
        self._inbox.put((reading, score))
        return score

    def close(self) -> None:
        """Drops what waits and ends the thread; a second call does nothing."""
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
        is_over = False
        while not is_over:
            orders, is_over = self._take()
            if orders:
                self._answer(verifier, orders)
        verifier.close()

    def _take(self) -> tuple[list[Order], bool]:
        """Waits for an order and takes what else is there; also returns whether the end has come."""
        orders, item = [], self._inbox.get()
        while item is not None:
            if item[1].set_running_or_notify_cancel():
                orders.append(item)
            if len(orders) == MAX_BATCH:
                break
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
        return orders, item is None

    def _answer(self, verifier: Verifier, orders: Sequence[Order]) -> None:
        began = time.perf_counter()
        try:
            if self._failure is not None:
                raise self._failure
            found = verifier.read([reading for reading, _ in orders])
            assert len(found) == len(orders), f"{len(found)} scores of {len(orders)} readings"
        except BaseException as error:
            self._fail(error, orders)
            return
        counts = [0 if each is None else each.num_tokens for each in found]
        shares = counts if any(counts) else [1] * len(counts)
        seconds = (time.perf_counter() - began) / sum(shares)
        for (_, score), each, count, share in zip(orders, found, counts, shares, strict=True):
            score.set_result(TimedScore(None if each is None else each.score, count, seconds * share))

    def _fail(self, error: BaseException, orders: Sequence[Order]) -> None:
        if self._failure is None:
            reason = str(error).strip() or type(error).__name__
            self._failure = EngineError(f"the verifier {self.info.name} failed: {reason}")
            self._failure.__cause__ = error
        for _, score in orders:
            score.set_exception(self._failure)

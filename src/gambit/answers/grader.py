"""Decides whether two answers are equal, within time limits that hostile answers cannot stretch."""

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self, TypeVar

from gambit.answers.equality import are_equal
from gambit.answers.forms import canonical, read
from gambit.answers.process import LOST, GradingProcess, Outcome
from gambit.errors import EngineError, UserError

Equivalent = Callable[[str, str], bool]

STRIKES = {  # of the first answer and the second; who has two is slow
    Outcome.FIRST_IS_SLOW: (2, 0),
    Outcome.SECOND_IS_SLOW: (0, 2),
    Outcome.BOTH_ARE_SLOW: (1, 1),  # one of them may be innocent
}
SLOW = 2
SHARE = 0.5  # of the time that is left until the deadline, for one comparison
FAIR_SECONDS = 1.0  # what exceeds less time than this is no answer's fault
Pair = tuple[str, str]


class _NeedsAlgebraError(Exception):
    """Structure alone does not tell."""


class _GaveUpError(Exception):
    """A comparison has exceeded its time or memory."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class Grader:
    """Compares answers, from any thread.

    Structure, numbers, units and words are compared here; algebra happens in a process of its own, because nothing
    inside this one can stop a runaway power or simplification. An answer that exceeds its time or memory there is
    remembered and compared by its spelling from then on. So is every pair that has not been compared by a deadline.
    """

    def __init__(
        self,
        comparison_seconds: float = 5.0,
        vote_seconds: float = 30.0,
        startup_seconds: float = 120.0,
        cache_size: int = 65536,
    ) -> None:
        for name, seconds in (("comparison_seconds", comparison_seconds), ("vote_seconds", vote_seconds)):
            if not seconds > 0:
                raise UserError(f"{name} is {seconds}: comparing answers takes some time, so give it a positive limit")
        self._comparison_seconds = comparison_seconds
        self._vote_seconds = vote_seconds
        self._startup_seconds = startup_seconds
        self._cache_size = cache_size
        self._cache: dict[Pair, bool] = {}
        self._strikes: dict[str, int] = {}
        self._process: GradingProcess | None = None
        self._lock = threading.Lock()  # of the process and of what is remembered
        self._num_given_up = 0

    @property
    def num_given_up(self) -> int:
        """Comparisons that exceeded their time or memory, and so counted as not equal."""
        return self._num_given_up

    def for_vote(self, deadline: float = math.inf) -> Equivalent:
        """`equivalent` for one vote, whose comparisons together end at `deadline`, or after `vote_seconds` from now."""
        return partial(self.equivalent, deadline=min(deadline, time.monotonic() + self._vote_seconds))

    def grade(self, answer: str | None, gold: str) -> bool:
        return answer is not None and self.equivalent(answer, gold)

    def equivalent(self, first: str, second: str, deadline: float = math.inf) -> bool:
        """Whether two answers are equal; not, where algebra has not shown it by `deadline` (of `time.monotonic()`)."""
        pair = _ordered(canonical(first), canonical(second))
        if "" in pair or pair[0] == pair[1]:
            return pair[0] == pair[1] != ""
        try:
            return are_equal(read(pair[0]), read(pair[1]), _no_algebra)
        except _NeedsAlgebraError:
            known = self._remembered(pair)
            return self._wait_and_compare(pair, deadline) if known is None else known

    def close(self) -> None:
        with self._lock:
            self._drop_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remembered(self, pair: Pair) -> bool | None:
        if any(self._strikes.get(answer, 0) >= SLOW for answer in pair):
            return False
        return self._cache.get(pair)

    def _wait_and_compare(self, pair: Pair, deadline: float) -> bool:
        patience = deadline - time.monotonic()
        if patience <= 0 or not self._lock.acquire(timeout=min(patience, threading.TIMEOUT_MAX)):
            return False
        try:
            known = self._remembered(pair)  # perhaps by now, from another thread
            return self._compare(pair, deadline) if known is None else known
        finally:
            self._lock.release()

    def _compare(self, pair: Pair, deadline: float) -> bool:
        try:
            process = self._ready_process(deadline)
        except TimeoutError:
            return False
        seconds = min(self._comparison_seconds, SHARE * (deadline - time.monotonic()))
        algebra = partial(_algebra, process, time.monotonic() + seconds)
        try:
            return _keep(self._cache, pair, are_equal(read(pair[0]), read(pair[1]), algebra), self._cache_size)
        except _GaveUpError as error:
            return self._give_up(pair, error.outcome, is_fair=seconds >= min(FAIR_SECONDS, self._comparison_seconds))
        except LOST:
            self._drop_process()
            return self._give_up(pair, Outcome.BOTH_ARE_SLOW, is_fair=True)

    def _give_up(self, pair: Pair, outcome: Outcome, *, is_fair: bool) -> bool:
        self._num_given_up += 1
        if is_fair:
            _keep(self._cache, pair, False, self._cache_size)
            for answer, strikes in zip(pair, STRIKES[outcome], strict=True):
                _keep(self._strikes, answer, self._strikes.get(answer, 0) + strikes, self._cache_size)
        return False

    def _ready_process(self, deadline: float) -> GradingProcess:
        """Raises TimeoutError where it has not started by the deadline; the next comparison then waits on."""
        if self._process is not None and not self._process.is_alive():
            self._drop_process()  # ended while idle, so the next comparison is not to blame
        if self._process is None:
            self._process = GradingProcess()
        try:
            self._process.wait_until_ready(deadline, self._startup_seconds)
        except EngineError:
            self._drop_process()
            raise
        return self._process

    def _drop_process(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def _ordered(first: str, second: str) -> Pair:
    """The same pair whoever asks in whichever order, so that equality is symmetric also where math-verify is not."""
    return (first, second) if first <= second else (second, first)


def _no_algebra(first: str, second: str) -> bool:
    raise _NeedsAlgebraError


def _algebra(process: GradingProcess, deadline: float, first: str, second: str) -> bool:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise _GaveUpError(Outcome.BOTH_ARE_SLOW)
    outcome = process.compare(first, second, seconds)
    if outcome in STRIKES:
        raise _GaveUpError(outcome)
    return outcome is Outcome.EQUAL


Key = TypeVar("Key")
Kept = TypeVar("Kept")


def _keep(memory: dict[Key, Kept], key: Key, value: Kept, size: int) -> Kept:
    """Remembers the value, and forgets the oldest where there are too many."""
    memory[key] = value
    if len(memory) > size:
        del memory[next(iter(memory))]
    return value

"""Decides whether two answers are equal, within time limits that hostile answers cannot stretch.

Algebra happens in a process of its own (worker.py), which can be killed at any time.
"""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from gambit.answers.forms import are_equal, canonical, read
from gambit.errors import EngineError, UserError

GRACE_SECONDS = 2.0  # for the process to report itself that a comparison has run out of time
LOST = (OSError, EOFError, ValueError)  # too late (TimeoutError is an OSError), gone, or out of the protocol

Equivalent = Callable[[str, str], bool]

# For the first answer and the second, by whose expression exceeded its time or memory; an answer with two is slow.
STRIKES = {"first": (2, 0), "second": (0, 2), "both": (1, 1)}  # of both, one may be innocent
SLOW = 2
SHARE = 0.5  # of the time that is left until the deadline, for one comparison
FAIR_SECONDS = 1.0  # what exceeds less time than this is no answer's fault
Pair = tuple[str, str]


class _NeedsAlgebraError(Exception):
    """Structure alone does not decide."""


class GaveUpError(Exception):
    """A comparison has exceeded its time or memory: in reading the first expression, the second, or both."""

    def __init__(self, slow: str) -> None:
        self.strikes = STRIKES[slow]


class Grader(AbstractContextManager["Grader"]):
    """Compares answers, from any thread.

    Structure, numbers, units and words are compared here; algebra happens in another process, since no code in this
    one can stop a runaway power or simplification. An answer that exceeds its time or memory there is
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
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()  # of the process and of what is remembered
        self._num_given_up = 0

    @property
    def num_given_up(self) -> int:
        """Counts comparisons that exceeded their time or memory; their answers count as different."""
        return self._num_given_up

    def for_vote(self, deadline: float = math.inf) -> Equivalent:
        """Returns `equivalent` for one vote; its comparisons together end at `deadline`, or after `vote_seconds`."""
        return partial(self.equivalent, deadline=min(deadline, time.monotonic() + self._vote_seconds))

    def grade(self, answer: str | None, gold: str) -> bool:
        return answer is not None and self.equivalent(answer, gold)

    def equivalent(self, first: str, second: str, deadline: float = math.inf) -> bool:
        """Returns whether two answers are shown to be equal, by algebra until `deadline` (of `time.monotonic()`)."""
        first, second = sorted((canonical(first), canonical(second)))  # symmetric, even if math-verify is not
        pair = first, second
        if not first or first == second:
            return first == second != ""
        try:
            return are_equal(read(first), read(second), _no_algebra)
        except _NeedsAlgebraError:
            known = self._remembered(pair)
            return self._wait_and_compare(pair, deadline) if known is None else known

    def close(self) -> None:
        """Ends the grading process; a later comparison starts another one."""
        with self._lock:
            self._drop_process()

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
        except GaveUpError as error:
            return self._give_up(pair, error.strikes, is_fair=seconds >= min(FAIR_SECONDS, self._comparison_seconds))
        except LOST:
            self._drop_process()
            return self._give_up(pair, STRIKES["both"], is_fair=True)

    def _give_up(self, pair: Pair, strikes: tuple[int, int], *, is_fair: bool) -> bool:
        self._num_given_up += 1
        if is_fair:
            _keep(self._cache, pair, False, self._cache_size)
            for answer, more in zip(pair, strikes, strict=True):
                _keep(self._strikes, answer, self._strikes.get(answer, 0) + more, self._cache_size)
        return False

    def _ready_process(self, deadline: float) -> "WorkerProcess":
        """Raises TimeoutError if it has not started by the deadline; the next comparison waits on."""
        if self._process is not None and not self._process.is_alive():
            self._drop_process()  # ended while idle, so the next comparison is not to blame
        if self._process is None:
            self._process = WorkerProcess()
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


def _no_algebra(first: str, second: str) -> bool:
    raise _NeedsAlgebraError


def _algebra(process: "WorkerProcess", deadline: float, first: str, second: str) -> bool:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise GaveUpError("both")
    return process.compare(first, second, seconds)


Key = TypeVar("Key")
Kept = TypeVar("Kept")


def _keep(memory: dict[Key, Kept], key: Key, value: Kept, size: int) -> Kept:
    """Stores the value, and forgets the oldest one above `size`."""
    memory[key] = value
    if len(memory) > size:
        del memory[next(iter(memory))]
    return value


# -- the grading process ---------------------------------------------------------------------------------------


class WorkerProcess:
    """A new interpreter that answers in JSON lines; a fork of this process would copy torch's threads and locks.

    It ends with its stdin, which the kernel closes when this process ends, however it ends.
    """

    def __init__(self, command: list[str] | None = None, name: str = "the grading process") -> None:
        self._name = name
        pipe = subprocess.PIPE
        # A session of its own keeps Ctrl-C away from it, and makes one group of it and its children.
        self._process = subprocess.Popen(
            command or worker_command(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0,
            start_new_session=True,
        )  # fmt: skip
        self._started = time.monotonic()
        self._is_ready = False
        self._unread = b""
        self.pid = self._process.pid
        self.stop = weakref.finalize(self, _end, self._process)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, deadline: float, startup_seconds: float) -> None:
        """Raises TimeoutError at the deadline while it may still get ready, and EngineError if it cannot."""
        if self._is_ready:
            return
        latest = self._started + startup_seconds
        try:
            reply = self._receive(min(deadline, latest))
        except LOST as error:
            if isinstance(error, TimeoutError) and deadline < latest:
                raise
            raise EngineError(f"{self._name} did not start within {startup_seconds} s ({error!r})") from error
        if "failed" in reply:
            raise EngineError(
                f"the grading process cannot work ({reply['failed']}): pip install 'math-verify>=0.9,<0.10'"
            )
        self._is_ready = True

    def compare(self, first: str, second: str, seconds: float) -> bool:
        """Returns whether the expressions are equal; raises GaveUpError, or one of LOST if the process is."""
        reply = self.ask({"first": first, "second": second, "seconds": seconds}, seconds)
        if isinstance(equal := reply.get("equal"), bool):
            return equal
        slow = str(reply.get("gave_up"))
        raise GaveUpError(slow) if slow in STRIKES else ValueError(reply)

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, bool | str]:
        """Returns the reply to a request that takes so many seconds."""
        self.send(request)
        return self._receive(time.monotonic() + seconds + GRACE_SECONDS)

    def send(self, request: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _receive(self, deadline: float) -> dict[str, bool | str]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                if not (chunk := os.read(self._process.stdout.fileno(), 65536)):
                    raise EOFError
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError(line)
        return reply


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def worker_command(script: Path | None = None) -> list[str]:
    # -P: without it Python would put the script's folder first on the path of modules.
    return [sys.executable, "-P", str(script or Path(__file__).with_name("worker.py"))]

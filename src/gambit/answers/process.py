"""The grading process as its grader sees it: started, asked with a time limit, ended with everything it has forked."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from gambit.errors import EngineError

GRACE_SECONDS = 2.0  # for the process to say itself that a comparison has run out of time
LOST = (OSError, EOFError, ValueError)  # too late (TimeoutError is an OSError), gone, or talking nonsense


class Outcome(StrEnum):
    """Of a comparison; a reading that exceeds time or memory is one expression's fault, the comparison both's."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FIRST_IS_SLOW = "first"
    SECOND_IS_SLOW = "second"
    BOTH_ARE_SLOW = "both"


class GradingProcess:
    """A fresh interpreter speaking JSON lines, not a fork of ours, which would copy torch's threads and locks.

    Its stdin ends with us however we end, and so does it.
    """

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        # A session of its own keeps Ctrl-C away from it, and lets us end it together with its children.
        self._process = subprocess.Popen(
            worker_command(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
        )
        self._started = time.monotonic()
        self._is_ready = False
        self._unread = b""
        self.pid = self._process.pid
        self.stop = weakref.finalize(self, _end, self._process)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, deadline: float, startup_seconds: float) -> None:
        """Raises TimeoutError at the deadline, where it may still get ready, and EngineError where it will not."""
        if self._is_ready:
            return
        latest = self._started + startup_seconds
        try:
            reply = self._receive(min(deadline, latest))
        except LOST as error:
            if isinstance(error, TimeoutError) and deadline < latest:
                raise
            raise EngineError(f"the grading process did not start within {startup_seconds} s ({error!r})") from error
        if "failed" in reply:
            raise EngineError(
                f"the grading process cannot work ({reply['failed']}): pip install 'math-verify>=0.9,<0.10'"
            )
        self._is_ready = True

    def compare(self, first: str, second: str, seconds: float) -> Outcome:
        assert self._process.stdin is not None
        request = {"first": first, "second": second, "seconds": seconds}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        reply = self._receive(time.monotonic() + seconds + GRACE_SECONDS)
        if isinstance(equal := reply.get("equal"), bool):
            return Outcome.EQUAL if equal else Outcome.DIFFERENT
        return Outcome(str(reply.get("gave_up")))

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


def worker_command() -> list[str]:
    # -P: without it Python would put this folder first on the path, and our numbers.py before the standard one.
    return [sys.executable, "-P", str(Path(__file__).with_name("worker.py"))]

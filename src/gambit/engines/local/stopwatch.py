"""Adds up where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gambit.types import StepSeconds


class Stopwatch:
    """Adds up the seconds of a step by part. A part inside another is taken from the outer one."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._since = 0.0
        self.reset()

    def reset(self) -> None:
        self._spent = {"engine": 0.0, "scoring": 0.0, "scheduling": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._spent[self._open[-1]] += now - self._since
        self._since = now

    def seconds(self) -> StepSeconds:
        return StepSeconds(**self._spent)

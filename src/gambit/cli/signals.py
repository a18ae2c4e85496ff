"""Ctrl-C and SIGTERM: the first asks a run to stop, the second ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeAlias

from gambit.errors import StopWish

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it


class StopSignal:
    """While entered: the first signal makes it true when called, a later one ends the process at once."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._number: int | None = None
        self._wish = StopWish()
        self._previous: dict[int, _Handler] = {}

    def __call__(self) -> bool:
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """The shell's convention, 128 + the signal; 0 without one."""
        return 0 if self._number is None else 128 + self._number

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._wish.is_repeated():
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            os._exit(128 + number)
        if self._number is None:
            self._number = number
            self._on_stop()

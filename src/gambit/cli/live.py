"""Base class for live displays: a few lines that are redrawn on a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self

from rich.console import Console, RenderableType
from rich.live import Live


class LiveScreen(ABC):
    """Redrawn while it is open; makes room for lasting lines."""

    stopping_words: ClassVar[str]
    refresh_per_second: ClassVar[float] = 8

    def __init__(self, console: Console, *, is_live: bool) -> None:
        self.is_live = is_live
        self._console = console
        self._loading = ""
        self._is_stopping = False
        self._live: Live | None = None

    @abstractmethod
    def render(self) -> RenderableType:
        """The lines of this moment; they fit into 60 columns and are cut, never wrapped."""

    def loading(self, model: str) -> None:
        self._loading = f"loading {model}"

    def stopping(self) -> None:
        """Safe in a signal handler: no lock is taken and no buffer touched."""
        self._is_stopping = True
        if not self.is_live:
            os.write(2, f"{self.stopping_words}\n".encode())

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Room for lasting lines above the live ones."""
        was_on = self._live is not None
        self._stop()
        try:
            yield
        finally:
            if was_on:
                self._start()

    def _start(self) -> None:
        if self.is_live:
            self._live = Live(
                console=self._console, get_renderable=self.render, transient=True,
                refresh_per_second=self.refresh_per_second, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

"""Printing to stdout and stderr, signals, and the exit code of a command."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeAlias

import typer

from gambit.errors import GambitError, StopWish, UserError, named

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OK, FAILURE, USER_MISTAKE, NO_ANSWER, INTERRUPTED, UNREAD = 0, 1, 2, 3, 130, 141
PIPE_WIDTH = 200  # of output that is no terminal's: its lines need not be folded
SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


def exit_code(body: Callable[[], int]) -> int:
    """Returns the exit code of a command; a failure is printed as one sentence without a stack trace."""
    try:
        return body()
    except UserError as error:
        return failed(error, str(error), USER_MISTAKE)
    except GambitError as error:
        return failed(error, str(error), FAILURE)
    except KeyboardInterrupt as error:
        return failed(error, "interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the pipe is gone: quiet, as `cat` is when SIGPIPE ends it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would complain
        return UNREAD
    except PermissionError as error:
        path = error.filename or "a file"
        return failed(error, f"permission denied for {path}: ask its owner, or name another", USER_MISTAKE)
    except Exception as error:
        return failed(error, f"{named(error).splitlines()[0]} (GAMBIT_DEBUG=1 shows the traceback)", FAILURE)


def failed(error: BaseException, message: str, code: int) -> int:
    """Prints an error and returns the exit code."""
    if os.environ.get("GAMBIT_DEBUG"):
        traceback.print_exception(error)
    say(f"error: {message}", style="red")
    for note in getattr(error, "__notes__", ()):
        say(note)
    return code


def put(content: RenderableType) -> None:
    """Prints to stdout, in a pipe without the spaces that pad a table's lines."""
    console = stdout()
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def say(message: str, style: str = "") -> None:
    """Prints a line to stderr."""
    stderr().print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    """Prints a warning to stderr."""
    say(f"warning: {message}", style="yellow")


def stdout() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def is_watched() -> bool:
    """Returns whether both streams are terminals: live displays are for these alone."""
    return sys.stdout.isatty() and sys.stderr.isatty()


class StopSignal:
    """Ctrl-C and SIGTERM: the first makes calls of this object return True, a later one ends the process at once."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._number: int | None = None
        self._wish = StopWish()
        self._previous: dict[int, _Handler] = {}

    def __call__(self) -> bool:
        return self._number is not None

    @property
    def exit_code(self) -> int:
        """The exit code by the shell's convention: 128 + the signal, or 0 without one."""
        return 0 if self._number is None else 128 + self._number

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
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

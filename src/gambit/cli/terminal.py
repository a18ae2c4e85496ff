"""Prints to stdout and stderr, and ends a command with an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer

from gambit.errors import GambitError, UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OK, FAILURE, USER_MISTAKE, NO_ANSWER, INTERRUPTED = 0, 1, 2, 3, 130
PIPE_WIDTH = 200  # nobody looks at it: lines need not be folded


def exit_with(body: Callable[[], int]) -> NoReturn:
    """Run a command inside typer, and leave with its exit code."""
    raise typer.Exit(exit_code(body))


def exit_code(body: Callable[[], int]) -> int:
    """Of what was run; whatever goes wrong is one sentence without a stack trace."""
    try:
        return body()
    except UserError as error:
        return failed(error, str(error), USER_MISTAKE)
    except GambitError as error:
        return failed(error, str(error), FAILURE)
    except KeyboardInterrupt as error:
        return failed(error, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        raise  # nobody reads on: typer ends quietly
    except Exception as error:
        return failed(error, f"{_first_line(error)} (GAMBIT_DEBUG=1 shows the traceback)", FAILURE)


def failed(error: BaseException, message: str, code: int) -> int:
    """Say what went wrong; gives the exit code back."""
    if os.environ.get("GAMBIT_DEBUG"):
        traceback.print_exception(error)
    say(f"error: {message}", style="red")
    for note in getattr(error, "__notes__", ()):
        say(note)
    return code


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def put(content: RenderableType) -> None:
    """To stdout; tables pad their lines, which is of no use in a pipe."""
    console = stdout()
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def say(message: str, style: str = "") -> None:
    stderr().print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    say(f"warning: {message}", style="yellow")


def stdout() -> Console:
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def is_watched() -> bool:
    """Whether somebody looks: live displays are for terminals alone."""
    return sys.stdout.isatty() and sys.stderr.isatty()

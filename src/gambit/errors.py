"""The errors that Gambit raises on purpose: a user's mistake, a failure of the machine, a warning."""

import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


class GambitError(Exception):
    """An error that Gambit raises on purpose; its message names the offending value and the fix."""


class UserError(GambitError):
    """The input is wrong: retrying without changing it cannot help (exit code 2)."""


class EngineError(GambitError):
    """The engine, the model or the machine failed although the input was right (exit code 1)."""


class DeadEngineError(EngineError):
    """The engine has failed for good: no search can run on it any more."""


class StorageError(GambitError):
    """Results cannot be written: the disk is full, or the folder is gone (exit code 1)."""


def install_line(extra: str) -> str:
    """Returns the command that installs an extra: from a clone, unless Gambit itself came from a package index."""
    try:
        origin = distribution("gambit-search").read_text("direct_url.json")
    except PackageNotFoundError:  # a source tree on the path
        origin = "{}"
    if origin is None:
        return f"pip install 'gambit-search[{extra}]'"
    is_editable = json.loads(origin).get("dir_info", {}).get("editable", False)
    return f"pip install {'-e ' if is_editable else ''}'.[{extra}]' in a clone of Gambit"


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error, or its kind if it has no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def named(error: BaseException) -> str:
    """Returns the message of an error raised on purpose; of any other its kind, message and notes."""
    if isinstance(error, GambitError):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{text} ({notes})" if notes else text


def place_of(error: BaseException) -> str:
    """Returns the file and the line that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def reason_of(error: Exception) -> str:
    """Returns the reason of a failed system call, without its number and path; of other errors, the message."""
    return getattr(error, "strerror", None) or str(error)


class GambitWarning(UserWarning):
    """Something the user should know that stops nothing."""


class GambitNote(GambitWarning):
    """Something that is being done, which the user should know and need not mind."""


class WarnOnce:
    """Issues each warning once."""

    def __init__(self) -> None:
        self._notes: set[str] = set()

    def warn(self, notes: Iterable[str]) -> tuple[str, ...]:
        """Issues the warnings that are new, and returns them."""
        news = tuple(note for note in dict.fromkeys(notes) if note not in self._notes)
        self._notes.update(news)
        for note in news:
            warnings.warn(note, GambitWarning, stacklevel=4)
        return news


def check_host(platform: str = sys.platform) -> None:
    """Refuses Windows: file locks, grading processes and signals are those of POSIX."""
    if platform == "win32":
        raise UserError("Gambit runs on Linux and macOS; on Windows, use it inside WSL (wsl --install)")


ONE_WISH_SECONDS = 0.3  # coreutils' `timeout` signals a process, and at once again with its whole group


class StopWish:
    """Debounces repeated stop signals: a second one counts only if it comes later."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_repeated(self) -> bool:
        """Returns True if the user has asked to stop a second time; to be called at every signal."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since > ONE_WISH_SECONDS

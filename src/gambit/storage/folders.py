"""Folders: locks, Gambit's cache, and folders that vanish when nothing was put into them."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gambit.errors import GambitWarning, UserError, reason_of

LOCK_FILE = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)  # of file systems that have none


def cache_folder(*parts: str) -> Path:
    """Returns `$XDG_CACHE_HOME/gambit`, by default `~/.cache/gambit`, or a folder in it; does not make it."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache", "gambit", *parts)
    except RuntimeError as error:
        raise UserError("there is no home directory to keep a cache in: set XDG_CACHE_HOME to a folder") from error


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and its parents; at the end removes those that it made and that are empty."""
    missing: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _remove_empty(missing)
        raise refusal(folder, error) from error
    try:
        yield
    finally:
        _remove_empty(missing)


def _remove_empty(folders: list[Path]) -> None:
    for path in folders:
        with suppress(OSError, ValueError):
            path.rmdir()


def refusal(folder: Path, error: OSError | ValueError) -> UserError:
    hint = ": name another folder with --out FOLDER" if folder.parts[:1] == ("runs",) else ""
    return UserError(f"cannot write to {folder}: {reason_of(error)}{hint}")


@contextmanager
def locked(
    folder: Path, seconds: float = 0.0, fix: str = "wait until it has ended, or choose another --out"
) -> Iterator[None]:
    """Locks a folder for this process; raises if another process has it locked for so many `seconds`.

    The operating system frees the lock when the process ends, however it ends: a file that a killed process leaves
    behind is no lock. On a file system without locks the run goes on with a warning.
    """
    from filelock import FileLock, Timeout

    path = folder / LOCK_FILE
    lock = FileLock(path, timeout=seconds, fallback_to_soft=False)
    with made_folder(folder):
        try:
            lock.acquire()
        except Timeout as error:
            raise UserError(f"another run is writing to {folder}: {fix}") from error
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise refusal(folder, error) from error
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): let no second run write to it meanwhile",
                          GambitWarning, stacklevel=3)  # fmt: skip
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before the release, or it would be the next holder's
            lock.release()

"""Locks of folders: one run at a time writes into a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gambit.errors import GambitWarning, UserError
from gambit.storage.folders import made_folder, refusal

LOCK_FILE = ".lock"
_TAKEN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While entered, no other process enters for this folder: it is refused at once.

    The operating system releases the lock when a process ends, however it ends; a file that a killed one leaves behind
    is no lock. Where the file system has no locks, a warning says so and the run goes on.
    """
    path = folder / LOCK_FILE
    with made_folder(folder), _opened(path) as file:
        _lock(file, path)
        os.register_at_fork(after_in_child=file.close)  # else a forked engine that outlives us would hold it on
        try:
            yield
        finally:
            if _is_still(file, path):
                path.unlink()


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")  # network file systems lock only what is open for writing
    except OSError as error:
        raise refusal(path.parent, error) from error


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(path.parent) from error
        warnings.warn(f"{path.parent} cannot be locked ({error.strerror}): let no second run write to it meanwhile",
                      GambitWarning, stacklevel=4)  # fmt: skip
        return
    if not _is_still(file, path):  # its last holder has removed it, and the next one has another file
        raise _taken(path.parent)


def _is_still(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # its folder was taken away
        return False


def _taken(folder: Path) -> UserError:
    return UserError(f"another run is writing to {folder}: wait until it has ended, or choose another --out")

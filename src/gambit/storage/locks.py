"""File locks: one writer at a time in a folder that a run appends to."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gambit.core.errors import UserError


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold the lock of this file; `refusal` is what a user reads while another process holds it.

    The operating system releases it when the process ends, however it ends, so that the file itself may stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(refusal) from error
        yield

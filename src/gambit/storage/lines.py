"""Files of lines that are only ever appended to: synced writes, and what a kill in the middle of a line leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 16


def append_synced(file: BinaryIO, line: str) -> None:
    """Add a line and wait until it is on the disk."""
    file.write(line.encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that have their end, numbered from 1; nothing where there is no such file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line.decode()


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without its end, so that the next one does not continue it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = _end_of_last_line(file, end)
        if keep < end:
            file.truncate(keep)
            os.fsync(file.fileno())


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    while end > 0:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

"""Folders that are there only as long as something is in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gambit.core.errors import UserError


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and those it lies in; at the end, those of them that are empty go again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        yield
    finally:
        for path in missing:
            with suppress(OSError, ValueError):
                path.rmdir()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write to {folder}: {getattr(error, 'strerror', None) or error}") from error

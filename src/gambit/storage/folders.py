"""Folders that are there only as long as something is in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gambit.errors import UserError, reason_of


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and those it lies in; at the end, those of them that are empty go again."""
    missing = _missing(folder)
    try:
        _make(folder)
        yield
    finally:
        for path in missing:
            with suppress(OSError, ValueError):
                path.rmdir()


def _missing(folder: Path) -> list[Path]:
    try:
        return [path for path in (folder, *folder.parents) if not path.exists()]
    except OSError as error:  # too long a name
        raise refusal(folder, error) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise refusal(folder, error) from error


def refusal(folder: Path, error: OSError | ValueError) -> UserError:
    return UserError(f"cannot write to {folder}: {reason_of(error)}")

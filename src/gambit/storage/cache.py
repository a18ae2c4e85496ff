"""Gambit's cache folder: compiled code, benchmarks on disk, prepared weights."""

from __future__ import annotations

import os
from pathlib import Path

from gambit.errors import UserError


def cache_folder(*parts: str) -> Path:
    """`$XDG_CACHE_HOME/gambit`, by default `~/.cache/gambit`, or a folder in it; not created here."""
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given or _home() / ".cache", "gambit", *parts)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise UserError("there is no home directory to keep a cache in: set XDG_CACHE_HOME to a folder") from error

"""Where Gambit runs."""

from __future__ import annotations

import sys

from gambit.core.errors import UserError


def check_host(platform: str = sys.platform) -> None:
    """Windows is refused: file locks, grading processes and signals are those of POSIX."""
    if platform == "win32":
        raise UserError("Gambit runs on Linux and macOS; on Windows, use it inside WSL (wsl --install)")

"""Thought-level beam search for reasoning LLMs. The names that most users need; all public ones are in `gambit.api`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gambit.errors import check_host

if TYPE_CHECKING:
    from gambit.config.options import SearchConfig
    from gambit.errors import GambitError, UserError
    from gambit.results.record import replay
    from gambit.results.result import SearchResult
    from gambit.solver import Solver
    from gambit.types import Problem

    __version__: str

__all__ = ["GambitError", "Problem", "SearchConfig", "SearchResult", "Solver", "UserError", "__version__", "replay"]

_HOME = {
    "GambitError": "gambit.errors",
    "Problem": "gambit.types",
    "SearchConfig": "gambit.config.options",
    "SearchResult": "gambit.results.record",
    "Solver": "gambit.solver",
    "UserError": "gambit.errors",
    "replay": "gambit.results.record",
}


def __getattr__(name: str) -> object:
    """Imports a name at its first use, so that `gambit --help` pays for nothing that it does not use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("gambit-search")
    if name not in _HOME:
        raise AttributeError(f"module 'gambit' has no attribute {name!r}")
    check_host()
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

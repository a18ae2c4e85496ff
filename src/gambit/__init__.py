"""Thought-level beam search for reasoning LLMs. The names that most users need; all public ones are in `gambit.api`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gambit import _old_paths
from gambit.core.host import check_host

if TYPE_CHECKING:
    from gambit.config.options import SearchConfig
    from gambit.core.errors import GambitError, UserError
    from gambit.core.problem import Problem
    from gambit.results.record import SearchResult
    from gambit.results.replay import replay
    from gambit.solver import Solver

    __version__: str

__all__ = [
    "GambitError",
    "Problem",
    "SearchConfig",
    "SearchResult",
    "Solver",
    "UserError",
    "__version__",
    "replay",
]

_HOME = {
    "GambitError": "gambit.core.errors",
    "Problem": "gambit.core.problem",
    "SearchConfig": "gambit.config.options",
    "SearchResult": "gambit.results.record",
    "Solver": "gambit.solver",
    "UserError": "gambit.core.errors",
    "replay": "gambit.results.replay",
}

_old_paths.install()


def __getattr__(name: str) -> object:
    """Lazy, so that `gambit --help` pays for nothing that it does not use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("gambit-search")
    if name not in _HOME:
        raise AttributeError(f"module 'gambit' has no attribute {name!r}")
    check_host()
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

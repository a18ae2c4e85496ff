"""Shows Gambit's own warnings and hides those of libraries, which are meant for programmers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from gambit.core.errors import GambitWarning


@contextmanager
def only_gambit_warnings(show: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile each warning of Gambit's is given to `show`, and every other one is dropped."""

    def on_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, GambitWarning):
            show(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GambitWarning)
        warnings.showwarning = on_warning
        yield

"""`gambit bench --on-row`: a function of the user's that gets every row, such as for an experiment tracker."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from gambit.bench.rows import Row
from gambit.errors import GambitError, UserError

OnRow = Callable[[Row], None]


def row_callback(name: str | None) -> OnRow:
    """Returns the function MODULE:FUNCTION, whose errors end a run by name; without a name one that does nothing."""
    if name is None:
        return lambda row: None
    function = _loaded(name)

    def on_row(row: Row) -> None:
        try:
            function(row)
        except Exception as error:
            raise GambitError(f"--on-row {name} failed ({type(error).__name__}: {error}); the rows so far are kept, "
                              "and --resume goes on") from error  # fmt: skip

    return on_row


def _loaded(name: str) -> OnRow:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # a file beside the recipe, as `python -m` would find it
    try:
        found: OnRow = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--on-row {name!r} is not found ({error}): give MODULE:FUNCTION, as in tracker:log") from error
    finally:
        del sys.path[0]
    return found

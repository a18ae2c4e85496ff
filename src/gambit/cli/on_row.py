"""`gambit bench --on-row`: a function of the user's that gets every row, such as for an experiment tracker."""

from collections.abc import Callable
from typing import cast

from gambit.bench.rows import Row
from gambit.config import registry
from gambit.errors import GambitError, named

OnRow = Callable[[Row], None]


def row_callback(name: str | None) -> OnRow:
    """Returns the function MODULE:FUNCTION, whose errors end a run by name; without a name one that does nothing."""
    if name is None:
        return lambda row: None
    function = cast("OnRow", registry.imported(name, "--on-row"))

    def on_row(row: Row) -> None:
        try:
            function(row)
        except Exception as error:
            raise GambitError(f"--on-row {name} failed ({named(error)}); the rows so far are kept, "
                              "and --resume goes on") from error  # fmt: skip

    return on_row

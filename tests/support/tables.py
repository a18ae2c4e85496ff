"""Tables of examples, each tried as one test case with a sub-test for every row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Stands for `pytest.mark.parametrize` where rows are many and alike. Fixtures are shared by all rows."""
    parameters = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)

    def fold(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in {*parameters, "subtests"}]
        is_table = "subtests" in signature.parameters  # of another table, within each of these rows

        def folded(subtests: pytest.Subtests, **fixtures: object) -> None:
            for row in rows:
                values = [row] if len(parameters) == 1 else row
                given = dict(zip(parameters, values, strict=True))
                if is_table:
                    test(subtests=subtests, **fixtures, **given)
                    continue
                name = " | ".join(map(str, given.values()))[:200]
                with subtests.test(name.encode(errors="backslashreplace").decode()):
                    test(**fixtures, **given)

        shared = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        folded.__signature__ = inspect.Signature([shared, *fixtures])  # type: ignore[attr-defined]
        folded.__name__, folded.__doc__, folded.__module__ = test.__name__, test.__doc__, test.__module__
        return folded

    return fold

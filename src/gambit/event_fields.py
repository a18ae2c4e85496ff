"""Checks that the fields of an event that was read from a file are what its class says."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

MOST = 2**63 - 1  # of counts and steps
MOST_PACKED = 2**31 - 1  # tokens, which traces keep in 32 bits, and whatever else comes in arrays
SHOWN_CHARS = 40

Check = Callable[[Any], bool]


def check_fields(event: Any) -> None:
    """Raises ValueError with the first field that holds something else."""
    kind: type = type(event)
    for name, is_right in _checks(kind):
        value = getattr(event, name)
        if not is_right(value):
            shown = repr(value)
            raise ValueError(f"{name} is {shown[:SHOWN_CHARS]}{'…' if len(shown) > SHOWN_CHARS else ''}")


@cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    return tuple((name, _is_seed if name == "seed" else _check_of(hint)) for name, hint in hints.items())


def _check_of(hint: Any) -> Check:
    if hint is int:
        return lambda value: type(value) is int and 0 <= value <= MOST
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= MOST)
    if hint == tuple[int, ...]:
        return _is_packable
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _any_of([_check_of(part) for part in parts])
    if get_origin(hint) is tuple:
        return _all_are(_check_of(parts[0]))
    if hasattr(hint, "_fields"):  # a named tuple
        return _has_right_fields(hint)
    return _is_a(Mapping if get_origin(hint) is Mapping else hint)


def _is_seed(value: Any) -> bool:
    return type(value) is int and abs(value) <= MOST + 1


def _is_packable(value: Any) -> bool:
    """Asked about every token of a log, hence without a call for each."""
    return isinstance(value, tuple) and (
        not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST_PACKED)
    )


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _all_are(check: Check) -> Check:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


def _has_right_fields(kind: type) -> Check:
    checks = _checks(kind)
    return lambda value: isinstance(value, kind) and all(check(getattr(value, name)) for name, check in checks)


def _is_a(kind: type) -> Check:
    return lambda value: isinstance(value, kind)

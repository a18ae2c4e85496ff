"""Reads the object in a JSON file, or says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gambit.errors import UserError, reason_of


def read_object(path: Path, what: str, fix: str) -> dict[str, Any]:
    """`what` the file should be, and how to mend it, for whoever has another one there."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}): {fix}") from error
    except ValueError as error:
        raise UserError(f"{path} is not {what}: {reason_of(error)}; {fix}") from error
    return object_in(text, str(path), what, fix)


def object_in(text: str, where: str, what: str, fix: str) -> dict[str, Any]:
    """The same of a text, such as a line of a file."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not {what}: {error}; {fix}") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is not {what}: it must be an object, not {type(found).__name__}; {fix}")
    return found

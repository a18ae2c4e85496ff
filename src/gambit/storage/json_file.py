"""Reads the object in a JSON file, or says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gambit.core.errors import UserError, reason_of


def read_object(path: Path, what: str, fix: str) -> dict[str, Any]:
    """`what` the file should be, and how to mend it, for whoever has another one there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not {what}: {reason_of(error)}; {fix}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not {what}: it must be an object, not {type(found).__name__}; {fix}")
    return found

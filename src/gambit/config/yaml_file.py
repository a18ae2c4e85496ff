"""A YAML file of options: one mapping, in which each key stands once."""

from pathlib import Path
from typing import Any

import yaml

from gambit.errors import UserError

MERGE = "<<"


class _UniqueKeys(yaml.SafeLoader):
    """Rejects duplicate keys; YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # its name; the stubs say a dictionary
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != MERGE:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


def read_mapping(path: Path, what: str) -> dict[str, object]:
    """Returns the options in a file, not yet checked; `what` the file is, is for the error message."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {what} {path}: {_mistake(error)}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{what} {path} must be a mapping of options to values, not {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def _mistake(error: Exception) -> str:
    """Returns YAML's message without the lines that it quotes: there may be secrets in them."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())

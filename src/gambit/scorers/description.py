"""The JSON file that describes a checkpoint folder (a verifier's): how it is read, checked and written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gambit.errors import UserError


class CheckpointRecord(BaseModel):
    """What a checkpoint's JSON is made of: an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class CheckpointDescription(CheckpointRecord):
    """A whole file of it."""

    format: int


class _FormatOnly(BaseModel):
    format: int


Description = TypeVar("Description", bound=CheckpointDescription)


def read_description(path: Path, kind: type[Description], name: str, known_format: int) -> Description:
    """`name`: what `gambit scorer train --architecture` calls it."""
    try:
        content = path.read_bytes()
        found = _FormatOnly.model_validate_json(content).format
        if found != known_format:  # before its fields, which may be others
            raise UserError(f"{path}: format {found}, this version reads {known_format}: write it anew with `gambit "
                            f"scorer train --architecture {name}`")  # fmt: skip
        return kind.model_validate_json(content)
    except OSError as error:
        raise UserError(f"{path.parent} holds no {path.name}: give a folder that `gambit scorer train --architecture "
                        f"{name}` wrote") from error  # fmt: skip
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: not a {name} ({where}{': ' if where else ''}{first['msg']})") from error


def write_description(path: Path, info: CheckpointDescription) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(info.model_dump_json(indent=1) + "\n", encoding="utf-8")

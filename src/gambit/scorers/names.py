"""Reads the name of a scorer: whatever `--scorer` takes is taken by every command that is given a scorer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gambit.errors import UserError
from gambit.scorers.readers.names import ReaderName, parse_reader
from gambit.scorers.verifier.folder import is_verifier


class ScorerKind(StrEnum):
    NAME = "name"  # auto, a registered one, one of the model's own
    FILE = "file"  # a checkpoint that looks at states
    VERIFIER = "verifier"  # reads thoughts


@dataclass(frozen=True, slots=True)
class ScorerName:
    """A scorer as it was asked for."""

    text: str
    kind: ScorerKind
    path: Path | None = None  # of a file
    reader: ReaderName | None = None  # of a verifier


def parse_scorer(text: str) -> ScorerName:
    """Finds out what a name stands for; the folder of a verifier needs no prefix."""
    if not text.strip():
        raise UserError(f"scorer {text!r}: the name is empty, give auto, a file, a folder or a registered name")
    if (reader := parse_reader(text)) is not None:
        return ScorerName(text, ScorerKind.VERIFIER, reader=reader)
    if is_verifier(text):
        return ScorerName(text, ScorerKind.VERIFIER, reader=ReaderName(text, None, text))
    path = Path(text)
    if path.suffix == ".safetensors" or path.is_file():
        return ScorerName(text, ScorerKind.FILE, path)
    if path.is_dir():
        raise UserError(f"scorer {text!r}: a folder without a verifier of `gambit scorer train`; a model "
                        f"that judges steps is named prm:{text}")  # fmt: skip
    return ScorerName(text, ScorerKind.NAME)


def trained_scorer(text: str) -> str:
    """What commands for trained scorers work on: a checkpoint's path without a prefix, or a name as it is."""
    found = parse_scorer(text)
    if found.reader is None:
        return text if found.path is None else str(found.path)
    if not is_verifier(found.reader.model):
        raise UserError(f"scorer {text!r} is no folder that `gambit scorer train --architecture verifier` wrote")
    return found.reader.model


def verifier_folder(text: str) -> Path:
    """Of a verifier that `gambit scorer train` wrote, with or without its prefix."""
    if parse_scorer(text).kind is not ScorerKind.VERIFIER:
        raise UserError(
            f"{text!r} is no verifier: give a folder that `gambit scorer train --architecture verifier` wrote"
        )
    return Path(trained_scorer(text))

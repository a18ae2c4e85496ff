"""Reads the name of a scorer, which means the same in every command: a verifier, a checkpoint, or a registered name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.choice import is_checkpoint_file
from gambit.verifiers.families import FAMILIES, Family, family_of
from gambit.verifiers.lora_folder import is_verifier

PREFIX = "verifier:"
SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class VerifierName:
    """A verifier as the user named it: a folder, a hub name or the address of a server."""

    family: str | None  # None: recognised by its files
    model: str  # a folder, a hub name or an address

    @property
    def is_served(self) -> bool:
        return self.model.startswith(SCHEMES)


def parse_scorer(text: str) -> VerifierName | Path | str:
    """Returns what a name stands for: a verifier, the checkpoint of a scorer of hidden states, or a name as it is.

    Names are `auto`, registered ones and the model's own. The folder of a trained verifier needs no prefix.
    """
    if not text.strip():
        raise UserError(f"scorer {text!r}: the name is empty, give auto, a file, a folder or a registered name")
    if (verifier := parse_verifier(text)) is not None:
        return verifier
    if is_verifier(text):
        return VerifierName(None, text)
    if is_checkpoint_file(text):
        return Path(text)
    if Path(text).is_dir():
        raise UserError(f"scorer {text!r}: the folder holds no verifier of `gambit scorer train`; name a whole "
                        f"model verifier:{text}")  # fmt: skip
    return text


def parse_verifier(scorer: str) -> VerifierName | None:
    """Reads the name of a verifier; returns None for another scorer."""
    if not scorer.startswith(PREFIX):
        return None
    text = scorer.removeprefix(PREFIX)
    first, _, rest = text.partition(":")
    if first in FAMILIES and rest:
        return VerifierName(first, rest)
    if not text or (not text.startswith(SCHEMES) and ":" in text and not Path(text).exists()):
        raise UserError(f"scorer {scorer!r}: give verifier:FOLDER, verifier:NAME, verifier:FORMAT:FOLDER or "
                        f"verifier:http://HOST:PORT; formats are {', '.join(FAMILIES)}")  # fmt: skip
    return VerifierName(None, text)


def trained_scorer(text: str) -> str:
    """Returns a checkpoint's path without a prefix, or a name as it is."""
    found = parse_scorer(text)
    if not isinstance(found, VerifierName):
        return str(found)
    if not is_verifier(found.model):
        raise UserError(f"scorer {text!r} is no folder that `gambit scorer train --architecture verifier` wrote")
    return found.model


def verifier_folder(text: str) -> Path:
    """Returns the folder of a verifier that `gambit scorer train` wrote, named with or without its prefix."""
    if not isinstance(parse_scorer(text), VerifierName):
        raise UserError(
            f"{text!r} is no verifier: give a folder that `gambit scorer train --architecture verifier` wrote"
        )
    return Path(trained_scorer(text))


def model_folder(name: VerifierName) -> Path:
    """Returns the folder with a verifier's files; those of a hub name are downloaded first."""
    source = models.locate(name.model)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def family_named(name: VerifierName, folder: Path) -> Family:
    """Returns the family that the name states, else the one that the files show."""
    return FAMILIES[name.family] if name.family is not None else family_of(folder)

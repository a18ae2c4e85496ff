"""What `--scorer prm:…` names: a folder or hub name, with or without its format, or the address of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.readers.families import FAMILIES, Family, family_of

PREFIX = "prm:"
SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class ReaderName:
    """A verifier as it was asked for."""

    text: str
    family: str | None  # None: by its files
    model: str  # a folder, a hub name or an address

    @property
    def is_served(self) -> bool:
        return self.model.startswith(SCHEMES)


def parse_reader(scorer: str) -> ReaderName | None:
    """None for a scorer that is no verifier."""
    if not scorer.startswith(PREFIX):
        return None
    text = scorer.removeprefix(PREFIX)
    first, _, rest = text.partition(":")
    if first in FAMILIES and rest:
        return ReaderName(scorer, first, rest)
    if not text or (not text.startswith(SCHEMES) and ":" in text and not Path(text).exists()):
        raise UserError(f"scorer {scorer!r}: prm:FOLDER, prm:NAME, prm:FORMAT:FOLDER or prm:http://HOST:PORT is "
                        f"needed; formats are {', '.join(FAMILIES)}")  # fmt: skip
    return ReaderName(scorer, None, text)


def model_folder(name: ReaderName) -> Path:
    """The verifier's files; those of a hub name are fetched."""
    source = models.locate(name.model)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def family_named(name: ReaderName, folder: Path) -> Family:
    return FAMILIES[name.family] if name.family is not None else family_of(folder)

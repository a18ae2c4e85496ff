"""The families of verifiers: how one is recognised by its files, how it is asked, and what its head is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gambit.core.errors import UserError
from gambit.scorers.readers.formats import GeneratorTokens, PromptFormat
from gambit.scorers.readers.heads import Head, as_one_logit, read_linear


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of verifier."""

    name: str
    make_format: Callable[[Path], PromptFormat]
    read_head: Callable[[Path], Head]


def _classifier_head(folder: Path) -> Head:
    return Head((as_one_logit(read_linear(folder, "score"), str(folder)),))


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("gambit", lambda folder: GeneratorTokens(), _classifier_head),
    )
}  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no verifier, its config.json cannot be read ({error})") from error
    return found


def family_of(folder: Path) -> Family:
    """The family of a model, by its own files."""
    architectures = read_config(folder).get("architectures") or ["none"]
    if str(architectures[0]).endswith("ForSequenceClassification"):
        return FAMILIES["gambit"]
    raise UserError(f"{folder}: what format its architecture {architectures[0]} reads cannot be told: name it, "
                    f"prm:FORMAT:{folder}, where FORMAT is one of {', '.join(FAMILIES)}")  # fmt: skip

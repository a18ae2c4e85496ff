"""A stack on disk: the files of the judges that it is made of, and the lines that make one probability of theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from pydantic import Field

from gambit.config.trust import read_trust
from gambit.errors import UserError
from gambit.events import Json
from gambit.scorers.description import CheckpointDescription, CheckpointRecord, read_description, write_description

FORMAT = 2
PREFIX = "stack:"
STACK_FILE = "stack.json"
STATE_FILE, VECTORS_FILE = "state.safetensors", "vectors.safetensors"  # beside the verifier's own files
STATE, CONFIDENCE, VERIFIER = "state", "confidence", "verifier"
CLOSENESS, SUPPORT, AGREEMENT = "closeness", "support", "agreement"  # what the other traces of the problem tell
OF_OTHER_TRACES = frozenset((CLOSENESS, SUPPORT, AGREEMENT))
PARTS = (STATE, CONFIDENCE, VERIFIER, CLOSENESS, SUPPORT, AGREEMENT)
BY_NAME = (CONFIDENCE, CLOSENESS, SUPPORT, AGREEMENT)  # what needs no file
SMALLEST_CHANCE = 1e-4
AT_END = frozenset((AGREEMENT,))  # what only a complete trace has


class StackLine(CheckpointRecord):
    """The logit of ending right: a weighted sum of what the parts say."""

    weights: dict[str, float]
    offset: float

    def chances(self, features: Mapping[str, npt.NDArray[np.float64]], count: int) -> npt.NDArray[np.float64]:
        """[trace]."""
        logits = np.full(count, self.offset)
        for name, weight in self.weights.items():
            logits = logits + weight * features[name]
        found: npt.NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(logits, -60, 60)))
        return found


class StackLines(CheckpointRecord):
    """One line for traces that run and one for those that are complete, which have more to say."""

    running: StackLine
    complete: StackLine

    def at(self, share: float) -> StackLine:
        return self.complete if share >= 1 else self.running

    def chance(self, features: Mapping[str, float], *, is_complete: bool) -> float:
        """Of one trace."""
        line = self.complete if is_complete else self.running
        logit = line.offset + sum(weight * features[name] for name, weight in line.weights.items())
        return 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))


def logit_of(chance: float) -> float:
    """Within bounds: a judge that is certain must not outweigh all others."""
    inside = min(max(chance, SMALLEST_CHANCE), 1 - SMALLEST_CHANCE)
    return math.log(inside / (1 - inside))


class StackInfo(CheckpointDescription):
    """What a stack is made of."""

    format: int = FORMAT
    architecture: str = "stack"
    base_model: str
    base_model_hash: str | None
    hidden_size: int
    boundary_rule: str
    parts: tuple[str, ...]
    closeness_layer: int = -1
    closeness_position: str = "boundary"
    lines: StackLines
    without: dict[str, StackLines] = Field(default_factory=dict)  # each part left out in turn: what it adds
    training: dict[str, object] = Field(default_factory=dict)
    trust: dict[str, object] | None = None  # a `ScorerTrust`: how it ranks problems that it was not fitted to
    metrics: dict[str, object] = Field(default_factory=dict)


def parse_stack(scorer: str) -> Path | None:
    """The folder that `--scorer stack:FOLDER` names, or a stack's folder as it is; None for other scorers."""
    if scorer.startswith(PREFIX):
        folder = Path(scorer.removeprefix(PREFIX))
        read_stack(folder)
        return folder
    return Path(scorer) if is_stack(scorer) else None


def is_stack(path: str | Path) -> bool:
    return (Path(path) / STACK_FILE).is_file()


def read_stack(folder: Path) -> StackInfo:
    info = read_description(folder / STACK_FILE, StackInfo, "stack", FORMAT)
    read_trust(cast("Json", info.trust), folder / STACK_FILE)
    both = info.lines.running.weights | info.lines.complete.weights
    if unknown := sorted(both.keys() - set(info.parts)):
        raise UserError(f"{folder / STACK_FILE}: it weighs {', '.join(unknown)}, which is none of its parts "
                        f"({', '.join(info.parts)}): copy or train the stack again")  # fmt: skip
    return info


def write_stack(folder: Path, info: StackInfo) -> None:
    write_description(folder / STACK_FILE, info)

"""The scorer protocol and checkpoint metadata: hidden states of finished thoughts -> numbers; never sees a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gambit.errors import UserError
from gambit.types import Aggregation, StatePosition

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """What a scorer needs from an engine and what its numbers mean; for a learned one, its checkpoint's metadata."""

    architecture: str
    state_position: StatePosition = StatePosition.BOUNDARY
    aggregation: Aggregation = Aggregation.MEAN
    is_probability: bool = True  # False switches the hard floor off
    needs_confidence: bool = False
    # A scorer without an absolute scale: each raw score is replaced by its quantile among those of its own search.
    ranks_within_run: bool = False
    hidden_size: int | None = None  # None: any
    boundary_rule: str = "blank-line"
    layer: int = -1
    base_model: str | None = None
    base_model_hash: str | None = None


@dataclass(frozen=True, slots=True)
class ThoughtBatch:
    """Finished thoughts, one per row, on the engine's device."""

    states: torch.Tensor  # [n, hidden], after the final norm, at the scorer's state position
    confidences: torch.Tensor  # [n], mean token confidence over the thought; zeros unless the scorer needs it


class Scorer(Protocol):
    """Scores finished thoughts, each on its own."""

    @property
    def info(self) -> ScorerInfo: ...

    def to(self, device: torch.device) -> Scorer:
        """The same scorer with its weights on a device."""

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        """[n] float32 scores, higher is better; row i depends on row i alone."""


def check_fit(info: ScorerInfo, *, hidden_size: int, boundary_rule: str) -> None:
    """Refuse a scorer that was made for another model shape or another way of cutting thoughts."""
    if info.hidden_size is not None and info.hidden_size != hidden_size:
        raise UserError(
            f"the scorer expects hidden size {info.hidden_size}, the model has {hidden_size}: "
            "use a scorer trained for this model, or leave --scorer out"
        )
    if info.boundary_rule != boundary_rule:
        raise UserError(f"the scorer expects thoughts cut by {info.boundary_rule!r}, this run uses {boundary_rule!r}")
    if info.layer != -1:
        raise UserError(f"the scorer reads layer {info.layer}; engines give the last layer (-1) only")

"""The scorer protocol, and what a scorer says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.text.boundary import BLANK_LINE
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
    boundary_rule: str = BLANK_LINE  # where the thoughts end that it was made for; engines cut so
    layers: tuple[int, ...] = (-1,)  # several are concatenated
    base_model: str | None = None
    base_model_hash: str | None = None
    trust: ScorerTrust | None = None  # None: nobody judged it


@dataclass(frozen=True, slots=True)
class ThoughtBatch:
    """Finished thoughts, one per row, on the engine's device."""

    states: torch.Tensor  # [n, hidden × layers] of the scorer's layers, at its state position; the last after its norm
    confidences: torch.Tensor  # [n], mean token confidence over the thought; zeros unless the scorer needs it


class Scorer(Protocol):
    """Scores finished thoughts, each on its own.

    One that looks at states alone and never lets the host see a value may say `is_recordable = True`: vLLM's worker
    then records its kernels on a GPU and launches all of them by one call. One that is no more than two layers may say
    so too (`two_layers`): the worker then has one kernel for it.
    """

    @property
    def info(self) -> ScorerInfo:
        """Which states it reads and what its scores mean."""

    def to(self, device: torch.device) -> Scorer:
        """The same scorer with its weights on a device."""

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        """[n] float32 scores, higher is better; row i depends on row i alone."""


@dataclass(frozen=True, slots=True)
class TwoLayers:
    """W₂·relu(W₁·h + b₁) + b₂: what a scorer makes of states, or the logit of that."""

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor
    is_logit: bool


@runtime_checkable
class SplitScorer(Scorer, Protocol):
    """Scores by states and confidences together, in two steps: vLLM has the two in different places."""

    def part(self, states: torch.Tensor) -> torch.Tensor:
        """[n], what the states alone say."""

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        """[n] scores."""


@dataclass(frozen=True, slots=True)
class PastThoughts:
    """Where a history scorer finds what it remembers of n traces and where it puts what it remembers next.

    A slot belongs to one scored thought of one trace and of every branch that inherited it; it is written once.
    """

    slots: torch.Tensor  # [n, most], the thoughts before, oldest first, at most `max_past` of them
    mask: torch.Tensor  # [n, most], False where a trace has no such thought and the slot is anyone's
    positions: torch.Tensor  # [n], how many thoughts the trace had before this one
    own: torch.Tensor  # [n], the slot to fill; all different

    def split(self, size: int) -> list[PastThoughts]:
        """In parts of so many traces."""
        import torch

        columns = (torch.split(part, size) for part in (self.slots, self.mask, self.positions, self.own))
        return [PastThoughts(*parts) for parts in zip(*columns, strict=True)]


@runtime_checkable
class HistoryScorer(Scorer, Protocol):
    """Scores a finished thought by the thoughts before it, without another pass over them.

    Engines give each scored thought a slot of `memory`, share slots on a branch and free them with the last trace
    that holds them; the memory is the scorer's to lay out and the engines' to own.
    """

    @property
    def max_past(self) -> int:
        """How many thoughts before the one to be scored it reads."""

    def memory(self, num_slots: int) -> torch.Tensor:
        """Zeros on the scorer's device, the slots in dimension 2."""

    def score_next(self, thoughts: ThoughtBatch, memory: torch.Tensor, past: PastThoughts) -> torch.Tensor:
        """[n] float32 scores of the next thought of n traces; fills their own slots."""


def check_fit(info: ScorerInfo, *, hidden_size: int) -> None:
    """Refuses a scorer that was made for another model shape."""
    if info.hidden_size is not None and info.hidden_size != hidden_size:
        raise UserError(
            f"the scorer expects hidden size {info.hidden_size}, the model has {hidden_size}: "
            "use a scorer trained for this model, or leave --scorer out"
        )

"""The scorer protocols, and the facts that a scorer states about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from pydantic import ConfigDict

from gambit.config.trust import ScorerTrust
from gambit.errors import UserError
from gambit.text.boundary import BLANK_LINE
from gambit.types import Aggregation, StatePosition

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """A scorer's needs and the meaning of its numbers. For a learned scorer this is its checkpoint's metadata."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True)

    architecture: str
    state_position: StatePosition = StatePosition.BOUNDARY
    aggregation: Aggregation = Aggregation.MEAN
    is_probability: bool = True  # False switches the hard floor off
    needs_confidence: bool = False
    # A scorer without an absolute scale: each raw score is replaced by its quantile among those of its own search.
    ranks_within_run: bool = False
    hidden_size: int | None = None  # None: any
    boundary_rule: str = BLANK_LINE  # the rule that ended the thoughts it was trained on; engines use it too
    layers: tuple[int, ...] = (-1,)  # several are concatenated
    base_model: str | None = None
    base_model_hash: str | None = None  # of its weights, and of the adapter after a "+"
    trust: ScorerTrust | None = None  # None: it was never evaluated


@dataclass(frozen=True, slots=True)
class ThoughtBatch:
    """Finished thoughts, one per row, on the engine's device."""

    states: torch.Tensor  # [n, hidden × layers] of the scorer's layers, at its state position; the last after its norm
    confidences: torch.Tensor  # [n], mean token confidence over the thought; zeros unless the scorer needs it


class Scorer(Protocol):
    """Scores finished thoughts, each on its own.

    A scorer that looks at states alone and never lets the host see a value may set `is_recordable = True`: vLLM's
    worker then records its kernels on a GPU and launches all of them by one call. A scorer of no more than two layers
    may have the attribute `two_layers` too: the worker then has one kernel for it.
    """

    @property
    def info(self) -> ScorerInfo:
        """The states that it reads and the meaning of its scores."""

    def to(self, device: torch.device) -> Scorer:
        """Returns the same scorer with its weights on a device."""

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        """Returns [n] float32 scores, higher is better; row i depends on row i alone."""


def listed(scores: torch.Tensor, num_thoughts: int, info: ScorerInfo) -> list[float]:
    """Returns what a scorer gave; raises unless that is a score for each thought."""
    if (found := getattr(scores, "shape", None)) != (num_thoughts,):
        given = f"a {type(scores).__name__}" if found is None else f"scores of shape {list(found)}"
        raise UserError(f"scorer {info.architecture!r} gave {given} for {num_thoughts} thoughts: give a tensor [n]")
    return scores.tolist()


@dataclass(frozen=True, slots=True)
class TwoLayers:
    """The weights of a scorer that computes W₂·relu(W₁·h + b₁) + b₂ of states, or the sigmoid of that."""

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor
    is_logit: bool


@runtime_checkable
class SplitScorer(Scorer, Protocol):
    """Scores by states and confidences together, in two steps: vLLM has the two in different places."""

    def part(self, states: torch.Tensor) -> torch.Tensor:
        """Returns [n] numbers that depend on the states alone."""

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        """Returns [n] scores."""


@dataclass(frozen=True, slots=True)
class PastThoughts:
    """The slots of n traces' past thoughts in a history scorer's memory, and the slots of their next thoughts.

    A slot belongs to one scored thought of one trace and of every branch that inherited it. It is written once.
    """

    slots: torch.Tensor  # [n, most], the thoughts before, oldest first, at most `max_past` of them
    mask: torch.Tensor  # [n, most], False where a trace has no such thought and the slot means nothing
    positions: torch.Tensor  # [n], the number of thoughts before this one
    own: torch.Tensor  # [n], the slot to fill; all different

    def split(self, size: int) -> list[PastThoughts]:
        """Splits into batches of so many traces."""
        import torch

        columns = (torch.split(column, size) for column in (self.slots, self.mask, self.positions, self.own))
        return [PastThoughts(*rows) for rows in zip(*columns, strict=True)]


@runtime_checkable
class HistoryScorer(Scorer, Protocol):
    """Scores a finished thought by the thoughts before it, without another pass over them.

    Engines give each scored thought a slot of `memory`, share slots on a branch and free them with the last trace
    that holds them; the memory is the scorer's to lay out and the engines' to own.
    """

    @property
    def max_past(self) -> int:
        """The number of thoughts before the scored one that it reads."""

    def memory(self, num_slots: int) -> torch.Tensor:
        """Returns zeros on the scorer's device, the slots in dimension 2."""

    def score_next(self, thoughts: ThoughtBatch, memory: torch.Tensor, past: PastThoughts) -> torch.Tensor:
        """Returns [n] float32 scores of the next thought of n traces; fills their own slots."""


@dataclass(frozen=True, slots=True)
class MadeFor:
    """A model and a way of cutting thoughts: those that a scorer, verifier or collection needs, or those of a run."""

    name: str  # in messages: "the scorer", "the model"
    hidden_size: int | None = None  # None here and below: any, or not known
    boundary_rule: str | None = None
    weights: str | None = None  # their hash
    model: str | None = None  # whose weights these are


def made_for(info: ScorerInfo, name: str = "the scorer") -> MadeFor:
    """Returns the model and the rule that a scorer was trained for."""
    return MadeFor(name, info.hidden_size, info.boundary_rule, info.base_model_hash, info.base_model)


def check_fit(
    scorer: MadeFor,
    found: MadeFor,
    fix: str = "give a scorer that was trained for this model",
    *,
    needs_weights: bool = False,
) -> str | None:
    """Raises if a scorer cannot work. Returns None if it fits.

    If only the model's weights differ, it raises with `needs_weights`, else it returns a warning.
    """
    for name, needed, there in (
        ("hidden size", scorer.hidden_size, found.hidden_size),
        ("thoughts cut by", scorer.boundary_rule, found.boundary_rule),
    ):
        if None not in (needed, there) and needed != there:
            raise UserError(f"{scorer.name} expects {name} {needed}, {found.name} has {there}: {fix}")
    if not scorer.weights or not found.weights or scorer.weights == found.weights:
        return None
    of_model = f"{scorer.model} with weights" if scorer.model else "weights"
    differ = f"{scorer.name} was made for {of_model} {scorer.weights[:20]}…, {found.name} has {found.weights[:20]}…"
    if needs_weights:
        raise UserError(f"{differ}: {fix}")
    return f"{differ}: fine for a quantised variant, wrong for another model"

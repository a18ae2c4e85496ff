"""What a stack needs of an engine: its state scorer's scores, and vectors by which states of a layer are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gambit.errors import UserError
from gambit.scorers.base import HistoryScorer, Scorer, ScorerInfo, SplitScorer, ThoughtBatch
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.simple import ConfidenceScorer
from gambit.scorers.stack import CLOSENESS, CONFIDENCE, STATE, STATE_FILE, SUPPORT, VECTORS_FILE, StackInfo
from gambit.types import Aggregation, StatePosition

if TYPE_CHECKING:
    import torch

MAX_SIZE = 256  # of a vector: one leaves the device with every finished thought


@dataclass(frozen=True, slots=True)
class StateVectors:
    """States of one layer, standardised and turned into their widest directions: cosines stay nearly as they are."""

    layer: int
    position: StatePosition
    mean: torch.Tensor  # [hidden]
    deviation: torch.Tensor
    basis: torch.Tensor  # [hidden, size]

    @property
    def size(self) -> int:
        return int(self.basis.shape[1])

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """[n, size], each of length 1, of [n, hidden]."""
        import torch

        turned = ((states.float() - self.mean) / self.deviation) @ self.basis
        return torch.nn.functional.normalize(turned, dim=-1)

    def to(self, device: torch.device) -> StateVectors:
        mean, deviation, basis = (each.to(device) for each in (self.mean, self.deviation, self.basis))
        return replace(self, mean=mean, deviation=deviation, basis=basis)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {"mean": self.mean, "deviation": self.deviation, "basis": self.basis}
        save_file({name: each.contiguous() for name, each in tensors.items()}, folder / VECTORS_FILE)


def load_vectors(folder: Path, info: StackInfo) -> StateVectors | None:
    """None for a stack that compares no states."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not compares_states(info.parts):
        return None
    try:
        tensors = load_file(folder / VECTORS_FILE)
        position = StatePosition(info.closeness_position)
        return StateVectors(info.closeness_layer, position, tensors["mean"], tensors["deviation"], tensors["basis"])
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder / VECTORS_FILE}: cannot be read ({error}): copy or train the stack again") from error


def compares_states(parts: tuple[str, ...]) -> bool:
    return CLOSENESS in parts or SUPPORT in parts


@dataclass(frozen=True, slots=True)
class StackStates:
    """Scores thoughts by a stack's state scorer, 0 where it has none, and gives their vectors."""

    info: ScorerInfo
    state: Scorer | None
    vectors: StateVectors | None

    def to(self, device: torch.device) -> StackStates:
        state = None if self.state is None else self.state.to(device)
        return StackStates(self.info, state, None if self.vectors is None else self.vectors.to(device))

    def part(self, states: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            return states.new_zeros(len(states)).float()
        own = states[:, : self._width * len(self.state.info.layers)]
        if isinstance(self.state, SplitScorer):
            return self.state.part(own)
        return self.state.score(ThoughtBatch(own, own.new_zeros(len(own))))

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        return self.state.whole(parts, confidences) if isinstance(self.state, SplitScorer) else parts

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return self.whole(self.part(thoughts.states), thoughts.confidences)

    def embed(self, states: torch.Tensor, size: int) -> torch.Tensor:
        """[n, size] of [n, hidden × layers]."""
        import torch

        assert self.vectors is not None, "a search asked for vectors that its stack does not have"
        place = self.info.layers.index(self.vectors.layer)
        found = self.vectors.of(states[:, place * self._width : (place + 1) * self._width])
        # Another search on the engine may want shorter or longer ones.
        return torch.nn.functional.pad(found, (0, max(0, size - self.vectors.size)))[:, :size]

    @property
    def _width(self) -> int:
        assert self.info.hidden_size is not None
        return self.info.hidden_size


def engine_scorer(folder: Path, info: StackInfo) -> Scorer:
    """What an engine scores thoughts with on behalf of a stack."""
    state = load_checkpoint(folder / STATE_FILE) if STATE in info.parts else None
    vectors = load_vectors(folder, info)
    if state is None and vectors is None:
        return ConfidenceScorer() if CONFIDENCE in info.parts else StackStates(_info(info, None, None), None, None)
    if isinstance(state, HistoryScorer):
        return _alone(state, folder, info)
    if state is not None and vectors is not None and state.info.state_position is not vectors.position:
        raise UserError(f"{folder}: its state scorer reads states {state.info.state_position}, it compares them at "
                        f"{vectors.position}, and a search gives one of the two: train it again")  # fmt: skip
    return StackStates(_info(info, state, vectors), state, vectors)


def _alone(state: HistoryScorer, folder: Path, info: StackInfo) -> Scorer:
    """A scorer that remembers thoughts has the engine's memory to itself."""
    if CONFIDENCE in info.parts or compares_states(info.parts):
        raise UserError(f"{folder}: a search with a sequence scorer gives a stack neither confidence nor states to "
                        "compare: train the stack with an mlp, or without these parts")  # fmt: skip
    return state


def _info(info: StackInfo, state: Scorer | None, vectors: StateVectors | None) -> ScorerInfo:
    layers = () if state is None else state.info.layers
    if vectors is not None and vectors.layer not in layers:
        layers = (*layers, vectors.layer)
    needs = CONFIDENCE in info.parts or (state is not None and state.info.needs_confidence)
    position = state.info.state_position if state is not None else vectors.position if vectors is not None else None
    return ScorerInfo(
        "stack", position or StatePosition.BOUNDARY, Aggregation.LAST, is_probability=False, needs_confidence=needs,
        hidden_size=info.hidden_size if layers else None, boundary_rule=info.boundary_rule, layers=layers or (-1,),
        base_model=info.base_model, base_model_hash=info.base_model_hash,
    )  # fmt: skip

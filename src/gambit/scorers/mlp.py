"""The two-layer scorer of STEP and the authors' deeper ones, by themselves and blended with token confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gambit.scorers.base import ScorerInfo, ThoughtBatch, TwoLayers

if TYPE_CHECKING:
    import torch

Weights = tuple["torch.Tensor", ...]  # W₁, b₁, W₂, b₂ and, of deeper ones, so on
KINDS = ("weight", "bias")  # of a layer's tensors
DEEP = "deep-mlp"  # architecture of more than two layers


def tensor_names(num_layers: int) -> tuple[str, ...]:
    """Returns the names of the weights, STEP's own, in their order."""
    return tuple(f"net.{2 * place}.{kind}" for place in range(num_layers) for kind in KINDS)


TENSORS = tensor_names(2)


@dataclass(frozen=True, slots=True)
class MlpScorer:
    """sigmoid(W₂·relu(W₁·h + b₁) + b₂), in float32 for models of any dtype. On a CPU it is computed in float64.

    The authors' have further layers between the two, with ReLU between all.
    """

    info: ScorerInfo
    weights: Weights
    architecture: ClassVar[str] = "mlp"
    shape_metadata: ClassVar[dict[str, object]] = {}
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> MlpScorer:
        return MlpScorer(self.info, tuple(tensor.to(device) for tensor in self.weights))

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(tensor_names(len(self.weights) // 2), self.weights, strict=True))

    @property
    def two_layers(self) -> TwoLayers | None:
        """The weights, for engines that have one kernel for two layers; None of a deeper network."""
        if len(self.weights) > len(TENSORS):
            return None
        w1, b1, w2, b2 = self.weights
        return TwoLayers(w1, b1, w2, b2, is_logit=True)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear, relu

        # On a CPU float32 sums depend on how many rows there are. The same thought must score the same in every batch:
        # traces with the same tokens are equal, and their ids decide which of them goes, not rounding.
        dtype = torch.float64 if states.device.type == "cpu" else torch.float32
        x = states.to(dtype)
        for place, (weight, bias) in enumerate(zip(self.weights[::2], self.weights[1::2], strict=True)):
            x = linear(relu(x) if place else x, weight.to(dtype), bias.to(dtype))
        return x.squeeze(-1).float()

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return _sigmoid(self.logits(thoughts.states))


@dataclass(frozen=True, slots=True)
class BlendScorer:
    """sigmoid(W₂·relu(W₁·h + b₁) + b₂ + a·c) of a state h and the thought's token confidence c.

    It is a sum, so that an engine can compute each term where its input is: states on the device, confidences where the
    tokens of a thought are known.
    """

    info: ScorerInfo
    mlp: MlpScorer
    slope: float  # a
    architecture: ClassVar[str] = "mlp+confidence"
    slope_name: ClassVar[str] = "confidence.weight"
    shape_metadata: ClassVar[dict[str, object]] = {}
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> BlendScorer:
        return BlendScorer(self.info, self.mlp.to(device), self.slope)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**self.mlp.tensors(), self.slope_name: self.mlp.weights[0].new_tensor(self.slope)}

    @property
    def two_layers(self) -> TwoLayers:
        w1, b1, w2, b2 = self.mlp.weights
        return TwoLayers(w1, b1, w2, b2, is_logit=False)  # of `part`

    def part(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp.logits(states)

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        return _sigmoid(parts + self.slope * confidences)

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return self.whole(self.part(thoughts.states), thoughts.confidences)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Uses float64 on a CPU: in float32 a vector's last elements are computed in another way than the rest."""
    return logits.double().sigmoid().float() if logits.device.type == "cpu" else logits.sigmoid()

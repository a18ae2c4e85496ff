"""The two-layer scorer of STEP, by itself and blended with token confidence, and the authors' deeper ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gambit.scorers.base import ScorerInfo, ThoughtBatch, TwoLayers

if TYPE_CHECKING:
    import torch

Weights = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]  # W₁, b₁, W₂, b₂
TENSORS = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")  # STEP's own names
KINDS = ("weight", "bias")  # of a layer's tensors


@dataclass(frozen=True, slots=True)
class MlpScorer:
    """sigmoid(W₂·relu(W₁·h + b₁) + b₂), in float32 for models of any dtype. On a CPU it is computed in float64."""

    info: ScorerInfo
    weights: Weights
    architecture: ClassVar[str] = "mlp"
    shape_metadata: ClassVar[dict[str, object]] = {}
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> MlpScorer:
        w1, b1, w2, b2 = (tensor.to(device) for tensor in self.weights)
        return MlpScorer(self.info, (w1, b1, w2, b2))

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(TENSORS, self.weights, strict=True))

    @property
    def two_layers(self) -> TwoLayers:
        return TwoLayers(*self.weights, is_logit=True)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear, relu

        # On a CPU float32 sums depend on how many rows there are. The same thought must score the same in every batch:
        # traces with the same tokens are equal, and their ids decide which of them goes, not rounding.
        dtype = torch.float64 if states.device.type == "cpu" else torch.float32
        w1, b1, w2, b2 = (tensor.to(dtype) for tensor in self.weights)
        return linear(relu(linear(states.to(dtype), w1, b1)), w2, b2).squeeze(-1).float()

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return _sigmoid(self.logits(thoughts.states))


@dataclass(frozen=True, slots=True)
class DeepMlpScorer:
    """The authors' MLPs of more than two layers: sigmoid of the last, ReLU between them, in `MlpScorer`'s precision."""

    info: ScorerInfo
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # weight and bias of each
    architecture: ClassVar[str] = "deep-mlp"
    shape_metadata: ClassVar[dict[str, object]] = {}
    is_recordable: ClassVar[bool] = True

    def to(self, device: torch.device) -> DeepMlpScorer:
        return DeepMlpScorer(self.info, tuple((weight.to(device), bias.to(device)) for weight, bias in self.layers))

    def tensors(self) -> dict[str, torch.Tensor]:
        named = ((f"net.{2 * place}", layer) for place, layer in enumerate(self.layers))
        return {f"{name}.{what}": tensor for name, layer in named for what, tensor in zip(KINDS, layer, strict=True)}

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear, relu

        dtype = torch.float64 if thoughts.states.device.type == "cpu" else torch.float32
        x = thoughts.states.to(dtype)
        for place, (weight, bias) in enumerate(self.layers):
            x = linear(relu(x) if place else x, weight.to(dtype), bias.to(dtype))
        return _sigmoid(x.squeeze(-1).float())


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
        return TwoLayers(*self.mlp.weights, is_logit=False)  # of `part`

    def part(self, states: torch.Tensor) -> torch.Tensor:
        return self.mlp.logits(states)

    def whole(self, parts: torch.Tensor, confidences: torch.Tensor) -> torch.Tensor:
        return _sigmoid(parts + self.slope * confidences)

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return self.whole(self.part(thoughts.states), thoughts.confidences)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Uses float64 on a CPU: in float32 a vector's last elements are computed in another way than the rest."""
    return logits.double().sigmoid().float() if logits.device.type == "cpu" else logits.sigmoid()

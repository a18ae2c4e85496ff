"""The networks that are trained, and how a trained one becomes a scorer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gambit.errors import UserError
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.mlp import BlendScorer, MlpScorer
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.training.objectives import FitRecipe

MLP_WIDTH = 512
SLOPE_GAIN = 30.0  # one parameter beside a million with the same learning rate
SMALLEST_SPREAD = 1e-3  # of a feature: one that hardly varies must not be amplified
BLEND = BlendScorer.architecture
ARCHITECTURES = (MlpScorer.architecture, BLEND, "sequence")


@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and standard deviation of every input feature over the training thoughts."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, states: Tensor) -> Scaling:
        """Measures the scaling of states, chunk by chunk."""
        mean = torch.zeros(states.shape[-1], dtype=torch.float64)
        square = torch.zeros_like(mean)
        for chunk in torch.split(states, 65_536):
            exact = chunk.double().cpu()
            mean += exact.sum(0)
            square += exact.square().sum(0)
        mean, square = mean / len(states), square / len(states)
        return cls(mean.float(), (square - mean.square()).clamp(min=0).sqrt().float().clamp(min=SMALLEST_SPREAD))

    @classmethod
    def none(cls, features: int) -> Scaling:
        """Returns the scaling that changes nothing."""
        return cls(torch.zeros(features), torch.ones(features))

    def normalised(self, states: Tensor) -> Tensor:
        return (states - self.mean.to(states.device)) / self.deviation.to(states.device)


class MlpNetwork(nn.Module):
    """STEP's two layers over normalised inputs; the normalisation is folded into the first layer of the checkpoint."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.register_buffer("mean", scaling.mean)
        self.register_buffer("deviation", scaling.deviation)
        self.net = nn.Sequential(nn.Linear(len(scaling.mean), MLP_WIDTH), nn.ReLU(), nn.Linear(MLP_WIDTH, 1))

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.net((states - self.mean) / self.deviation)
        return logits.squeeze(-1)

    @torch.no_grad()
    def become_line(self, weights: Tensor, bias: float) -> None:
        """Sets the weights to a line, which two of the hidden units carry, one above and one below zero."""
        first, last = self.net[0], self.net[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        for parameter in self.net.parameters():
            parameter.zero_()
        for unit, sign in enumerate((1.0, -1.0)):
            first.weight[unit], first.bias[unit], last.weight[0, unit] = sign * weights, sign * bias, sign

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the four tensors of a checkpoint, which takes states as they come."""
        weights = {name: value.double().cpu() for name, value in self.net.state_dict().items()}
        first = weights["0.weight"] / self.deviation.double().cpu()
        bias = weights["0.bias"] - first @ self.mean.double().cpu()
        return first.float(), bias.float(), weights["2.weight"].float(), weights["2.bias"].float()


class BlendNetwork(nn.Module):
    """The same two layers and, beside them, the thought's confidence: the last feature of each thought."""

    def __init__(self, scaling: Scaling) -> None:
        super().__init__()
        self.mlp = MlpNetwork(Scaling(scaling.mean[:-1], scaling.deviation[:-1]))
        self._mean, self._deviation = float(scaling.mean[-1]), float(scaling.deviation[-1])
        self.rise = nn.Parameter(torch.zeros(()))

    @property
    def slope(self) -> Tensor:
        """Returns the slope of the confidence, in deviations; scaled up to learn faster than the layers overfit."""
        return SLOPE_GAIN * self.rise

    def forward(self, states: Tensor) -> Tensor:
        logits: Tensor = self.mlp(states[..., :-1])
        return logits + self.slope * (states[..., -1] - self._mean) / self._deviation

    @torch.no_grad()
    def become_line(self, weights: Tensor, bias: float) -> None:
        self.mlp.become_line(weights[:-1], bias)
        self.rise.fill_(float(weights[-1]) / SLOPE_GAIN)

    @torch.no_grad()
    def folded(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], float]:
        """Returns the tensors of a checkpoint and the slope, which take states and confidences as they come."""
        w1, b1, w2, b2 = self.mlp.folded()
        slope = float(self.slope) / self._deviation
        return (w1, b1, w2, b2 - slope * self._mean), slope


def build_network(architecture: str, features: int, scaling: Scaling | None, recipe: FitRecipe) -> nn.Module:
    """Makes a network.

    A sequence scorer has the recipe's sizes. It normalises each state itself, so it takes no scaling.
    """
    if architecture == "mlp":
        return MlpNetwork(scaling or Scaling.none(features))
    if architecture == BLEND:
        return BlendNetwork(scaling or Scaling.none(features))
    if architecture == "sequence":
        shape = SequenceShape(features, recipe.width, recipe.blocks, mlp_width=recipe.mlp_width)
        return SequenceNetwork(shape, recipe.dropout)
    raise UserError(f"unknown architecture {architecture!r}: use {', '.join(ARCHITECTURES)}")


def straight_network(architecture: str, scaling: Scaling, weights: Tensor, bias: float) -> nn.Module:
    """Makes a network whose logits are a line through normalised inputs."""
    network = build_network(architecture, len(scaling.mean), scaling, FitRecipe(""))
    if not isinstance(network, MlpNetwork | BlendNetwork):
        raise UserError(f"the {architecture} scorer cannot be a straight line: choose another objective than ridge")
    network.become_line(weights.cpu(), bias)
    return network


def as_scorer(network: nn.Module, info: ScorerInfo) -> Scorer:
    """Turns a trained network into what an engine takes and a checkpoint holds."""
    if isinstance(network, MlpNetwork):
        return MlpScorer(info, network.folded())
    if isinstance(network, BlendNetwork):
        weights, slope = network.folded()
        return BlendScorer(info, MlpScorer(info, weights), slope)
    assert isinstance(network, SequenceNetwork)
    return SequenceScorer(sequence_info(network.shape, info), network.cpu().eval().requires_grad_(False))

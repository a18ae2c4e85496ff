"""Losses, the settings of a fit (published ones and ours), the networks that are trained, and scorers made of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gambit.errors import UserError
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.mlp import BlendScorer, MlpScorer
from gambit.scorers.sequence import SequenceNetwork, SequenceScorer, SequenceShape, sequence_info
from gambit.training.scoring import QUARTERS
from gambit.types import Aggregation


@dataclass(frozen=True, slots=True)
class Batch:
    """Traces with the logits of their thoughts; everything beyond `num_thoughts` is padding."""

    logits: Tensor  # [trace, thought]
    num_thoughts: Tensor  # [trace], at least 1
    labels: Tensor  # [trace, thought]: the outcome of the trace, or a value
    problem: Tensor  # [trace]
    aggregation: Aggregation = Aggregation.LAST
    pos_weight: Tensor | None = None  # wrong per right, where the classes are balanced

    @property
    def is_real(self) -> Tensor:
        return torch.arange(self.logits.shape[1], device=self.logits.device) < self.num_thoughts[:, None]

    def bce(self, weights: Tensor) -> Tensor:
        """Returns the cross-entropy of every thought's probability, averaged with these weights."""
        losses = F.binary_cross_entropy_with_logits(
            self.logits, self.labels, pos_weight=self.pos_weight, reduction="none"
        )
        return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


def bce(batch: Batch) -> Tensor:
    """Returns STEP's loss, in which every thought counts the same."""
    return batch.bce(batch.is_real.float())


def last_thought_bce(batch: Batch) -> Tensor:
    """Returns the paper's loss (its equation for the sequence scorer): only the last thought has a gradient."""
    last = torch.arange(batch.logits.shape[1], device=batch.logits.device) == (batch.num_thoughts - 1)[:, None]
    return batch.bce(last.float())


def prefix(batch: Batch) -> Tensor:
    """Takes every prefix of a trace for a training example; later ones, which can know more, weigh more.

    A search looks at every thought, so a scorer must be right at every thought. Each trace weighs the same.
    """
    rising = torch.arange(1, batch.logits.shape[1] + 1, device=batch.logits.device) * batch.is_real
    return batch.bce(rising / rising.sum(-1, keepdim=True))


SHARPNESS = 20.0  # a difference of 1/20 between running means counts as clear


def pairwise(batch: Batch) -> Tensor:
    """Returns the logistic loss of right against wrong traces of a problem, after the same share of their thoughts.

    A pair counts by the difference of its labels.

    The share is drawn anew for each problem and batch. The scores compared are those that a search would compare: the
    running mean of probabilities, or the last logit, depending on the aggregation. Each problem weighs the same.
    """
    problems, problem = torch.unique(batch.problem, return_inverse=True)
    shares = torch.rand(len(problems), device=batch.logits.device)[problem]
    return pairs_at(batch, (torch.ceil(batch.num_thoughts * shares).long() - 1).clamp(min=0))


def pairs_at(batch: Batch, last: Tensor) -> Tensor:
    """Returns the pairwise loss when each trace is seen up to a thought of its own."""
    scores = batch.logits
    if batch.aggregation is Aggregation.MEAN:
        counts = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        scores = SHARPNESS * scores.sigmoid().cumsum(-1) / counts
    reached = scores.gather(1, last[:, None])[:, 0]
    labels = batch.labels.gather(1, last[:, None])[:, 0]
    is_same = batch.problem[:, None] == batch.problem
    lead = (labels[:, None] - labels).clamp(min=0) * is_same
    lead_in_problem = is_same.to(lead.dtype) @ lead.sum(1)
    weights = lead / lead_in_problem.clamp(min=1e-9)[:, None]
    loss: Tensor = (F.softplus(reached - reached[:, None]) * weights).sum() / weights.sum().clamp(min=1e-9)
    return loss


def ranking_loss(batch: Batch) -> Tensor:
    """Returns a verifier's ranking loss: the pairwise one after the same share of thoughts, once in each quarter."""
    shares = [share - torch.rand((), device=batch.logits.device) / len(QUARTERS) for share in QUARTERS]
    lasts = [(torch.ceil(batch.num_thoughts * share).long() - 1).clamp(min=0) for share in shares]
    return torch.stack([pairs_at(batch, last) for last in (*lasts[:-1], batch.num_thoughts - 1)]).mean()


def chance_loss(batch: Batch) -> Tensor:
    """Returns a verifier's cross-entropy; later thoughts, which can know more, weigh up to three times as much."""
    count = batch.num_thoughts[:, None]
    rising = 0.5 + torch.arange(1, batch.logits.shape[1] + 1, device=batch.logits.device) / count
    weights = rising * batch.is_real
    losses = F.binary_cross_entropy_with_logits(batch.logits, batch.labels, reduction="none")
    return ((losses * weights).sum(-1) / weights.sum(-1)).mean()


TERMS: Mapping[str, Callable[[Batch], Tensor]] = {
    "bce": bce,
    "last-thought-bce": last_thought_bce,
    "prefix": prefix,
    "pairwise": pairwise,
}


class Unit(StrEnum):
    """The unit that batches are made of."""

    THOUGHT = "thought"
    TRACE = "trace"
    PROBLEM = "problem"  # with all its traces: only so are there pairs


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """The settings of one fit."""

    objective: str
    unit: Unit = Unit.PROBLEM
    batch_size: int = 24
    rate: float = 1e-3
    weight_decay: float = 0.01
    is_decaying: bool = True  # the rate falls to zero over `max_epochs`
    max_epochs: int = 60
    patience: int = 12  # epochs without a better held-out ranking
    is_balanced: bool = False  # weigh right and wrong alike; probabilities are then no longer calibrated
    normalises: bool = True
    input_dropout: float = 0.1
    width: int = 256  # of the sequence scorer, as its number of blocks; the mlp keeps STEP's shape
    blocks: int = 2
    mlp_width: int | None = None  # inside a block of the sequence scorer; None: its usual one
    dropout: float = 0.0  # inside its blocks
    warmup_epochs: int | None = None  # with a number the rate rises in so many epochs, then falls as a cosine
    last_rate: float = 0.0  # of the cosine
    clip: float | None = None  # the most that a gradient's norm may be
    seed: int = 0

    def rate_at(self, update: int, epoch_updates: int) -> float:
        """Returns the learning rate of an update, counted from 0; an epoch has `epoch_updates`."""
        if not self.is_decaying:
            return self.rate
        if self.warmup_epochs is None:
            return self.rate * (1 - update / (self.max_epochs * epoch_updates))
        epoch = update // epoch_updates
        if epoch < self.warmup_epochs:
            return self.rate * (epoch + 1) / self.warmup_epochs
        share = (epoch - self.warmup_epochs) / max(self.max_epochs - self.warmup_epochs, 1)
        return self.last_rate + (self.rate - self.last_rate) * (1 + math.cos(math.pi * share)) / 2

    def loss(self, batch: Batch) -> Tensor:
        """Returns the sum of the objective's terms."""
        return torch.stack([TERMS[name](batch) for name in terms_of(self.objective)]).sum()


RIDGE = "ridge"  # has no loss to descend: it is solved, see `fit_ridge`


def terms_of(objective: str) -> list[str]:
    """Splits an objective: `prefix+pairwise` is the sum of two losses."""
    if objective == RIDGE:
        return []
    names = objective.split("+")
    for name in names:
        if name not in TERMS:
            raise UserError(f"unknown objective {name!r}: use auto, ridge, {', '.join(TERMS)}, or several joined by +")
    return names


_PUBLISHED = FitRecipe(
    "", rate=1e-4, weight_decay=1e-5, is_decaying=False, batch_size=128, max_epochs=20, patience=5, is_balanced=True,
    normalises=False, input_dropout=0.0,
)  # fmt: skip
PUBLISHED: Mapping[str, FitRecipe] = {
    "bce": dataclasses.replace(_PUBLISHED, objective="bce", unit=Unit.THOUGHT),
    # As the method's authors train their sequence scorer, with the sizes of its network.
    "last-thought-bce": FitRecipe(
        "last-thought-bce", unit=Unit.TRACE, batch_size=8, rate=1e-4, weight_decay=1e-5, max_epochs=30, patience=8,
        is_balanced=True, normalises=False, input_dropout=0.0, blocks=1, mlp_width=1024, dropout=0.1, warmup_epochs=2,
        last_rate=1e-6, clip=1.0,
    ),
}  # fmt: skip
CANDIDATES: Mapping[str, tuple[str, ...]] = {  # the first one chooses the states
    "mlp": (RIDGE, "pairwise", "bce", "bce+pairwise", "prefix+pairwise"),
    "mlp+confidence": (RIDGE, "pairwise", "bce+pairwise", "prefix+pairwise"),
    "sequence": ("pairwise", "last-thought-bce", "prefix", "prefix+pairwise"),
}
AGGREGATIONS: Mapping[str, Aggregation] = {
    "mlp": Aggregation.MEAN, "mlp+confidence": Aggregation.MEAN, "sequence": Aggregation.LAST,
}  # fmt: skip


def recipe_for(objective: str, architecture: str) -> FitRecipe:
    """Returns the published recipe for a published objective, ours for all others."""
    terms_of(objective)
    if objective in PUBLISHED:
        recipe = PUBLISHED[objective]
        # A scorer that reads histories learns nothing from single thoughts.
        is_alone = architecture == "sequence" and recipe.unit is Unit.THOUGHT
        return dataclasses.replace(recipe, unit=Unit.TRACE) if is_alone else recipe
    recipe = FitRecipe(objective)
    if architecture != "sequence":
        return recipe
    # It has far more to overfit with: on 130 puzzles it was best after a few epochs.
    return dataclasses.replace(recipe, rate=2e-4, weight_decay=0.1, input_dropout=0.3, max_epochs=40)


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
    def of(cls, states: Tensor) -> Self:
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
    def none(cls, features: int) -> Self:
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
    """Makes a network. A sequence scorer normalises each state itself, so it takes no scaling."""
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

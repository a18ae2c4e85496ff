"""A straight line through the states that sets right apart from wrong traces of one problem, solved in closed form.

Where problems are few and the signal is weak, a network has learned the problems by heart before it has found what they
share; a line has less to learn them with. It takes seconds, so that it also finds out which states to read.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gambit.scorers.base import ScorerInfo
from gambit.training.dataset import Dataset, Division
from gambit.training.fit import Fitted, Say, held_out_auc, parts_of, spread_of
from gambit.training.networks import Spread, as_scorer, straight_network
from gambit.training.objectives import AGGREGATIONS, Recipe
from gambit.training.ranking import QUARTERS, Ints
from gambit.training.scoring import SCORING_STEPS, Steps

# Of the penalty, beside how much a feature varies among the traces of a problem.
STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
SMALLEST_VARIANCE = 1e-6
NEWTON_STEPS = 25
FLATTEST = 0.05  # logits per deviation of the line: a ranking must survive whatever the calibration says


def fit_ridge(
    data: Dataset, division: Division, recipe: Recipe, info: ScorerInfo, device: torch.device, say: Say = lambda _: None
) -> Fitted:
    """The penalty is chosen by held-out ranking; the line's slope so that probabilities are calibrated."""
    began = time.monotonic()
    train, held_out = parts_of(data, division)
    steps, spread = Steps.of(data, device), spread_of(data, train)
    moments = Moments.of(steps, train, spread)
    best: Fitted | None = None
    for strength in STRENGTHS:
        weights, bias = calibrated(moments.solved(strength), steps, train, spread)
        network = straight_network(info.architecture, spread, weights, bias).to(device)
        reached = held_out_auc(network, data, held_out, steps, AGGREGATIONS[info.architecture])
        say(f"{recipe.objective}: penalty {strength:g}, held-out AUC {reached:.4f}")
        if best is None or reached > best.held_out_auc:
            chosen = dataclasses.replace(recipe, weight_decay=strength)
            best = Fitted(chosen, as_scorer(network, info), reached, 1, 1, time.monotonic() - began)
    assert best is not None
    return dataclasses.replace(best, seconds=time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class Moments:
    """How states vary among the traces of one problem, and with their outcome, over all problems."""

    covariance: Tensor  # [feature, feature]
    slant: Tensor  # [feature]: with the outcome

    @classmethod
    def of(cls, steps: Steps, traces: Ints, spread: Spread) -> Moments:
        """Of running means after each quarter of the steps, which is what a search compares."""
        mean, deviation = spread.mean.to(steps.device), spread.deviation.to(steps.device)
        covariance = torch.zeros(len(mean), len(mean), device=steps.device)
        slant, count = torch.zeros_like(mean), 0
        mine = torch.from_numpy(traces).to(steps.device)
        _, sizes = torch.unique_consecutive(steps.problem_of[mine], return_counts=True)
        for members in torch.split(mine, sizes.tolist()):
            outcome = steps.is_correct[members].float()
            rows = (_running_means(steps, members) - mean) / deviation
            rows = (rows - rows.mean(0)).flatten(0, 1)
            covariance += rows.T @ rows
            slant += rows.T @ (outcome - outcome.mean()).repeat_interleave(len(QUARTERS))
            count += len(rows)
        return cls(covariance / count, slant / count)

    def solved(self, strength: float) -> Tensor:
        """[feature] weights on normalised states."""
        exact = "cpu" if self.slant.device.type == "mps" else self.slant.device  # which has no double precision
        covariance, slant = self.covariance.to(exact).double(), self.slant.to(exact).double()
        scale = covariance.diagonal().clamp(min=SMALLEST_VARIANCE).sqrt()
        correlation = covariance / scale / scale[:, None]
        correlation.diagonal().add_(strength)
        weights: Tensor = torch.linalg.solve(correlation, slant / scale) / scale
        return weights.float().to(self.slant.device)


def _running_means(steps: Steps, traces: Tensor) -> Tensor:
    """[trace, quarter, feature]."""
    sums, counts = steps.take(traces).cumsum(1), steps.num_steps[traces]
    shares = torch.tensor(QUARTERS, dtype=torch.float64, device=counts.device)
    seen = torch.ceil(counts[:, None].to(shares.dtype) * shares - 1e-9).long().clamp(min=1)
    picked = sums.gather(1, (seen - 1)[..., None].expand(-1, -1, sums.shape[-1]))
    return picked / seen[..., None]


def calibrated(weights: Tensor, steps: Steps, train: Ints, spread: Spread) -> tuple[Tensor, float]:
    """The line's weights and bias as logits of being right: logistic regression on the line alone."""
    heights, outcomes = _heights(weights, steps, train, spread)
    deviation = heights.std().clamp(min=1e-12)
    inputs = torch.stack([heights / deviation, torch.ones_like(heights)], dim=1)
    line = torch.zeros(2, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        chance = (inputs @ line).sigmoid()
        curvature = inputs.T @ (inputs * (chance * (1 - chance))[:, None]) + 1e-9 * torch.eye(2, dtype=torch.float64)
        line = line + torch.linalg.solve(curvature, inputs.T @ (outcomes - chance))
    slope, bias = max(float(line[0]), FLATTEST), float(line[1])
    return weights * (slope / float(deviation)), bias


def _heights(weights: Tensor, steps: Steps, train: Ints, spread: Spread) -> tuple[Tensor, Tensor]:
    """Of every training step where it stands along the line, and its trace's outcome."""
    traces = torch.from_numpy(train).to(steps.device)
    rows = steps.step_rows(traces)
    mean, deviation = spread.mean.to(steps.device), spread.deviation.to(steps.device)
    parts = [
        ((steps.take_steps(part)[:, 0] - mean) / deviation) @ weights for part in torch.split(rows[:, 1], SCORING_STEPS)
    ]
    return torch.cat(parts).double().cpu(), steps.is_correct[rows[:, 0]].double().cpu()

"""Logistic regression by Newton's method."""

from __future__ import annotations

import torch
from torch import Tensor

ITERATIONS = 25
LONGEST_MOVE = 4.0  # a longer one would land where every chance is 0 or 1 and nothing leads back
SMALLEST = 1e-9  # added to the curvature, so that it can be inverted
FLATTEST = 0.05  # logits per deviation of the scores: a flat calibration must not erase the ranking


def logistic(inputs: Tensor, outcomes: Tensor, weights: Tensor | None = None, penalty: float = 0.0) -> Tensor:
    """[feature] such that sigmoid(inputs @ found) fits the outcomes; `penalty` shrinks all of them."""
    inputs, outcomes = inputs.double(), outcomes.double()
    weights = torch.ones_like(outcomes) if weights is None else weights.double()
    ridge = (SMALLEST + penalty) * torch.eye(inputs.shape[1], dtype=torch.float64)
    found = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for _ in range(ITERATIONS):
        chance = (inputs @ found).sigmoid()
        curvature = inputs.T @ (inputs * (weights * chance * (1 - chance))[:, None]) + ridge
        move = torch.linalg.solve(curvature, inputs.T @ (weights * (outcomes - chance)) - penalty * found)
        found = found + move * min(1.0, LONGEST_MOVE / max(SMALLEST, float(move.norm())))
    return found


def calibrating_line(scores: Tensor, outcomes: Tensor) -> tuple[float, float]:
    """Slope and offset: sigmoid(slope × score + offset) is how often a score ends right. The slope is positive."""
    scores = scores.double()
    mean, deviation = float(scores.mean()), max(float(scores.std()), 1e-12)
    inputs = torch.stack([(scores - mean) / deviation, torch.ones_like(scores)], dim=1)
    steepness, middle = logistic(inputs, outcomes).tolist()
    slope = max(steepness, FLATTEST) / deviation
    return slope, middle - slope * mean

"""Logistic regression by Newton's method."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 25
SMALLEST = 1e-9  # added to the curvature, so that it can be inverted


def logistic(inputs: Tensor, outcomes: Tensor, weights: Tensor | None = None, penalty: float = 0.0) -> Tensor:
    """[feature] such that sigmoid(inputs @ found) fits the outcomes; `penalty` shrinks all of them."""
    inputs, outcomes = inputs.double(), outcomes.double()
    weights = torch.ones_like(outcomes) if weights is None else weights.double()
    ridge = (SMALLEST + penalty) * torch.eye(inputs.shape[1], dtype=torch.float64)
    found = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for _ in range(STEPS):
        chance = (inputs @ found).sigmoid()
        curvature = inputs.T @ (inputs * (weights * chance * (1 - chance))[:, None]) + ridge
        slope = inputs.T @ (weights * (outcomes - chance)) - penalty * found
        found = found + torch.linalg.solve(curvature, slope).clamp(-2, 2)
    return found

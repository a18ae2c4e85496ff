"""Ridge regression within problems, in closed form: a linear scorer of hidden states.

With few problems and a weak signal a network overfits to the problems before it finds what they share; a linear scorer
has fewer parameters to do so. A fit takes seconds, so that it also serves to choose state position and layers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gambit.errors import UserError
from gambit.scorers.base import ScorerInfo
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset, Division, in_groups
from gambit.training.fit import Fitted, Say, parts_of, problem_aucs, scaling_of
from gambit.training.networks import Scaling, as_scorer, straight_network
from gambit.training.objectives import AGGREGATIONS, FitRecipe
from gambit.training.ranking import QUARTERS, last_thoughts
from gambit.training.scoring import SCORING_THOUGHTS, Thoughts, calibrating_line

# The penalty as a multiple of a feature's variance among the traces of a problem.
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
NUM_FOLDS = 5
SMALLEST_VARIANCE = 1e-6
BATCH_ROWS = 2_048  # a product of few rows spends its time on reading and writing a matrix of all features


def fit_ridge(
    data: Dataset,
    division: Division,
    recipe: FitRecipe,
    info: ScorerInfo,
    device: torch.device,
    say: Say = lambda _: None,
) -> Fitted:
    """Fits a line, with a penalty that is chosen by cross-validation, since held-out problems are few.

    Once the line has been evaluated by them, it is solved again with them: more problems are what it gains most by.
    """
    began = time.monotonic()
    train, held_out = parts_of(data, division)
    thoughts, scaling = Thoughts.of(data, device), scaling_of(data, train)

    def aucs(others: Moments, strength: float, traces: Ints) -> Floats:
        """Returns [problem], the AUCs of a line that other problems gave, ranked as the fits that descend are."""
        weights = others.solved(strength)
        network = straight_network(info.architecture, scaling, weights / others.deviation(weights), 0.0).to(device)
        return problem_aucs(network, data, traces, thoughts, AGGREGATIONS[info.architecture])

    folds = _folds(train, data.traces.problem_of[train])
    moments = [Moments.of(thoughts, fold, scaling) for fold in folds]
    whole = Moments.sum(moments)
    reached = {}
    for strength in STRENGTHS:
        found = [aucs(whole - mine, strength, fold) for mine, fold in zip(moments, folds, strict=True)]
        reached[strength] = float(np.nanmean(np.concatenate(found)))
        say(f"{recipe.objective}: penalty {strength:g}, cross-validated AUC {reached[strength]:.4f}")
    strength = max(reached, key=reached.__getitem__)
    on_held_out = aucs(whole, strength, held_out)
    seen = held_out[data.traces.num_thoughts[held_out] > 0]
    line = Moments.sum([whole, Moments.of(thoughts, seen, scaling)]).solved(strength)
    weights, bias = calibrated(line, thoughts, np.concatenate([train, seen]), scaling)
    scorer = as_scorer(straight_network(info.architecture, scaling, weights, bias), info)
    chosen = dataclasses.replace(recipe, weight_decay=strength)
    return Fitted(data, chosen, scorer, on_held_out, 1, 1, time.monotonic() - began)


def _folds(traces: Ints, problem_of: Ints) -> list[Ints]:
    problems, number = np.unique(problem_of, return_inverse=True)
    if len(problems) < 2:
        raise UserError("one problem alone cannot be cross-validated: collect more, or choose another objective")
    return [traces[number % NUM_FOLDS == fold] for fold in range(min(NUM_FOLDS, len(problems)))]


@dataclass(frozen=True, slots=True)
class Moments:
    """Covariances of states within problems, with each other and with the outcome, summed over problems."""

    covariance: Tensor  # [feature, feature], summed over `count` rows
    slant: Tensor  # [feature]: with the outcome
    count: int

    @classmethod
    def of(cls, thoughts: Thoughts, traces: Ints, scaling: Scaling) -> Moments:
        """Sums over running means after each quarter of the thoughts, which is what a search compares."""
        slant, count = torch.zeros_like(scaling.mean, device=thoughts.device), 0
        covariance = slant.new_zeros(len(slant), len(slant))
        for group in in_groups(_centred(thoughts, traces, scaling), lambda each: len(each[1]), BATCH_ROWS):
            rows, labels = (torch.cat(column) for column in zip(*group, strict=True))
            covariance += rows.T @ rows
            slant += rows.T @ labels
            count += len(rows)
        return cls(covariance, slant, count)

    @classmethod
    def sum(cls, terms: Sequence[Moments]) -> Moments:
        covariance = torch.stack([term.covariance for term in terms]).sum(0)
        return cls(covariance, torch.stack([term.slant for term in terms]).sum(0), sum(term.count for term in terms))

    def __sub__(self, other: Moments) -> Moments:
        """Returns the moments of the problems that are not in the other."""
        return Moments(self.covariance - other.covariance, self.slant - other.slant, self.count - other.count)

    def deviation(self, weights: Tensor) -> Tensor:
        """Returns the standard deviation, within problems, of the scores by these weights."""
        return (weights @ self.covariance @ weights / self.count).clamp(min=1e-12).sqrt()

    def solved(self, strength: float) -> Tensor:
        """Returns [feature], the weights on normalised states."""
        exact = "cpu" if self.slant.device.type == "mps" else self.slant.device  # which has no double precision
        covariance, slant = (each.to(exact).double() / self.count for each in (self.covariance, self.slant))
        scale = covariance.diagonal().clamp(min=SMALLEST_VARIANCE).sqrt()
        correlation = covariance / scale / scale[:, None]
        correlation.diagonal().add_(strength)
        factor = torch.linalg.cholesky(correlation)  # half the work of a general solver
        weights = torch.cholesky_solve((slant / scale)[:, None], factor)[:, 0] / scale
        return weights.float().to(self.slant.device)


def _centred(thoughts: Thoughts, traces: Ints, scaling: Scaling) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields [row, feature] and [row] labels of each problem, less their means over its traces."""
    mine = torch.from_numpy(traces).to(thoughts.device)
    _, sizes = torch.unique_consecutive(thoughts.problem_of[mine], return_counts=True)
    for members in torch.split(mine, sizes.tolist()):
        counts = thoughts.num_thoughts[members].cpu().numpy()
        seen = np.stack([last_thoughts(counts, share) for share in QUARTERS], axis=1)
        last = torch.from_numpy(seen).to(thoughts.device)  # [trace, quarter]
        labels = thoughts.labels[thoughts.starts[members, None] + last]
        sums = thoughts.take(members).cumsum(1)
        means = sums.gather(1, last[..., None].expand(-1, -1, sums.shape[-1])) / (last[..., None] + 1)
        rows = scaling.normalised(means)
        yield (rows - rows.mean(0)).flatten(0, 1), (labels - labels.mean(0)).flatten()


def calibrated(weights: Tensor, thoughts: Thoughts, train: Ints, scaling: Scaling) -> tuple[Tensor, float]:
    """Returns the line's weights and bias as logits of being right, by logistic regression on the line alone."""
    places = thoughts.thought_rows(torch.from_numpy(train).to(thoughts.device))[:, 1]
    chunks = torch.split(places, SCORING_THOUGHTS)
    heights = torch.cat([scaling.normalised(thoughts.take_thoughts(each)[:, 0]) @ weights for each in chunks])
    slope, bias = calibrating_line(heights.cpu(), thoughts.labels[places].cpu())
    return weights * slope, bias

"""How well scores rank the traces of a problem: AUC per problem, pairs won, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gambit.types import Aggregation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CURVE = tuple(round(0.1 * i, 1) for i in range(1, 11))  # the paper's figure
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # their mean is the one number a scorer is chosen by
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of each problem: how many pairs of a right and a wrong trace it has, and how many the right one wins."""

    wins: Floats  # [problem], a tie is half a win
    num_pairs: Floats

    @property
    def auc(self) -> Floats:
        """[problem]; not a number where a problem has no pair."""
        with np.errstate(invalid="ignore"):
            return self.wins / self.num_pairs


def last_steps(num_steps: Ints, fraction: float) -> Ints:
    """Index of the last step seen when a share of the steps is seen; -1 for a trace without any."""
    seen = np.ceil(num_steps * fraction - 1e-9).astype(np.int64)
    last: Ints = np.minimum(np.maximum(seen, 1), num_steps) - 1
    return last


def trace_scores(
    step_scores: Floats, starts: Ints, num_steps: Ints, fraction: float, aggregation: Aggregation
) -> Floats:
    """The score of each trace after a share of its steps; a trace without a step counts as 0, as in a search."""
    last = last_steps(num_steps, fraction)
    has_step = last >= 0
    place = np.where(has_step, starts + last, 0)
    if len(step_scores) == 0:
        return np.zeros(len(num_steps))
    if aggregation is Aggregation.LAST:
        found = step_scores[place]
    else:
        sums = np.concatenate([[0.0], np.cumsum(step_scores, dtype=np.float64)])
        found = (sums[place + 1] - sums[np.where(has_step, starts, 0)]) / (last + 1).clip(min=1)
    return np.where(has_step, found, 0.0)


def pairs(scores: Floats, is_correct: Bools, problem_of: Ints, num_problems: int) -> Pairs:
    """Every right trace against every wrong one of the same problem."""
    wins, counts = np.zeros(num_problems), np.zeros(num_problems)
    order = np.argsort(problem_of, kind="stable")
    bounds = np.searchsorted(problem_of[order], np.arange(num_problems + 1))
    for problem in range(num_problems):
        members = order[bounds[problem] : bounds[problem + 1]]
        right, wrong = scores[members[is_correct[members]]], scores[members[~is_correct[members]]]
        gaps = right[:, None] - wrong[None, :]
        counts[problem] = gaps.size
        wins[problem] = (gaps > 0).sum() + 0.5 * (gaps == 0).sum()
    return Pairs(wins, counts)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its 95 % interval; one problem has none, and its bounds are no numbers."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        return self.low < self.high

    def __str__(self) -> str:
        interval = f" ({self.low:.3f}–{self.high:.3f})" if self.has_interval else ""
        return f"{self.value:.3f}{interval}"


def mean_estimate(values: Floats) -> Estimate:
    """The mean over the problems that have a value."""
    return ratio_estimate(np.nan_to_num(values), np.isfinite(values).astype(np.float64))


def ratio_estimate(parts: Floats, wholes: Floats) -> Estimate:
    """Σ parts / Σ wholes, resampled over problems."""
    if wholes.sum() == 0:
        return Estimate(math.nan, math.nan, math.nan)
    value = float(parts.sum() / wholes.sum())
    if np.count_nonzero(wholes) == 1:
        return Estimate(value, math.nan, math.nan)
    counts = _resampled(len(parts))
    with np.errstate(invalid="ignore"):
        found = (counts @ parts) / (counts @ wholes)
    low, high = np.nanquantile(found, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


@lru_cache(maxsize=4)
def _resampled(num_problems: int) -> Floats:
    """[resample, problem]: how often each problem was drawn. The same for every measure, so that they are paired."""
    rng = np.random.default_rng(0)
    draws = rng.multinomial(num_problems, np.full(num_problems, 1 / num_problems), size=RESAMPLES)
    return draws.astype(np.float64)


def mean_auc(per_fraction: Sequence[Pairs]) -> Floats:
    """[problem]: the mean AUC over shares of the steps."""
    found: Floats = np.mean([found.auc for found in per_fraction], axis=0)
    return found

"""Statistics, once for all: bootstrap intervals over problems, exact paired tests, AUC, log-odds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NUM_RESAMPLES = 10_000
LEVEL = 0.95
SIGNIFICANT = 0.05
FEWEST_PROBLEMS = 20  # bootstrap intervals of fewer are too narrow
LEAST_CHANCE = 1e-6  # chances nearer to 0 or 1 count as this: what lies beyond is rounding
LARGEST_LOGIT = 60.0  # whose chance is 1 within rounding, and whose exponential is still finite


# -- intervals -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bootstrap interval. The bounds are NaN where nothing could be resampled."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        interval = f" ({self.low:.3f}–{self.high:.3f})" if self.low < self.high else ""
        return f"{self.value:.3f}{interval}"


@lru_cache(maxsize=4)
def resamples(num_problems: int) -> Floats:
    """Returns [resample, problem], how often each problem is drawn. All measures share them, so they are paired."""
    drawn = np.random.default_rng(0).integers(0, num_problems, (NUM_RESAMPLES, num_problems))
    drawn += num_problems * np.arange(NUM_RESAMPLES)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
    return counts.astype(np.float64)


def mean_interval(values: Floats, draws: Floats) -> Interval:
    """Returns the mean over problems."""
    return _interval(float(values.mean()), _means(values, draws))


def share_interval(values: Floats, draws: Floats) -> Interval:
    """Returns the mean of shares. Where all are 0 or all are 1, its bound is the exact binomial one."""
    found = mean_interval(values, draws)
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / len(values))
    if found.low == found.high == 1:
        return Interval(1.0, 1 - unseen, 1.0)
    return Interval(0.0, 0.0, unseen) if found.low == found.high == 0 else found


def ratio_interval(above: Floats, below: Floats, draws: Floats) -> Interval | None:
    """Returns the ratio of two means over the same problems; None where the denominator is 0."""
    if below.sum() == 0:
        return None
    bottoms = _means(below, draws)
    ratios = _means(above, draws)[bottoms > 0] / bottoms[bottoms > 0]
    return _interval(float(above.sum() / below.sum()), ratios)


def stratified_mean_interval(groups: Sequence[tuple[Floats, Floats]]) -> Interval:
    """Returns the mean over benchmarks of their means. Each benchmark counts alike and is resampled by itself."""
    value = float(np.mean([values.mean() for values, _ in groups]))
    return _interval(value, np.mean(_group_means(groups), axis=0))


def pooled_mean_interval(groups: Sequence[tuple[Floats, Floats]]) -> Interval:
    """Returns the mean over the problems of all benchmarks, each of which is resampled by itself."""
    value = float(np.concatenate([values for values, _ in groups]).mean())
    sizes = [len(values) for values, _ in groups]
    return _interval(value, np.average(_group_means(groups), axis=0, weights=sizes))


def _group_means(groups: Sequence[tuple[Floats, Floats]]) -> list[Floats]:
    """Returns each group's mean in each resample. Groups of one size share draws, so they are put out of step."""
    return [np.roll(_means(values, draws), number) for number, (values, draws) in enumerate(groups)]


def _means(values: Floats, draws: Floats) -> Floats:
    means: Floats = draws @ values / len(values)
    return means


def _interval(value: float, spread: Floats) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(spread, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def supports_claim(low: float, high: float, num_problems: int, *, no_difference: float = 0.0) -> bool:
    """Returns True where an interval shows a difference: over enough problems, and without `no_difference`.

    An interval of width 0 comes from problems that all agree, which resampling cannot doubt: it shows nothing.
    """
    return num_problems >= FEWEST_PROBLEMS and low < high and not low <= no_difference <= high


# -- tests -----------------------------------------------------------------------------------------------------


def sign_flip_p(differences: Sequence[Fraction]) -> float:
    """Returns the exact two-sided p of a paired permutation test: is the sum so far from 0 under random signs?

    With one seed a difference is -1, 0 or 1, and this is the exact McNemar test.
    """
    scale = math.lcm(*(difference.denominator for difference in differences)) if differences else 1
    steps = [abs(int(difference * scale)) for difference in differences if difference]
    observed = abs(int(sum(differences, Fraction(0)) * scale))
    ways = np.ones(1)  # probabilities of the sums -total … total, in steps of 1
    for step in steps:
        wider = np.zeros(len(ways) + 2 * step)
        wider[: len(ways)] += 0.5 * ways
        wider[2 * step :] += 0.5 * ways
        ways = wider
    total = sum(steps)
    sums = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, ways[sums >= observed].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for how many there are (Holm's step-down), in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - place)))
        corrected[index] = largest
    return corrected


# -- ranking ---------------------------------------------------------------------------------------------------


def pairs_won(scores: Floats, right: Floats, wrong: Floats) -> tuple[float, float]:
    """Returns how many pairs of a right and a wrong outcome the scores order rightly, and the number of all pairs.

    All arguments are [item] or [ranking, item]: a score, and how many of the item's outcomes were right and wrong. A
    tie is half a pair won. Two outcomes of one item are no pair.
    """
    ahead = np.sign(scores[..., :, None] - scores[..., None, :]) / 2 + 0.5
    pairs = right[..., :, None] * wrong[..., None, :] * ~np.eye(scores.shape[-1], dtype=bool)
    return float((ahead * pairs).sum()), float(pairs.sum())


# -- chances ---------------------------------------------------------------------------------------------------


def log_odds(chance: float) -> float:
    kept = min(max(chance, LEAST_CHANCE), 1 - LEAST_CHANCE)
    return math.log(kept / (1 - kept))


def all_log_odds(chances: Floats) -> Floats:
    kept = np.clip(chances, LEAST_CHANCE, 1 - LEAST_CHANCE)
    found: Floats = np.log(kept / (1 - kept))
    return found


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-max(-LARGEST_LOGIT, min(LARGEST_LOGIT, logit))))


def all_sigmoids(logits: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT)))
    return found


def drawn(weights: Floats, num: int, offset: float) -> list[int]:
    """Returns how often each is drawn, `num` times in all: systematic resampling, at `offset` of each N-th."""
    places = np.searchsorted(np.cumsum(weights), (np.arange(num) + offset) / num, side="right")
    # The weights' sum may fall short of 1 in its last digit.
    return [int(count) for count in np.bincount(np.minimum(places, len(weights) - 1), minlength=len(weights))]

"""Measures how well scores rank the traces of a problem: AUC per problem, pairs won, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gambit.stats import Bools, Floats, Interval, Ints, mean_interval, pairs_won, ratio_interval, resamples
from gambit.types import Aggregation

if TYPE_CHECKING:
    from gambit.training.dataset import Dataset, Traces

CURVE = tuple(round(0.1 * i, 1) for i in range(1, 11))  # the paper's figure
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # their mean is the one number a scorer is chosen by


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a right and a wrong trace that each problem has, and how many of them the right one wins."""

    wins: Floats  # [problem], a tie is half a win
    num_pairs: Floats

    @property
    def auc(self) -> Floats:
        """Returns [problem]; not a number where a problem has no pair."""
        with np.errstate(invalid="ignore"):
            return self.wins / self.num_pairs


def last_thoughts(num_thoughts: Ints, fraction: float) -> Ints:
    """Returns the index of the last thought when a share of the thoughts is seen; -1 for a trace without any."""
    seen = np.ceil(num_thoughts * fraction - 1e-9).astype(np.int64)
    last: Ints = np.minimum(np.maximum(seen, 1), num_thoughts) - 1
    return last


def trace_scores(
    thought_scores: Floats, starts: Ints, num_thoughts: Ints, fraction: float, aggregation: Aggregation
) -> Floats:
    """Returns each trace's score after a share of its thoughts; a trace without any counts as 0, as in a search."""
    last = last_thoughts(num_thoughts, fraction)
    has_thought = last >= 0
    place = np.where(has_thought, starts + last, 0)
    if len(thought_scores) == 0:
        return np.zeros(len(num_thoughts))
    if aggregation is Aggregation.LAST:
        found = thought_scores[place]
    else:
        sums = np.concatenate([[0.0], np.cumsum(thought_scores, dtype=np.float64)])
        found = (sums[place + 1] - sums[np.where(has_thought, starts, 0)]) / (last + 1).clip(min=1)
    return np.where(has_thought, found, 0.0)


def scores_after(
    share: float, traces: Traces, chosen: Ints, thought_scores: Floats, aggregation: Aggregation
) -> Floats:
    """Returns the score of each chosen trace after a share of its thoughts."""
    return trace_scores(thought_scores, traces.starts[chosen], traces.num_thoughts[chosen], share, aggregation)


def pairs(scores: Floats, is_correct: Bools, problem_of: Ints, num_problems: int) -> Pairs:
    """Compares every right trace with every wrong one of the same problem."""
    found = np.zeros((2, num_problems))
    order = np.argsort(problem_of, kind="stable")
    bounds = np.searchsorted(problem_of[order], np.arange(num_problems + 1))
    for problem in range(num_problems):
        members = order[bounds[problem] : bounds[problem + 1]]
        right = is_correct[members].astype(np.float64)
        found[:, problem] = pairs_won(scores[members], right, 1 - right)
    return Pairs(*found)


def pairs_in(data: Dataset, traces: Ints, scores: Floats) -> Pairs:
    """Compares right and wrong traces of each problem of a dataset, by a score of each of these traces."""
    known = data.traces
    return pairs(scores, known.is_correct[traces], known.problem_of[traces], len(data.problems))


def mean_over_problems(values: Floats) -> Interval:
    """Returns the mean over the problems that have a value. One problem alone has no interval."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return Interval(float(known.mean()) if len(known) else math.nan, math.nan, math.nan)
    return mean_interval(known, resamples(len(known)))


def share_of_pairs(found: Pairs) -> Interval:
    """Returns the share of all pairs that the right trace wins. One problem alone has no interval."""
    has_pairs = found.num_pairs > 0
    wins, num_pairs = found.wins[has_pairs], found.num_pairs[has_pairs]
    interval = ratio_interval(wins, num_pairs, resamples(len(wins))) if len(wins) > 1 else None
    if interval is not None:
        return interval
    return Interval(float(wins[0] / num_pairs[0]) if len(wins) else math.nan, math.nan, math.nan)


def mean_auc(per_fraction: Sequence[Pairs]) -> Floats:
    """Returns [problem], the mean AUC over shares of the thoughts."""
    found: Floats = np.mean([found.auc for found in per_fraction], axis=0)
    return found


def clearly_better(aucs: Floats, others: Floats) -> bool:
    """Returns whether AUCs of the same problems are higher by more than the standard error of the difference.

    Less is often luck.
    """
    gains = aucs - others
    gains = gains[np.isfinite(gains)]
    error = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return bool(gains.mean() > error)

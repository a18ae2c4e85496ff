"""Statistics of a comparison: bootstrap intervals over problems, exact paired tests, Holm's correction."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from gambit.bench.rows import Row

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Measure = Callable[[Row], float]

NUM_RESAMPLES = 10_000
LEVEL = 0.95
SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def resamples(num_problems: int) -> Indices:
    """Which problems each resample draws; shared by all variants, so that differences are paired."""
    return np.random.default_rng(0).integers(0, num_problems, (NUM_RESAMPLES, num_problems))


def mean_interval(values: Floats, draws: Indices) -> Interval:
    """Interval of the mean over problems."""
    return _interval(float(values.mean()), _means(values, draws))


def share_interval(values: Floats, draws: Indices) -> Interval:
    """Interval of a mean of shares; where all are 0 or all are 1, the exact binomial bound."""
    found = mean_interval(values, draws)
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / len(values))
    if found.low == found.high == 1:
        return Interval(1.0, 1 - unseen, 1.0)
    return Interval(0.0, 0.0, unseen) if found.low == found.high == 0 else found


def ratio_interval(above: Floats, below: Floats, draws: Indices) -> Interval | None:
    """Interval of a ratio of two means over the same problems; None where the denominator is 0."""
    if below.sum() == 0:
        return None
    bottoms = _means(below, draws)
    ratios = _means(above, draws)[bottoms > 0] / bottoms[bottoms > 0]
    return _interval(float(above.sum() / below.sum()), ratios)


def stratified_mean_interval(groups: Sequence[tuple[Floats, Indices]]) -> Interval:
    """Interval of the mean over benchmarks of their means; each benchmark counts alike and is resampled by itself."""
    value = float(np.mean([values.mean() for values, _ in groups]))
    return _interval(value, np.mean(_group_means(groups), axis=0))


def pooled_mean_interval(groups: Sequence[tuple[Floats, Indices]]) -> Interval:
    """The same where each problem of all benchmarks counts alike."""
    value = float(np.concatenate([values for values, _ in groups]).mean())
    sizes = [len(values) for values, _ in groups]
    return _interval(value, np.average(_group_means(groups), axis=0, weights=sizes))


def _group_means(groups: Sequence[tuple[Floats, Indices]]) -> list[Floats]:
    """Of each resample. Benchmarks of one size have the same draws, which are put out of step to be independent."""
    return [np.roll(_means(values, draws), number) for number, (values, draws) in enumerate(groups)]


def _means(values: Floats, draws: Indices) -> Floats:
    means: Floats = np.empty(len(draws))
    step = max(1, 4_000_000 // max(1, draws.shape[1]))  # a bounded piece at a time
    for start in range(0, len(draws), step):
        means[start : start + step] = values[draws[start : start + step]].mean(axis=1)
    return means


def _interval(value: float, spread: Floats) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(spread, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def sign_flip_p(differences: Sequence[Fraction]) -> float:
    """Exact two-sided p of a paired permutation test: could the sum be so far from 0 if every sign were a coin?

    With one seed a difference is -1, 0 or 1 and this is the exact McNemar test.
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
    """p-values corrected for how many there are (Holm's step-down), in their order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = largest
    return corrected


def union_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans of time: what a clock on the wall shows for searches that ran side by side."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# -- rows by problem -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProblemTable:
    """The rows of one benchmark by variant and problem: of problems, and with seeds, that all variants have."""

    problems: tuple[str, ...]
    rows: Mapping[tuple[str, str], list[Row]]
    draws: Indices
    num_left_out: int

    @classmethod
    def of(cls, rows: Sequence[Row], variants: Sequence[str]) -> ProblemTable:
        """A run that was cut short compares what it has: each problem with the seeds that every variant has done."""
        searched = Counter((row.problem, row.seed) for row in rows)
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.seed):
            if searched[row.problem, row.seed] == len(variants):
                found[row.variant, row.problem].append(row)
        whole = sorted({problem for _, problem in found})
        draws = resamples(len(whole)) if whole else np.zeros((0, 0), dtype=np.int64)
        return cls(tuple(whole), found, draws, len({row.problem for row in rows}) - len(whole))

    def turns(self) -> list[Indices]:
        """Blocks of problems, by index, that ran side by side with every method: their seconds are not independent.

        The order of methods changes from block to block, so that one may go through two blocks without a break; the
        others tell them apart.
        """
        goes: dict[str, list[int]] = defaultdict(list)
        for number, names in enumerate(self._searched_in_one_go()):
            for name in names:
                goes[name].append(number)
        blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, name in enumerate(self.problems):
            blocks[tuple(goes[name])].append(place)
        return [np.array(block) for block in blocks.values()]

    def _searched_in_one_go(self) -> Iterator[list[str]]:
        whole = set(self.problems)
        rows = [row for (_, name), found in self.rows.items() if name in whole for row in found]
        rows.sort(key=lambda row: (row.shard, row.engine, row.began))
        for _, turn in itertools.groupby(rows, key=lambda row: (row.shard, row.engine, row.variant)):
            yield [row.problem for row in turn]

    def of_variant(self, variant: str) -> list[Row]:
        return [row for name in self.problems for row in self.rows[variant, name]]

    def means(self, variant: str, measure: Measure) -> Floats:
        """Per problem, seeds averaged; not a number where all its searches failed."""
        return np.array([mean_of(measure(row) for row in self.rows[variant, name]) for name in self.problems])

    def costs(self, variant: str, measure: Measure) -> Floats:
        """As `means`, over searches that did not fail."""
        good = [[row for row in self.rows[variant, name] if row.error is None] for name in self.problems]
        return np.array([mean_of(map(measure, rows)) for rows in good])

    def known(self, *columns: Floats) -> tuple[list[Floats], Indices]:
        """Columns of numbers per problem without the problems that lack one, and how to resample the others."""
        are_known = ~np.isnan(columns).any(axis=0)
        draws = self.draws if are_known.all() else resamples(int(are_known.sum()))
        return [column[are_known] for column in columns], draws


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")

"""The rows of a benchmark by variant and problem, as its statistics take them."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.bench.rows import Row
from gambit.stats import Floats, Ints, resamples

Measure = Callable[[Row], float]


def union_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of spans of time: what a clock on the wall shows for searches that ran side by side."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True, slots=True)
class ProblemTable:
    """The rows of one benchmark by variant and problem: of problems, and with seeds, that all variants have."""

    problems: tuple[str, ...]
    rows: Mapping[tuple[str, str], list[Row]]
    draws: Floats
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
        draws = resamples(len(whole)) if whole else np.zeros((0, 0))
        return cls(tuple(whole), found, draws, len({row.problem for row in rows}) - len(whole))

    def turns(self) -> list[Ints]:
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

    def known(self, *columns: Floats) -> tuple[list[Floats], Floats]:
        """Columns of numbers per problem without the problems that lack one, and how to resample the others."""
        are_known = ~np.isnan(columns).any(axis=0)
        draws = self.draws if are_known.all() else resamples(int(are_known.sum()))
        return [column[are_known] for column in columns], draws


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")

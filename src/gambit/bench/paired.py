"""The rows of one benchmark, problem by problem, so that methods are compared on the same ones; computes means only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.bench.rows import Row
from gambit.bench.statistics import Floats, Indices, resamples

Measure = Callable[[Row], float]


@dataclass(frozen=True, slots=True)
class ProblemTable:
    """The rows of one benchmark by variant and problem, complete ones only."""

    problems: tuple[str, ...]
    rows: Mapping[tuple[str, str], list[Row]]
    draws: Indices
    num_left_out: int

    @classmethod
    def of(cls, rows: Sequence[Row], variants: Sequence[str], seeds: Sequence[int]) -> ProblemTable:
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.seed):
            found[row.variant, row.problem].append(row)
        everything = sorted({row.problem for row in rows})
        whole = [name for name in everything if all(len(found[v, name]) == len(seeds) for v in variants)]
        draws = resamples(len(whole)) if whole else np.zeros((0, 0), dtype=np.int64)
        return cls(tuple(whole), found, draws, len(everything) - len(whole))

    def turns(self) -> list[Indices]:
        """Problems, by place, that ran side by side under any method: they shared the machine of that moment."""
        turn_of = {name: {place} for place, name in enumerate(self.problems)}
        for before, after in self._neighbours():
            if turn_of[before] is not turn_of[after]:
                turn_of[before] |= turn_of[after]
                turn_of |= {self.problems[place]: turn_of[before] for place in turn_of[after]}
        distinct = {id(places): places for places in turn_of.values()}
        return [np.array(sorted(places)) for places in distinct.values()]

    def _neighbours(self) -> Iterator[tuple[str, str]]:
        """Problems whose searches by the same method, in the same shard, overlapped in time."""
        by_turn, whole = defaultdict(list), set(self.problems)
        for (variant, problem), rows in self.rows.items():
            if problem in whole:
                for row in rows:
                    by_turn[variant, row.shard].append((row.began, row.began + row.seconds.total, problem))
        for spans in by_turn.values():
            last, reached = "", -math.inf
            for began, ended, problem in sorted(spans):
                if began < reached:
                    yield last, problem
                if ended > reached:
                    last, reached = problem, ended

    def of_variant(self, variant: str) -> list[Row]:
        return [row for name in self.problems for row in self.rows[variant, name]]

    def means(self, variant: str, measure: Measure) -> Floats:
        """Per problem, seeds averaged; not a number where all its searches failed."""
        return np.array([mean_of(measure(row) for row in self.rows[variant, name]) for name in self.problems])

    def costs(self, variant: str, measure: Measure) -> Floats:
        """As `means`, over searches that did not fail."""
        good = [[row for row in self.rows[variant, name] if row.error is None] for name in self.problems]
        return np.array([mean_of(map(measure, rows)) for rows in good])


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")

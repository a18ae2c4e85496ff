"""The figures of a bench report: rows of dots with their intervals, and curves over the time of a search."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import numpy as np

from gambit.bench.rows import Row
from gambit.bench.summary import BenchSummary, Cell
from gambit.results.dots import Dot, curve_plot, dot_plot
from gambit.results.html import Markup
from gambit.stats import Floats, Interval

OURS = "gambit"
NUM_MOMENTS = 100
MIDDLE = (0.5, 0.1, 0.9)  # of lengths: the median, and the ends of the middle 80 %

Figures: TypeAlias = Iterator[tuple[str, Markup]]  # each with its title, of which the name of its file is made


def accuracies(summary: BenchSummary) -> Figures:
    """Yields a plot per benchmark: the accuracy of each method."""
    for benchmark in summary.benchmarks:
        yield from _dots(f"{benchmark}: accuracy", [_percent(cell) for cell in _cells(summary, benchmark)])


def further(summary: BenchSummary, rows: Sequence[Row]) -> Figures:
    """Yields every other figure that the rows allow, benchmark by benchmark."""
    for benchmark in summary.benchmarks:
        cells = _cells(summary, benchmark)
        good = [row for row in rows if row.benchmark == benchmark and row.error is None]
        found = {cell.variant: [row for row in good if row.variant == cell.variant] for cell in cells}
        yield from _costs(benchmark, cells)
        yield from _lengths(benchmark, found)
        yield from _courses(benchmark, found)
        yield from _sweeps(benchmark, summary)


def _cells(summary: BenchSummary, benchmark: str) -> list[Cell]:
    return [cell for cell in summary.cells if cell.benchmark == benchmark]


def _costs(benchmark: str, cells: Sequence[Cell]) -> Figures:
    tokens = [_cost(cell, cell.tokens) for cell in cells if cell.tokens is not None]
    yield from _dots(f"{benchmark}: tokens a problem", tokens, unit="", digits=0)
    seconds = [_cost(cell, cell.seconds) for cell in cells if cell.seconds is not None]
    yield from _dots(f"{benchmark}: seconds a problem", seconds, unit="")


def _lengths(benchmark: str, found: Mapping[str, Sequence[Row]]) -> Figures:
    """Yields plots of completed traces: the median of their tokens, with the middle 80 %."""
    for name, words in (("unique_lengths", "own tokens"), ("total_lengths", "tokens")):
        lengths = {variant: [each for row in rows for each in getattr(row, name)] for variant, rows in found.items()}
        dots = [
            Dot.of(variant, Interval(*map(float, np.quantile(each, MIDDLE))), is_ours=variant == OURS)
            for variant, each in lengths.items()
            if each
        ]
        yield from _dots(f"{benchmark}: {words} of a trace, middle 80 %", dots, unit="", digits=0)


def _courses(benchmark: str, found: Mapping[str, Sequence[Row]]) -> Figures:
    """Yields curves of the pool over the time of a search: means, where a search that has ended counts as 0."""
    sampled = {variant: mine for variant, rows in found.items() if (mine := [r for r in rows if r.series.seconds])}
    if not sampled:
        return
    ends = [row.seconds.total for rows in sampled.values() for row in rows]
    grid = np.linspace(0, float(np.quantile(ends, 0.98)), NUM_MOMENTS)
    for name, words in (("running", "running traces"), ("kv_used", "KV tokens in use")):
        curves = {variant: mean_curve(rows, grid, attrgetter(f"series.{name}")) for variant, rows in sampled.items()}
        title = f"{benchmark}: {words} over seconds, and most"
        yield title, curve_plot(title, grid, curves, OURS)


def mean_curve(rows: Sequence[Row], grid: Floats, values: Callable[[Row], Sequence[float]]) -> Floats:
    """Returns the mean over searches; one that has ended counts as 0."""
    curves = [np.interp(grid, row.series.seconds, values(row), right=0.0) for row in rows]
    mean: Floats = np.mean(curves, axis=0)
    return mean


def _sweeps(benchmark: str, summary: BenchSummary) -> Figures:
    """Yields accuracy and tokens by the value of each swept option, below the methods that are not swept."""
    others = [cell for cell in _cells(summary, benchmark) if cell.variant not in summary.swept]
    points = [point for point in summary.sweep if point.benchmark == benchmark]
    for policy, option in dict.fromkeys((point.policy, point.option) for point in points):
        mine = {str(each.value): each for each in points if (each.policy, each.option) == (policy, option)}
        accuracy = [Dot.of(value, each.accuracy, is_ours=True, scale=100) for value, each in mine.items()]
        yield from _dots(f"{benchmark}: accuracy by {policy} {option}", [*map(_percent, others), *accuracy])
        tokens = [_cost(each, each.tokens) for each in others if each.tokens is not None]
        tokens += [Dot.of(value, each.tokens, is_ours=True) for value, each in mine.items() if each.tokens is not None]
        yield from _dots(f"{benchmark}: tokens by {policy} {option}", tokens, unit="", digits=0)


def _dots(title: str, dots: Sequence[Dot], *, unit: str = " %", digits: int = 1) -> Figures:
    if dots:
        yield title, dot_plot(title, dots, unit=unit, digits=digits)


def _percent(cell: Cell) -> Dot:
    return Dot.of(cell.variant, cell.accuracy, is_ours=cell.variant == OURS, scale=100)


def _cost(cell: Cell, cost: Interval) -> Dot:
    return Dot.of(cell.variant, cost, is_ours=cell.variant == OURS)

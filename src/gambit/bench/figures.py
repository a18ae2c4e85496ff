"""The figures of a bench report, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gambit.bench.datasets import slug
from gambit.bench.recipe import Scalar
from gambit.bench.rows import Row
from gambit.bench.summary import PARTS, BenchSummary, Cell, SweepPoint
from gambit.results.html import Markup, attributes_html
from gambit.stats import Floats, Interval
from gambit.view.series import COLOURS, FIGURE_WIDTH, FONT_SIZE, HATCHES, SeriesStyle, styles_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE = "#222222", "#d4d4d4"  # exchanged for the page's colours where a figure stands in the page
NUM_MOMENTS = 200
LEGEND_COLUMNS = 3

Styles = Mapping[str, SeriesStyle]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure with its caption, as a PNG file and as an SVG element of the page."""

    name: str
    caption: str
    png: bytes
    svg: Markup


def draw_all(summary: BenchSummary, rows: Sequence[Row]) -> Iterator[Picture]:
    """Draws every figure that the rows allow, benchmark by benchmark."""
    styles = styles_for(summary.variants)
    for benchmark in summary.benchmarks:
        on = "" if len(summary.benchmarks) == 1 else f" ({benchmark})"
        cells = [cell for cell in summary.cells if cell.benchmark == benchmark]
        mine = [row for row in rows if row.benchmark == benchmark and row.error is None]
        points = [point for point in summary.sweep if point.benchmark == benchmark]
        drawn: list[tuple[str, str, Callable[[], Figure]]] = [
            ("tradeoff", f"Accuracy against tokens and seconds a problem, with 95 % intervals{on}.",
             partial(_tradeoff, cells, styles)),
            ("pool", "Running traces and KV tokens in use over the time of a search (dashed: the KV cache): means "
             f"over searches, one that has ended counting as 0{on}.", partial(_pool, mine, styles)),
            ("lengths", f"Tokens of completed traces: their own, and with the inherited part{on}.",
             partial(_lengths, mine, styles)),
            ("throughput", f"Completed traces and tokens a second; the pale part is in no completed trace{on}.",
             partial(_throughput, cells, styles)),
            ("seconds", f"Where the seconds of a search go{on}.", partial(_decomposition, cells)),
        ]  # fmt: skip
        if points:
            others = [cell for cell in cells if cell.variant not in summary.swept]
            caption = f"Accuracy and tokens over the swept options; level lines: the other methods{on}."
            drawn.append(("sweep", caption, partial(_sweep, points, others, styles)))
        for name, caption, draw in drawn:
            yield _picture(f"{name}-{slug(benchmark)}", caption, draw)


def _picture(name: str, caption: str, draw: Callable[[], Figure]) -> Picture:
    """Draws a figure as PNG and SVG."""
    import matplotlib

    style = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": FONT_SIZE, "font.family": "sans-serif",
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": FONT_SIZE,
        "axes.labelsize": FONT_SIZE, "xtick.labelsize": FONT_SIZE, "ytick.labelsize": FONT_SIZE, "hatch.linewidth": 0.8,
        "legend.handlelength": 3.2,
    }  # fmt: skip
    with matplotlib.rc_context(style):  # type: ignore[arg-type] # its keys are a list of literals
        figure = draw()
        png, svg = io.BytesIO(), io.StringIO()
        figure.savefig(png, format="png", dpi=200, facecolor="white", metadata={"Software": None})
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # The element alone, in the colours of the page around it.
    element = svg.getvalue()[svg.getvalue().index("<svg") :].replace(INK, "currentColor").replace(RULE, "var(--rule)")
    label = attributes_html(role="img", style="max-width: 980px", aria_label=caption)
    return Picture(name, caption, png.getvalue(), Markup(element.replace("<svg", f"<svg{label}", 1)))


def _new_figure(rows: int, height: float = 2.3) -> tuple[Figure, list[Axes]]:
    """Makes panels under each other: side by side their text would be too small for a narrow page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(FIGURE_WIDTH, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, 1, squeeze=False).flat)


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Puts a legend below the panels, with each name once."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = LEGEND_COLUMNS if max(map(len, named), default=0) <= 10 else 2
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns)


def _few_ticks(axes: Axes) -> None:
    """Keeps numbers along the bottom from running into each other."""
    axes.locator_params(axis="x", nbins=5)


def _name_bars(axes: Axes, label: str, cells: Sequence[Cell]) -> None:
    axes.set(xlabel=label)
    axes.set_yticks(np.arange(len(cells))[::-1], [cell.variant for cell in cells])
    axes.grid(visible=False, axis="y")
    _few_ticks(axes)


# -- the figures -----------------------------------------------------------------------------------------------


def _tradeoff(cells: Sequence[Cell], styles: Styles) -> Figure:
    figure, (above, below) = _new_figure(2)
    for axes, label in ((above, "tokens a problem"), (below, "seconds a problem")):
        for cell in cells:
            cost = cell.tokens if axes is above else cell.seconds
            if cost is not None:
                styles[cell.variant].point(axes, cost, cell.accuracy, cell.variant)
        axes.set(xlabel=label, ylabel="accuracy %", xlim=(0, None))
        _few_ticks(axes)
    _add_legend(figure, above)
    return figure


def _pool(rows: Sequence[Row], styles: Styles) -> Figure:
    figure, (above, below) = _new_figure(2)
    ends = [row.seconds.total for row in rows if row.series.seconds]
    grid = np.linspace(0, float(np.quantile(ends, 0.98)) if ends else 1.0, NUM_MOMENTS)
    for variant, style in styles.items():
        mine = [row for row in rows if row.variant == variant and row.series.seconds]
        if mine:
            style.line(above, grid, mean_curve(mine, grid, lambda row: row.series.running), variant)
            style.line(below, grid, mean_curve(mine, grid, lambda row: row.series.kv_used), variant)
    above.set(ylabel="running traces", ylim=(0, None), xlim=(0, grid[-1]))
    below.set(xlabel="seconds", ylabel="KV tokens in use", ylim=(0, None), xlim=(0, grid[-1]))
    capacity = max((row.kv_capacity for row in rows), default=0)
    if 0 < capacity < 2 * below.get_ylim()[1]:  # far above, it would flatten the curves
        below.axhline(capacity, linestyle="--", color=INK, linewidth=1)
        below.set_ylim(0, 1.05 * capacity)
    _add_legend(figure, above)
    return figure


def mean_curve(rows: Sequence[Row], grid: Floats, values: Callable[[Row], Sequence[float]]) -> Floats:
    """Returns the mean over searches; one that has ended counts as 0."""
    curves = [np.interp(grid, row.series.seconds, values(row), right=0.0) for row in rows]
    mean: Floats = np.mean(curves, axis=0)
    return mean


def _lengths(rows: Sequence[Row], styles: Styles) -> Figure:
    figure, (above, below) = _new_figure(2)
    for variant, style in styles.items():
        mine = [row for row in rows if row.variant == variant]
        for axes, name in ((above, "unique_lengths"), (below, "total_lengths")):
            if lengths := [length for row in mine for length in getattr(row, name)]:
                shares = np.linspace(0, 1, 201)  # a cumulative distribution
                style.line(axes, np.quantile(lengths, shares), 100 * shares, variant)
    above.set(xlabel="tokens of its own (unique)")
    below.set(xlabel="tokens in all (with the inherited part)")
    for axes in (above, below):
        axes.set(ylabel="% of completed traces", xlim=(0, None), ylim=(0, 101))
        _few_ticks(axes)
    _add_legend(figure, above)
    return figure


def _throughput(cells: Sequence[Cell], styles: Styles) -> Figure:
    figure, (above, below) = _new_figure(2, height=0.9 + 0.26 * len(cells))
    places = np.arange(len(cells))[::-1]
    shades = [styles[cell.variant].colour for cell in cells]
    above.barh(places, [cell.completed_per_second or 0 for cell in cells], color=shades, height=0.65)
    speeds = np.array([cell.tokens_per_second or 0 for cell in cells])
    shares = np.array([cell.productive_share or 0 for cell in cells])
    below.barh(places, speeds, color=shades, height=0.65, alpha=0.35)
    below.barh(places, speeds * shares, color=shades, height=0.65)
    _name_bars(above, "completed traces a second", cells)
    _name_bars(below, "tokens a second (full: productive)", cells)
    return figure


def _decomposition(cells: Sequence[Cell]) -> Figure:
    figure, (axes,) = _new_figure(1, height=1.4 + 0.28 * len(cells))
    places, reached = np.arange(len(cells))[::-1], np.zeros(len(cells))
    for part, colour, hatch in zip(PARTS, COLOURS, HATCHES, strict=False):
        seconds = np.array([cell.parts[part] for cell in cells])
        axes.barh(places, seconds, left=reached, color=colour, hatch=hatch, edgecolor="white", height=0.65, label=part)
        reached += seconds
    _name_bars(axes, "mean seconds a search", cells)
    _add_legend(figure, axes)
    return figure


def _sweep(points: Sequence[SweepPoint], others: Sequence[Cell], styles: Styles) -> Figure:
    """Draws accuracy and tokens of each swept option, under each other."""
    places = list(dict.fromkeys((point.policy, point.option) for point in points))
    figure, axes = _new_figure(2 * len(places), height=1.9)
    for row, (policy, option) in enumerate(places):
        mine = [point for point in points if (point.policy, point.option) == (policy, option)]
        top, bottom = axes[2 * row], axes[2 * row + 1]
        _values(top, [(point.value, point.accuracy) for point in mine], 100)
        _values(bottom, [(point.value, point.tokens) for point in mine if point.tokens is not None], 1)
        for cell in others:
            style = styles[cell.variant]
            style.line(top, top.get_xlim(), 2 * (100 * cell.accuracy.value,), cell.variant)
            if cell.tokens is not None:
                style.line(bottom, bottom.get_xlim(), 2 * (cell.tokens.value,), cell.variant)
        top.set(ylabel="accuracy %")
        bottom.set(ylabel="tokens a problem", xlabel=f"{policy} {option}", ylim=(0, None))
    if others:
        _add_legend(figure, axes[0])
    return figure


def _values(axes: Axes, points: Sequence[tuple[Scalar, Interval]], scale: float) -> None:
    y = [scale * x.value for _, x in points]
    errors = [[scale * (x.value - x.low) for _, x in points], [scale * (x.high - x.value) for _, x in points]]
    axes.errorbar(range(len(y)), y, yerr=errors, fmt="o-", color=INK, capsize=2, elinewidth=1)
    axes.set_xticks(range(len(y)), [str(value) for value, _ in points])

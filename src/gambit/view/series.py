"""Styles of the series of a figure: each differs from the others by its colour, its marker and its dashes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gambit.stats import Interval

# Okabe and Ito's colours, which differ for any kind of colour vision; then three of Tol's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#44AA99", "#999933", "#6b6b6b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
DASHES: tuple[tuple[float, ...], ...] = (
    (), (5, 2), (1.5, 1.5), (7, 2, 1.5, 2), (10, 3), (3, 1, 1, 1, 1, 1), (1, 3), (7, 2, 7, 2, 1.5, 2), (2, 4),
    (12, 2, 3, 2),
)  # fmt: skip
WIDTHS = (4.4, 3.6, 3.0, 2.5, 2.1, 1.8, 1.6, 1.4, 1.2, 1.0)  # an earlier line shows around a later one
HATCHES = ("", "//", "..", "\\\\", "xx")
FIGURE_WIDTH = 4.6  # inches: at 400 pixels a font of 9 points is still 11 pixels high
FONT_SIZE = 9.0

Values = Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """The look of a series, the same in every figure of a report."""

    colour: str
    marker: str
    dashes: tuple[float, ...]
    width: float

    def line(self, axes: Axes, x: Values, y: Values, label: str, num_markers: int = 6) -> None:
        """Draws a curve with a few markers on it."""
        every = max(1, len(x) // num_markers)
        [line] = axes.plot(x, y, color=self.colour, label=label, linewidth=self.width, marker=self.marker,
                           markersize=self.width + 3, markerfacecolor="white", markeredgewidth=1.2,
                           markevery=every)  # fmt: skip
        if self.dashes:
            line.set_dashes(self.dashes)

    def point(self, axes: Axes, x: Interval, y: Interval, label: str) -> None:
        """Draws a hollow marker with its intervals, `y` in percent; another one at its place shows inside or around."""
        axes.errorbar(
            x.value, 100 * y.value, xerr=[[x.value - x.low], [x.high - x.value]],
            yerr=[[100 * (y.value - y.low)], [100 * (y.high - y.value)]], fmt=self.marker, color=self.colour,
            label=label, capsize=2, elinewidth=self.width / 3, markersize=4 + 2 * self.width, markerfacecolor="none",
            markeredgewidth=1.6,
        )  # fmt: skip


def styles_for(names: Sequence[str]) -> dict[str, SeriesStyle]:
    """Returns a style for each name by its place; after ten they begin again."""
    styles = itertools.cycle(zip(COLOURS, MARKERS, DASHES, WIDTHS, strict=True))
    return {name: SeriesStyle(*style) for name, style in zip(names, styles, strict=False)}

"""Draws ranking curves and calibration of scorers as a PNG, with matplotlib."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gambit.errors import UserError, install_line
from gambit.training.scoring import CURVE, QUARTERS
from gambit.view.series import FIGURE_WIDTH, FONT_SIZE, SeriesStyle, styles_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gambit.training.evaluate import ScorerReport

MOST_BANDS = 3  # intervals of more scorers hide each other
INK = "#333333"
GREYS = ("#8a8a8a", "#b0b0b0", "#6b6b6b")


def check_installed() -> None:
    """Raises if matplotlib is missing; called before an evaluation that would end with a plot."""
    if find_spec("matplotlib") is None:
        raise UserError(f"a plot needs matplotlib: {install_line('train')}, or leave --plot out")


def draw(report: ScorerReport, path: Path) -> None:
    """Writes the figure of a report."""
    check_installed()
    import matplotlib

    style = {"font.size": FONT_SIZE, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK,
             "axes.titlesize": FONT_SIZE + 1, "legend.handlelength": 3.2}  # fmt: skip
    with matplotlib.rc_context(style):  # type: ignore[arg-type] # its keys are a list of literals
        figure = draw_figure(report)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)


def draw_figure(report: ScorerReport) -> Figure:
    """Draws panels under each other, so that the text is readable on a narrow page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(FIGURE_WIDTH, 8.2), layout="constrained")
    above, middle, below = figure.subplots(3)
    styles = _styles(report)
    _curves(above, report, styles, is_auc=False)
    _curves(middle, report, styles, is_auc=True)
    _calibration(below, report, styles)
    title = f"{report.model}, {report.source}:\n{report.num_mixed} problems with right and wrong traces"
    figure.suptitle(title, fontsize=FONT_SIZE + 1)
    handles, names = above.get_legend_handles_labels()  # both curves have the same
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _styles(report: ScorerReport) -> dict[str, SeriesStyle]:
    """Returns a style for each name. Baselines are thin and grey, and differ by their markers and dashes."""
    styles = styles_for([ranking.name for ranking in report.rankings])
    greys = itertools.cycle(GREYS)
    thin = {
        ranking.name: dataclasses.replace(styles[ranking.name], colour=next(greys), width=1.4)
        for ranking in report.rankings
        if ranking.is_baseline
    }
    return {**styles, **thin}


def _curves(axes: Axes, report: ScorerReport, styles: Mapping[str, SeriesStyle], *, is_auc: bool) -> None:
    shares = CURVE if not is_auc else tuple(sorted({*CURVE, *QUARTERS}))
    has_bands = sum(bool(ranking.calibration) for ranking in report.rankings) <= MOST_BANDS
    for ranking in report.rankings:
        found = ranking.auc if is_auc else ranking.pairwise
        styles[ranking.name].line(axes, shares, [found[share].value for share in shares], ranking.name)
        if has_bands and not ranking.is_baseline:
            low, high = [found[share].low for share in shares], [found[share].high for share in shares]
            axes.fill_between(shares, low, high, color=styles[ranking.name].colour, alpha=0.15, linewidth=0)
    axes.axhline(0.5, color="#dddddd", linewidth=1, zorder=0)
    axes.set_xlabel("share of thoughts seen")
    axes.set_title("AUC within problems" if is_auc else "pairs ranked right")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(0.08, 1.02)
    _plain_frame(axes)


def _calibration(axes: Axes, report: ScorerReport, styles: Mapping[str, SeriesStyle]) -> None:
    axes.plot([0, 1], [0, 1], color="#dddddd", linewidth=1, zorder=0)
    for ranking in report.rankings:
        if ranking.is_baseline or not ranking.calibration:
            continue
        bins, style = ranking.calibration[-1].bins, styles[ranking.name]
        x, y = [each.mean_score for each in bins], [each.share_right for each in bins]
        style.line(axes, x, y, ranking.name, num_markers=len(bins))
    axes.set_xlabel("score at the end")
    axes.set_title("share of traces that are right")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    _plain_frame(axes)


def _plain_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)

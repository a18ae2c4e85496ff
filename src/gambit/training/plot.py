"""Draws ranking curves and calibration of scorers as a PNG, with matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gambit.core.errors import UserError
from gambit.training.ranking import CURVE, QUARTERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gambit.training.evaluate import ScorerRanking, ScorerReport

# Okabe and Ito: told apart by everybody; two of Tol's where there are more scorers than those.
SCORERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#44AA99")
MOST_BANDS = 3  # intervals of more scorers hide each other
LEGEND_COLUMNS = 6
BASELINES = ("#8a8a8a", "#b0b0b0", "#6b6b6b")
INK = "#333333"


def check_installed() -> None:
    """Before an evaluation that would end with a plot."""
    if find_spec("matplotlib") is None:
        raise UserError("a plot needs matplotlib: pip install 'gambit-search[train]', or leave --plot out")


def draw(report: ScorerReport, path: Path) -> None:
    check_installed()
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), width_ratios=(1, 1, 0.8))
        _curves(left, report, is_auc=False)
        _curves(middle, report, is_auc=True)
        _calibration(right, report)
        figure.suptitle(
            f"{report.model}, {report.source}: {report.num_mixed} problems with right and wrong traces", y=0.99
        )
        handles, labels = left.get_legend_handles_labels()
        extra = dict(zip(*reversed(middle.get_legend_handles_labels()), strict=True))
        named = {**dict(zip(labels, handles, strict=True)), **extra}
        columns = min(LEGEND_COLUMNS, len(named))
        figure.legend(list(named.values()), list(named), loc="lower center", ncols=columns, frameon=False)
        figure.tight_layout(rect=(0, 0.01 + 0.06 * -(-len(named) // columns), 1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _curves(axes: Axes, report: ScorerReport, *, is_auc: bool) -> None:
    shares = CURVE if not is_auc else tuple(sorted({*CURVE, *QUARTERS}))
    colours = {True: iter(BASELINES * 2), False: iter(SCORERS * 4)}
    has_bands = sum(bool(ranking.calibration) for ranking in report.rankings) <= MOST_BANDS
    for ranking in report.rankings:
        found = ranking.auc if is_auc else ranking.pairwise
        known = [share for share in shares if share in found]
        is_partial = len(known) < len(shares)
        if is_partial and not is_auc:
            continue  # the judge is known at the quarters only
        colour = INK if is_partial else next(colours[ranking.is_baseline])
        _line(axes, ranking, found, known, colour, is_partial=is_partial, has_band=has_bands and not is_partial)
    axes.axhline(0.5, color="#dddddd", linewidth=1, zorder=0)
    axes.set_xlabel("share of steps seen")
    axes.set_title("AUC within problems" if is_auc else "pairs ranked right", fontsize=11)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlim(0.08, 1.02)
    _plain_frame(axes)


def _line(axes, ranking: ScorerRanking, found, known, colour, *, is_partial: bool, has_band: bool) -> None:  # type: ignore[no-untyped-def]
    values = [found[share].value for share in known]
    style = "--" if ranking.is_baseline else ":" if is_partial else "-"
    axes.plot(known, values, style, color=colour, label=ranking.name, linewidth=1.6 if ranking.is_baseline else 2.2,
              marker="o" if is_partial else None, markersize=4)  # fmt: skip
    if has_band and not ranking.is_baseline:
        low, high = [found[share].low for share in known], [found[share].high for share in known]
        axes.fill_between(known, low, high, color=colour, alpha=0.15, linewidth=0)


def _calibration(axes: Axes, report: ScorerReport) -> None:
    axes.plot([0, 1], [0, 1], color="#dddddd", linewidth=1, zorder=0)
    colours = iter(SCORERS * 4)
    for ranking in report.rankings:
        if ranking.is_baseline or not ranking.calibration:
            continue
        last = ranking.calibration[-1]
        colour = next(colours)
        axes.plot([each.mean_score for each in last.bins], [each.share_right for each in last.bins], color=colour)
        sizes = [10 + 150 * each.count / max(1, report.num_traces) for each in last.bins]
        axes.scatter([each.mean_score for each in last.bins], [each.share_right for each in last.bins], sizes, colour)
    axes.set_xlabel("score at the end")
    axes.set_title("share of traces that are right", fontsize=11)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    _plain_frame(axes)


def _plain_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)

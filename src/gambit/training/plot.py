"""Draws how scorers and baselines rank, and how scorers are calibrated, as an SVG."""

from collections.abc import Iterable

from gambit.results.dots import Dot, dot_plot, stacked
from gambit.results.html import Markup
from gambit.stats import Interval
from gambit.training.evaluate import ScorerRanking, ScorerReport
from gambit.training.scoring import QUARTERS


def draw(report: ScorerReport) -> Markup:
    """Returns plots below each other: a row for each scorer and baseline, then the calibration of each scorer."""

    def plot(title: str, found: Iterable[Interval]) -> Markup:
        pairs = zip(report.rankings, found, strict=True)
        dots = [Dot.of(ranking.name, interval, is_ours=not ranking.is_baseline) for ranking, interval in pairs]
        return dot_plot(title, dots, unit="", digits=3)

    rankings = report.rankings
    plots = [
        plot("AUC within problems, mean of the four", [each.mean_auc for each in rankings]),
        *(plot(f"AUC at {at:.0%} of the thoughts", [each.auc[at] for each in rankings]) for at in QUARTERS),
        *(plot(f"pairs ranked right at {at:.0%}", [each.pairwise[at] for each in rankings]) for at in (0.5, 1.0)),
    ]
    return stacked([*plots, *(_calibration(each) for each in rankings if each.calibration)])


def _calibration(ranking: ScorerRanking) -> Markup:
    """Returns a row for each bin of scores at the end: the share of right traces, with its distance to the score."""
    dots = [
        Dot.of(
            f"score {each.mean_score:.2f}",
            Interval(each.share_right, *sorted((each.mean_score, each.share_right))),
            is_ours=True,
        )
        for each in ranking.calibration[-1].bins
    ]
    return dot_plot(f"{ranking.name}: share of right traces", dots, unit="", digits=3)

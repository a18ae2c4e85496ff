"""The report of a prefix-value run: Markdown, JSON, figures, an HTML page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gambit.bench.figures import Picture, add_legend, is_available, new_figure, picture
from gambit.bench.page import Content
from gambit.bench.prefix_statistics import JUDGE, CutSummary, JudgeSummary
from gambit.bench.prefix_value import PrefixPlan, PrefixSummary
from gambit.bench.report import NO_FIGURES, BenchReport, made_with, write_files
from gambit.bench.statistics import Interval
from gambit.bench.tables import Table, number, percent, points
from gambit.config.trust import FEWEST_PROBLEMS, supports_claim
from gambit.training.storage import read_header
from gambit.view.series import COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE_WIDTH = "540px"  # narrow enough to be read on a telephone
GREY = "#777777"


def write_prefix_report(folder: Path, plan: PrefixPlan, summary: PrefixSummary) -> BenchReport:
    """report.md, report.json, report.html and figures/*.png in the run's folder."""
    pictures = list(draw_all(summary)) if is_available() else []
    content = Content(
        title=f"Prefix values: {plan.benchmark.name}",
        lead=_lead(summary),
        cautions=cautions(summary),
        findings=findings(summary),
        tables=all_tables(summary),
        figures=[(drawn.svg, drawn.caption) for drawn in pictures],
        environment=_environment(folder, plan),
        links=[],
        notes=[] if pictures else [NO_FIGURES],
    )
    return write_files(folder, content, pictures, _json(plan, summary, content))


def _lead(summary: PrefixSummary) -> str:
    return (
        f"{summary.traces_per_problem} traces of each of {summary.num_sampled:,} problems, of which "
        f"{summary.num_mixed:,} have right and wrong ones; cut at the thought nearest to each share of their tokens, "
        f"{summary.num_rollouts} rollouts from each prefix, {summary.tokens:,} tokens in all."
    )


def _environment(folder: Path, plan: PrefixPlan) -> dict[str, str]:
    header, info = read_header(folder), plan.benchmark
    return {
        "model": f"{header.model} ({header.model_hash})",
        **made_with(folder),
        "sampling": ", ".join(f"{key} = {value}" for key, value in header.sampling.items() if value is not None),
        "problems": f"{info.name}: {info.num_problems} ({info.hash}), shard {plan.shard}",
    }


def _json(plan: PrefixPlan, summary: PrefixSummary, content: Content) -> str:
    figures = {"plan": plan.to_json(), "environment": content.environment, **dataclasses.asdict(summary)}
    words = {"cautions": list(content.cautions), "findings": list(content.findings)}
    return json.dumps({**figures, **words}, indent=2, ensure_ascii=False)


# -- words -------------------------------------------------------------------------------------------------------


def cautions(summary: PrefixSummary) -> list[str]:
    """What a reader must know before believing the tables."""
    found = []
    fewest = min(cut.num_problems for cut in summary.cuts)
    if fewest < FEWEST_PROBLEMS:
        found.append(f"Only {fewest} problems: nothing is claimed from fewer than {FEWEST_PROBLEMS}, and their "
                     "intervals are rough.")  # fmt: skip
    if summary.num_missing:
        found.append(f"{summary.num_missing:,} prefixes have no rollouts: the run is incomplete, or a problem was "
                     "refused.")  # fmt: skip
    if summary.num_uncut:
        found.append(f"{summary.num_uncut:,} traces go on after no thought and could not be cut.")
    return found


def findings(summary: PrefixSummary) -> list[str]:
    """One sentence for each thing asked at each cut that has enough problems."""
    return [line for cut in summary.cuts if cut.num_problems >= FEWEST_PROBLEMS for line in _findings(summary, cut)]


def _findings(summary: PrefixSummary, cut: CutSummary) -> Iterator[str]:
    where, keep = f"At {_share(cut.fraction)}", summary.keep
    if cut.decided is not None:
        yield f"{where} the prefix decides {_share_of(cut.decided)} of the outcome's variance within a problem."
    for judge in cut.judges:
        name = _judge_name(judge, summary)
        auc = "" if judge.auc is None else f" (AUC {judge.auc.value:.3f}, {judge.auc.low:.3f} to {judge.auc.high:.3f})"
        chosen = f"the {keep} prefixes that {name}{auc} ranks highest"
        if supports_claim(judge.gain.low, judge.gain.high, cut.num_problems):
            word = "raises" if judge.gain.value > 0 else "lowers"
            yield f"{where} continuing {chosen} {word} the vote by {points(judge.gain)} against {keep} random ones."
        else:
            yield f"{where} no gain of the vote is shown from continuing {chosen} ({points(judge.gain)})."
    if cut.points_per_tenth is not None:
        yield f"{where} each 0.1 of a judge's AUC is worth {points(cut.points_per_tenth)} of the vote."


def _judge_name(judge: JudgeSummary, summary: PrefixSummary) -> str:
    return f"a judge of {summary.num_rollouts // 2} rollouts" if judge.name == JUDGE else judge.name


# -- tables ------------------------------------------------------------------------------------------------------


def all_tables(summary: PrefixSummary) -> list[Table]:
    return [_decided(summary), _aucs(summary), _votes(summary), _curve(summary)]


def _decided(summary: PrefixSummary) -> Table:
    rows = [
        (_share(cut.fraction), _share(cut.mean_share), f"{cut.num_problems}", f"{cut.num_prefixes:,}",
         percent(cut.decided), _auc(cut.judges[0].original_auc), percent(cut.one_right))
        for cut in summary.cuts
    ]  # fmt: skip
    columns = ("cut at", "in fact", "problems", "prefixes", "decided by the prefix %", "AUC of a judge of "
               f"{summary.num_rollouts} rollouts", "rollouts right %")  # fmt: skip
    note = (
        "In brackets 95 % bootstrap intervals over problems. Decided: variance of the values of a problem's prefixes "
        "over the variance of the outcome, both summed over problems; the rollouts' own noise is taken out without "
        "bias. The judge ranks the prefixes of a problem by their share of right rollouts, the outcome is that of the "
        "trace they were cut from; a judge that knew the values exactly would be somewhat better."
    )
    return Table("What prefixes decide", note, columns, tuple(rows), 1)


def _aucs(summary: PrefixSummary) -> Table:
    rows = [
        (_share(cut.fraction), _judge_name(judge, summary), _auc(judge.auc), _auc(judge.original_auc))
        for cut in summary.cuts
        for judge in cut.judges
    ]
    half = summary.num_rollouts // 2
    note = (
        "AUC within problems: how often a right outcome's prefix stands above a wrong outcome's of another prefix of "
        "the same problem, ties counting half; means over problems that have both outcomes. Against rollouts: the "
        f"outcomes are rollouts; the judge of {half} ranks by one half of them and is asked about the other, over many "
        "splits and both ways; scorers are asked about all. Against traces: the outcome is that of the trace the "
        f"prefix was cut from, and the judge ranks by all {summary.num_rollouts} rollouts."
    )
    return Table("Judges", note, ("cut at", "judge", "AUC against rollouts", "AUC against traces"), tuple(rows))


def _votes(summary: PrefixSummary) -> Table:
    rows = []
    for cut in summary.cuts:
        where = _share(cut.fraction)
        rows.append((where, "random", percent(cut.one_right), percent(cut.random_vote), ""))
        rows += [
            (where, _judge_name(judge, summary), percent(judge.one_right), percent(judge.vote), points(judge.gain))
            for judge in cut.judges
        ]
    keep, half = summary.keep, summary.num_rollouts // 2
    first = summary.cuts[0]
    note = (
        f"The best {keep} prefixes of each problem, as the judge ranks them, are continued by {half} rollouts each; "
        "these vote, the most frequent answer wins, a tie counts by its share. Rollouts that judge do not vote. Gains "
        f"are over {keep} random prefixes with as many votes, paired by problem. The {summary.traces_per_problem} "
        f"traces themselves vote {_share_of(first.original_vote)} right on the same problems."
    )
    columns = ("cut at", "prefixes by", "one continuation right %", "vote right %", "gain of the vote")
    return Table(f"What the vote gains if the best {keep} prefixes are continued", note, columns, tuple(rows))


def _curve(summary: PrefixSummary) -> Table:
    rows = [
        (_share(cut.fraction), f"{point.noise:g}", _auc(point.auc), percent(point.vote), points(point.gain))
        for cut in summary.cuts
        for point in cut.curve
    ]
    slopes = [
        f"{points(cut.points_per_tenth)} at {_share(cut.fraction)}"
        for cut in summary.cuts
        if cut.points_per_tenth is not None
    ]
    note = (
        f"The judge of {summary.num_rollouts // 2} rollouts with normal noise of that deviation added to its share of "
        "right rollouts: what a judge of that AUC would bring. The line through the points rises, for each 0.1 of AUC, "
        f"by {', '.join(slopes) or '–'}."
    )
    columns = ("cut at", "noise", "AUC against rollouts", "vote right %", "gain of the vote")
    return Table("From AUC to the vote", note, columns, tuple(rows), 1)


def _auc(x: Interval | None) -> str:
    return number(x, digits=3)


def _share(x: float) -> str:
    return f"{100 * x:.0f} %"


def _share_of(x: Interval) -> str:
    return f"{100 * x.value:.1f} % ({100 * x.low:.1f} to {100 * x.high:.1f})"


# -- figures -----------------------------------------------------------------------------------------------------


def draw_all(summary: PrefixSummary) -> Iterator[Picture]:
    keep = summary.keep
    drawn = (
        ("decided", "Share of the outcome's variance within a problem that the prefix decides.", _draw_decided),
        ("auc", "AUC within problems against the outcomes of rollouts; dotted: chance.", _draw_aucs),
        ("vote", f"The vote of continuations of {keep} prefixes; dotted: the vote of the traces themselves.",
         _draw_votes),
        ("curve", f"The vote of continuations of the best {keep} prefixes by the AUC of who chose them: the line is a "
         "judge with ever more noise, from right to left; shapes are scorers.", _draw_curves),
    )  # fmt: skip
    for name, caption, draw in drawn:
        yield picture(name, f"{caption} With 95 % intervals.", partial(draw, summary), PAGE_WIDTH)


def _draw_decided(summary: PrefixSummary) -> Figure:
    figure, (axes,) = new_figure(1, height=2.6)
    known = [(cut.fraction, cut.decided) for cut in summary.cuts if cut.decided is not None]
    _series(axes, [at for at, _ in known], [share for _, share in known], COLOURS[0], MARKERS[0], "", scale=100)
    axes.set(ylabel="decided, %", ylim=(min(0.0, axes.get_ylim()[0]), max(100.0, axes.get_ylim()[1])))
    _cut_axis(axes, summary)
    return figure


def _draw_aucs(summary: PrefixSummary) -> Figure:
    figure, (axes,) = new_figure(1, height=3.0)
    axes.axhline(0.5, linestyle=":", color=GREY)
    for place, (name, colour, marker, judges) in enumerate(_by_judge(summary)):
        known = [(cut.fraction, judge.auc) for cut, judge in judges if judge.auc is not None]
        places = [at + _aside(place, len(summary.cuts[0].judges)) for at, _ in known]
        _series(axes, places, [auc for _, auc in known], colour, marker, name)
    axes.set(ylabel="AUC within problems")
    _cut_axis(axes, summary)
    add_legend(figure, axes)
    return figure


def _draw_votes(summary: PrefixSummary) -> Figure:
    figure, (axes,) = new_figure(1, height=3.0)
    count = len(summary.cuts[0].judges) + 1
    places = [cut.fraction + _aside(0, count) for cut in summary.cuts]
    axes.plot([cut.fraction for cut in summary.cuts], [100 * cut.original_vote.value for cut in summary.cuts],
              linestyle=":", color=GREY)  # fmt: skip
    _series(axes, places, [cut.random_vote for cut in summary.cuts], GREY, "x", "random prefixes", scale=100)
    for place, (name, colour, marker, judges) in enumerate(_by_judge(summary), start=1):
        places = [cut.fraction + _aside(place, count) for cut, _ in judges]
        _series(axes, places, [judge.vote for _, judge in judges], colour, marker, name, scale=100)
    axes.set(ylabel="vote right, %")
    _cut_axis(axes, summary)
    add_legend(figure, axes)
    return figure


def _draw_curves(summary: PrefixSummary) -> Figure:
    figure, panels = new_figure(len(summary.cuts), height=2.6)
    for axes, cut in zip(panels, summary.cuts, strict=True):
        known = [(point.auc.value, point.vote) for point in cut.curve if point.auc is not None]
        votes = np.array([[100 * vote.low, 100 * vote.value, 100 * vote.high] for _, vote in known]).reshape(-1, 3).T
        aucs = [auc for auc, _ in known]
        axes.fill_between(aucs, votes[0], votes[2], color=COLOURS[0], alpha=0.15, linewidth=0)
        axes.plot(aucs, votes[1], "-", color=COLOURS[0], marker=".", label="judge of rollouts with noise")
        for place, judge in enumerate(cut.judges[1:], start=1):
            if judge.auc is not None:
                _series(axes, [judge.auc.value], [judge.vote], _colour(place), _marker(place), judge.name, scale=100)
        axes.set(title=f"cut at {_share(cut.fraction)}", ylabel="vote right, %")
        axes.title.set_fontsize(9)
    panels[-1].set_xlabel("AUC within problems")
    add_legend(figure, panels[0])
    return figure


def _by_judge(summary: PrefixSummary) -> Iterator[tuple[str, str, str, list[tuple[CutSummary, JudgeSummary]]]]:
    """Each judge with its colour and shape over the cuts."""
    for place, judge in enumerate(summary.cuts[0].judges):
        name = _judge_name(judge, summary)
        yield name, _colour(place), _marker(place), [(cut, cut.judges[place]) for cut in summary.cuts]


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def _series(
    axes: Axes, x: Sequence[float], y: Sequence[Interval], colour: str, marker: str, label: str, scale: float = 1.0
) -> None:
    values = [scale * each.value for each in y]
    errors = [[scale * (each.value - each.low) for each in y], [scale * (each.high - each.value) for each in y]]
    axes.errorbar(x, values, yerr=errors, fmt=f"{marker}-", color=colour, label=label, capsize=2, elinewidth=1,
                  linewidth=1.2, markersize=6)  # fmt: skip


def _aside(place: int, count: int) -> float:
    """Points of one cut stand beside each other."""
    return 0.018 * (place - (count - 1) / 2)


def _cut_axis(axes: Axes, summary: PrefixSummary) -> None:
    fractions = [cut.fraction for cut in summary.cuts]
    axes.set_xticks(fractions, [_share(fraction) for fraction in fractions])
    axes.set(xlabel="cut at this share of the trace", xlim=(min(fractions) - 0.1, max(fractions) + 0.1))

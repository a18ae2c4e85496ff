"""Tables and sentences of `gambit scorer`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from gambit.cli.terminal import put
from gambit.events import Json

if TYPE_CHECKING:
    from gambit.training.collect import CollectSummary
    from gambit.training.evaluate import ScorerReport
    from gambit.training.train import Trained
    from gambit.training.verifier.train import TrainedVerifier


def summary_line(summary: CollectSummary, out: Path, seconds: float) -> str:
    share = summary.num_correct / max(1, summary.num_traces)
    before = f", {summary.num_before} were there before" if summary.num_before else ""
    stopped = "; stopped early, the same command goes on" if summary.was_stopped else ""
    return (
        f"{out}: {summary.num_problems} problems{before}; {summary.num_traces} traces, {share:.1%} right; "
        f"{summary.num_mixed} problems with both; {summary.num_thoughts} thoughts, {summary.num_tokens} tokens"
        f", {seconds:.0f} s{stopped}"
    )


def show_training(out: Path, trained: Trained, as_json: bool) -> None:
    best, metadata = trained.best, trained.metadata
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(out), **metadata}))
        return
    table = Table("objective", "state", "layers", "held-out AUC", "epochs", "seconds", box=None)
    candidates = metadata["candidates"]
    assert isinstance(candidates, list)
    for each in candidates:
        chosen = "bold" if each["is_chosen"] else None
        layers = ",".join(map(str, each["layers"]))
        row = (each["objective"], each["state_position"], layers, f"{each['held_out_auc']:.4f}", str(each["epochs"]))
        table.add_row(*row, f"{each['seconds']:.0f}", style=chosen)
    put(table)
    put(f"{out}: {best.recipe.objective}; held-out AUC within problems, mean over 25-100 % of the thoughts: "
        f"{best.held_out_auc:.4f}")  # fmt: skip
    if best.held_out_auc < max(each["held_out_auc"] for each in candidates):
        put("kept because it is the simplest: none is ahead of it by more than chance among so few problems")


def show_verifier(out: Path, trained: TrainedVerifier, files: Iterable[Path], as_json: bool) -> None:
    if as_json:
        typer.echo(trained.verifier.info.model_dump_json())
        return
    sizes = [path.stat().st_size for path in files]
    quarters = " / ".join(f"{auc:.3f}" for auc in trained.quarters)
    put(f"{out}: verifier, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB; {trained.seconds:.0f} s at "
        f"{trained.tokens_per_second:,.0f} tokens/s; held-out AUC within problems {trained.held_out_auc:.4f}, at "
        f"25 / 50 / 75 / 100 %: {quarters}")  # fmt: skip


def show_report(report: ScorerReport) -> None:
    from gambit.training.evaluate import conclusions

    put(f"{report.model}, {report.source}: {report.num_problems} problems, {report.num_mixed} with both right and "
        f"wrong traces, {report.num_traces} traces, {report.share_right:.1%} right\n")  # fmt: skip
    put(_ranking_table(report, "AUC within problems"))
    put("")
    put(_ranking_table(report, "pairs ranked right"))
    put("")
    for ranking in report.rankings:
        if ranking.calibration:
            errors = ", ".join(f"{each.error:.3f} at {each.share:.0%}" for each in ranking.calibration)
            put(f"calibration error of {ranking.name}: {errors} of the thoughts")
    for line in conclusions(report):
        put(line)


def _ranking_table(report: ScorerReport, title: str) -> Table:
    from gambit.training.ranking import CURVE, QUARTERS

    is_auc = title.startswith("AUC")
    shares = QUARTERS if is_auc else CURVE
    means = ["mean (95 %)"] if is_auc else []
    table = Table(title, *means, *(f"{share:.0%}" for share in shares), box=None)
    for ranking in report.rankings:
        found = ranking.auc if is_auc else ranking.pairwise
        cells = [f"{found[share].value:.3f}" if share in found else "" for share in shares]
        table.add_row(ranking.name, *([str(ranking.mean_auc)] if is_auc else []), *cells)
    return table


def metadata_table(metadata: Json) -> Table:
    table = Table(box=None, show_header=False)
    for name, value in _flat(metadata):
        table.add_row(name, value)
    return table


def _flat(value: Json, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields nested metadata as lines, each with the path to its value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{index}")
    elif isinstance(value, float):
        yield name, f"{value:.4g}" if math.isfinite(value) else str(value)
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)

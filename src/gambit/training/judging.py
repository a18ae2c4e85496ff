"""Loads checkpoints, judges them on the held-out problems of a collection, and gives the report as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from gambit.config import registry
from gambit.core.errors import UserError
from gambit.core.events import Json
from gambit.core.types import StatePosition
from gambit.engines.local.model import pick_device
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.checkpoint import add_metrics, load_checkpoint, read_metadata
from gambit.training.dataset import Dataset, Division, Part, load_dataset
from gambit.training.evaluate import JUDGE, ScorerRanking, ScorerReport, conclusions, evaluate, trust_of
from gambit.training.perfect_judge import judge_by_rollouts
from gambit.training.ranking import QUARTERS, Estimate, Ints
from gambit.training.storage import read_header

ALL = "all"
AUTO = "auto"


def judge_scorers(
    names: Sequence[str],
    folder: Path,
    part: str,
    *,
    device: str = AUTO,
    num_rollouts: int = 0,
    num_workers: int = 1,
    skip_corrupted: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> ScorerReport:
    """Checkpoints or registered scorers, judged on the same problems of one collection."""
    scorers = {_label(name): _load(name) for name in names}
    skipped: list[str] = []
    loaded: dict[str, tuple[Scorer, Dataset]] = {}
    by_states: dict[tuple[StatePosition, tuple[int, ...]], Dataset] = {}
    for name, scorer in scorers.items():
        key = scorer.info.state_position, scorer.info.layers
        if key not in by_states:
            by_states[key] = load_dataset(
                folder, *key, skip_corrupted=skip_corrupted, with_tokens=num_rollouts > 0, on_skip=skipped
            )
        data = by_states[key]
        _check_made_for(name, scorer.info, data, warn)
        loaded[name] = (scorer, data)
    for line in dict.fromkeys(skipped):
        warn(line)
    first = next(iter(loaded.values()))[1]
    traces = _chosen(first, part, [_division_on(name, folder) for name in names])
    perfect_judge = judge_by_rollouts(num_rollouts, num_workers) if num_rollouts else None
    return evaluate(loaded, traces, pick_device(device), perfect_judge=perfect_judge)


def check_writable_trust(names: Sequence[str], folder: Path, part: str) -> None:
    """Refuse to write figures into what is no checkpoint, or figures of problems that a scorer was fitted to."""
    for name in names:
        if not name.endswith(".safetensors"):
            raise UserError(f"--write: {name!r} is no checkpoint file that figures could be written into")
        if part not in (AUTO, Part.TEST) and _division_on(name, folder) is not None:
            raise UserError(f"--write: {name} was fitted to this collection, and its figures on --part {part} would "
                            "flatter it: leave --part out, or judge it on another collection")  # fmt: skip


def write_figures(names: Sequence[str], report: ScorerReport) -> None:
    """Into each checkpoint: what it reached, and how far a search may trust it."""
    for name in names:
        add_metrics(Path(name), {"test": metrics_of(report, _label(name))}, trust_of(report, _label(name)))


def _label(name: str) -> str:
    return Path(name).stem if name.endswith(".safetensors") else name


def _load(name: str) -> Scorer:
    if name.endswith(".safetensors") or Path(name).is_file():
        return load_checkpoint(Path(name))
    return cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))()


def _check_made_for(name: str, info: ScorerInfo, data: Dataset, warn: Callable[[str], None]) -> None:
    header = data.header
    if info.hidden_size is not None and info.hidden_size != header.hidden_size:
        raise UserError(f"{name} expects hidden size {info.hidden_size}, the collection has {header.hidden_size}")
    if info.boundary_rule != header.boundary_rule:
        raise UserError(
            f"{name} expects thoughts cut by {info.boundary_rule!r}, the collection has {header.boundary_rule!r}"
        )
    if info.base_model_hash and header.model_hash and info.base_model_hash != header.model_hash:
        warn(
            f"{name} was trained on weights {info.base_model_hash[:20]}…, the collection has {header.model_hash[:20]}…"
        )


def _division_on(name: str, folder: Path) -> Division | None:
    """How the collection was divided when this scorer was trained on it; None if it never saw it."""
    if not name.endswith(".safetensors"):
        return None
    training = read_metadata(Path(name)).get("training")
    if not isinstance(training, dict) or training.get("collection") != read_header(folder).id:
        return None
    return Division(**cast("dict[str, float]", training["division"]))  # type: ignore[arg-type]


def _chosen(data: Dataset, part: str, divisions: Sequence[Division | None]) -> Ints:
    """`auto` never judges by a problem that one of the scorers was trained or chosen on."""
    known = [division for division in divisions if division is not None]
    if len(set(known)) > 1:
        raise UserError(f"these scorers divided the collection differently ({known[0]} and {known[1]}): "
                        "judge them on another collection, or one at a time")  # fmt: skip
    if part == ALL or (part == AUTO and not known):
        return data.all_traces()
    if part != AUTO and part not in list(Part):
        raise UserError(f"unknown part {part!r}: use auto, all, {', '.join(Part)}")
    division = known[0] if known else Division()
    return data.of_part(division, Part.TEST if part == AUTO else Part(part))


def report_json(report: ScorerReport) -> dict[str, Json]:
    """The whole report as plain values, with its conclusions in words."""
    rankings: list[Json] = [
        {
            "name": ranking.name,
            "is_baseline": ranking.is_baseline,
            "mean_auc": _plain(ranking.mean_auc),
            "auc": {f"{share:g}": _plain(found) for share, found in ranking.auc.items()},
            "pairwise": {f"{share:g}": _plain(found) for share, found in ranking.pairwise.items()},
            "calibration": [cast("Json", dataclasses.asdict(each)) for each in ranking.calibration],
        }
        for ranking in report.rankings
    ]
    comparisons: list[Json] = [
        {"scorer": each.scorer, "other": each.other, "gain": _plain(each.gain), "verdict": each.verdict}
        for each in report.comparisons
    ]
    counts: dict[str, Json] = {
        name: getattr(report, name)
        for name in ("model", "source", "num_problems", "num_mixed", "num_traces", "share_right")
    }
    words: list[Json] = [*conclusions(report)]
    return {**counts, "rankings": rankings, "comparisons": comparisons, "conclusions": words}


def metrics_of(report: ScorerReport, name: str) -> dict[str, Json]:
    """What a checkpoint's metadata quotes of a report: its own figures, and the perfect judge's where there is one."""
    rankings = {ranking.name: ranking for ranking in report.rankings}
    mine, judge = rankings[name], rankings.get(JUDGE)
    return {
        "source": report.source,
        "problems": report.num_mixed,
        **_aucs(mine),
        "calibration_error": mine.calibration[-1].error if mine.calibration else None,
        "ceiling": _aucs(judge) if judge else None,
    }


def _aucs(ranking: ScorerRanking) -> dict[str, Json]:
    return {
        "mean_auc": _plain(ranking.mean_auc),
        "auc": {f"{share:g}": _plain(ranking.auc[share]) for share in QUARTERS},
    }


def _plain(found: Estimate) -> dict[str, Json]:
    values = dataclasses.asdict(found)
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

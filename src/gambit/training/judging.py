"""Loads checkpoints, judges them on the held-out problems of a collection, and gives the report as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch

from gambit.config import registry
from gambit.core.errors import UserError
from gambit.core.events import Json
from gambit.core.types import StatePosition
from gambit.engines.local.model import pick_device
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.scorers.checkpoint import load_checkpoint, read_metadata
from gambit.scorers.verifier.folder import is_verifier, read_info
from gambit.scorers.verifier.model import Verifier
from gambit.training.dataset import Dataset, Division, Part, load_dataset
from gambit.training.evaluate import JUDGE, SHARES, Rated, ScorerRanking, ScorerReport, compare, conclusions, rated_by
from gambit.training.perfect_judge import judge_by_rollouts
from gambit.training.ranking import QUARTERS, Estimate, Ints
from gambit.training.storage import Header, read_header
from gambit.training.verifier.passages import Passages
from gambit.training.verifier.reading import read_traces

ALL = "all"
AUTO = "auto"


def judge_scorers(
    names: Sequence[str],
    folder: Path,
    part: str,
    *,
    device: str = AUTO,
    model: str | None = None,
    num_rollouts: int = 0,
    num_workers: int = 1,
    skip_corrupted: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> ScorerReport:
    """Checkpoints, registered scorers or folders of verifiers, judged on the same problems of one collection."""
    collection = _Collection(folder, skip_corrupted, with_tokens=num_rollouts > 0)
    infos = {name: _info(name) for name in names}
    for name, info in infos.items():
        _check_made_for(_label(name), info, collection.header, warn)
    first = next(iter(infos.values()))
    data = collection.at(first.state_position, first.layers)
    traces = _chosen(data, part, [_division_on(name, folder) for name in names])
    rated = {_label(name): _rated(name, collection, traces, pick_device(device), model) for name in names}
    for line in dict.fromkeys(collection.skipped):
        warn(line)
    perfect_judge = judge_by_rollouts(num_rollouts, num_workers) if num_rollouts else None
    return compare(rated, data, traces, perfect_judge=perfect_judge)


class _Collection:
    """A collection's datasets, each read once."""

    def __init__(self, folder: Path, skip_corrupted: bool, with_tokens: bool) -> None:
        self.header = read_header(folder)
        self.skipped: list[str] = []
        self._folder, self._skips, self._with_tokens = folder, skip_corrupted, with_tokens
        self._found: dict[tuple[StatePosition, tuple[int, ...], bool], Dataset] = {}

    def at(self, position: StatePosition, layers: tuple[int, ...], with_tokens: bool = False) -> Dataset:
        key = position, layers, with_tokens or self._with_tokens
        if key not in self._found:
            self._found[key] = load_dataset(
                self._folder, position, layers, skip_corrupted=self._skips, with_tokens=key[2], on_skip=self.skipped
            )
        return self._found[key]

    @property
    def passages(self) -> Passages:
        return Passages.of(self.at(StatePosition.BOUNDARY, (), with_tokens=True))


def _rated(name: str, collection: _Collection, traces: Ints, device: torch.device, model: str | None) -> Rated:
    if not is_verifier(name):
        scorer = _load(name)
        return rated_by(scorer, collection.at(scorer.info.state_position, scorer.info.layers), traces, device)
    verifier = Verifier.load(Path(name), device, model)
    read = read_traces(verifier, collection.passages, traces)
    return Rated(read.by_share(traces, SHARES, verifier.info.aggregation, verifier.info.calibration))


def _info(name: str) -> ScorerInfo:
    if not is_verifier(name):
        return _load(name).info
    info = read_info(Path(name))
    return ScorerInfo(
        "verifier", hidden_size=info.hidden_size, boundary_rule=info.boundary_rule, layers=(),
        base_model=info.base_model, base_model_hash=info.base_model_hash,
    )  # fmt: skip


def _label(name: str) -> str:
    return Path(name).stem if name.endswith(".safetensors") else Path(name).name if is_verifier(name) else name


def _load(name: str) -> Scorer:
    if name.endswith(".safetensors") or Path(name).is_file():
        return load_checkpoint(Path(name))
    return cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))()


def _check_made_for(name: str, info: ScorerInfo, header: Header, warn: Callable[[str], None]) -> None:
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
    if is_verifier(name):
        training: object = read_info(Path(name)).training
    else:
        training = read_metadata(Path(name)).get("training") if name.endswith(".safetensors") else None
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

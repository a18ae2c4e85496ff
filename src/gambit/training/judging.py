"""Evaluates checkpoints on the held-out problems of a collection, and turns the report into JSON."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from gambit.config import registry
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.events import Json
from gambit.models import files as models
from gambit.scorers.base import Scorer, check_fit, made_for
from gambit.scorers.checkpoint import add_metrics, load_checkpoint, read_metadata
from gambit.scorers.choice import scorer_file
from gambit.scorers.published import trained_on
from gambit.stats import Interval, Ints
from gambit.training.dataset import Dataset, Division, Part, load_dataset
from gambit.training.evaluate import SHARES, Rated, ScorerReport, compare, conclusions, rated_by, spreads, trust_of
from gambit.training.ranking import QUARTERS
from gambit.training.storage import read_header, read_index
from gambit.training.verifier.passages import read_traces, with_prompts
from gambit.types import StatePosition
from gambit.verifiers.lora import LoraVerifier
from gambit.verifiers.lora_folder import is_verifier, read_info, write_info
from gambit.verifiers.names import parse_scorer

ALL = "all"
AUTO = "auto"


def judge_scorers(
    names: Sequence[str],
    folder: Path,
    part: str,
    *,
    device: str = AUTO,
    model: str | None = None,
    skip_corrupted: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> ScorerReport:
    """Evaluates checkpoints, registered scorers and folders of verifiers on the same problems of a collection.

    `part` is one of the collection, or `auto`: the problems that none of these scorers was trained or chosen on.
    """
    header, skipped = read_header(folder), list[str]()
    names = [_found(name, model or header.model) for name in names]
    if twice := [label for label, count in Counter(map(_label, names)).items() if count > 1]:
        raise UserError(f"two scorers are called {twice[0]!r}: rename one, or judge one at a time")
    scorers = {name: _load(name) for name in names if not is_verifier(name)}
    for name in names:
        label = _label(name)
        made = made_for(scorers[name].info, label) if name in scorers else read_info(Path(name)).made_for(label)
        if (warning := check_fit(made, header.made_for("the collection"))) is not None:
            warn(warning)

    @functools.cache
    def data_at(position: StatePosition, layers: tuple[int, ...], with_tokens: bool = False) -> Dataset:
        return load_dataset(
            folder, position, layers, skip_corrupted=skip_corrupted, with_tokens=with_tokens, on_skip=skipped
        )

    def data_for(name: str) -> Dataset:
        if name not in scorers:
            return data_at(StatePosition.BOUNDARY, (), with_tokens=True)
        return data_at(scorers[name].info.state_position, scorers[name].info.layers)

    def rate(name: str, traces: Ints) -> Rated:
        data = data_for(name)
        if name in scorers:
            return rated_by(scorers[name], data, traces, pick_device(device))
        verifier = LoraVerifier.load(Path(name), pick_device(device), model)
        read, info = read_traces(verifier, with_prompts(data), traces), verifier.info
        by_share = {share: read.chances(traces, share, info.aggregation, info.calibration) for share in SHARES}
        return Rated(by_share, spread=spreads(info.calibration.slope * read.thoughts, data, traces))

    data = data_for(names[0])  # baselines need no states, so that the data of any scorer will do
    traces = _chosen(data, part, [_division_on(name, folder) for name in names])
    rated = {_label(name): rate(name, traces) for name in names}
    for line in dict.fromkeys(skipped):
        warn(line)
    return compare(rated, data, traces)


def check_writable_trust(names: Sequence[str], folder: Path, part: str) -> None:
    """Raises if a name is no checkpoint to write figures into, or if figures of this part would flatter it."""
    for name in names:
        if not name.endswith(".safetensors") and not is_verifier(name):
            raise UserError(f"--write: {name!r} is no checkpoint file that figures could be written into: leave it out")
        if part not in (AUTO, Part.TEST) and _division_on(name, folder) is not None:
            raise UserError(f"--write: {name} was fitted to this collection, and its figures on --part {part} would "
                            "flatter it: leave --part out, or judge it on another collection")  # fmt: skip
        if name.endswith(".safetensors"):
            check_unseen(Path(name), [problem.question for entry in read_index(folder) for problem in entry.problems])


def check_unseen(checkpoint: Path, questions: Sequence[str]) -> None:
    """Refuses figures of problems that a published scorer was trained on."""
    problem_set, known = trained_on(checkpoint, questions)
    if known:
        raise UserError(f"--write: {checkpoint} was trained on {problem_set}, and {known} of these {len(questions)} "
                        "problems are from it: judge it on others")  # fmt: skip


def write_figures(names: Sequence[str], report: ScorerReport) -> None:
    """Writes into each checkpoint its figures, and how far a search may trust it."""
    for name in names:
        metrics, trust = {"test": metrics_of(report, _label(name))}, trust_of(report, _label(name))
        if not is_verifier(name):
            add_metrics(Path(name), metrics, trust)
        else:
            info = read_info(Path(name))
            changes = {"metrics": {**info.metrics, **metrics}, "trust": trust or info.trust}
            write_info(Path(name), info.model_copy(update=changes))


def _found(name: str, model: str) -> str:
    """Returns the file of a scorer of the model's own; other names as they are."""
    if not isinstance(parse_scorer(name), str) or registry.knows("gambit.scorers", name):
        return name
    path = scorer_file(name, models.locate(model) if models.named_model(model) is not None else model)
    if path is None:
        known = ", ".join(registry.names("gambit.scorers"))
        raise UserError(f"unknown scorer {name!r}: give a file, the folder of a verifier, {known}, or a "
                        f"scorer that lies beside {model}'s weights on this disk")  # fmt: skip
    return str(path)


def _label(name: str) -> str:
    """Returns the name of a scorer in a report."""
    if is_verifier(name):
        return Path(name).resolve().name
    return Path(name).stem if name.endswith(".safetensors") else name


def _load(name: str) -> Scorer:
    if name.endswith(".safetensors") or Path(name).is_file():
        return load_checkpoint(Path(name))
    return cast("Callable[[], Scorer]", registry.load("gambit.scorers", name))()


def _division_on(name: str, folder: Path) -> Division | None:
    """Returns how the collection's problems were divided when this scorer was trained; None if it never saw them.

    A problem's part follows from its id. Other traces of the same problems, collected anew or merged otherwise, are
    divided in the same way.
    """
    if is_verifier(name):
        training: object = read_info(Path(name)).training
    else:
        training = read_metadata(Path(name)).get("training") if name.endswith(".safetensors") else None
    if not isinstance(training, dict):
        return None
    header = read_header(folder)
    has_same_source = bool(header.source) and training.get("source") == header.source
    return Division(**training["division"]) if has_same_source or training.get("collection") == header.id else None


def _chosen(data: Dataset, part: str, divisions: Sequence[Division | None]) -> Ints:
    """Returns the traces of a part; `auto` leaves out problems that a scorer was trained or chosen on."""
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
    """Returns the whole report as plain values, with its conclusions in words."""
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
        for name in ("model", "source", "num_problems", "num_mixed", "num_traces", "share_right", "median_tokens")
    }
    words: list[Json] = [*conclusions(report)]
    return {**counts, "rankings": rankings, "comparisons": comparisons, "conclusions": words}


def metrics_of(report: ScorerReport, name: str) -> dict[str, Json]:
    """Returns a scorer's own figures of a report, for its checkpoint's metadata."""
    mine = next(ranking for ranking in report.rankings if ranking.name == name)
    return {
        "source": report.source,
        "problems": report.num_mixed,
        "mean_auc": _plain(mine.mean_auc),
        "auc": {f"{share:g}": _plain(mine.auc[share]) for share in QUARTERS},
        "calibration_error": mine.calibration[-1].error if mine.calibration else None,
    }


def _plain(found: Interval) -> dict[str, Json]:
    values = dataclasses.asdict(found)
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

"""Tries state positions, layers and objectives on a collection, and keeps the best scorer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gambit.config.trust import ScorerTrust
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.scorers.base import ScorerInfo
from gambit.training.dataset import OUTCOMES, Dataset, Division, Part, load_dataset, read_labels
from gambit.training.evaluate import evaluate, trust_of
from gambit.training.fit import Fitted, Say, fit
from gambit.training.networks import ARCHITECTURES, BLEND
from gambit.training.objectives import AGGREGATIONS, CANDIDATES, RIDGE, FitRecipe, recipe_for
from gambit.training.ridge import fit_ridge
from gambit.training.storage import read_header
from gambit.types import StatePosition

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """What to fit to what; `auto` tries all and keeps what ranks held-out problems best."""

    data: Path
    architecture: str = "mlp"
    objective: str = AUTO
    state_position: str = AUTO
    layers: tuple[int, ...] | None = None  # None: each one of the collection by itself, and all of them together
    division: Division = field(default_factory=Division)
    changes: Mapping[str, int | float | bool] = field(default_factory=dict)  # of the recipes' own values
    device: str = AUTO
    skip_corrupted: bool = False
    labels: str = OUTCOMES


@dataclass(frozen=True, slots=True)
class Trained:
    """What was tried, each with the data it was fitted to, and which of it is best."""

    tried: tuple[tuple[Dataset, Fitted], ...]
    best: Fitted
    division: Division
    device: torch.device

    @property
    def metadata(self) -> dict[str, object]:
        return self.metadata_of(self.best)

    def metadata_of(self, fitted: Fitted) -> dict[str, object]:
        """For its checkpoint, besides what engines need."""
        data = next(data for data, each in self.tried if each is fitted)
        trust = self.trust_in(fitted, data)
        known = metadata_of(data, self.division, fitted, self.tried, self.device)
        return known | {"trust": None if trust is None else trust.to_json()}

    def trust_in(self, fitted: Fitted, data: Dataset) -> ScorerTrust | None:
        """By the problems kept for testing; those it was chosen by would flatter it."""
        traces = data.of_part(self.division, Part.TEST)
        if not len(traces):
            return None
        states = data.states[:, : data.header.hidden_size * len(data.layers)]  # without a blend's confidences
        report = evaluate({"": (fitted.scorer, dataclasses.replace(data, states=states))}, traces, self.device)
        return trust_of(report, "")


def train(
    plan: TrainPlan,
    datasets: Sequence[Dataset],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    say: Say = lambda _: None,
) -> Trained:
    """Fit several scorers and choose by their ranking within held-out problems.

    First where to read: one objective on every dataset. Then how: the others on the dataset that won, each of which
    must clearly outrank what came before. Trying all with all takes many times as long, and the best of many by a few
    held-out problems is mostly the luckiest.
    """
    scout, *others = recipes_for(plan.architecture, plan.objective, plan.changes)
    device = pick_device(plan.device)
    if plan.architecture == BLEND:
        datasets = [data.with_confidences() for data in datasets]
    total = len(datasets) + len(others)
    tried: list[tuple[Dataset, Fitted]] = []

    def try_out(data: Dataset, recipe: FitRecipe) -> None:
        on_progress(len(tried), total)
        fitter = fit_ridge if recipe.objective == RIDGE else fit
        tried.append((data, fitter(data, plan.division, recipe, info_for(data, plan.architecture), device, say)))

    for data in datasets:
        try_out(data, scout)
    told_most, best = max(tried, key=lambda each: each[1].held_out_auc)
    for recipe in others:
        try_out(told_most, recipe)
        best = best_of((best, tried[-1][1]))
    return Trained(tuple(tried), best, plan.division, device)


def best_of(fitted: Sequence[Fitted]) -> Fitted:
    """The best: one replaces an earlier one only if it clearly outranks it."""
    return functools.reduce(lambda best, other: other if other.clearly_outranks(best) else best, fitted)


def recipes_for(architecture: str, objective: str, changes: Mapping[str, int | float | bool]) -> list[FitRecipe]:
    """Recipes to try; the first one is used to choose state position and layers."""
    if architecture not in ARCHITECTURES:
        raise UserError(f"unknown architecture {architecture!r}: use {', '.join(ARCHITECTURES)}")
    names = CANDIDATES[architecture] if objective == AUTO else (objective,)
    return [dataclasses.replace(recipe_for(name, architecture), **changes) for name in names]  # type: ignore[arg-type]


def datasets_of(plan: TrainPlan, skipped: list[str] | None = None) -> list[Dataset]:
    """The collection as it is to be tried: state positions, layers. `skipped` gathers shards that were left out."""
    known = [str(each) for each in StatePosition]
    if plan.state_position not in (AUTO, *known):
        raise UserError(f"unknown state position {plan.state_position!r}: use auto, {', '.join(known)}")
    labels = read_labels(plan.labels)
    header = read_header(plan.data)
    if not header.layers:
        raise UserError(f"{plan.data} holds no states, by which a scorer judges: collect them without --layers none, "
                        "or train a verifier (--architecture verifier)")  # fmt: skip
    positions = header.positions if plan.state_position == AUTO else (plan.state_position,)
    choices = layer_choices(header.layers) if plan.layers is None else [plan.layers]
    return [
        labels.on(load_dataset(plan.data, position, layers, skip_corrupted=plan.skip_corrupted, on_skip=skipped))
        for position in map(StatePosition, positions)
        for layers in choices
    ]


def layer_choices(layers: Sequence[int]) -> list[tuple[int, ...]]:
    return [*dict.fromkeys([*((layer,) for layer in layers), tuple(layers)])]


def info_for(data: Dataset, architecture: str) -> ScorerInfo:
    """What a scorer trained on this collection needs of a model and an engine."""
    return ScorerInfo(
        architecture=architecture,
        state_position=data.position,
        aggregation=AGGREGATIONS[architecture],
        needs_confidence=architecture == BLEND,
        hidden_size=data.header.hidden_size,
        boundary_rule=data.header.boundary_rule,
        layers=data.layers,
        base_model=data.header.model,
        base_model_hash=data.header.model_hash,
    )


def metadata_of(
    data: Dataset,
    division: Division,
    best: Fitted,
    tried: Sequence[tuple[Dataset, Fitted]],
    device: torch.device,
) -> dict[str, object]:
    """What a checkpoint says of its making, besides what engines need to know."""
    parts = {str(part): data.of_part(division, part) for part in Part}
    training = {
        "collection": data.header.id,
        "source": data.header.source,
        "problems": len(data.problems),
        "traces_per_problem": data.header.traces_per_problem,
        "traces": {name: len(traces) for name, traces in parts.items()},
        "thoughts": int(data.traces.num_thoughts.sum()),
        "labels": data.labelled_by,
        "division": dataclasses.asdict(division),
        "device": device.type,
        "epochs": best.epochs,
        "best_epoch": best.best_epoch,
        **dataclasses.asdict(best.recipe),
    }
    candidates = [
        {
            "objective": fitted.recipe.objective,
            "state_position": str(each.position),
            "layers": list(each.layers),
            "held_out_auc": fitted.held_out_auc,
            "epochs": fitted.epochs,
            "seconds": fitted.seconds,
            "is_chosen": fitted is best,
        }
        for each, fitted in tried
    ]
    return {"training": training, "metrics": {"held_out_auc": best.held_out_auc}, "candidates": candidates}

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
from gambit.training.dataset import OUTCOMES, Dataset, Division, Part, load_dataset, read_labels, with_labels
from gambit.training.evaluate import evaluate, trust_of
from gambit.training.fit import Fitted, Say, fit, fit_ridge
from gambit.training.networks import AGGREGATIONS, ARCHITECTURES, BLEND, CANDIDATES, RIDGE, FitRecipe, recipe_for
from gambit.training.storage import read_header
from gambit.types import StatePosition

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """A training: a collection and what to try on it; `auto` tries all and keeps what ranks held-out problems best."""

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
    """All fits that were tried, and the best of them."""

    tried: tuple[Fitted, ...]
    best: Fitted
    division: Division
    device: torch.device

    @property
    def metadata(self) -> dict[str, object]:
        return self.metadata_of(self.best)

    def metadata_of(self, fitted: Fitted) -> dict[str, object]:
        """Returns what the checkpoint of a fit holds besides what engines need: its origin, figures and trust."""
        data, trust = fitted.data, self.trust_in(fitted)
        training = {
            **data.origin(self.division),
            "traces_per_problem": data.header.traces_per_problem,
            "thoughts": int(data.traces.num_thoughts.sum()),
            "device": self.device.type,
            "epochs": fitted.epochs,
            "best_epoch": fitted.best_epoch,
            **dataclasses.asdict(fitted.recipe),
        }
        candidates = [
            {
                "objective": each.recipe.objective,
                "state_position": str(each.data.position),
                "layers": list(each.data.layers),
                "held_out_auc": each.held_out_auc,
                "epochs": each.epochs,
                "seconds": each.seconds,
                "is_chosen": each is fitted,
            }
            for each in self.tried
        ]
        metrics = {"held_out_auc": fitted.held_out_auc}
        return {"training": training, "metrics": metrics, "candidates": candidates,
                "trust": None if trust is None else trust.to_json()}  # fmt: skip

    def trust_in(self, fitted: Fitted) -> ScorerTrust | None:
        """Returns how far a search may trust a fit, by the problems kept for testing; None without any.

        Those that it was chosen by would flatter it.
        """
        data = fitted.data
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
    """Fits several scorers and chooses by their ranking within held-out problems.

    The first objective is fitted to every dataset, which chooses the states. The others are fitted to the dataset that
    won, and each must clearly outrank what came before. Trying all with all takes many times as long, and the best of
    many by a few held-out problems is mostly the luckiest.
    """
    scout, *others = recipes_for(plan.architecture, plan.objective, plan.changes)
    device = pick_device(plan.device)
    if plan.architecture == BLEND:
        datasets = [data.with_confidences() for data in datasets]
    total = len(datasets) + len(others)
    tried: list[Fitted] = []

    def try_out(data: Dataset, recipe: FitRecipe) -> None:
        on_progress(len(tried), total)
        fitter = fit_ridge if recipe.objective == RIDGE else fit
        tried.append(fitter(data, plan.division, recipe, info_for(data, plan.architecture), device, say))

    for data in datasets:
        try_out(data, scout)
    scouted = max(tried, key=lambda each: each.held_out_auc)
    for recipe in others:
        try_out(scouted.data, recipe)
    best = best_of((scouted, *tried[len(datasets) :]))
    return Trained(tuple(tried), best, plan.division, device)


def best_of(fitted: Sequence[Fitted]) -> Fitted:
    """Returns the best fit: one replaces an earlier one only if it clearly outranks it."""
    return functools.reduce(lambda best, other: other if other.clearly_outranks(best) else best, fitted)


def recipes_for(architecture: str, objective: str, changes: Mapping[str, int | float | bool]) -> list[FitRecipe]:
    """Returns the recipes to try; the first one is used to choose state position and layers."""
    if architecture not in ARCHITECTURES:
        raise UserError(f"unknown architecture {architecture!r}: use {', '.join(ARCHITECTURES)}")
    names = CANDIDATES[architecture] if objective == AUTO else (objective,)
    return [dataclasses.replace(recipe_for(name, architecture), **changes) for name in names]  # type: ignore[arg-type]


def datasets_of(plan: TrainPlan, skipped: list[str] | None = None) -> list[Dataset]:
    """Loads the collection at each state position and choice of layers; `skipped` gathers shards left out."""
    known = [str(each) for each in StatePosition]
    if plan.state_position not in (AUTO, *known):
        raise UserError(f"unknown state position {plan.state_position!r}: use auto, {', '.join(known)}")
    labels = read_labels(plan.labels)
    header = read_header(plan.data)
    if not header.layers:
        raise UserError(f"{plan.data} holds no states, by which a scorer judges: collect them without --layers none, "
                        "or train a verifier (--architecture verifier)")  # fmt: skip
    positions = header.positions if plan.state_position == AUTO else (plan.state_position,)
    each_and_all = dict.fromkeys([*((layer,) for layer in header.layers), header.layers])
    choices = each_and_all if plan.layers is None else [plan.layers]
    found = [
        load_dataset(plan.data, position, layers, skip_corrupted=plan.skip_corrupted, on_skip=skipped)
        for position in map(StatePosition, positions)
        for layers in choices
    ]
    return [with_labels(data, labels, plan.labels) for data in found]


def info_for(data: Dataset, architecture: str) -> ScorerInfo:
    """Returns what a scorer trained on this collection needs of a model and an engine."""
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

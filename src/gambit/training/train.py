"""Fits scorers to a collection: each state position, layer and objective is tried, and the best scorer is kept."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from gambit.config.trust import ScorerTrust
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.stats import Floats, Ints
from gambit.training.dataset import OUTCOMES, Dataset, Division, Part, in_groups, load_dataset, read_labels, with_labels
from gambit.training.evaluate import evaluate, trust_of
from gambit.training.networks import (
    AGGREGATIONS,
    ARCHITECTURES,
    BLEND,
    CANDIDATES,
    RIDGE,
    Batch,
    FitRecipe,
    Scaling,
    Unit,
    as_scorer,
    build_network,
    recipe_for,
    straight_network,
)
from gambit.training.scoring import (
    QUARTERS,
    SCORING_THOUGHTS,
    Thoughts,
    calibrating_line,
    clearly_better,
    last_thoughts,
    mean_auc,
    network_scores,
    pairs_in,
    scores_after,
)
from gambit.training.storage import read_header
from gambit.types import Aggregation, StatePosition

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A scorer as it was at its best epoch."""

    data: Dataset  # that it was fitted to
    recipe: FitRecipe
    scorer: Scorer
    held_out: Floats  # [problem] AUC, mean over 25, 50, 75 and 100 % of the thoughts, on validation problems
    epochs: int
    best_epoch: int
    seconds: float

    @property
    def held_out_auc(self) -> float:
        return float(np.nanmean(self.held_out))

    def clearly_outranks(self, other: "Fitted") -> bool:
        """Returns whether it ranks held-out problems better than by luck."""
        return clearly_better(self.held_out, other.held_out)


def fit(
    data: Dataset, division: Division, recipe: FitRecipe, info: ScorerInfo, device: torch.device, say: Say
) -> Fitted:
    """Fits a network with early stopping on held-out ranking."""
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    train, held_out = parts_of(data, division)
    thoughts = Thoughts.of(data, device)
    scaling = scaling_of(data, train) if recipe.normalises and info.architecture != "sequence" else None
    network = build_network(info.architecture, data.states.shape[-1], scaling, recipe).to(device)
    run = _FitRun(network, thoughts, train, recipe, AGGREGATIONS[info.architecture])
    best, best_epoch, weights, epoch = np.full(len(data.problems), -1.0), 0, _copied(network), 0
    for epoch in range(1, recipe.max_epochs + 1):
        loss = run.epoch()
        reached = problem_aucs(network, data, held_out, thoughts, run.aggregation)
        say(f"{recipe.objective}: epoch {epoch}, loss {loss:.4f}, held-out AUC {np.nanmean(reached):.4f}")
        if np.nanmean(reached) > np.nanmean(best):
            best, best_epoch, weights = reached, epoch, _copied(network)
        elif epoch - best_epoch >= recipe.patience:
            break
    network.load_state_dict(weights)
    network.eval()
    return Fitted(data, recipe, as_scorer(network, info), best, epoch, best_epoch, time.monotonic() - began)


class _FitRun:
    """The optimiser's side of a fit."""

    def __init__(
        self, network: nn.Module, thoughts: Thoughts, train: Ints, recipe: FitRecipe, aggregation: Aggregation
    ) -> None:
        self.aggregation = aggregation
        self._network, self._thoughts, self._recipe = network, thoughts, recipe
        self._traces = torch.from_numpy(train).to(thoughts.device)
        self._problems: list[Tensor] = []  # the traces of each, where these are the units
        self._rows = self._traces  # else: a trace or, for thoughts, a trace and a place each
        if recipe.unit is Unit.PROBLEM:
            _, counts = torch.unique_consecutive(thoughts.problem_of[self._traces], return_counts=True)
            self._problems = list(torch.split(self._traces, counts.tolist()))
        elif recipe.unit is Unit.THOUGHT:
            self._rows = thoughts.thought_rows(self._traces)
        self._num_units = len(self._problems) or len(self._rows)
        self._dropout = nn.Dropout(recipe.input_dropout)
        self._pos_weight = self._wrong_per_right() if recipe.is_balanced else None
        kind = torch.optim.AdamW if recipe.is_decaying else torch.optim.Adam
        is_fused = thoughts.device.type == "cuda"  # thousands of tiny updates: launches are what they cost
        self._optimizer = kind(network.parameters(), recipe.rate, weight_decay=recipe.weight_decay, fused=is_fused)
        self._num_updates = 0
        self._epoch_updates = -(-self._num_units // recipe.batch_size)

    def epoch(self) -> float:
        """Passes once over the units in a new order, and returns the mean loss."""
        self._network.train()
        return float(torch.stack([self._update(rows) for rows in self._batches()]).mean())

    def _batches(self) -> Iterator[Tensor]:
        """Yields rows of units: traces or, for thoughts, [trace, place]."""
        order = torch.randperm(self._num_units)
        if not self._problems:
            yield from torch.split(self._rows[order.to(self._rows.device)], self._recipe.batch_size)
            return
        for numbers in torch.split(order, self._recipe.batch_size):
            yield torch.cat([self._problems[number] for number in numbers.tolist()])

    def _update(self, rows: Tensor) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate_at(self._num_updates, self._epoch_updates)
        self._num_updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._recipe.loss(self._batch(rows))
        loss.backward()  # type: ignore[no-untyped-call]
        if self._recipe.clip is not None:
            nn.utils.clip_grad_norm_(self._network.parameters(), self._recipe.clip)
        self._optimizer.step()
        return loss.detach()

    def _batch(self, rows: Tensor) -> Batch:
        thoughts = self._thoughts
        if self._recipe.unit is Unit.THOUGHT:
            traces, places = rows[:, 0], rows[:, 1]
            states, num_thoughts = thoughts.take_thoughts(places), torch.ones_like(traces)
            labels = thoughts.labels[places, None]
        else:
            traces = rows
            states, num_thoughts = thoughts.take(traces), thoughts.num_thoughts[traces]
            labels = thoughts.take_labels(traces)
        logits = self._network(self._dropout(states))
        return Batch(logits, num_thoughts, labels, thoughts.problem_of[traces], self.aggregation, self._pos_weight)

    def _wrong_per_right(self) -> Tensor:
        """Returns the ratio among the thoughts or traces of the loss, by which the classes are balanced."""
        thoughts, traces = self._thoughts, self._traces
        is_by_thought = self._recipe.unit is Unit.THOUGHT
        weights = thoughts.num_thoughts[traces].float() if is_by_thought else torch.ones_like(traces).float()
        right = (weights * thoughts.is_correct[traces]).sum()
        return (weights.sum() - right) / right.clamp(min=1)


def parts_of(data: Dataset, division: Division) -> tuple[Ints, Ints]:
    """Returns traces to train on, those with at least one thought, and traces to choose by; raises if too few."""
    train, held_out = data.of_part(division, Part.TRAIN), data.of_part(division, Part.VALIDATION)
    train = train[data.traces.num_thoughts[train] > 0]
    for name, traces in (("train", train), ("validation", held_out)):
        problem_of = data.traces.problem_of[traces]
        right = np.bincount(problem_of, data.traces.is_correct[traces], len(data.problems))
        num_mixed = int(((right > 0) & (right < np.bincount(problem_of, minlength=len(data.problems)))).sum())
        if num_mixed == 0:
            raise UserError(f"the {name} part has {len(set(problem_of))} problems, {num_mixed} of them with right and "
                            "wrong traces: collect more problems, or harder or easier ones")  # fmt: skip
    return train, held_out


def scaling_of(data: Dataset, train: Ints) -> Scaling:
    """Measures the scaling of inputs by the training thoughts."""
    return Scaling.of(data.states[torch.from_numpy(data.traces.places(train))])


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def problem_aucs(
    network: nn.Module, data: Dataset, traces: Ints, thoughts: Thoughts, aggregation: Aggregation
) -> Floats:
    """Returns [problem], the mean AUC over the quarters, by which scorers are chosen; NaN without a pair to rank."""
    scores = network_scores(network, thoughts, traces)
    reached = [scores_after(share, data.traces, traces, scores, aggregation) for share in QUARTERS]
    return mean_auc([pairs_in(data, traces, each) for each in reached])


# -- ridge regression -------------------------------------------------------------------------------------------


# The penalty as a multiple of a feature's variance among the traces of a problem.
STRENGTHS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
NUM_FOLDS = 5
SMALLEST_VARIANCE = 1e-6
BATCH_ROWS = 2_048  # a product of few rows spends its time on reading and writing a matrix of all features


def fit_ridge(
    data: Dataset, division: Division, recipe: FitRecipe, info: ScorerInfo, device: torch.device, say: Say
) -> Fitted:
    """Fits a line within problems, with a penalty that is chosen by cross-validation, since held-out problems are few.

    With few problems and a weak signal a network overfits to the problems before it finds what they share; a line has
    fewer parameters to do so. It is solved in seconds, so that it also serves to choose state position and layers.
    Once the line has been evaluated by them, it is solved again with them: more problems are what it gains most by.
    """
    began = time.monotonic()
    train, held_out = parts_of(data, division)
    thoughts, scaling = Thoughts.of(data, device), scaling_of(data, train)

    def aucs(others: Moments, strength: float, traces: Ints) -> Floats:
        """Returns [problem], the AUCs of a line that other problems gave, ranked as the fits that descend are."""
        weights = others.solved(strength)
        network = straight_network(info.architecture, scaling, weights / others.deviation(weights), 0.0).to(device)
        return problem_aucs(network, data, traces, thoughts, AGGREGATIONS[info.architecture])

    folds = _folds(train, data.traces.problem_of[train])
    moments = [Moments.of(thoughts, fold, scaling) for fold in folds]
    whole = Moments.sum(moments)
    reached = {}
    for strength in STRENGTHS:
        found = [aucs(whole - mine, strength, fold) for mine, fold in zip(moments, folds, strict=True)]
        reached[strength] = float(np.nanmean(np.concatenate(found)))
        say(f"{recipe.objective}: penalty {strength:g}, cross-validated AUC {reached[strength]:.4f}")
    strength = max(reached, key=reached.__getitem__)
    on_held_out = aucs(whole, strength, held_out)
    seen = held_out[data.traces.num_thoughts[held_out] > 0]
    line = Moments.sum([whole, Moments.of(thoughts, seen, scaling)]).solved(strength)
    weights, bias = calibrated(line, thoughts, np.concatenate([train, seen]), scaling)
    scorer = as_scorer(straight_network(info.architecture, scaling, weights, bias), info)
    chosen = dataclasses.replace(recipe, weight_decay=strength)
    return Fitted(data, chosen, scorer, on_held_out, 1, 1, time.monotonic() - began)


def _folds(traces: Ints, problem_of: Ints) -> list[Ints]:
    problems, number = np.unique(problem_of, return_inverse=True)
    if len(problems) < 2:
        raise UserError("one problem alone cannot be cross-validated: collect more, or choose another objective")
    return [traces[number % NUM_FOLDS == fold] for fold in range(min(NUM_FOLDS, len(problems)))]


@dataclass(frozen=True, slots=True)
class Moments:
    """Covariances of states within problems, with each other and with the outcome, summed over problems."""

    covariance: Tensor  # [feature, feature], summed over `count` rows
    slant: Tensor  # [feature]: with the outcome
    count: int

    @classmethod
    def of(cls, thoughts: Thoughts, traces: Ints, scaling: Scaling) -> Self:
        """Sums over running means after each quarter of the thoughts, which is what a search compares."""
        slant, count = torch.zeros_like(scaling.mean, device=thoughts.device), 0
        covariance = slant.new_zeros(len(slant), len(slant))
        for group in in_groups(_centred(thoughts, traces, scaling), lambda each: len(each[1]), BATCH_ROWS):
            rows, labels = (torch.cat(column) for column in zip(*group, strict=True))
            covariance += rows.T @ rows
            slant += rows.T @ labels
            count += len(rows)
        return cls(covariance, slant, count)

    @classmethod
    def sum(cls, terms: Sequence[Self]) -> Self:
        covariance = torch.stack([term.covariance for term in terms]).sum(0)
        return cls(covariance, torch.stack([term.slant for term in terms]).sum(0), sum(term.count for term in terms))

    def __sub__(self, other: "Moments") -> "Moments":
        """Returns the moments of the problems that are not in the other."""
        return Moments(self.covariance - other.covariance, self.slant - other.slant, self.count - other.count)

    def deviation(self, weights: Tensor) -> Tensor:
        """Returns the standard deviation, within problems, of the scores by these weights."""
        return (weights @ self.covariance @ weights / self.count).clamp(min=1e-12).sqrt()

    def solved(self, strength: float) -> Tensor:
        """Returns [feature], the weights on normalised states."""
        exact = "cpu" if self.slant.device.type == "mps" else self.slant.device  # which has no double precision
        covariance, slant = (each.to(exact).double() / self.count for each in (self.covariance, self.slant))
        scale = covariance.diagonal().clamp(min=SMALLEST_VARIANCE).sqrt()
        correlation = covariance / scale / scale[:, None]
        correlation.diagonal().add_(strength)
        factor = torch.linalg.cholesky(correlation)  # half the work of a general solver
        weights = torch.cholesky_solve((slant / scale)[:, None], factor)[:, 0] / scale
        return weights.float().to(self.slant.device)


def _centred(thoughts: Thoughts, traces: Ints, scaling: Scaling) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields [row, feature] and [row] labels of each problem, less their means over its traces."""
    mine = torch.from_numpy(traces).to(thoughts.device)
    _, sizes = torch.unique_consecutive(thoughts.problem_of[mine], return_counts=True)
    for members in torch.split(mine, sizes.tolist()):
        counts = thoughts.num_thoughts[members].cpu().numpy()
        seen = np.stack([last_thoughts(counts, share) for share in QUARTERS], axis=1)
        last = torch.from_numpy(seen).to(thoughts.device)  # [trace, quarter]
        labels = thoughts.labels[thoughts.starts[members, None] + last]
        sums = thoughts.take(members).cumsum(1)
        means = sums.gather(1, last[..., None].expand(-1, -1, sums.shape[-1])) / (last[..., None] + 1)
        rows = scaling.normalised(means)
        yield (rows - rows.mean(0)).flatten(0, 1), (labels - labels.mean(0)).flatten()


def calibrated(weights: Tensor, thoughts: Thoughts, train: Ints, scaling: Scaling) -> tuple[Tensor, float]:
    """Returns the line's weights and bias as logits of being right, by logistic regression on the line alone."""
    places = thoughts.thought_rows(torch.from_numpy(train).to(thoughts.device))[:, 1]
    chunks = torch.split(places, SCORING_THOUGHTS)
    heights = torch.cat([scaling.normalised(thoughts.take_thoughts(each)[:, 0]) @ weights for each in chunks])
    slope, bias = calibrating_line(heights.cpu(), thoughts.labels[places].cpu())
    return weights * slope, bias


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
        """Returns how far a search may trust a fit, by the problems kept for testing alone; None without any."""
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
    """Loads the collection at each state position and choice of layers; `skipped` gathers corrupted shards."""
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
        load_dataset(plan.data, position, layers, skipped=skipped)
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

"""Fits one scorer by gradient descent, stopped early by its ranking of held-out problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gambit.errors import UserError
from gambit.scorers.base import Scorer, ScorerInfo
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset, Division, Part
from gambit.training.networks import Scaling, as_scorer, build_network
from gambit.training.objectives import AGGREGATIONS, Batch, FitRecipe, Unit
from gambit.training.ranking import QUARTERS, mean_auc, pairs, trace_scores
from gambit.training.scoring import Thoughts, network_scores
from gambit.types import Aggregation

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A scorer as it was at its best epoch."""

    recipe: FitRecipe
    scorer: Scorer
    held_out: Floats  # [problem] AUC, mean over 25, 50, 75 and 100 % of the thoughts, on validation problems
    epochs: int
    best_epoch: int
    seconds: float

    @property
    def held_out_auc(self) -> float:
        return float(np.nanmean(self.held_out))

    def clearly_outranks(self, other: Fitted) -> bool:
        """Whether it is better by more than the standard error of the difference; less is often luck."""
        gains = self.held_out - other.held_out
        gains = gains[np.isfinite(gains)]
        error = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
        return bool(gains.mean() > error)


def fit(
    data: Dataset,
    division: Division,
    recipe: FitRecipe,
    info: ScorerInfo,
    device: torch.device,
    say: Say = lambda _: None,
) -> Fitted:
    """One fit with early stopping on held-out ranking."""
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    train, held_out = parts_of(data, division)
    thoughts = Thoughts.of(data, device)
    scaling = scaling_of(data, train) if recipe.normalises and info.architecture != "sequence" else None
    network = build_network(info.architecture, data.num_features, scaling, recipe.width, recipe.blocks).to(device)
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
    return Fitted(recipe, as_scorer(network, info), best, epoch, best_epoch, time.monotonic() - began)


class _FitRun:
    """The optimiser's side of a fit."""

    def __init__(
        self, network: nn.Module, thoughts: Thoughts, train: Ints, recipe: FitRecipe, aggregation: Aggregation
    ) -> None:
        self.aggregation = aggregation
        self._network, self._thoughts, self._recipe = network, thoughts, recipe
        self._units = _units(recipe.unit, thoughts, train)
        self._dropout = nn.Dropout(recipe.input_dropout)
        self._pos_weight = _pos_weight(recipe, thoughts, train)
        kind = torch.optim.AdamW if recipe.is_decaying else torch.optim.Adam
        is_fused = thoughts.device.type == "cuda"  # thousands of tiny updates: launches are what they cost
        self._optimizer = kind(network.parameters(), recipe.rate, weight_decay=recipe.weight_decay, fused=is_fused)
        self._num_updates = 0
        self._all_updates = recipe.max_epochs * -(-self._units.count // recipe.batch_size)

    def epoch(self) -> float:
        """One pass over the units in a new order; gives the mean loss."""
        self._network.train()
        order = torch.randperm(self._units.count).to(self._units.device)
        losses = [self._update(self._units.pick(part)) for part in torch.split(order, self._recipe.batch_size)]
        return float(torch.stack(losses).mean())

    def _update(self, rows: Tensor) -> Tensor:
        if self._recipe.is_decaying:
            share = 1 - self._num_updates / self._all_updates
            for group in self._optimizer.param_groups:
                group["lr"] = self._recipe.rate * share
        self._num_updates += 1
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._recipe.loss(self._batch(rows))
        loss.backward()  # type: ignore[no-untyped-call]
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
        problem = thoughts.problem_of[traces]
        is_correct = thoughts.is_correct[traces]
        return Batch(logits, num_thoughts, is_correct, problem, self.aggregation, self._pos_weight, labels)


@dataclass(frozen=True, slots=True)
class _Units:
    """What an epoch passes over, by number."""

    count: int
    device: torch.device  # where `pick` wants its numbers
    pick: Callable[[Tensor], Tensor]  # numbers -> [rows] of traces, or for thoughts (trace, place) pairs


def _units(unit: Unit, thoughts: Thoughts, train: Ints) -> _Units:
    traces = torch.from_numpy(train).to(thoughts.device)
    if unit is Unit.PROBLEM:
        _, counts = torch.unique_consecutive(thoughts.problem_of[traces], return_counts=True)
        members = torch.split(traces, counts.tolist())
        return _Units(
            len(members), torch.device("cpu"), lambda numbers: torch.cat([members[i] for i in numbers.tolist()])
        )
    rows = thoughts.thought_rows(traces) if unit is Unit.THOUGHT else traces
    return _Units(len(rows), thoughts.device, rows.__getitem__)


def _pos_weight(recipe: FitRecipe, thoughts: Thoughts, train: Ints) -> Tensor | None:
    """Wrong per right among the thoughts or traces of the loss, to balance the classes."""
    if not recipe.is_balanced:
        return None
    traces = torch.from_numpy(train).to(thoughts.device)
    weights = thoughts.num_thoughts[traces].float() if recipe.unit is Unit.THOUGHT else torch.ones_like(traces).float()
    right = (weights * thoughts.is_correct[traces]).sum()
    return (weights.sum() - right) / right.clamp(min=1)


def parts_of(data: Dataset, division: Division) -> tuple[Ints, Ints]:
    """Traces to train on, those with at least one thought, and traces to choose by; refuses too few."""
    train, held_out = data.of_part(division, Part.TRAIN), data.of_part(division, Part.VALIDATION)
    train = train[data.traces.num_thoughts[train] > 0]
    _check_enough(data, train, held_out)
    return train, held_out


def scaling_of(data: Dataset, train: Ints) -> Scaling:
    is_train = np.zeros(len(data.states), dtype=np.bool_)
    for start, count in zip(data.traces.starts[train], data.traces.num_thoughts[train], strict=True):
        is_train[start : start + count] = True
    return Scaling.of(data.states[torch.from_numpy(is_train)])


def _check_enough(data: Dataset, train: Ints, held_out: Ints) -> None:
    for name, traces in (("train", train), ("validation", held_out)):
        outcomes = data.traces.is_correct[traces]
        mixed = _num_mixed(data, traces)
        if len(traces) == 0 or outcomes.all() or not outcomes.any() or mixed == 0:
            raise UserError(
                f"the {name} part has {len(set(data.traces.problem_of[traces]))} problems, {mixed} of them with right "
                "and wrong traces: collect more problems, or harder or easier ones"
            )


def _num_mixed(data: Dataset, traces: Ints) -> int:
    right = np.bincount(data.traces.problem_of[traces], data.traces.is_correct[traces], len(data.problems))
    every = np.bincount(data.traces.problem_of[traces], minlength=len(data.problems))
    return int(((right > 0) & (right < every)).sum())


def _copied(network: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


# -- ranking ---------------------------------------------------------------------------------------------------


def problem_aucs(
    network: nn.Module, data: Dataset, traces: Ints, thoughts: Thoughts, aggregation: Aggregation
) -> Floats:
    """[problem], mean over the quarters: what scorers are chosen by. Not a number where there is nothing to rank."""
    scores = network_scores(network, thoughts, traces)
    known = data.traces
    found = [
        pairs(
            trace_scores(scores, known.starts[traces], known.num_thoughts[traces], share, aggregation),
            known.is_correct[traces],
            known.problem_of[traces],
            len(data.problems),
        )
        for share in QUARTERS
    ]
    return mean_auc(found)

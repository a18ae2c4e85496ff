"""Fits one scorer by gradient descent, stopped early by its ranking of held-out problems."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from gambit.training.ranking import QUARTERS, clearly_better, mean_auc, pairs_in, scores_after
from gambit.training.scoring import Thoughts, network_scores
from gambit.types import Aggregation

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

    def clearly_outranks(self, other: Fitted) -> bool:
        """Returns whether it ranks held-out problems better than by luck."""
        return clearly_better(self.held_out, other.held_out)


def fit(
    data: Dataset,
    division: Division,
    recipe: FitRecipe,
    info: ScorerInfo,
    device: torch.device,
    say: Say = lambda _: None,
) -> Fitted:
    """Fits a network with early stopping on held-out ranking."""
    began = time.monotonic()
    torch.manual_seed(recipe.seed)
    train, held_out = parts_of(data, division)
    thoughts = Thoughts.of(data, device)
    scaling = scaling_of(data, train) if recipe.normalises and info.architecture != "sequence" else None
    network = build_network(info.architecture, data.num_features, scaling, recipe).to(device)
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

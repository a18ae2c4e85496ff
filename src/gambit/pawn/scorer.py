"""Pawn's scorer: an MLP on boundary states, fitted to rank the traces of one puzzle; reads only the scorer split."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from gambit.pawn.sampling import Samples

_WIDTH = 512


@dataclass(frozen=True, slots=True)
class StateTable:
    """States of many traces: [puzzle, trace, step, D], how many steps are real, and which traces are correct."""

    states: Tensor
    num_steps: Tensor
    is_correct: Tensor

    def select(self, puzzles: Tensor) -> "StateTable":
        return StateTable(self.states[puzzles], self.num_steps[puzzles], self.is_correct[puzzles])


@dataclass(frozen=True, slots=True)
class FitRecipe:
    num_updates: int = 1500
    puzzles_per_update: int = 24
    rate: float = 1e-3
    weight_decay: float = 0.01
    ranking_weight: float = 1.0
    sharpness: float = 20.0  # of the ranking loss: a difference of 1/20 in the running mean counts as clear
    held_out_share: float = 0.15
    check_every: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    scorer: nn.Sequential
    held_out_auc: float  # mean of those at 50 and 75 % of the steps


def state_table(samples: Samples, position: str) -> StateTable:
    return StateTable(samples.states[position], samples.num_steps, samples.is_correct)


def build_scorer(hidden_size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden_size, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))


def fit_scorer(table: StateTable, recipe: FitRecipe) -> Fit:
    """The scorer with the best mean AUC at 50 and 75 % of the steps on held-out puzzles."""
    torch.manual_seed(recipe.seed)
    device = table.states.device
    order = torch.randperm(len(table.states), device=device)
    num_held_out = max(1, round(recipe.held_out_share * len(order)))
    held_out, fitted = table.select(order[:num_held_out]), table.select(order[num_held_out:])
    scorer = build_scorer(table.states.shape[-1]).to(device)
    optimizer = torch.optim.AdamW(scorer.parameters(), recipe.rate, weight_decay=recipe.weight_decay)
    best, weights = -1.0, scorer.state_dict()
    for update in range(1, recipe.num_updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * (1 - (update - 1) / recipe.num_updates)
        batch = fitted.select(torch.randint(len(fitted.states), (recipe.puzzles_per_update,), device=device))
        optimizer.zero_grad()
        _loss(scorer, batch, recipe).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if update % recipe.check_every == 0 or update == recipe.num_updates:
            reached = sum(ranking_auc(running_means(scorer, held_out), held_out, q) for q in (0.5, 0.75)) / 2
            if reached > best:
                best, weights = reached, {name: value.clone() for name, value in scorer.state_dict().items()}
    scorer.load_state_dict(weights)
    return Fit(scorer, best)


def _loss(scorer: nn.Sequential, batch: StateTable, recipe: FitRecipe) -> Tensor:
    """Every step's score should be the chance of success; the running mean should rank the traces of a puzzle."""
    logits = scorer(batch.states.float())[..., 0]
    real = torch.arange(logits.shape[-1], device=logits.device) < batch.num_steps[..., None]
    labels = batch.is_correct[..., None].expand_as(logits).float()
    calibration = F.binary_cross_entropy_with_logits(logits[real], labels[real])
    means = _cumulative_means(logits.sigmoid() * real)
    fractions = torch.rand(len(means), 1, device=means.device)
    reached = _at_fraction(means, batch.num_steps, fractions)
    gaps = reached[:, :, None] - reached[:, None, :]
    pairs = batch.is_correct[:, :, None] & ~batch.is_correct[:, None, :]
    ranking = (F.softplus(-recipe.sharpness * gaps) * pairs).sum() / pairs.sum().clamp(min=1)
    return calibration + recipe.ranking_weight * ranking


def _cumulative_means(scores: Tensor) -> Tensor:
    return scores.cumsum(-1) / torch.arange(1, scores.shape[-1] + 1, device=scores.device)


def _at_fraction(means: Tensor, num_steps: Tensor, fractions: Tensor | float) -> Tensor:
    last = (torch.ceil(num_steps * fractions).long() - 1).clamp(min=0)
    return means.gather(-1, last[..., None])[..., 0]


@torch.no_grad()
def running_means(scorer: nn.Sequential, table: StateTable) -> Tensor:
    """[puzzle, trace, step]: the trace score after each step."""
    scores = torch.stack([scorer(states.float())[..., 0].sigmoid() for states in table.states])
    return _cumulative_means(scores)


def ranking_auc(means: Tensor, table: StateTable, fraction: float) -> float:
    """Within-puzzle AUC of the trace score at a share of the steps, averaged over puzzles with both outcomes."""
    return within_puzzle_auc(_at_fraction(means, table.num_steps, fraction), table.is_correct)


def within_puzzle_auc(scores: Tensor, is_correct: Tensor) -> float:
    pairs = (is_correct[:, :, None] & ~is_correct[:, None, :]).double()
    gaps = scores[:, :, None] - scores[:, None, :]
    wins = ((gaps > 0).double() + 0.5 * (gaps == 0).double()) * pairs
    num_pairs = pairs.sum((1, 2))
    both = num_pairs > 0
    return (wins.sum((1, 2))[both] / num_pairs[both]).mean().item() if both.any() else 0.5


def save_scorer(scorer: nn.Sequential, path: Path, metadata: dict[str, object]) -> None:
    tensors = {f"net.{name}": value.float().cpu().contiguous() for name, value in scorer.state_dict().items()}
    save_file(tensors, path, metadata={"gambit": json.dumps(metadata)})

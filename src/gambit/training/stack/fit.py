"""The lines of a stack: the direction that ranks traces within problems, scaled to a probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gambit.scorers.stack import AT_END, StackLine, StackLines
from gambit.training.dataset import Dataset
from gambit.training.logistic import calibrating_line, logistic
from gambit.training.ranking import QUARTERS, Floats, Ints, pairs
from gambit.training.stack.features import ByShare, members_by_problem

RUNNING, COMPLETE = QUARTERS[:-1], QUARTERS[-1:]
PENALTY = 1.0  # on weights of features with deviation 1, beside a sum over problems
NUM_FOLDS = 5


@dataclass(frozen=True, slots=True)
class StackData:
    """What the parts say about some traces, and how those ended."""

    data: Dataset
    traces: Ints
    features: Mapping[str, ByShare]

    def part(self, places: Ints) -> StackData:
        features = {
            name: {share: each[places] for share, each in found.items()} for name, found in self.features.items()
        }
        return StackData(self.data, self.traces[places], features)

    @property
    def is_correct(self) -> Floats:
        return self.data.traces.is_correct[self.traces].astype(np.float64)

    def columns(self, names: Sequence[str], share: float) -> Floats:
        """[trace, part]."""
        none = np.zeros((len(self.traces), 0))
        return np.concatenate([none, *(self.features[name][share][:, None] for name in names)], axis=1)

    def chances(self, lines: StackLines, share: float) -> Floats:
        """[trace]; 0 for one without a thought, as in a search."""
        at_share = {name: found[share] for name, found in self.features.items()}
        found = lines.at(share).chances(at_share, len(self.traces))
        has_thought = self.data.traces.num_steps[self.traces] > 0
        return np.where(has_thought | (share >= 1), found, 0.0)


def fit_stack(data: StackData, names: Sequence[str]) -> StackLines:
    running = [name for name in names if name not in AT_END]
    return StackLines(running=fit_line(data, running, RUNNING), complete=fit_line(data, names, COMPLETE))


def fit_line(data: StackData, names: Sequence[str], shares: Sequence[float]) -> StackLine:
    """Weights by pairs of right and wrong traces of a problem, then slope and offset by how often they end right."""
    has_thought = np.flatnonzero(data.data.traces.num_steps[data.traces] > 0)
    seen = data.part(has_thought)
    outcomes = np.tile(seen.is_correct, len(shares))
    rows = np.concatenate([seen.columns(names, share) for share in shares])
    deviation = np.maximum(rows.std(axis=0), 1e-9)
    weights = _pair_weights(seen, names, shares, deviation) / deviation
    slope, offset = calibrating_line(torch.from_numpy(rows @ weights), torch.from_numpy(outcomes))
    return StackLine(weights=dict(zip(names, (slope * weights).tolist(), strict=True)), offset=offset)


def _pair_weights(data: StackData, names: Sequence[str], shares: Sequence[float], deviation: Floats) -> Floats:
    """[part]; every problem with right and wrong traces weighs the same."""
    if not names:
        return np.zeros(0)
    gaps, weights = [np.zeros((0, len(names)))], [np.zeros(0)]
    is_correct = data.is_correct > 0
    for mine in members_by_problem(data.data, data.traces):
        right, wrong = mine[is_correct[mine]], mine[~is_correct[mine]]
        if not len(right) or not len(wrong):
            continue
        for share in shares:
            columns = data.columns(names, share) / deviation
            gaps.append((columns[right][:, None] - columns[wrong][None]).reshape(-1, len(names)))
            weights.append(np.full(len(gaps[-1]), 1 / len(gaps[-1])))
    rows = torch.from_numpy(np.concatenate(gaps))
    found = logistic(rows, torch.ones(len(rows)), torch.from_numpy(np.concatenate(weights)), PENALTY)
    return found.numpy()


def cross_fitted(data: StackData, names: Sequence[str]) -> Mapping[float, Floats]:
    """[trace] chances at the quarters, each problem's by lines that other problems gave."""
    problems = np.unique(data.data.traces.problem_of[data.traces])
    fold_of = dict(zip(problems.tolist(), (np.arange(len(problems)) % NUM_FOLDS).tolist(), strict=True))
    folds = np.array([fold_of[problem] for problem in data.data.traces.problem_of[data.traces].tolist()])
    found = {share: np.zeros(len(data.traces)) for share in QUARTERS}
    for fold in range(NUM_FOLDS):
        mine = np.flatnonzero(folds == fold)
        lines = fit_stack(data.part(np.flatnonzero(folds != fold)), names)
        for share in QUARTERS:
            found[share][mine] = data.part(mine).chances(lines, share)
    return found


def stack_aucs(data: StackData, chances: Mapping[float, Floats]) -> list[Floats]:
    """[quarter][problem]."""
    known, count = data.data.traces, len(data.data.problems)
    return [
        pairs(chances[share], known.is_correct[data.traces], known.problem_of[data.traces], count).auc
        for share in QUARTERS
    ]

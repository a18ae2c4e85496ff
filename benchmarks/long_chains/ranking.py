"""Measures how well scores rank a problem's traces after a share of their tokens, and how votes by them come out."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.long_chains.fitting import Cut

if TYPE_CHECKING:
    from benchmarks.long_chains.collection import Collection

SHARES = (0.25, 0.5, 0.75, 1.0)
NUM_RESAMPLES = 2000


def scores_at(num_traces: int, cut: Cut, values: np.ndarray, share: float, how: str = "mean") -> np.ndarray:
    """Returns each trace's score by the thoughts that end within a share of its tokens; 0.5 without any."""
    seen = cut.place + 1 <= share * cut.length + 1e-9
    counts = np.bincount(cut.trace[seen], minlength=num_traces)
    if how == "last":
        found = np.full(num_traces, 0.5)
        found[cut.trace[seen]] = values[seen]  # thoughts of a trace stand in order, so the last one stays
        return found
    sums = np.bincount(cut.trace[seen], values[seen], minlength=num_traces)
    if how == "sum":
        return sums
    return np.where(counts > 0, sums / np.maximum(counts, 1), 0.5)


def problem_aucs(data: Collection, scores: np.ndarray, only_answered: bool) -> np.ndarray:
    """Returns the AUC of every problem with right and wrong traces."""
    found = []
    order = np.argsort(data.problem, kind="stable")
    bounds = np.searchsorted(data.problem[order], np.arange(len(data.problems) + 1))
    for first, last in pairwise(bounds.tolist()):
        own = order[first:last]
        own = own[data.has_answer[own]] if only_answered else own
        right, wrong = scores[own[data.is_correct[own]]], scores[own[~data.is_correct[own]]]
        if len(right) and len(wrong):
            gaps = right[:, None] - wrong
            found.append(float((gaps > 0).mean() + 0.5 * (gaps == 0).mean()))
    return np.array(found)


def mean_auc(data: Collection, cut: Cut, values: np.ndarray, how: str = "mean") -> float:
    """Returns the mean over all shares, by which scorers are chosen."""
    found = [problem_aucs(data, scores_at(len(data.problem), cut, values, share, how), True) for share in SHARES]
    return float(np.mean([each.mean() if len(each) else 0.5 for each in found]))


def auc_table(data: Collection, cut: Cut, values: np.ndarray, how: str = "mean") -> dict[str, object]:
    """Returns mean AUCs with 95 % intervals by share of tokens, over answered traces and over all."""
    rng = np.random.default_rng(0)
    table: dict[str, object] = {}
    for name, only_answered in (("answered", True), ("all", False)):
        for share in SHARES:
            aucs = problem_aucs(data, scores_at(len(data.problem), cut, values, share, how), only_answered)
            if not len(aucs):
                continue
            draws = aucs[rng.integers(len(aucs), size=(NUM_RESAMPLES, len(aucs)))].mean(1)
            low, high = np.quantile(draws, [0.025, 0.975])
            table[f"{name} {share:.0%}"] = [round(float(each), 4) for each in (aucs.mean(), low, high)]
        table[f"{name} problems"] = len(aucs)
    return table


def votes(data: Collection, cut: Cut, values: np.ndarray, how: str = "mean") -> dict[str, float]:
    """Returns the accuracy of votes over all traces of each problem."""
    scores = scores_at(len(data.problem), cut, values, 1.0, how)
    weights = {
        "majority": np.ones(len(scores)),
        "weighted": scores,
        "weighted by square": scores**2,
        "weighted by fourth power": scores**4,
    }
    found: dict[str, float] = {name: _vote(data, weight) for name, weight in weights.items()}
    cuts = np.array([np.quantile(scores[data.problem == i], 0.5) for i in range(len(data.problems))])
    found["upper half"] = _vote(data, (scores >= cuts[data.problem]).astype(np.float64))
    found["best one"] = _best_one(data, scores)
    found["some right"] = float(np.mean([data.is_correct[data.problem == i].any() for i in range(len(data.problems))]))
    return {name: round(value, 4) for name, value in found.items()}


def _vote(data: Collection, weights: np.ndarray) -> float:
    total = 0.0
    by_problem: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for problem, answer, weight in zip(data.problem, data.answers, weights, strict=True):
        if answer is not None:
            by_problem[int(problem)][answer] += float(weight)
    for problem, tally in by_problem.items():
        most = max(tally.values())
        best = [answer for answer, weight in tally.items() if weight >= most - 1e-9]
        total += (data.problems[problem]["answer"].lower() in best) / len(best)
    return total / len(data.problems)


def _best_one(data: Collection, scores: np.ndarray) -> float:
    scores = np.where(data.has_answer, scores, -np.inf)
    found = []
    for i in range(len(data.problems)):
        own = np.flatnonzero(data.problem == i)
        found.append(data.is_correct[own[np.argmax(scores[own])]])
    return float(np.mean(found))

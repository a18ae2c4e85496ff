"""Measures pawn on the development split, by level: alone, by votes, and by picking the best trace."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from benchmarks.pawn.judge import Judgement

from gambit.pawn.puzzles import Level, parse_puzzle
from gambit.scorers.base import Scorer
from gambit.training.dataset import Dataset
from gambit.training.scoring import thought_scores, trace_scores


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of puzzles or traces, means over traces."""

    num_puzzles: int
    pass_at_1: float
    majority: float
    score_weighted: float  # the majority weighted by the traces' final scores
    best_of_n: float  # the trace with the best final score
    valid_format: float
    mean_tokens: float
    mean_thoughts: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One puzzle's share in the accuracies."""

    is_correct: list[bool]
    answers: list[str | None]
    gold: str
    scores: list[float]
    is_valid: list[bool]
    num_tokens: list[int]
    num_thoughts: list[int]

    def is_voted(self, weights: Sequence[float]) -> bool:
        totals: dict[str, float] = defaultdict(float)
        for answer, weight in zip(self.answers, weights, strict=True):
            if answer is not None:
                totals[answer] += weight
        return bool(totals) and max(totals, key=totals.__getitem__) == self.gold

    @property
    def is_picked(self) -> bool:
        return self.is_correct[int(np.argmax(self.scores))]


def accuracy_by_level(
    data: Dataset, judgements: Sequence[Judgement], scorer: Scorer, device: torch.device
) -> dict[str, Accuracy]:
    """Over all puzzles and for each level; the judgements are of all traces."""
    outcomes: dict[str, list[_Outcome]] = {"all": []}
    scores, known = _final_scores(data, scorer, device), data.traces
    for number, problem in enumerate(data.problems):
        mine = np.flatnonzero(known.problem_of == number)
        outcome = _Outcome(
            is_correct=known.is_correct[mine].tolist(),
            answers=[trace.answer for trace in problem.traces],
            gold=problem.gold,
            scores=scores[mine].tolist(),
            is_valid=[judgements[trace].is_valid for trace in mine],
            num_tokens=known.num_tokens[mine].tolist(),
            num_thoughts=known.num_thoughts[mine].tolist(),
        )
        level = Level(len(parse_puzzle(problem.question).steps)).name.lower()
        outcomes["all"].append(outcome)
        outcomes.setdefault(level, []).append(outcome)
    return {name: _accuracy(members) for name, members in outcomes.items()}


def _final_scores(data: Dataset, scorer: Scorer, device: torch.device) -> np.ndarray:
    known = data.traces
    scores = thought_scores(scorer, data, data.all_traces(), device)
    return trace_scores(scores, known.starts, known.num_thoughts, 1.0, scorer.info.aggregation)


def _accuracy(outcomes: Sequence[_Outcome]) -> Accuracy:
    return Accuracy(
        num_puzzles=len(outcomes),
        pass_at_1=fmean(fmean(o.is_correct) for o in outcomes),
        majority=fmean(o.is_voted([1.0] * len(o.answers)) for o in outcomes),
        score_weighted=fmean(o.is_voted(o.scores) for o in outcomes),
        best_of_n=fmean(o.is_picked for o in outcomes),
        valid_format=fmean(fmean(o.is_valid) for o in outcomes),
        mean_tokens=fmean(fmean(o.num_tokens) for o in outcomes),
        mean_thoughts=fmean(fmean(o.num_thoughts) for o in outcomes),
    )

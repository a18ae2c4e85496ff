"""What pawn and its scorer reach on held-out puzzles, beside a perfect judge; trains nothing, searches nothing."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from gambit.pawn.judge import FRACTIONS, Judgement
from gambit.pawn.puzzles import Level, Puzzle
from gambit.pawn.sampling import Samples
from gambit.pawn.scorer import ranking_auc, running_means, state_table, within_puzzle_auc
from gambit.pawn.traces import final_answer


@dataclass(frozen=True, slots=True)
class Accuracy:
    num_puzzles: int
    pass_at_1: float
    self_consistency: float  # plain majority over all sampled traces
    weighted: float  # the majority weighted by the traces' final running means
    valid_format: float
    mean_tokens: float
    mean_thoughts: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Within-puzzle AUC at each share of the steps: of the trace score, and of a judge that knows the exact state."""

    scorer: dict[float, float]
    ceiling: dict[float, float]

    def share(self, fraction: float) -> float:
        """How much of what the judge has above chance the scorer has."""
        room = self.ceiling[fraction] - 0.5
        return (self.scorer[fraction] - 0.5) / room if room > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One puzzle's share in the accuracies."""

    is_correct: list[bool]
    majority_is_right: bool
    weighted_is_right: bool
    num_tokens: list[int]
    judgements: list[Judgement]


def accuracy_by_level(
    puzzles: Sequence[Puzzle], samples: Samples, scores: Tensor, judgements: list[list[Judgement]]
) -> dict[str, Accuracy]:
    """Over all puzzles and for each level."""
    outcomes = [_outcome(p, samples, i, scores[i].tolist(), judgements[i]) for i, p in enumerate(puzzles)]
    found = {"all": _accuracy(outcomes)}
    for level in Level:
        members = [o for p, o in zip(puzzles, outcomes, strict=True) if len(p.steps) == level.value]
        if members:
            found[level.name.lower()] = _accuracy(members)
    return found


def _outcome(
    puzzle: Puzzle, samples: Samples, index: int, weights: list[float], judgements: list[Judgement]
) -> _Outcome:
    answers = [final_answer(text) for text in samples.texts[index]]
    return _Outcome(
        is_correct=samples.is_correct[index].tolist(),
        majority_is_right=_vote(answers, [1.0] * len(answers)) == puzzle.answer,
        weighted_is_right=_vote(answers, weights) == puzzle.answer,
        num_tokens=samples.num_tokens[index].tolist(),
        judgements=judgements,
    )


def _vote(answers: list[int | None], weights: list[float]) -> int | None:
    totals: dict[int, float] = defaultdict(float)
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] += weight
    return max(totals, key=totals.__getitem__) if totals else None


def _accuracy(outcomes: list[_Outcome]) -> Accuracy:
    judgements = [judgement for outcome in outcomes for judgement in outcome.judgements]
    return Accuracy(
        num_puzzles=len(outcomes),
        pass_at_1=fmean(value for outcome in outcomes for value in outcome.is_correct),
        self_consistency=fmean(outcome.majority_is_right for outcome in outcomes),
        weighted=fmean(outcome.weighted_is_right for outcome in outcomes),
        valid_format=fmean(judgement.is_valid for judgement in judgements),
        mean_tokens=fmean(value for outcome in outcomes for value in outcome.num_tokens),
        mean_thoughts=fmean(judgement.num_thoughts for judgement in judgements),
    )


def final_scores(scorer: nn.Sequential, samples: Samples, position: str) -> Tensor:
    """[puzzle, trace]: the running mean each trace ends with."""
    last = (samples.num_steps - 1).clamp(min=0)
    return running_means(scorer, state_table(samples, position)).gather(-1, last[..., None])[..., 0]


def ranking(scorer: nn.Sequential, samples: Samples, position: str, judgements: list[list[Judgement]]) -> Ranking:
    table = state_table(samples, position)
    means = running_means(scorer, table)
    chances = torch.tensor([[judgement.chances for judgement in row] for row in judgements])
    is_correct = table.is_correct.cpu()
    return Ranking(
        scorer={q: ranking_auc(means, table, q) for q in FRACTIONS},
        ceiling={q: within_puzzle_auc(chances[..., i], is_correct) for i, q in enumerate(FRACTIONS)},
    )

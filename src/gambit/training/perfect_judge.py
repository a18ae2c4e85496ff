"""Pawn's ceiling: what a judge reaches that knows each trace's exact state."""

from collections.abc import Callable, Mapping

import numpy as np

from gambit.errors import UserError
from gambit.pawn.judge import FRACTIONS, Judgement, judge
from gambit.pawn.puzzles import parse_puzzle
from gambit.pawn.vocabulary import END, decode
from gambit.training.dataset import Dataset
from gambit.training.ranking import QUARTERS, Floats, Ints

assert FRACTIONS == QUARTERS, "the judge's shares are those scorers are compared at"

# The chance of success of each of these traces, by share of its steps.
PerfectJudge = Callable[[Dataset, Ints], Mapping[float, Floats]]


def judge_traces(data: Dataset, traces: Ints) -> list[Judgement]:
    """What the perfect judge says of each of these traces."""
    _check(data)
    puzzles = [parse_puzzle(problem.question) for problem in data.problems]
    texts = [decode(list(data.tokens[trace])).removesuffix(END) for trace in traces]
    return [judge(puzzles[data.traces.problem_of[trace]], text) for trace, text in zip(traces, texts, strict=True)]


def chances_by_share(data: Dataset, traces: Ints) -> Mapping[float, Floats]:
    found = np.array([judgement.chances for judgement in judge_traces(data, traces)])
    return dict(zip(FRACTIONS, found.T, strict=True))


def _check(data: Dataset) -> None:
    if not data.header.source.startswith("pawn:"):
        raise UserError(f"only pawn's puzzles have a perfect judge; these problems come from {data.header.source!r}")
    if not data.tokens:
        raise UserError("the judge reads the traces' text: load the collection with its tokens")

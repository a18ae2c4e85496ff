"""Pawn's ceiling: what a judge reaches that knows each trace's exact state."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gambit.core.errors import UserError
from gambit.pawn.judge import FRACTIONS, judge
from gambit.pawn.puzzles import parse_puzzle
from gambit.pawn.vocabulary import END, decode
from gambit.training.dataset import Dataset
from gambit.training.ranking import QUARTERS, Floats, Ints

assert FRACTIONS == QUARTERS, "the judge's shares are those scorers are compared at"

# The chance of success of each of these traces, by share of its steps.
PerfectJudge = Callable[[Dataset, Ints], Mapping[float, Floats]]


def judge_by_rollouts(num_rollouts: int, num_workers: int) -> PerfectJudge:
    """The judge of the pawn that ships: the share of fresh rollouts from a trace's state that end right."""

    def chances(data: Dataset, traces: Ints) -> Mapping[float, Floats]:
        _check(data)
        places = _places_by_problem(data, traces)
        puzzles = [parse_puzzle(data.problems[problem].question) for problem in places]
        texts = [[_text(data.tokens[traces[place]]) for place in mine] for mine in places.values()]
        by_share = {share: np.zeros(len(traces)) for share in QUARTERS}
        for mine, judgements in zip(places.values(), judge(puzzles, texts, num_rollouts, num_workers), strict=True):
            for place, judgement in zip(mine, judgements, strict=True):
                for share, chance in zip(FRACTIONS, judgement.chances, strict=True):
                    by_share[share][place] = chance
        return by_share

    return chances


def _check(data: Dataset) -> None:
    if not data.header.source.startswith("pawn:"):
        raise UserError(f"only pawn's puzzles have a perfect judge; these problems come from {data.header.source!r}")
    if not data.tokens:
        raise UserError("the judge reads the traces' text: load the collection with its tokens")


def _places_by_problem(data: Dataset, traces: Ints) -> dict[int, list[int]]:
    places: dict[int, list[int]] = {}
    for place, trace in enumerate(traces.tolist()):
        places.setdefault(int(data.traces.problem_of[trace]), []).append(place)
    return places


def _text(tokens: Sequence[int]) -> str:
    return decode(list(tokens)).removesuffix(END)

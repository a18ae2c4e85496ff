"""Votes: the answers of completed traces, weighted, become a winner, a margin and a vote table."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gambit.text.answers import canonical


class VoteKind(StrEnum):
    """Where a trace's weight comes from; the weights of equal answers add up, but for `best`."""

    MAJORITY = "majority"  # one each
    CONCISE = "concise"  # one each; a tie goes to the answer with the shortest trace (Slim-SC)
    SCORE = "score"  # its score
    POSITION = "position"  # its mean score with later thoughts heavier
    BEST = "best"  # its score, and an answer is worth as much as its best trace (best of N)
    # DeepConf: its token confidence, over the whole trace, its last window, its lowest 10 % of windows, its lowest one
    MEAN_CONFIDENCE = "mean-confidence"
    TAIL_CONFIDENCE = "tail-confidence"
    BOTTOM_CONFIDENCE = "bottom-confidence"
    LOWEST_CONFIDENCE = "lowest-confidence"
    # the same, only the tenth of the traces with the highest confidence voting
    TOP_TAIL_CONFIDENCE = "top-tail-confidence"
    TOP_BOTTOM_CONFIDENCE = "top-bottom-confidence"

    @property
    def needs_confidence(self) -> bool:
        return self.value.endswith("confidence")


@dataclass(frozen=True, slots=True)
class Consensus:
    """When a vote is settled although traces are still to come."""

    fraction: float | None  # the winner's share of all weight; None: once nothing can change the winner any more
    min_traces: int  # completed before a fraction counts

    @classmethod
    def parse(cls, text: str | float, min_traces: int) -> "Consensus | None":
        """`off`, `certain` or a share."""
        if text in ("off", "certain"):
            return None if text == "off" else cls(None, min_traces)
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ValueError("should be off, certain, or a share above 0 and at most 1")
        return cls(share, min_traces)


@dataclass(frozen=True, slots=True)
class Ballot:
    """The vote of one trace."""

    trace: int
    answer: str | None
    weight: float
    root: int
    tie_break: float = 0.0  # between answers of equal weight and number the smallest wins


@dataclass(frozen=True, slots=True)
class VoteEntry:
    """One answer in the vote table, with all the traces that gave it or an equal one."""

    answer: str  # the most frequent way this pool writes its answer
    weight: float
    traces: int
    roots: int  # distinct independent roots behind the traces


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The winning answer and the vote table."""

    answer: str | None
    entries: tuple[VoteEntry, ...]  # the winner first
    margin: float  # (first - second) / total weight, in [0, 1]
    num_abstained: int


Combine = Callable[[Iterable[float]], float]


def tally(
    ballots: Sequence[Ballot], equivalent: Callable[[str, str], bool], combine: Combine = math.fsum
) -> VoteResult:
    """`combine` makes the weight of an answer from those of its traces."""
    assert all(math.isfinite(b.weight) and b.weight >= 0 for b in ballots), "vote weights are finite and not negative"
    answered = [(b, b.answer) for b in ballots if b.answer is not None and has_answer(b)]
    # With all weights 0 the traces are counted instead, or the first answer would win.
    is_weightless = not any(ballot.weight for ballot, _ in answered)
    pools = sorted(_pools(answered, equivalent), key=_tie_break)
    entries = [_entry(pool, None if is_weightless else combine) for pool in pools]
    entries.sort(key=lambda entry: (-entry.weight, -entry.traces))  # stable, so what is left of a tie goes to the first
    winner = entries[0].answer if entries else None
    return VoteResult(winner, tuple(entries), _margin(entries), len(ballots) - len(answered))


def has_answer(ballot: Ballot) -> bool:
    return ballot.answer is not None and bool(canonical(ballot.answer))


_Pool = list[tuple[Ballot, str]]


def _tie_break(pool: _Pool) -> float:
    return min(ballot.tie_break for ballot, _ in pool)


def _pools(answered: _Pool, equivalent: Callable[[str, str], bool]) -> list[_Pool]:
    """Equal answers together, in order of appearance; a pool's first answer represents it."""
    pools: list[_Pool] = []
    pool_of_form: dict[str, _Pool] = {}
    for ballot, answer in answered:
        form = canonical(answer)
        if form not in pool_of_form:
            pool = next((pool for pool in pools if equivalent(pool[0][1], answer)), None)
            if pool is None:
                pools.append(pool := [])
            pool_of_form[form] = pool
        pool_of_form[form].append((ballot, answer))
    return pools


def _entry(pool: _Pool, combine: Combine | None) -> VoteEntry:
    surface = Counter(answer for _, answer in pool).most_common(1)[0][0]  # ties: the first seen
    weight = float(len(pool)) if combine is None else combine(ballot.weight for ballot, _ in pool)
    return VoteEntry(surface, weight, len(pool), len({ballot.root for ballot, _ in pool}))


def _margin(entries: Sequence[VoteEntry]) -> float:
    if not entries:
        return 0.0
    second = entries[1].weight if len(entries) > 1 else 0.0
    return min(1.0, (entries[0].weight - second) / math.fsum(entry.weight for entry in entries))

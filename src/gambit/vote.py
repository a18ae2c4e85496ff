"""Completed traces -> winner, margin, vote table; never looks at a trace's text or decides what is correct."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gambit.answers import canonical


class VoteKind(StrEnum):
    """Where a trace's weight comes from: one each, its running mean score, or that mean with later thoughts heavier."""

    MAJORITY = "majority"
    SCORE = "score"
    POSITION = "position"


@dataclass(frozen=True, slots=True)
class Ballot:
    trace: int
    answer: str | None
    weight: float
    root: int


@dataclass(frozen=True, slots=True)
class VoteEntry:
    answer: str  # the most frequent way this pool writes its answer
    weight: float
    traces: int
    roots: int  # distinct independent roots behind the traces


@dataclass(frozen=True, slots=True)
class VoteResult:
    answer: str | None
    entries: tuple[VoteEntry, ...]  # the winner first
    margin: float  # (first - second) / total weight, in [0, 1]
    num_abstained: int


def tally(ballots: Sequence[Ballot], equivalent: Callable[[str, str], bool]) -> VoteResult:
    assert all(math.isfinite(b.weight) and b.weight >= 0 for b in ballots), "vote weights are finite and not negative"
    answered = [(b, b.answer) for b in ballots if b.answer is not None and canonical(b.answer)]
    # A scorer that gives every trace 0 knows nothing; then the traces are counted instead of electing the first.
    is_weightless = not any(ballot.weight for ballot, _ in answered)
    entries = [_entry(pool, is_weightless) for pool in _pools(answered, equivalent)]
    entries.sort(key=lambda entry: (-entry.weight, -entry.traces))  # stable, so what is left of a tie goes to the first
    winner = entries[0].answer if entries else None
    return VoteResult(winner, tuple(entries), _margin(entries), len(ballots) - len(answered))


_Pool = list[tuple[Ballot, str]]


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


def _entry(pool: _Pool, is_weightless: bool) -> VoteEntry:
    surface = Counter(answer for _, answer in pool).most_common(1)[0][0]  # ties: the first seen
    weight = float(len(pool)) if is_weightless else math.fsum(ballot.weight for ballot, _ in pool)
    return VoteEntry(surface, weight, len(pool), len({ballot.root for ballot, _ in pool}))


def _margin(entries: Sequence[VoteEntry]) -> float:
    if not entries:
        return 0.0
    second = entries[1].weight if len(entries) > 1 else 0.0
    return min(1.0, (entries[0].weight - second) / math.fsum(entry.weight for entry in entries))

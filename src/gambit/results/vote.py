"""Votes: the weighted answers of completed traces make a winner, a margin and a vote table."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Self

from gambit.answers import Equivalent, canonical
from gambit.errors import UserError
from gambit.tree import Trace, TraceTree


class VoteKind(StrEnum):
    """The source of a trace's weight. The weights of equal answers add up, but for `best`."""

    MAJORITY = "majority"  # one each
    CONCISE = "concise"  # one each; a tie goes to the answer with the shortest trace (Slim-SC)
    SCORE = "score"  # its score
    SCORE_OR_ONE = "score-or-one"  # its score; without one 1, as in the authors' code
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
    def needs_scores(self) -> bool:
        return self.sums_scores or self is VoteKind.BEST

    @property
    def sums_scores(self) -> bool:
        return self in (VoteKind.SCORE, VoteKind.SCORE_OR_ONE, VoteKind.POSITION)

    @property
    def needs_confidence(self) -> bool:
        return self.value.endswith("confidence")


@dataclass(frozen=True, slots=True)
class Consensus:
    """The rule by which a vote is settled although traces are still to come."""

    fraction: float | None  # the winner's share of all weight; None: once nothing can change the winner any more
    min_traces: int  # completed before a fraction counts

    @classmethod
    def parse(cls, text: str | float, min_traces: int) -> Self | None:
        """Parses `off` (None), `certain` or a share; raises ValueError for anything else."""
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
    island: int = 0


Pools = tuple[tuple[str, ...], ...]  # answers that were held equal, by pool


@dataclass(frozen=True, slots=True)
class VoteEntry:
    """One answer in the vote table, with all the traces that gave it or an equal one."""

    answer: str  # the most frequent way this pool writes its answer
    weight: float
    traces: int
    roots: int  # distinct independent roots behind the traces
    forms: tuple[str, ...] = ()  # every way this pool writes its answer: what was held equal
    islands: int = 1  # distinct ones behind the traces: nothing that one found has spread to another


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The winning answer and the vote table."""

    answer: str | None
    entries: tuple[VoteEntry, ...]  # the winner first
    margin: float  # (first - second) / total weight, in [0, 1]
    num_abstained: int


NO_VOTE = VoteResult(None, (), 0.0, 0)


def count_votes(ballots: Sequence[Ballot], kind: VoteKind, equivalent: Equivalent) -> VoteResult:
    """Returns the vote, with answers pooled by `equivalent`."""
    answers = [ballot.answer for ballot in ballots if ballot.answer is not None and has_answer(ballot)]
    return recount_votes(ballots, kind, pools_of(answers, equivalent))


def has_answer(ballot: Ballot) -> bool:
    return ballot.answer is not None and bool(canonical(ballot.answer))


def pools_of(answers: Iterable[str], equivalent: Equivalent) -> Pools:
    """Returns pools of equal answers in order of appearance, with each way of writing once.

    An answer joins the first pool to all of which it is equal: 12 cm and 12 m do not meet because both are 12.
    """
    pools: list[dict[str, list[str]]] = []  # by canonical form, since equal forms need no comparison
    for answer in dict.fromkeys(answers):
        form = canonical(answer)
        pool = next((pool for pool in pools if form in pool), None) or next(
            (pool for pool in pools if all(equivalent(written[0], answer) for written in pool.values())), None
        )
        if pool is None:
            pools.append(pool := {})
        pool.setdefault(form, []).append(answer)
    return tuple(tuple(chain.from_iterable(pool.values())) for pool in pools)


def recount_votes(ballots: Sequence[Ballot], kind: VoteKind, pools: Pools) -> VoteResult:
    """Returns the vote where it is known which answers are equal, as from a log."""
    assert all(math.isfinite(b.weight) and b.weight >= 0 for b in ballots), "vote weights are finite and not negative"
    answered = [ballot for ballot in ballots if has_answer(ballot)]
    # With all weights 0 the traces are counted instead, or the first answer would win.
    is_weightless = not any(ballot.weight for ballot in answered)
    sides = sorted(_sides(answered, pools), key=lambda side: min(ballot.tie_break for ballot in side))
    entries = [_entry(side, kind, is_weightless=is_weightless) for side in sides]
    entries.sort(key=lambda entry: (-entry.weight, -entry.traces))  # stable, so what is left of a tie goes to the first
    winner = entries[0].answer if entries else None
    return VoteResult(winner, tuple(entries), _margin(entries), len(ballots) - len(answered))


def _sides(answered: Sequence[Ballot], pools: Pools) -> Iterable[list[Ballot]]:
    """Returns the ballots of each pool, pools in order of appearance."""
    pool_of = {answer: number for number, pool in enumerate(pools) for answer in pool}
    sides: dict[int, list[Ballot]] = {}
    for ballot in answered:
        if ballot.answer not in pool_of:
            raise UserError(
                f"trace {ballot.trace} answers {ballot.answer!r}, which the recorded vote does not mention: "
                "the log is incomplete or has been changed"
            )
        sides.setdefault(pool_of[ballot.answer], []).append(ballot)
    return sides.values()


def _entry(side: Sequence[Ballot], kind: VoteKind, *, is_weightless: bool) -> VoteEntry:
    written = Counter(ballot.answer for ballot in side if ballot.answer is not None)
    weights = [1.0 if is_weightless else ballot.weight for ballot in side]
    weight = max(weights) if kind is VoteKind.BEST and not is_weightless else math.fsum(weights)
    answer = written.most_common(1)[0][0]  # ties: the first seen
    roots, islands = {ballot.root for ballot in side}, {ballot.island for ballot in side}
    return VoteEntry(answer, weight, len(side), len(roots), tuple(written), len(islands))


def _margin(entries: Sequence[VoteEntry]) -> float:
    if not entries:
        return 0.0
    second = entries[1].weight if len(entries) > 1 else 0.0
    return min(1.0, (entries[0].weight - second) / math.fsum(entry.weight for entry in entries))


TOP_PERCENTILE = 90.0  # DeepConf's filtered votes: of the traces that have an answer


def ballots_of(tree: TraceTree, kind: VoteKind) -> list[Ballot]:
    """Returns a ballot for each voter, by id."""
    ballots = [_ballot(tree, trace, kind) for trace in tree.voters()]
    is_filtered = kind in (VoteKind.TOP_TAIL_CONFIDENCE, VoteKind.TOP_BOTTOM_CONFIDENCE)
    return _top(ballots) if is_filtered else ballots


def _ballot(tree: TraceTree, trace: Trace, kind: VoteKind) -> Ballot:
    # A trace that finished without a single thought is worth nothing to a weighted vote (STEP counts it so too).
    weight = max(_weight(tree, trace, kind) or 0.0, 0.0)
    tie_break = float(trace.num_tokens) if kind is VoteKind.CONCISE else 0.0
    return Ballot(trace.id, trace.answer, weight, trace.root, tie_break, trace.island)


def _weight(tree: TraceTree, trace: Trace, kind: VoteKind) -> float | None:
    if kind.needs_confidence:
        measure = kind.value.removeprefix("top-").removesuffix("-confidence")
        return None if trace.confidence is None else float(getattr(trace.confidence, measure))
    if kind is VoteKind.POSITION:
        return trace.score.position_weighted
    if kind is VoteKind.SCORE_OR_ONE:
        score = tree.score_of(trace)
        return 1.0 if score is None else score
    return tree.score_of(trace) if kind in (VoteKind.SCORE, VoteKind.BEST) else 1.0


def _top(ballots: Sequence[Ballot]) -> list[Ballot]:
    """Returns the ballots at or above the 90th percentile of the weights, interpolated as in DeepConf's own code.

    Ties are included. Traces without an answer neither count nor are dropped, so that they are still seen to abstain.
    """
    import numpy as np  # not before it is needed: every command imports this module

    weights = [ballot.weight for ballot in ballots if has_answer(ballot)]
    threshold = float(np.percentile(weights, TOP_PERCENTILE)) if weights else 0.0
    return [ballot for ballot in ballots if ballot.weight >= threshold or not has_answer(ballot)]


def most_weight(kind: VoteKind, *, is_probability: bool) -> float | None:
    """Returns the most that one trace can add to its answer; None without a bound, or if weights do not add up."""
    if kind in (VoteKind.MAJORITY, VoteKind.CONCISE):
        return 1.0
    return 1.0 if kind.sums_scores and is_probability else None


def check_consensus(consensus: Consensus | None, kind: VoteKind, *, is_probability: bool) -> None:
    """Raises if `certain` is impossible for this vote."""
    if consensus is None or consensus.fraction is not None or most_weight(kind, is_probability=is_probability):
        return
    why = ": the scorer's scores are no probabilities" if kind.sums_scores else ""
    raise UserError(
        f"consensus_stop = 'certain' cannot be known with the vote {kind.value!r}, where one trace may outweigh all "
        f"others{why}. Use --vote majority, or a share such as --consensus-stop 0.95"
    )


def is_settled(
    consensus: Consensus, kind: VoteKind, ballots: Sequence[Ballot], vote: VoteResult, most_to_come: int, unseen: float
) -> bool:
    """Returns whether to stop with at most `most_to_come` more votes; `unseen`: the weight of an answer not given."""
    weights = [entry.weight for entry in vote.entries]
    if not weights:
        return False
    if consensus.fraction is not None:
        return weights[0] >= consensus.fraction * (sum(weights) + unseen)
    if not any(ballot.weight for ballot in ballots):  # the traces were counted: the first real weight decides alone
        return False
    second = weights[1] if len(weights) > 1 else 0.0
    bound = most_weight(kind, is_probability=True)
    assert bound is not None, "checked before the search began"
    return weights[0] > second + bound * most_to_come

"""What the vote of each trace weighs, for every kind of vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gambit.core.tree import Trace, TraceTree
from gambit.results.vote import Ballot, VoteKind, VoteResult, has_answer, tally

TOP_SHARE = 0.1  # DeepConf's filtered votes: of the traces that have an answer


def ballots_of(tree: TraceTree, kind: VoteKind) -> list[Ballot]:
    """One per voter, by id."""
    ballots = [_ballot(tree, trace, kind) for trace in tree.voters()]
    is_filtered = kind in (VoteKind.TOP_TAIL_CONFIDENCE, VoteKind.TOP_BOTTOM_CONFIDENCE)
    return _top(ballots) if is_filtered else ballots


def count_votes(ballots: Sequence[Ballot], kind: VoteKind, equivalent: Callable[[str, str], bool]) -> VoteResult:
    return tally(ballots, equivalent, max if kind is VoteKind.BEST else math.fsum)


def _ballot(tree: TraceTree, trace: Trace, kind: VoteKind) -> Ballot:
    # A trace that finished without a single thought is worth nothing to a weighted vote (STEP counts it so too).
    weight = max(_weight(tree, trace, kind) or 0.0, 0.0)
    tie_break = float(trace.num_tokens) if kind is VoteKind.CONCISE else 0.0
    return Ballot(trace.id, trace.answer, weight, trace.root, tie_break)


def _weight(tree: TraceTree, trace: Trace, kind: VoteKind) -> float | None:
    if kind.needs_confidence:
        return _confidence(trace, kind)
    if kind is VoteKind.POSITION:
        return trace.score.position_weighted
    return tree.score_of(trace) if kind in (VoteKind.SCORE, VoteKind.BEST) else 1.0


def _confidence(trace: Trace, kind: VoteKind) -> float | None:
    measure = kind.value.removeprefix("top-").removesuffix("-confidence")
    return None if trace.confidence is None else float(getattr(trace.confidence, measure))


def _top(ballots: Sequence[Ballot]) -> list[Ballot]:
    """The tenth with the highest weight, at least one; those without an answer are not asked."""
    ranked = sorted(filter(has_answer, ballots), key=lambda ballot: (-ballot.weight, ballot.trace))
    kept = {ballot.trace for ballot in ranked[: math.ceil(TOP_SHARE * len(ranked))]}
    return [ballot for ballot in ballots if ballot.trace in kept or not has_answer(ballot)]

"""What the vote of each trace weighs, for every kind of vote."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gambit.answers import Equivalent
from gambit.results.vote import Ballot, Combine, Pools, VoteKind, VoteResult, has_answer, tally, tally_pools
from gambit.tree import Trace, TraceTree

TOP_PERCENTILE = 90.0  # DeepConf's filtered votes: of the traces that have an answer


def ballots_of(tree: TraceTree, kind: VoteKind) -> list[Ballot]:
    """One per voter, by id."""
    ballots = [_ballot(tree, trace, kind) for trace in tree.voters()]
    is_filtered = kind in (VoteKind.TOP_TAIL_CONFIDENCE, VoteKind.TOP_BOTTOM_CONFIDENCE)
    return _top(ballots) if is_filtered else ballots


def count_votes(ballots: Sequence[Ballot], kind: VoteKind, equivalent: Equivalent) -> VoteResult:
    return tally(ballots, equivalent, _combine(kind))


def recount_votes(ballots: Sequence[Ballot], kind: VoteKind, pools: Pools) -> VoteResult:
    """The vote again, with the answers held equal that were so the first time (`VoteResult.pools`)."""
    return tally_pools(ballots, pools, _combine(kind))


def _combine(kind: VoteKind) -> Combine:
    return max if kind is VoteKind.BEST else math.fsum


def _ballot(tree: TraceTree, trace: Trace, kind: VoteKind) -> Ballot:
    # A trace that finished without a single thought is worth nothing to a weighted vote (STEP counts it so too).
    weight = max(_weight(tree, trace, kind) or 0.0, 0.0)
    tie_break = float(trace.num_tokens) if kind is VoteKind.CONCISE else 0.0
    return Ballot(trace.id, trace.answer, weight, trace.root, tie_break, trace.island)


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
    """Those at or above the 90th percentile of the weights, interpolated, as in DeepConf's own code: ties included.

    Traces without an answer neither count nor are dropped, so that they are still seen to abstain.
    """
    weights = [ballot.weight for ballot in ballots if has_answer(ballot)]
    threshold = float(np.percentile(weights, TOP_PERCENTILE)) if weights else 0.0
    return [ballot for ballot in ballots if ballot.weight >= threshold or not has_answer(ballot)]

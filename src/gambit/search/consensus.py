"""Whether a vote is settled before all traces are complete."""

from __future__ import annotations

from collections.abc import Sequence

from gambit.errors import UserError
from gambit.policies.base import Requirements
from gambit.results.record import Equivalent, SearchRecord
from gambit.results.vote import Ballot, Consensus, VoteKind, VoteResult
from gambit.tree import TraceState

CHECK_SECONDS = 0.5  # the longest that a look at the vote may hold up the engine
# Where weights are chances, an answer that nobody has given yet has half of what a trace that is certainly right has:
# four traces that agree and are all thought to be wrong settle nothing.
UNSEEN = 0.5


def most_weight(kind: VoteKind, *, is_probability: bool) -> float | None:
    """The most one trace can add to its answer; None where there is no bound, or where weights do not add up."""
    if kind in (VoteKind.MAJORITY, VoteKind.CONCISE):
        return 1.0
    return 1.0 if kind in (VoteKind.SCORE, VoteKind.POSITION) and is_probability else None


def check_consensus(consensus: Consensus | None, kind: VoteKind, *, is_probability: bool) -> None:
    """Refuse to be certain where nobody can be."""
    if consensus is None or consensus.fraction is not None or most_weight(kind, is_probability=is_probability):
        return
    is_scored = kind in (VoteKind.SCORE, VoteKind.POSITION)
    why = ": the scorer's scores are no probabilities" if is_scored else ""
    raise UserError(
        f"consensus_stop = 'certain' cannot be known with the vote {kind.value!r}, where one trace may outweigh all "
        f"others{why}. Use --vote majority, or a share such as --consensus-stop 0.95"
    )


def is_over(
    consensus: Consensus,
    record: SearchRecord,
    requirements: Requirements,
    equivalent: Equivalent,
    *,
    is_probability: bool,
) -> bool:
    """Whether a search need not go on, as far as its vote is concerned. `is_probability`: whether scores are."""
    least = consensus.min_traces if consensus.fraction is not None else 0
    if record.tree.count(TraceState.FINISHED) < max(least, requirements.provisional_traces):
        return False
    vote = record.vote(equivalent)
    unseen = UNSEEN if is_probability and record.vote_kind in (VoteKind.SCORE, VoteKind.POSITION) else 0.0
    return is_settled(consensus, record.vote_kind, record.ballots(), vote, most_to_come(record, requirements), unseen)


def most_to_come(record: SearchRecord, requirements: Requirements) -> int:
    """How many more traces can still vote."""
    tree, num_traces = record.tree, record.started.num_traces
    if requirements.has_fixed_size:
        return num_traces - tree.count(TraceState.FINISHED) - tree.count(TraceState.PRUNED)
    # All of the pool may complete in the very step that reaches the target.
    return num_traces - tree.count(TraceState.FINISHED) - 1 + tree.capacity


def is_settled(
    consensus: Consensus,
    kind: VoteKind,
    ballots: Sequence[Ballot],
    vote: VoteResult,
    most_to_come: int,
    unseen: float = 0.0,
) -> bool:
    """Whether to stop now, when at most `most_to_come` more traces will vote.

    `unseen`: what an answer that nobody has given yet has of the weight.
    """
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

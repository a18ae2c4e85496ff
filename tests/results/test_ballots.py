"""What each trace weighs under each vote, by hand."""

import pytest

from gambit import events as ev
from gambit.results.record import fold
from gambit.results.vote import VoteKind, ballots_of, count_votes, recount_votes
from gambit.tree import TraceTree
from gambit.types import Aggregation, EndReason, TraceConfidence
from support.searching import make_header, make_settings


def tree_of(*traces):
    """Each (answer, scores, tokens, confidence); trace 0 is admitted first."""
    tree = TraceTree(99, Aggregation.MEAN)
    for i, (answer, scores, length, confidence) in enumerate(traces):
        tree.apply(ev.Created(0, i))
        tree.apply(ev.Admitted(0, i, 0, 0, 0))
        for at, score in enumerate(scores, start=1):
            tree.apply(ev.Scored(0, (i,), (score,), (at,)))
        tree.apply(ev.Finished(0, i, EndReason.STOP, answer, (0,) * length, confidence))
    return tree


def winner(tree, kind):
    return count_votes(ballots_of(tree, kind), kind, lambda a, b: a == b).answer


def weights(tree, kind):
    return [ballot.weight for ballot in ballots_of(tree, kind)]


SCORED = tree_of(("5", (0.2, 0.8), 9, None), ("6", (0.9,), 4, None), ("5", (0.6,), 5, None), ("7", (), 1, None))


def test_scores():
    assert weights(SCORED, VoteKind.MAJORITY) == [1, 1, 1, 1]
    assert weights(SCORED, VoteKind.SCORE) == pytest.approx([0.5, 0.9, 0.6, 0.0])
    assert weights(SCORED, VoteKind.POSITION) == pytest.approx([0.6, 0.9, 0.6, 0.0])
    assert [winner(SCORED, kind) for kind in (VoteKind.SCORE, VoteKind.BEST)] == ["5", "6"]


def test_a_ballot_tells_its_root_and_its_island():
    tree = TraceTree(9, Aggregation.MEAN)
    for event in (
        ev.Created(0, 0, island=0), ev.Created(0, 1, island=2), ev.Admitted(0, 0, 0, 0, 0), ev.Admitted(0, 1, 0, 0, 0),
        ev.Branched(1, 2, 1, 0, 1.0), ev.Admitted(1, 2, 0, 0, 0),
        *(ev.Finished(2, trace, EndReason.STOP, "5", (0,)) for trace in range(3)),
    ):  # fmt: skip
        tree.apply(event)
    ballots = ballots_of(tree, VoteKind.SCORE)
    assert [(ballot.trace, ballot.root, ballot.island) for ballot in ballots] == [(0, 0, 0), (1, 1, 2), (2, 1, 2)]


def test_a_tie_of_the_concise_vote_goes_to_the_shortest_trace():
    tied = tree_of(("5", (), 9, None), ("6", (), 4, None), ("5", (), 8, None), ("6", (), 30, None))
    assert winner(tied, VoteKind.CONCISE) == "6" and winner(tied, VoteKind.MAJORITY) == "5"
    clear = tree_of(("5", (), 9, None), ("6", (), 4, None), ("5", (), 8, None))
    assert winner(clear, VoteKind.CONCISE) == "5"


def confident(*numbers):
    return TraceConfidence(100, *numbers)


SURE = tree_of(
    ("5", (), 1, confident(1.0, 2.0, 9.0, 4.0)),
    ("6", (), 1, confident(5.0, 1.0, 2.0, 3.0)),
    ("6", (), 1, None),
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (VoteKind.MEAN_CONFIDENCE, [1.0, 5.0, 0.0]),
        (VoteKind.TAIL_CONFIDENCE, [2.0, 1.0, 0.0]),
        (VoteKind.BOTTOM_CONFIDENCE, [9.0, 2.0, 0.0]),
        (VoteKind.LOWEST_CONFIDENCE, [4.0, 3.0, 0.0]),
    ],
)
def test_confidences(kind, expected):
    assert weights(SURE, kind) == expected and kind.needs_confidence


def test_the_filtered_votes_ask_the_surest_tenth_of_those_with_an_answer():
    answers = ["1"] * 18 + ["2", "2"] + [None] * 5
    sure = [confident(0, i, 20 - i, 0) for i in range(25)]
    tree = tree_of(*((answer, (), 1, c) for answer, c in zip(answers, sure, strict=True)))
    assert winner(tree, VoteKind.TAIL_CONFIDENCE) == "1" and winner(tree, VoteKind.TOP_TAIL_CONFIDENCE) == "2"
    assert winner(tree, VoteKind.TOP_BOTTOM_CONFIDENCE) == "1"
    result = count_votes(ballots_of(tree, VoteKind.TOP_TAIL_CONFIDENCE), VoteKind.TOP_TAIL_CONFIDENCE, str.__eq__)
    assert [(entry.weight, entry.traces) for entry in result.entries] == [(18 + 19, 2)] and result.num_abstained == 5
    few = tree_of(("1", (), 1, sure[3]), ("2", (), 1, sure[5]))
    assert winner(few, VoteKind.TOP_TAIL_CONFIDENCE) == "2"  # at least one


def voters(*sure):
    tree = tree_of(*((str(i), (), 1, confident(0, weight, 0, 0)) for i, weight in enumerate(sure)))
    return [ballot.trace for ballot in ballots_of(tree, VoteKind.TOP_TAIL_CONFIDENCE)]


def test_the_filtered_votes_keep_all_at_or_above_the_90th_percentile():
    """numpy's linear interpolation, as in DeepConf's own code, so that exact ties are kept together."""
    assert voters(*[1.0] * 20) == list(range(20))
    assert voters(*[1.0] * 17, 5.0, 5.0, 5.0) == [17, 18, 19]
    assert voters(5.0, *[1.0] * 8, 5.0, 5.0) == [0, 9, 10]
    assert voters(*range(11)) == [9, 10]  # the percentile is the tenth value itself
    assert voters(*range(10)) == [9]
    assert voters(3.0) == [0]
    assert voters() == []


def test_a_recount_uses_the_pools_of_the_first_count():
    tree = tree_of(("a", (0.4,), 1, None), ("b", (0.5,), 1, None), ("c", (0.3,), 1, None))
    for kind, answer in ((VoteKind.SCORE, "a"), (VoteKind.BEST, "b")):
        first = count_votes(ballots_of(tree, kind), kind, lambda a, b: {a, b} == {"a", "c"})
        pools = tuple(entry.forms for entry in first.entries)
        assert first.answer == answer and recount_votes(ballots_of(tree, kind), kind, pools) == first


def test_a_discarded_trace_has_no_vote_also_in_a_replay():
    header = make_header(make_settings("sc", capacity=2), vote="majority")
    log = [
        header,
        *(ev.Created(0, i) for i in range(2)),
        *(ev.Admitted(0, i, 0, 0, 0) for i in range(2)),
        ev.Finished(1, 0, EndReason.STOP, "5", (1,), confident(1.0, 2.0, 3.0, 4.0)),
        ev.Discarded(1, 0, "below 5"),
        ev.Finished(2, 1, EndReason.STOP, "6", (1, 1)),
    ]
    record = fold(map(ev.from_json, map(ev.to_json, log)))
    assert record.vote(str.__eq__).answer == "6" and record.counts.discarded == 1
    assert record.tree.traces[0].confidence == confident(1.0, 2.0, 3.0, 4.0)
    assert isinstance(record.tree.traces[0].confidence, TraceConfidence)

"""The tree: transitions, the two views, lineage, the running score, and the paper's bookkeeping identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.core import events as ev
from gambit.core.tree import TraceState, TraceTree
from gambit.core.types import Aggregation, EndReason, RunningScore
from gambit.results.record import SearchRecord

from searching import make_header, make_settings  # isort: skip


def grown(*events, capacity=4):
    tree = TraceTree(capacity, Aggregation.MEAN)
    for event in events:
        tree.apply(event)
        tree.check()
    return tree


def root(trace):
    return ev.Created(0, trace), ev.Admitted(0, trace, 0, 0, 0)


def test_the_two_views_are_queries_on_one_tree():
    tree = grown(
        *root(0), *root(1), *root(2),
        ev.Evicted(3, 1, "pressure", 0.1, (5, 6)),
        ev.Branched(4, 3, 0, 2, 1.0),
    )  # fmt: skip
    assert [t.id for t in tree.in_state(TraceState.RUNNING)] == [0, 2]
    assert [t.id for t in tree.tree_view()] == [0, 1, 2, 3]  # the ghost and the waiting child are logically there
    assert (tree.num_active, tree.num_live) == (4, 3)
    assert tree.traces[3].state is TraceState.WAITING


@pytest.mark.parametrize(
    "events",
    [
        (*root(0), ev.Admitted(1, 0, 0, 0, 0)),
        (*root(0), ev.Finished(1, 0, EndReason.STOP, None, ()), ev.Pruned(2, 0, "x", None, ())),
        (*root(0), ev.Pruned(1, 0, "x", None, ()), ev.Scored(2, (0,), (0.5,), (3,))),
        (*root(0), ev.Evicted(1, 0, "x", None, (1,)), ev.Finished(2, 0, EndReason.STOP, None, (1, 2))),
        (*root(0), ev.Evicted(1, 0, "x", None, (1,)), ev.Pruned(2, 0, "x", None, (2,))),  # a ghost spoke
        (*root(0), ev.Scored(1, (0,), (0.5,), (3,)), ev.Scored(2, (0,), (0.5,), (3,))),  # a thought scored twice
        (*root(0), ev.Finished(1, 0, EndReason.STOP, None, (1,)), ev.Branched(2, 1, 0, 1, 1.0)),
        (*root(0), ev.Branched(1, 1, 0, 5, 1.0), ev.Admitted(1, 1, 4, 0, 0)),  # an inherited token unaccounted for
        (ev.Created(0, 1),),
        (ev.Created(0, 0), ev.Finished(1, 0, EndReason.STOP, None, ())),  # never ran
        tuple(ev.Created(0, i) for i in range(5)),  # one over the capacity
    ],
)
def test_what_cannot_be_is_refused(events):
    with pytest.raises(AssertionError):
        grown(*events)


def test_tokens_are_assembled_along_the_lineage():
    tree = grown(
        *root(0),
        ev.Branched(2, 1, 0, 2, 1.0), ev.Admitted(2, 1, 2, 0, 0),
        ev.Branched(4, 2, 1, 3, 1.0), ev.Admitted(4, 2, 3, 0, 0),
        ev.Pruned(5, 0, "x", None, (1, 2, 3, 4, 5)),
        ev.Finished(6, 1, EndReason.STOP, "a", (30, 40)),
        ev.Finished(6, 2, EndReason.STOP, "b", (400,)),
    )  # fmt: skip
    assert tree.tokens_of(0) == (1, 2, 3, 4, 5)
    assert tree.tokens_of(1) == (1, 2, 30, 40)
    assert tree.tokens_of(2) == (1, 2, 30, 400)
    assert tree.lineage(2) == [0, 1, 2] and tree.traces[2].depth == 2 and tree.traces[2].root == 0


def test_who_finished_votes_and_who_was_pruned_only_with_an_answer():
    tree = grown(
        *root(0), *root(1), *root(2), *root(3),
        ev.Pruned(1, 3, "x", None, (1,), answer="7"),
        ev.Pruned(1, 0, "x", None, (1,)),
        ev.Finished(2, 1, EndReason.STOP, None, (1,)),
        ev.Finished(2, 2, EndReason.STOP, "8", (1,)),
    )  # fmt: skip
    assert [trace.id for trace in tree.voters()] == [1, 2, 3]
    tree.apply(ev.Discarded(3, 2, "x"))
    assert [trace.id for trace in tree.voters()] == [1, 3]


def test_deep_lineages_need_no_deep_stack():
    tree = TraceTree(5000, Aggregation.MEAN)
    for event in root(0):
        tree.apply(event)
    for child in range(1, 3000):
        tree.apply(ev.Branched(child, child, child - 1, child, 1.0))
        tree.apply(ev.Admitted(child, child, child, 0, 0))
    assert len(tree.lineage(2999)) == 3000 and len(tree.tokens_of(2999)) == 0


def test_a_child_inherits_its_parents_sums():
    tree = grown(
        *root(0), ev.Scored(1, (0,), (0.9,), (4,)), ev.Scored(2, (0,), (0.5,), (8,)),
        ev.Branched(3, 1, 0, 9, 1.0), ev.Admitted(3, 1, 9, 0, 0), ev.Scored(4, (1,), (0.1,), (12,)),
    )  # fmt: skip
    assert tree.score_of(tree.traces[1]) == pytest.approx(0.5)
    assert tree.score_of(tree.traces[0]) == pytest.approx(0.7)
    assert tree.traces[1].score.position_weighted == pytest.approx((0.9 + 2 * 0.5 + 3 * 0.1) / 6)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_the_running_score_is_the_mean_the_last_or_the_position_weighted_mean(scores):
    running = RunningScore()
    assert running.value(Aggregation.MEAN) is None and running.position_weighted is None
    for score in scores:
        running = running.add(score)
    n = len(scores)
    assert running.value(Aggregation.MEAN) == pytest.approx(sum(scores) / n)
    assert running.value(Aggregation.LAST) == scores[-1]
    weights = range(1, n + 1)
    expected = sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)
    assert running.position_weighted == pytest.approx(expected)


def test_the_bookkeeping_identity_of_the_papers_example():
    """1,595 nodes = 256 roots + 1,339 branches = 1,083 pruned + 256 completed + 256 still active at the stop."""
    record = SearchRecord(make_header(make_settings(capacity=256, swap_size=16)))
    apply = record.apply
    for trace in range(256):
        apply(ev.Created(0, trace))
        apply(ev.Admitted(0, trace, 0, 0, 0))
    created, pruned, completed = 256, 0, 0

    def branch(step, parent):
        nonlocal created
        apply(ev.Branched(step, created, parent, 0, 1.0))
        apply(ev.Admitted(step, created, 0, 0, 0))
        created += 1

    def running():
        return sorted(trace.id for trace in record.tree.in_state(TraceState.RUNNING))

    step = 0
    while pruned < 1083:  # Case 2: sixteen out, sixteen in
        step += 200
        for _ in range(min(16, 1083 - pruned)):
            apply(ev.Pruned(step, running()[0], "tournament", 0.1, ()))
            branch(step, running()[-1])
            pruned += 1
    while completed < 256:  # each completion leaves a place that Case 1 fills
        apply(ev.Finished(step, running()[0], EndReason.STOP, "204", ()))
        branch(step, running()[-1])
        completed += 1
    for trace in running():
        apply(ev.Cancelled(step, trace, ()))
    record.tree.check_ended()
    counts = record.counts
    assert created == len(record.tree.traces) == 1595
    assert (counts.roots, counts.branched) == (256, 1339)
    assert (counts.pruned, counts.completed, counts.cancelled + counts.ghosts) == (1083, 256, 256)
    assert 14_004 % 200 == 31_404 % 200 == 4  # branches fall on multiples of Δ after the four prompt-side steps

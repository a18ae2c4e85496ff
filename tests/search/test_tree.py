"""The tree: transitions, the two views, lineage, the running score, and the paper's bookkeeping identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit import events as ev
from gambit.results.record import SearchRecord
from gambit.tree import TraceState, TraceTree
from gambit.types import Aggregation, EndReason, RunningScore, TraceConfidence

from support.searching import check_ended, check_tree, make_header, make_settings  # isort: skip
from support.tables import table


def grown(*events, capacity=4):
    tree = TraceTree(capacity, Aggregation.MEAN)
    for event in events:
        tree.apply(event)
        check_tree(tree)
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


@table(
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


def test_a_child_may_inherit_less_than_its_parent_did():
    """As at a boundary that lies before the parent's own beginning."""
    tree = grown(
        *root(0),
        ev.Branched(4, 1, 0, 3, 1.0), ev.Admitted(4, 1, 3, 0, 0),
        ev.Branched(5, 2, 1, 2, 1.0), ev.Admitted(5, 2, 2, 0, 0),
        ev.Pruned(6, 0, "x", None, (1, 2, 3, 4)),
        ev.Finished(6, 1, EndReason.STOP, "a", (30,)),
        ev.Finished(6, 2, EndReason.STOP, "b", (300,)),
    )  # fmt: skip
    assert tree.tokens_of(1) == (1, 2, 3, 30) and tree.tokens_of(2) == (1, 2, 300)


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
    check_ended(record.tree)
    counts = record.counts
    assert created == len(record.tree.traces) == 1595
    assert (counts.roots, counts.branched) == (256, 1339)
    assert (counts.pruned, counts.completed, counts.cancelled + counts.ghosts) == (1083, 256, 256)
    assert 14_004 % 200 == 31_404 % 200 == 4  # branches fall on multiples of Δ after the four prompt-side steps


def test_a_trace_has_all_that_its_events_say():
    tree = grown(
        ev.Created(3, 0, 2),
        ev.Admitted(4, 0, 0, 0, 1),
        ev.Scored(5, (0,), (0.5,), (2,)),
        ev.Queued(6, 0, 3),
        ev.Admitted(8, 0, 0, 3, 2),
        ev.Branched(9, 1, 0, 4, 0.7),
        ev.Admitted(9, 1, 3, 1, 0),
        ev.Evicted(10, 0, "floor", 0.5, (1, 2, 3, 4, 5)),
        ev.Finished(12, 1, EndReason.LENGTH, "7", (6, 7), TraceConfidence(6, 1.0, 2.0, 3.0, 4.0)),
        ev.Pruned(13, 0, "tournament", 0.5, ()),
        ev.Waited(14, (0, 1), (3, 4), (0.5, 0.25)),
    )
    parent, child = tree.traces
    assert (parent.parent, parent.root, parent.depth, parent.island, parent.temperature) == (None, 0, 0, 2, None)
    assert (parent.created_step, parent.inherited, parent.ended_step, parent.was_evicted) == (3, 0, 10, True)
    assert (parent.reused, parent.recomputed, parent.num_admissions) == (0, 3, 2)
    assert (parent.waited_steps, parent.waited_seconds) == (3, 0.5), "the account at the end of the search"
    assert (parent.num_own_tokens, parent.num_tokens, parent.own_tokens) == (5, 5, (1, 2, 3, 4, 5))
    assert (child.parent, child.root, child.depth, child.island, child.temperature) == (0, 0, 1, 2, 0.7)
    assert (child.created_step, child.inherited, child.ended_step, child.was_evicted) == (9, 4, 12, False)
    assert (child.reused, child.recomputed, child.num_admissions) == (3, 1, 1)
    assert (child.end_reason, child.answer, child.confidence.tail) == (EndReason.LENGTH, "7", 2.0)
    assert (child.score.count, child.boundary_tokens, child.num_tokens) == (1, 2, 6)
    assert [trace.state for trace in tree.traces] == [TraceState.PRUNED, TraceState.FINISHED]


def test_waiting_adds_up_until_the_last_account():
    tree = grown(ev.Created(0, 0), ev.Admitted(2, 0, 0, 0, 2), ev.Queued(3, 0, 1), ev.Admitted(6, 0, 0, 1, 3))
    assert (tree.traces[0].waited_steps, tree.traces[0].waited_seconds) == (5, 0.0)


@table(
    "event",
    [
        ev.Scored(1, (0, 1), (0.5,), (3, 3)),
        ev.Scored(1, (0, 1), (0.5, 0.5), (3,)),
        ev.Verified(1, (0, 1), (0.5,), (3, 3), (1, 1), (0.5, 0.5)),
        ev.Verified(1, (0, 1), (0.5, 0.5), (3,), (1, 1), (0.5, 0.5)),
        ev.Waited(1, (0, 1), (1,), (0.1, 0.1)),
        ev.Waited(1, (0, 1), (1, 1), (0.1,)),
    ],
)
def test_columns_of_different_lengths_are_refused(event):
    with pytest.raises(ValueError, match="shorter"):
        grown(*root(0), *root(1), event)


def test_a_late_score_reaches_a_trace_that_has_left():
    tree = grown(
        *root(0),
        ev.Finished(3, 0, EndReason.STOP, "7", (1, 2, 3)),
        ev.Verified(4, (0, 0), (0.5, 0.9), (1, 2), (2, 3), (0.1, None)),
    )
    assert tree.score_of(tree.traces[0]) == pytest.approx(0.7) and tree.traces[0].boundary_tokens == 2


def test_a_parent_may_wait_for_nothing_and_its_child_inherits_what_was_scored():
    with pytest.raises(AssertionError, match="parent 0 is waiting"):
        grown(ev.Created(0, 0), ev.Branched(1, 1, 0, 0, 1.0))
    with pytest.raises(AssertionError, match="child 1 inherits a score of tokens it lacks"):
        grown(*root(0), ev.Scored(1, (0,), (0.5,), (3,)), ev.Branched(2, 1, 0, 2, 1.0))
    assert grown(*root(0), ev.Scored(1, (0,), (0.5,), (3,)), ev.Branched(2, 1, 0, 3, 1.0)).traces[1].inherited == 3
    ghost = grown(*root(0), ev.Evicted(1, 0, "floor", None, (1, 2)), ev.Branched(2, 1, 0, 2, 1.0))
    assert ghost.traces[1].parent == 0


def test_only_a_vote_that_is_there_can_be_lost():
    with pytest.raises(AssertionError, match="trace 0 has no vote to lose"):
        grown(*root(0), ev.Discarded(1, 0, "x"))
    finished = (*root(0), ev.Finished(1, 0, EndReason.STOP, "7", ()))
    with pytest.raises(AssertionError, match="trace 0 has no vote to lose"):
        grown(*finished, ev.Discarded(2, 0, "x"), ev.Discarded(3, 0, "x"))
    tree = grown(*finished, ev.Discarded(2, 0, "x"))
    assert tree.traces[0].is_discarded and tree.voters() == []


def broken(change, *events):
    tree = grown(*root(0), ev.Branched(1, 1, 0, 1, 1.0), *events)
    change(tree)
    return tree


@table(
    ("change", "message"),
    [
        (lambda tree: setattr(tree, "capacity", 1), "2 active traces, capacity 1"),
        (lambda tree: tree._in_state[TraceState.PRUNED].update({0: None}), "^a trace is in two states or in none$"),
        (lambda tree: tree._in_state[TraceState.RUNNING].clear(), "^a trace is in two states or in none$"),
        (lambda tree: setattr(tree.traces[0], "state", TraceState.WAITING), ""),
        (lambda tree: setattr(tree.traces[0], "inherited", 1), ""),
        (lambda tree: setattr(tree.traces[0], "depth", 1), ""),
        (lambda tree: setattr(tree.traces[0], "root", 1), ""),
        (lambda tree: setattr(tree.traces[1], "depth", 2), ""),
        (lambda tree: setattr(tree.traces[1], "root", 1), ""),
        (lambda tree: setattr(tree.traces[1], "parent", 1), ""),
        (lambda tree: setattr(tree.traces[1], "island", 1), "trace 1 left the island of its parent"),
    ],
)
def test_the_invariants_find_what_is_wrong(change, message):
    with pytest.raises(AssertionError, match=message):
        check_tree(broken(change))


def test_the_invariants_of_what_has_ended():
    gone = ev.Cancelled(2, 0, (1,))
    tree = broken(lambda tree: None, gone)
    with pytest.raises(AssertionError, match="1 traces neither ended nor were cancelled"):
        check_ended(tree)
    with pytest.raises(AssertionError, match="trace 0 ended without a step"):
        check_tree(broken(lambda tree: setattr(tree.traces[0], "ended_step", None), gone))
    with pytest.raises(AssertionError, match="child 1 inherits tokens that 0 never had"):
        check_tree(broken(lambda tree: setattr(tree.traces[1], "inherited", 2), gone))
    tree.apply(ev.Cancelled(2, 1, ()))
    check_ended(tree)
    assert tree.num_live == 0 and tree.num_active == 0


def test_a_split_puts_every_trace_on_one_of_the_islands():
    tree = grown(*root(0), *root(1), ev.IslandsSplit(3, 2, 1, 1, "in doubt", (1, 0)))
    assert [trace.island for trace in tree.traces] == [1, 0]
    for island in (2, -1):
        with pytest.raises(AssertionError, match=f"trace 1 is put on island {island} of 2"):
            grown(*root(0), *root(1), ev.IslandsSplit(3, 2, 1, 1, "in doubt", (1, island)))
    with pytest.raises(AssertionError, match="2 traces, 1 placed"):
        grown(*root(0), *root(1), ev.IslandsSplit(3, 2, 1, 1, "in doubt", (1,)))


def test_a_queued_trace_notes_how_many_tokens_of_its_own_it_had():
    tree = grown(*root(0), ev.Branched(3, 1, 0, 3, 1.0), ev.Admitted(3, 1, 3, 0, 0), ev.Queued(5, 1, 5))
    assert tree.traces[1].queued_tokens == [2] and tree.traces[0].queued_tokens == []

"""When a search is over: its target, its budgets, its clock."""

import math
import time

import pytest

from gambit import events as ev
from gambit.config.presets import SearchPart
from gambit.policies.islands import Islands
from gambit.search.limits import SearchLimits
from gambit.tree import TraceTree
from gambit.types import Aggregation, EndReason, StopReason
from support.searching import make_settings


@pytest.fixture
def clock(monkeypatch):
    """Set by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def limits_of(finished=(), live=1, **options):
    """`finished`: the islands of complete traces."""
    settings = make_settings(**{"capacity": 9, "num_traces": 4, **options})
    tree = TraceTree(9, Aggregation.MEAN)
    for trace, island in enumerate([*finished, *[0] * live]):
        tree.apply(ev.Created(0, trace, island))
        tree.apply(ev.Admitted(0, trace, 0, 0, 0))
    for trace in range(len(finished)):
        tree.apply(ev.Finished(1, trace, EndReason.STOP, "7", (1,)))
    return SearchLimits(settings, Islands.of(settings), tree)


def due(limits, num_generated=0, is_settled=False):
    return limits.due_reason(num_generated, is_settled=is_settled)


def test_it_goes_on_while_something_runs_and_nothing_is_used_up():
    assert due(limits_of(finished=(0, 0, 0))) is None
    assert due(limits_of(), num_generated=10**9) is None


def test_the_target():
    assert due(limits_of(finished=(0, 0, 0, 0))) is StopReason.COMPLETED
    assert due(limits_of(finished=(0, 0, 0, 0), live=0)) is StopReason.COMPLETED
    assert limits_of(finished=(0, 0, 0, 0)).has_enough_traces and not limits_of(finished=(0, 0, 0)).has_enough_traces


def test_every_island_has_its_share_of_the_target():
    assert due(limits_of(finished=(0, 0, 0, 1), islands=2)) is None
    assert due(limits_of(finished=(0, 0, 1, 1), islands=2)) is StopReason.COMPLETED


def test_nothing_is_left_to_run():
    assert due(limits_of(finished=(0,), live=0)) is StopReason.EXHAUSTED


def test_a_settled_vote_ends_what_still_runs():
    assert due(limits_of(), is_settled=True) is StopReason.CONSENSUS
    assert due(limits_of(live=0), is_settled=True) is StopReason.CONSENSUS, "nothing runs because nothing more has to"
    assert due(limits_of(finished=(0, 0, 0, 0)), is_settled=True) is StopReason.COMPLETED


def test_a_budget_of_traces_is_looked_at_first():
    assert due(limits_of(finished=(0, 0), budget_traces=3)) is None
    assert due(limits_of(finished=(0, 0), budget_traces=2)) is StopReason.BUDGET_TRACES
    assert due(limits_of(finished=(0, 0, 0, 0), budget_traces=4)) is StopReason.BUDGET_TRACES


def test_a_budget_of_tokens_is_used_up_and_not_passed():
    assert due(limits_of(live=3, budget_tokens=10), num_generated=7) is None, "three more are ten"
    assert due(limits_of(live=3, budget_tokens=10), num_generated=8) is StopReason.BUDGET_TOKENS


def test_a_budget_of_seconds_keeps_a_part_for_the_vote(clock):
    limits = limits_of(budget_seconds=20.0)
    assert (limits.search_deadline, limits.vote_deadline) == (118.0, 120.0)
    clock[0] = 117.9
    assert due(limits) is None
    clock[0] = 118.0
    assert due(limits) is StopReason.BUDGET_SECONDS and limits.seconds == 18.0


def test_the_clock_starts_with_the_search(clock):
    limits = limits_of(budget_seconds=20.0)
    clock[0] = 200.0
    limits.start_clock()
    assert (limits.seconds, limits.search_deadline, limits.vote_deadline) == (0.0, 218.0, 220.0)


def test_a_part_of_a_search_ends_with_its_own_traces(clock):
    """Whoever has all parts watches over budgets and the vote."""
    part = {"part": SearchPart(range(1)), "islands": 2, "num_traces": 4}
    budgets = {"budget_traces": 1, "budget_tokens": 1, "budget_seconds": 1.0}
    limits = limits_of(finished=(0,), **part, **budgets)
    clock[0] = 500.0
    assert due(limits, num_generated=99, is_settled=True) is None
    assert limits.is_time_up and limits.reason_in_pool(99, is_settled=True) is StopReason.BUDGET_TRACES
    assert due(limits_of(finished=(0, 0), **part, **budgets)) is StopReason.COMPLETED, "its island's share"
    assert due(limits_of(finished=(0,), live=0, **part)) is StopReason.EXHAUSTED


def test_without_a_budget_of_seconds_there_is_no_deadline():
    limits = limits_of()
    assert limits.search_deadline == limits.vote_deadline == math.inf

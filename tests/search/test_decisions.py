"""What a user's policy does wrong ends its search with a sentence that names policy, step, decision and fault."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gambit import events as ev
from gambit.errors import UserError, named
from gambit.policies.base import Branch, Discard, Evict, Force, Prune, SplitIslands, Start, Wake
from gambit.types import OnPressure, PoolSettings, PressureAction, StopReason
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one
from support.tables import table

QUEUE = OnPressure(PressureAction.QUEUE)
EVERY_FOUR = Wake(every_steps=4)
SETTINGS = make_settings("sc", capacity=4, num_traces=4, max_new_tokens=30)


@dataclass(frozen=True)
class Deciding:
    """Starts a pool, and decides at step 4 what a test wants."""

    wrong: Any
    first: Any = (Start(4, QUEUE),)
    wake: Any = EVERY_FOUR

    def initial_state(self):
        return None

    def decide(self, state, view):
        if view.num_created == 0:
            return None, self.first
        return self.wrong(view) if callable(self.wrong) else (None, [self.wrong])


def failure_of(policy):
    """Returns the message of a search with a policy."""
    with pytest.raises(UserError) as found:
        run_one(ScriptedEngine(seed=0, finish_chance=0), SETTINGS, wrap=lambda _: policy)
    return str(found.value)


WRONG = [
    (Prune(-1, "x"), "there is no trace -1: 4 were created"), (Prune(99, "x"), "there is no trace 99"),
    (Prune(0, None), "reason is None: give str"), (Prune(np.int64(0), "x"), "trace is .*: give int"),
    (Prune(True, "x"), "trace is True: give int"), (Evict(7, "x"), "there is no trace 7"),
    (Discard(0, "x"), "trace 0 is running"), (Branch(0, 9999, QUEUE), "a child of trace 0 inherits 3 to 4 tokens"),
    (Branch(-2, 1, QUEUE), "there is no trace -2"), (Branch(0, 1, None), "on_pressure is None: give OnPressure"),
    (Start(4, None), "on_pressure is None: give OnPressure"),
    (Start(4, PressureAction.PRUNE), "on_pressure is .*: give OnPressure"), (Start(100, QUEUE), "has room for 0"),
    (Start(-1, QUEUE), "count is at least 0"), (Start(0, QUEUE, None, 3), "numbered from 0 to 0"),
    (Start(1.0, QUEUE), "count is 1.0: give int"), (Start(0, QUEUE, 5), "stop_rule is 5: give .*StopRule . None"),
    (Force(0, "x"), "give tokens and max_tokens"), (Force(0, "x", [1]), r"given is \[1\]: give tuple"),
    (SplitIslands(PoolSettings(1, 1, 1, 1)), "1 islands are split into a multiple of that, 4 at most"),
    (SplitIslands(3), "pool is 3: give PoolSettings"), ("Prune(0)", "this is none of Start, Branch, Force, Prune"),
    (None, "this is none of"),
]  # fmt: skip


@table("wrong", WRONG)
def test_a_decision_that_cannot_be_carried_out_is_named(wrong):
    decision, fault = wrong
    found = failure_of(Deciding(decision))
    assert found.startswith(f"policy 'sc', step 4: {repr(decision)[:12]}"), found
    assert re.search(fault, found), found


@table("answer", [None, [], [Prune(0, "x")], (None, Prune(0, "x")), (None, [], []), 5, (None, None), (None, "ab")])
def test_what_decide_returns_is_a_pair(answer):
    found = failure_of(Deciding(lambda view: answer))
    assert found.startswith("policy 'sc', step 4: decide returned ") and found.endswith("[decision, …])")


def test_an_error_in_a_policy_keeps_its_kind_and_names_policy_step_and_line():
    with pytest.raises(ZeroDivisionError) as found:
        run_one(ScriptedEngine(seed=0, finish_chance=0), SETTINGS, wrap=lambda _: Deciding(lambda view: 1 // 0))
    assert re.fullmatch(r"ZeroDivisionError: .* \(policy 'sc', step 4, test_decisions.py:\d+\)", named(found.value))


@table("wake", [None, 5, Wake(every_steps=0), Wake(every_steps=-1), Wake(every_steps=2.0), Wake(every_steps=True)])
def test_a_wake_that_is_none_is_refused_before_the_search_begins(wake):
    found = failure_of(Deciding(None, wake=wake))
    assert found.startswith("policy 'sc': its wake is ") and "give a Wake" in found


def test_more_traces_than_the_pool_has_places_are_refused_at_the_start():
    found = failure_of(Deciding(None, first=[Start(100, QUEUE)]))
    assert found.startswith("policy 'sc', step 0: Start(count=100, …: ") and "the pool of 4 has room for 4" in found


@pytest.mark.parametrize("inherited", [-1, 9999])
def test_a_child_inherits_no_more_than_its_parent_has(inherited):
    found = failure_of(Deciding(Branch(0, inherited, QUEUE), first=[Start(3, QUEUE)]))
    assert re.search(r"a child of trace 0 inherits \d+ to 4 tokens", found)


def test_a_ghost_branches_only_where_ghosts_may_be_parents():
    def ghost(view):
        ghosts = [trace for trace in view.traces if trace.state == "ghost"]
        return None, [Branch(each.id, each.num_tokens, QUEUE) for each in ghosts] or [Evict(0, "x")]

    assert "trace 0 is ghost: running ones branch" in failure_of(Deciding(ghost, first=[Start(2, QUEUE)]))


def test_a_trace_ends_once():
    assert "trace 1 is pruned" in failure_of(Deciding(lambda view: (None, [Prune(1, "x"), Prune(1, "y")])))
    assert "trace 1 is ghost" in failure_of(Deciding(lambda view: (None, [Evict(1, "x"), Evict(1, "y")])))


def test_a_view_has_parent_and_newest_score():
    seen = []

    def branch(view):
        seen.append(view)
        room = 4 - len(view.traces)
        return None, [Branch(0, view.traces[0].num_tokens, QUEUE)] * (room and view.traces[0].id == 0)

    watched = run_one(
        ScriptedEngine(seed=0, finish_chance=0), SETTINGS, wrap=lambda _: Deciding(branch, first=[Start(3, QUEUE)])
    )
    assert watched.search.result.stop_reason is StopReason.COMPLETED
    last = seen[-1].traces
    assert [trace.parent for trace in last] == [None, None, None, 0]
    scored = [event for event in watched.events if isinstance(event, ev.Scored) and event.step <= seen[-1].step]
    scores = {trace: found for event in scored for trace, found in zip(event.traces, event.scores, strict=True)}
    assert scores, "some thought has ended"
    assert {trace.id: trace.last_score for trace in last if trace.id in scores} == scores

"""DeepConf by hand: the threshold, who has a vote, which rule later traces run under."""

import dataclasses

import pytest

from gambit import events as ev
from gambit.policies.base import Discard, PoolView, Start
from gambit.policies.deepconf import ROUNDING, DeepConf, DeepConfOptions, DeepConfState
from gambit.types import OnPressure, PressureAction, StopRule, TraceConfidence
from support.scripted import ScriptedEngine
from support.searching import finished_view, make_settings, run_one

QUEUE = OnPressure(PressureAction.QUEUE)


def finished(trace, lowest):
    return finished_view(trace, "1", confidence=TraceConfidence(10, 9.0, 9.0, 9.0, lowest))


def view(lowest, created):
    done = tuple(finished(trace, value) for trace, value in enumerate(lowest))
    return PoolView(0, (), created, done)


def make(num_traces=64, capacity=32, **options):
    return DeepConf(num_traces, capacity, DeepConfOptions(**options))


def test_sixteen_warm_ups_set_the_threshold_between_the_14th_and_the_15th():
    lowest = [float(x) for x in range(1, 17)]
    threshold = make().threshold(view(lowest, 16).finished)
    assert threshold == pytest.approx(14.5, rel=2 * ROUNDING) and threshold < 14.5


def test_the_warm_up_runs_alone_without_a_rule_and_in_full():
    state, decisions = make().decide(DeepConfState(), view([], 0))
    assert decisions == [Start(16, QUEUE, None)] and state == DeepConfState()
    state, decisions = make().decide(state, view([1.0] * 15, 16))
    assert decisions == [] and state.threshold is None


def test_after_the_warm_up_about_two_of_sixteen_vote_and_the_rest_start_under_the_rule():
    lowest = [float(x) for x in range(16, 0, -1)]
    state, decisions = make(window_tokens=7).decide(DeepConfState(), view(lowest, 16))
    discarded = [d.trace for d in decisions if isinstance(d, Discard)]
    assert discarded == list(range(2, 16))  # 16 and 15 are above 14.5
    assert decisions[-1] == Start(32, QUEUE, StopRule(7, state.threshold)) and state.num_judged == 16


def test_a_later_trace_that_finishes_below_has_no_vote_and_is_judged_once():
    policy = make()
    state, _ = policy.decide(DeepConfState(), view([float(x) for x in range(16)], 16))
    later = [*map(float, range(16)), state.threshold + 1, state.threshold - 1]
    state, decisions = policy.decide(state, view(later, 64))
    assert [d.trace for d in decisions] == [17]
    assert policy.decide(state, view(later, 64))[1] == []


def test_equally_sure_warm_ups_all_vote():
    _, decisions = make().decide(DeepConfState(), view([3.0] * 15 + [3.0 - 1e-6], 16))
    assert not [d for d in decisions if isinstance(d, Discard)]


def test_fewer_traces_than_a_warm_up_are_all_warm_up():
    policy = make(num_traces=3)
    _, decisions = policy.decide(DeepConfState(), view([], 0))
    assert decisions == [Start(3, QUEUE, None)]
    _, decisions = policy.decide(DeepConfState(), view([1.0, 2.0, 3.0], 3))
    assert [d.trace for d in decisions] == [0, 1]  # the 90th percentile of three is 2.8


def test_a_whole_search_stops_low_traces_and_only_survivors_vote():
    options = DeepConfOptions(warmup_traces=4, window_tokens=3, percentile=50)
    settings = dataclasses.replace(make_settings("deepconf", capacity=16), policy_options=options)
    watched = run_one(ScriptedEngine(seed=2, finish_chance=0.1), settings, vote="lowest-confidence")
    tree, result = watched.search.record.tree, watched.search.result
    stopped = [e for e in watched.events if isinstance(e, ev.Pruned) and e.reason == "confidence"]
    assert stopped and all(e.trace >= 4 for e in stopped)
    assert result.counts.roots == 16 and result.counts.completed + len(stopped) == 16
    voters = [trace for trace in tree.traces if trace.confidence is not None and not trace.is_discarded]
    threshold = min(trace.confidence.lowest for trace in voters)
    dropped = [trace for trace in tree.traces if trace.is_discarded]
    assert len(dropped) == result.counts.discarded >= 2
    assert all(trace.confidence.lowest < threshold for trace in dropped)
    assert sum(entry.weight for entry in result.votes) == pytest.approx(sum(t.confidence.lowest for t in voters))


def test_the_last_trace_loses_its_vote_too():
    """It completes in the step that reaches the target."""
    options = DeepConfOptions(warmup_traces=2, percentile=100)
    settings = dataclasses.replace(make_settings("deepconf", capacity=2), policy_options=options)
    watched = run_one(ScriptedEngine(seed=5, finish_chance=0.2), settings, vote="lowest-confidence")
    assert watched.search.result.counts.discarded == 1

"""Beam search, DVTS, particle filtering and adaptive self-consistency: what their authors' code decided on random
pools, and whole searches on a scripted engine."""

import dataclasses
import json
import lzma
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.policies.base import Branch, PoolView, Prune, Stop, TraceView
from gambit.policies.baselines import Adaptive, AdaptiveOptions
from gambit.policies.beam_search import BeamOptions, BeamSearch, Dvts, ParticleFiltering, ParticleOptions
from gambit.search.choice import policy_options
from gambit.tree import TraceState
from gambit.types import StopReason
from support import GOLDEN
from support.scripted import ScriptedEngine
from support.searching import check_ended, finished_view, make_settings, run_one

PEERS = json.loads(lzma.decompress((GOLDEN / "originals" / "peers.json.xz").read_bytes()))


def trace(id_, score, *, state=TraceState.RUNNING, thinking=True, root=None):
    return TraceView(
        id_, state, score, 0 if score is None else 3, 40, 40, 30, thinking, root=id_ if root is None else root
    )


def pool(scores, ended=()):
    live = tuple(trace(i, score) for i, score in enumerate(scores) if i not in ended)
    return PoolView(24, live, len(scores), tuple(finished_view(i, "1", 0.5) for i in ended))


def continued(view, decisions):
    """The traces that are there after the decisions, as the traces that they continue: those that stayed first."""
    pruned = {each.trace for each in decisions if isinstance(each, Prune)}
    first_branch = next((i for i, each in enumerate(decisions) if isinstance(each, Branch)), len(decisions))
    assert not any(isinstance(each, Prune) for each in decisions[first_branch:]), "a place is free before it is taken"
    stayed = [each.id for each in view.traces if each.id not in pruned]
    return stayed + [each.parent for each in decisions if isinstance(each, Branch)]


def beams(capacity, width, kind=BeamSearch, num_traces=None):
    return kind(capacity, num_traces or capacity, 24, width)


# -- the originals ---------------------------------------------------------------------------------------------


def test_beam_search_continues_the_same_beams_in_the_same_order():
    assert len(PEERS["beam_search"]) == 500
    for case in PEERS["beam_search"]:
        view = pool(case["scores"], set(case["ended"]))
        _, decisions = beams(len(case["scores"]), case["width"]).decide(None, view)
        assert continued(view, decisions) == case["continued"], case


def test_dvts_continues_the_same_trace_of_each_tree():
    assert len(PEERS["dvts"]) == 500
    for case in PEERS["dvts"]:
        width, num_trees = case["width"], len(case["scores"]) // case["width"]
        # Theirs numbers the continuations tree by tree, ours the roots in turn.
        scores = [case["scores"][i % num_trees * width + i // num_trees] for i in range(len(case["scores"]))]
        view = pool(scores)
        _, decisions = beams(len(scores), width, Dvts).decide(None, view)
        found = Counter(i % num_trees * width + i // num_trees for i in continued(view, decisions))
        assert found == dict.fromkeys(case["continued"], width), case


class Offset(ParticleFiltering):
    """Particle filtering that draws at a known offset."""

    at = 0.0

    def offset(self, step):
        return self.at


def test_particle_filtering_draws_the_same_particles():
    assert len(PEERS["particle_filtering"]) == 500
    for case in PEERS["particle_filtering"]:
        view, capacity = pool(case["scores"]), len(case["scores"])
        policy = Offset(make_settings(capacity=capacity, is_probability=True), 1.0)
        Offset.at = case["offset"]
        _, decisions = policy.decide(None, view)
        assert sorted(continued(view, decisions)) == sorted(case["continued"]), case


def test_adaptive_stops_after_the_same_answer():
    assert len(PEERS["adaptive"]) == 500
    for case in PEERS["adaptive"]:
        budget = len(case["answers"])
        policy = Adaptive(budget, budget, AdaptiveOptions(first=budget, confidence=case["confidence"]))
        done = [finished_view(i, answer) for i, answer in enumerate(case["answers"])]
        live = [trace(i, None) for i in range(budget)]
        views = (PoolView(i, tuple(live[i:]), budget, tuple(done[:i])) for i in range(1, budget))
        stops = (i for i, view in enumerate(views, 1) if policy.decide(budget, view)[1] == [Stop()])
        assert next(stops, budget) == case["stopped_after"], case


# -- what is ours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [beams(4, 2), beams(4, 2, Dvts), ParticleFiltering(make_settings(capacity=4), 1.0)])
def test_traces_without_a_score_or_with_an_answer_begun_are_left_alone(policy):
    view = PoolView(24, (trace(0, None), trace(1, 0.1, thinking=False), trace(2, 0.2), trace(3, 0.9)), 4)
    _, decisions = policy.decide(None, view)
    assert not {0, 1} & {each.trace if isinstance(each, Prune) else each.parent for each in decisions}


def test_a_trace_that_waits_may_be_kept_and_does_not_branch():
    view = PoolView(24, (trace(0, 0.9, state=TraceState.WAITING), trace(1, 0.1)), 2)
    _, decisions = beams(2, 2).decide(None, view)
    assert decisions == [Prune(1, "narrowed")]


def test_a_tree_of_dvts_ends_when_its_share_is_complete():
    view = PoolView(24, (trace(2, 0.9), trace(1, 0.3), trace(3, 0.8)), 6,
                    (finished_view(0, "1", 0.5), dataclasses.replace(finished_view(4, "1", 0.5), root=4)))  # fmt: skip
    _, decisions = beams(4, 2, Dvts).decide(None, view)
    assert decisions[:2] == [Prune(2, "tree complete"), Prune(1, "narrowed")]
    assert [each.parent for each in decisions[2:]] == [3]


def test_a_prune_of_particle_filtering_has_the_effective_sample_size_as_its_reason():
    policy = ParticleFiltering(make_settings(capacity=4, is_probability=True), 1.0)
    _, decisions = policy.decide(None, pool([0.5, 0.999999, 0.5, 0.5]))
    assert [each.reason for each in decisions if isinstance(each, Prune)] == [
        "not drawn: effective sample size 1.0 of 4"
    ] * 3
    softer = dataclasses.replace(policy, temperature=1000.0)
    assert softer.decide(None, pool([0.5, 0.999999, 0.5, 0.5]))[1] == []


def test_adaptive_doubles_its_traces_until_the_leader_is_likely_to_stay():
    policy = Adaptive(64, 64, AdaptiveOptions())
    state, answers, counts = policy.initial_state(), [], []
    for more in (["1", "1"], ["2", "1"], ["2", "2", "1", "1"]):
        done = tuple(finished_view(i, answer) for i, answer in enumerate(answers))
        state, (start,) = policy.decide(state, PoolView(9, (), len(done), done))
        counts.append(start.count)
        answers += more
    assert state == 8 and counts == [2, 2, 4]


@pytest.mark.parametrize(("ones", "is_over"), [(6, False), (7, False), (8, True)])  # against two: 0.91, 0.945, 0.967
def test_adaptive_ends_a_round_as_soon_as_it_is_settled(ones, is_over):
    answers = ["2", None, "2.0", *["1"] * ones]
    done = tuple(finished_view(i, answer) for i, answer in enumerate(answers))
    view = PoolView(9, (trace(20, None),), 21, done)
    assert Adaptive(64, 64, AdaptiveOptions()).decide(16, view) == (16, [Stop()] if is_over else [])


@settings(max_examples=25)
@given(
    policy=st.sampled_from(["beam-search", "dvts", "particle-filtering", "adaptive"]),
    capacity=st.integers(1, 16),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
    kv_tokens=st.sampled_from([80, 150, 1 << 30]),
    finish_chance=st.sampled_from([0.02, 0.1, 0.4]),
)
def test_whole_searches_keep_the_invariants_and_end(policy, capacity, width, seed, kv_tokens, finish_chance):
    options = {
        "beam-search": BeamOptions(beam_width=width),
        "dvts": BeamOptions(beam_width=width),
        "particle-filtering": ParticleOptions(temperature=width),
        "adaptive": AdaptiveOptions(first=width),
    }
    chosen = make_settings(policy=policy, capacity=capacity, num_traces=capacity, check_interval=5, max_new_tokens=40,
                           policy_options=options[policy], is_probability=True)  # fmt: skip
    engine = ScriptedEngine(seed=seed, kv_tokens=kv_tokens, finish_chance=finish_chance)
    watched = run_one(engine, chosen)
    check_ended(watched.search.record.tree)
    result = watched.search.result
    expected = {StopReason.POLICY, StopReason.COMPLETED} if policy == "adaptive" else {StopReason.COMPLETED}
    # A pool whose traces all complete between two checks has nothing left to branch.
    assert result.stop_reason in expected or (result.stop_reason is StopReason.EXHAUSTED and policy != "adaptive")


def test_options_are_checked():
    with pytest.raises(UserError, match="beam_width"):
        policy_options(SearchConfig(policy="dvts", policy_options={"beam_width": 0}))

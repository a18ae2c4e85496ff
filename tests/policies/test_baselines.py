"""STEP, best of N and the single sample by hand; options of policies; who waits and for how long."""

import dataclasses

import pytest

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.policies.base import PoolView, Start
from gambit.policies.baselines import StepOptions
from gambit.results.record import fold
from gambit.search.choice import check_search, load_policy, options_model, policy_options, with_fixed_pool
from gambit.types import (
    Admission,
    EndReason,
    Eviction,
    OnPressure,
    PressureAction,
    SearchStep,
    ThoughtScore,
    TraceEnd,
)
from support.scripted import PuppetEngine, ScriptedEngine, admit
from support.searching import absorb, make_search, make_settings, run_one

ALL = ["best-of-n", "deepconf", "gambit", "gambit-authors", "sc", "single", "slim-sc", "step"]


def drive(steps, settings, **options):
    watched = make_search(PuppetEngine(steps), settings, **options)
    watched.search.begin()
    for _ in steps:
        batch = watched.search._engine.step()
        absorb(watched.search, batch)
        if watched.search.is_stopped:
            watched.search.conclude()
            break
    return watched


# -- STEP ----------------------------------------------------------------------------------------------------------


def test_step_declares_that_unscored_traces_go_first_and_nothing_is_queued():
    policy = load_policy("step").from_settings(make_settings("step", capacity=4))
    _, [start] = policy.decide(None, PoolView(0, (), 0))
    assert start == Start(4, OnPressure(PressureAction.PRUNE, unscored_first=True))


def test_steps_victims_are_the_unscored_then_the_lowest_mean_then_the_latest():
    """In a pool of four: 3 has no thought, 0 the lowest mean, 1 and 2 tie."""
    engine = ScriptedEngine(seed=1, thought_chance=0.0, finish_chance=0.0, kv_tokens=10**6)
    watched = make_search(engine, make_settings("step", capacity=4, max_new_tokens=10**6))
    watched.search.begin()
    engine.step()
    for key, trace in engine.running.items():
        for score in {0: (0.1, 0.5), 1: (0.4, 0.4), 2: (0.4,), 3: ()}[key.trace]:
            trace.score = trace.score.add(score)
    victims = []
    while engine.running:
        engine.kv_tokens = engine.used + len(engine.running) - 1
        victims += [lost.trace for lost in engine.step().searches[1].evicted]
    assert victims == [3, 0, 2, 1]


@pytest.mark.parametrize(("pruned_vote", "winner"), [(False, "7"), (True, "8")])
def test_a_pruned_trace_votes_only_in_the_public_codes_reading(pruned_vote, winner):
    scores = (ThoughtScore(0, 0.4, 1), ThoughtScore(1, 0.9, 1), ThoughtScore(2, 0.8, 1))
    steps = [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3, scored=scores),
        SearchStep(
            evicted=(
                Eviction(1, PressureAction.PRUNE, 0.9, 1, (8,)),
                Eviction(2, PressureAction.PRUNE, 0.8, 1, (0,)),  # nothing boxed so far
            ),
            num_generated=1,
            finished=(TraceEnd(0, EndReason.STOP, (0, 7)),),
        ),
    ]
    settings = make_settings("step", capacity=3)
    settings = dataclasses.replace(settings, policy_options=StepOptions(pruned_vote=pruned_vote))
    watched = drive(steps, settings, answer_of=lambda tokens: str(tokens[-1]) if tokens[-1] else None)
    result = watched.search.result
    assert result.answer == winner and result.counts.pruned == 2 and result.counts.completed == 1
    assert sum(entry.traces for entry in result.votes) == (2 if pruned_vote else 1)
    replayed = fold(map(ev.from_json, map(ev.to_json, watched.events)))
    assert replayed.vote(lambda a, b: a == b).answer == winner


def test_step_replaces_nothing_and_queues_nothing():
    engine = ScriptedEngine(seed=3, kv_tokens=120, finish_chance=0.01)
    watched = run_one(engine, make_settings("step", capacity=10, max_new_tokens=50))
    counts = watched.search.result.counts
    assert (counts.roots, counts.branched, counts.ghosts) == (10, 0, 0) and counts.pruned >= 3
    assert counts.pruned + counts.completed == 10 and engine.num_preempted == 0


def test_traces_beyond_the_pool_start_when_a_pruned_one_leaves_its_place():
    engine = ScriptedEngine(seed=3, kv_tokens=60, finish_chance=0.0)
    watched = run_one(engine, make_settings("step", capacity=4, num_traces=9, max_new_tokens=40))
    assert watched.search.result.counts.roots == 9


# -- best of N, single ------------------------------------------------------------------------------------------------


def test_the_best_trace_answers_also_against_a_majority():
    steps = [
        SearchStep(
            admitted=admit(0, 1, 2),
            num_generated=3,
            scored=(ThoughtScore(0, 0.6, 1), ThoughtScore(1, 0.7, 1), ThoughtScore(2, 0.65, 1)),
            finished=tuple(TraceEnd(i, EndReason.STOP, (answer,)) for i, answer in enumerate((5, 6, 5))),
        )
    ]
    answer_of = lambda tokens: str(tokens[-1])  # noqa: E731
    best = drive(steps, make_settings("best-of-n", capacity=3), answer_of=answer_of, vote="best").search.result
    assert best.answer == "6" and [entry.weight for entry in best.votes] == [0.7, 0.65]
    summed = drive(steps, make_settings("best-of-n", capacity=3), answer_of=answer_of, vote="score").search.result
    assert summed.answer == "5"


def test_a_single_sample_is_one_trace_whatever_the_pool():
    config = with_fixed_pool(SearchConfig(policy="single", capacity=64, num_traces=9, swap_size=4))
    assert (config.capacity, config.num_traces) == (1, 1)
    watched = run_one(ScriptedEngine(seed=1), make_settings("single", capacity=1, num_traces=1))
    assert watched.search.result.counts.roots == watched.search.result.counts.completed == 1


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_policy_says_who_it_is_and_describes_its_options(name):
    policy = load_policy(name)
    assert policy.name == name and policy.__doc__ and "\x60" not in name
    for option in options_model(policy).model_fields.values():
        assert option.description and not option.is_required()
    assert options_model(policy).model_config["frozen"] and options_model(policy).model_config["extra"] == "forbid"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "deepconf", "policy_options": {"window": 5}}, "policy 'deepconf': unknown option 'window': "),
        ({"policy": "deepconf", "policy_options": {"windowtokens": 5}}, "did you mean 'window_tokens'"),
        ({"policy": "deepconf", "policy_options": {"percentile": 101}}, "percentile = 101: input should be less"),
        ({"policy": "slim-sc", "policy_options": {"variant": "loud"}}, "variant = 'loud'"),
        ({"policy": "slim-sc", "policy_options": {"embedding_size": 257}}, "embedding_size = 257"),
        ({"policy": "sc", "policy_options": {"x": 1}}, "the policy 'sc' has no options of its own, but was given x"),
        ({"policy": "stepp"}, "unknown policy 'stepp': did you mean 'step'"),
    ],
)
def test_wrong_options_are_named_with_the_near_match(values, message):
    with pytest.raises(UserError) as error:
        check_search(SearchConfig(**values))
    assert message in str(error.value)


def test_options_arrive_checked():
    options = policy_options(SearchConfig(policy="deepconf", policy_options={"window_tokens": "32"}))
    assert options == options_model(load_policy("deepconf"))(window_tokens=32)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_is_counted_per_trace_in_steps_and_seconds():
    steps = [
        SearchStep(admitted=admit(0, 1), num_generated=2),
        SearchStep(evicted=(Eviction(1, PressureAction.QUEUE, None, 1, ()),), num_generated=1),
        SearchStep(num_generated=1),
        SearchStep(admitted=(Admission(1, 0, 1, 2),), num_generated=2),
        SearchStep(num_generated=2, finished=(TraceEnd(0, EndReason.STOP, (0,) * 5),)),
    ]
    watched = drive(steps, make_settings("sc", capacity=3, num_traces=3, budget_traces=1))
    traces = watched.search.record.tree.traces
    # Trace 2 never found room: it waited all four steps that followed its first chance.
    assert [trace.waited_steps for trace in traces] == [0, 2, 5]
    assert traces[0].waited_seconds == 0.0 < traces[1].waited_seconds < traces[2].waited_seconds
    waiting = watched.search.result.waiting
    assert (waiting.traces, waiting.steps, waiting.most_steps) == (2, 7, 5)
    assert waiting.most_seconds == traces[2].waited_seconds


def test_without_pressure_nobody_waits_and_the_log_says_nothing_of_it():
    watched = run_one(ScriptedEngine(seed=2), make_settings("sc"))
    assert not [e for e in watched.events if isinstance(e, ev.Waited)]
    assert watched.search.result.waiting.traces == 0

"""Doubt: a search whose scores lie further apart than when its scorer was judged splits its islands."""

import dataclasses
import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.presets import ModelDefaults, resolve
from gambit.config.trust import (
    DOUBTED_SPREAD,
    THOUGHTS,
    Doubt,
    ScorerTrust,
    log_odds,
    spread_of,
)
from gambit.policies.doubt import DoubtWatch
from gambit.policies.islands import Islands
from gambit.results.record import fold
from gambit.tree import TraceTree
from gambit.types import Aggregation, StopReason
from support.scripted import ScriptedEngine
from support.searching import POOLS, SPREAD, check_tree, doubt_of, fallback, make_settings, run_one


def judged(halfway, spread=SPREAD):
    return ScorerTrust(
        auc=(0.6, halfway, 0.9, 0.9), num_problems=100, base_model="tiny", source="made.jsonl", spread=spread
    )


# -- how far scores lie apart ----------------------------------------------------------------------------------


def test_the_spread_is_that_of_traces_at_the_same_thought():
    drifting = [[0.0, 5.0, 10.0], [2.0, 7.0, 12.0]]
    assert spread_of(drifting) == 1.0, "what all traces share is no spread"
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(50, 4)) * [1, 2, 3, 4]
    assert spread_of(scores.tolist()) == pytest.approx(math.sqrt(scores.var(axis=0).mean()))


def test_scores_that_lie_further_apart_say_less():
    doubt = doubt_of()
    assert doubt.auc_at(4, 0.5) == doubt.auc_at(4, 0.5 * DOUBTED_SPREAD) == 0.9
    found = [doubt.auc_at(4, 0.5 * times) for times in (2.1, 4, 8, 1000)]
    assert found == sorted(found, reverse=True) and found[1] == pytest.approx(0.5 + 0.4 / 4)
    assert found[-1] == pytest.approx(0.5, abs=1e-3)


def test_where_nobody_measured_the_spread_nothing_is_doubted():
    assert doubt_of(spread=(None,) * len(THOUGHTS)).auc_at(4, 1e9) == 0.9


def test_chances_are_compared_by_their_log_odds():
    assert log_odds(0.5) == 0 and log_odds(0.9) == pytest.approx(-log_odds(0.1))
    assert math.isfinite(log_odds(0.0)) and math.isfinite(log_odds(1.0))
    assert Doubt(0.9, SPREAD, is_probability=False, pools=POOLS).scale(3.5) == 3.5


# -- what trust and options make of it -------------------------------------------------------------------------


def resolved(trust, **options):
    return resolve(SearchConfig(**options), ModelDefaults(), 1000, is_probability=True, trust=trust)[0]


def test_a_trusted_scorer_falls_back_to_the_pools_of_the_rules_below():
    found = resolved(judged(0.9), capacity=64)
    assert found.pool.islands == 4 and [pool.islands for _, pool in found.doubt.pools] == [16, 32]
    assert [from_auc for from_auc, _ in found.doubt.pools] == [0.7, 0.0]
    less = resolved(judged(0.7), capacity=64)
    assert less.pool.islands == 16 and [pool.islands for _, pool in less.doubt.pools] == [32]
    safest = resolved(None, capacity=64)
    for trusted in (found, less):
        last = trusted.doubt.pools[-1][1]
        assert dataclasses.replace(last, why="", swap_margin=0.0) == dataclasses.replace(
            safest.pool, why="", swap_margin=0.0, check_interval=last.check_interval
        )


def test_the_safest_pool_has_nothing_to_fall_back_to():
    assert resolved(judged(0.5), capacity=64).doubt is None
    assert resolved(None, capacity=64).doubt is None


def test_islands_that_somebody_chose_are_not_doubted():
    assert resolved(judged(0.9), capacity=64, islands=4).doubt is None
    assert resolved(judged(0.9), capacity=64, policy="sc").doubt is None
    assert resolved(judged(0.9, spread=()), capacity=64).doubt is None, "a checkpoint from before"


@given(st.integers(1, 300), st.floats(0.6, 1.0))
def test_every_island_can_be_split_into_as_many(capacity, auc):
    found = resolved(judged(auc), capacity=capacity)
    counts = [found.pool.islands, *(pool.islands for _, pool in (found.doubt.pools if found.doubt else ()))]
    assert all(less < more and more % less == 0 for less, more in itertools.pairwise(counts)), counts
    assert counts[-1] <= capacity


def test_a_checkpoint_keeps_the_spread():
    trust = judged(0.8, spread=(0.1, 0.2, None, 0.4, 0.5, 0.6, 0.7, None))
    assert ScorerTrust.model_validate(json.loads(json.dumps(trust.to_json()))) == trust
    before = {name: value for name, value in trust.to_json().items() if name != "spread"}
    assert ScorerTrust.model_validate(before).spread == ()


@pytest.mark.parametrize("wrong", [[0.1], {"1": -1.0}, {"1": "wide"}, {"2": math.inf}, {"4": True}, {"1": 10**400}])
def test_a_spread_that_is_none_is_refused(wrong):
    with pytest.raises((ValueError, TypeError)):
        ScorerTrust.model_validate(judged(0.8).to_json() | {"spread": wrong})


# -- the search ------------------------------------------------------------------------------------------------


def doubting(**values):
    pool = {"capacity": 16, "num_traces": 16, "islands": 2, "swap_size": 4, "check_interval": 6, "warmup_tokens": 2,
            "max_new_tokens": 60, "why": "trusted", "doubt": doubt_of()}  # fmt: skip
    return make_settings(**(pool | values))


def noisy_engine(seed=0, **options):
    """Every score is drawn anew from 0 to 1: far wider than 0.5 in log-odds."""
    return ScriptedEngine(seed=seed, **{"thought_chance": 0.6, "finish_chance": 0.02} | options)


def calm_engine(seed=0):
    scores = {trace: 0.5 + 0.02 * (trace % 5) for trace in range(400)}
    return ScriptedEngine(seed=seed, thought_chance=0.6, finish_chance=0.02, scores=scores)


def splits(watched):
    return [event for event in watched.events if isinstance(event, ev.IslandsSplit)]


def test_wide_scores_split_the_islands_and_calm_ones_do_not():
    (split,) = splits(run_one(noisy_engine(), doubting()))
    assert split.islands in (4, 8) and split.step % 6 == 0 and "further apart" in split.why
    assert splits(run_one(calm_engine(), doubting())) == []
    assert splits(run_one(noisy_engine(), doubting(doubt=None))) == []


def test_without_a_split_the_search_is_the_one_without_doubt():
    def story(**options):
        return [
            ev.to_json(e) for e in run_one(calm_engine(), doubting(**options)).events if not isinstance(e, ev.Sample)
        ]

    assert story()[1:] == story(doubt=None)[1:]


def test_a_split_before_the_first_branch_leaves_the_roots_that_many_islands_would_have_had():
    """Their random numbers say where they belong, so that the search is the one that began with so many."""
    engine = noisy_engine()
    watched = run_one(engine, doubting(warmup_tokens=30, doubt=doubt_of(pools=(fallback(0.0, 8, 8, 30),))))
    (split,) = splits(watched)
    assert not any(isinstance(e, ev.Branched) and e.step < split.step for e in watched.events)
    began_with_eight = run_one(noisy_engine(), doubting(islands=8, warmup_tokens=30, doubt=None))

    def by_noise(run, islands):
        ids = Islands(islands, 16, 16)
        seen, found = Counter(), {}
        for event in run.events:
            if isinstance(event, ev.Created) and event.step == 0:
                found[ids.noise_id(event.island, seen[event.island])] = event.trace
                seen[event.island] += 1
        return found

    first, second = by_noise(watched, 2), by_noise(began_with_eight, 8)
    assert set(first) == set(second) == set(range(16))
    assert all(split.island_of[trace] == noise % 8 for noise, trace in first.items())


@settings(max_examples=200)
@given(
    st.integers(0, 10**6), st.sampled_from([0.0, 0.02, 0.1, 0.3]), st.sampled_from([120, 1 << 30]),
    st.integers(1, 9), st.integers(0, 20), st.integers(16, 40), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_after_a_split_every_island_keeps_to_itself_and_to_its_places(
    seed, finish, kv, interval, warmup, num_traces, count
):
    pools = (fallback(0.75, 2 * count, 2 * count, warmup), fallback(0.0, 4 * count, 4 * count, 2 * warmup))
    wanted = doubting(
        check_interval=interval, warmup_tokens=warmup, num_traces=num_traces, islands=count, doubt=doubt_of(pools=pools)
    )
    seen = []

    def check(search, event):
        check_tree(search.record.tree)  # no branch crosses islands, none is lost
        if isinstance(event, ev.IslandsSplit):
            seen.append((event.islands, len(search.record.tree.traces)))

    watched = run_one(noisy_engine(seed, finish_chance=finish, kv_tokens=kv), wanted, check=check)
    tree, result = watched.search.record.tree, watched.search.result
    assert [islands for islands, _ in seen] == sorted({islands for islands, _ in seen}), "only ever into more"
    if seen:
        islands = Islands(seen[-1][0], wanted.capacity, wanted.num_traces)
        assert result.pool.islands == islands.count == result.num_islands
        assert all(0 <= trace.island < islands.count for trace in tree.traces)
        completed = Counter(trace.island for trace in tree.voters())
        if result.stop_reason is StopReason.COMPLETED:
            assert all(completed[island] >= islands.share(island) for island in islands)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9))
def test_no_two_traces_share_their_random_numbers_across_a_split(seed, interval):
    submitted = []

    class Noting(ScriptedEngine):
        def submit(self, specs):
            submitted.extend(spec.noise for spec in specs)
            super().submit(specs)

    run_one(Noting(seed=seed, thought_chance=0.6, finish_chance=0.1), doubting(check_interval=interval, num_traces=24))
    assert len(set(submitted)) == len(submitted)


def test_the_log_of_a_split_search_replays():
    watched = run_one(noisy_engine(3), doubting())
    again = fold([ev.from_json(ev.to_json(event)) for event in watched.events])
    assert again.num_islands == watched.search.result.num_islands > 2
    assert [t.island for t in again.tree.traces] == [t.island for t in watched.search.record.tree.traces]
    assert str(again.pool) == str(watched.search.result.pool) and "2 islands up to step" in str(again.pool)


def test_a_split_that_cannot_have_been_is_refused():
    events = run_one(noisy_engine(3), doubting()).events
    place = next(i for i, event in enumerate(events) if isinstance(event, ev.IslandsSplit))
    split = events[place]
    wrong = [
        [dataclasses.replace(split, island_of=split.island_of[:-1])],
        [dataclasses.replace(split, island_of=(99, *split.island_of[1:]))],
        [dataclasses.replace(split, island_of=(0.5, *split.island_of[1:]))],
        [dataclasses.replace(split, islands=1, island_of=(0,) * len(split.island_of))],  # fewer than before
        [split, split],
    ]
    for changed in wrong:
        with pytest.raises(Exception, match=f"line {place + len(changed)}"):
            fold([*events[:place], *changed, *events[place + 1 :]])


# -- a search over several engines, which cannot split ---------------------------------------------------------


def watch_over(scores):
    """A watch that has been sent one score of each of so many roots."""
    tree = TraceTree(len(scores), Aggregation.MEAN)
    for trace in range(len(scores)):
        tree.apply(ev.Created(0, trace))
        tree.apply(ev.Admitted(0, trace, 0, 0, 0))
    watch = DoubtWatch(doubt_of(), doubting(capacity=len(scores)), tree)
    watch.note(ev.Scored(2, tuple(range(len(scores))), tuple(scores), (2,) * len(scores)))
    return watch


def sample(step):
    return ev.Sample(step, 16, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)


WIDE, CALM = (0.01, 0.99) * 8, (0.49, 0.51) * 8


def test_a_watch_over_wide_scores_finds_out_in_a_round():
    watch = watch_over(WIDE)
    for event in (ev.Stopped(6, StopReason.COMPLETED), sample(1), sample(5), sample(7)):
        watch.note(event)
        assert watch.finding is None, "no tournament is due"
    watch.note(sample(12))
    assert "further apart" in watch.finding and watch.finding.endswith("--islands 8 is safer here")
    assert "it keeps its 2, so" in watch.finding
    first = watch.finding
    watch.note(ev.Scored(13, (0,), (0.5,), (9,)))
    watch.note(sample(18))
    assert watch.finding is first


def test_a_watch_over_calm_scores_finds_nothing():
    watch = watch_over(CALM)
    watch.note(sample(6))
    assert watch.finding is None

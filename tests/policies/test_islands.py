"""Islands: who competes with whom, what each completes, how they fare under memory pressure, and the two ends of the
dial: one island is the paper's pool, an island per place is self-consistency."""

import dataclasses
import json
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.presets import ModelDefaults, resolve
from gambit.engines.eviction import action_on, eviction_order, standing
from gambit.errors import UserError
from gambit.policies.base import Start
from gambit.policies.islands import Gambit, Islands
from gambit.types import OnPressure, PressureAction, Sampling, StopReason
from support import GOLDEN as KEPT
from support.engine_setups import PROMPT, RULE, STOPS, start_local
from support.scripted import ScriptedEngine
from support.searching import check_tree, make_search, make_settings, run_one, run_searches

GOLDEN = KEPT / "one_island.jsonl"
schedules = st.fixed_dictionaries({
    "seed": st.integers(0, 10**6),
    "thought_chance": st.sampled_from([0.1, 0.4, 1.0]),
    "finish_chance": st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    "kv_tokens": st.sampled_from([80, 150, 1 << 30]),
})  # fmt: skip
pools = st.fixed_dictionaries({
    "capacity": st.integers(2, 12),
    "num_traces": st.integers(2, 16),
    "check_interval": st.integers(1, 9),
    "warmup_tokens": st.integers(0, 12),
    "max_new_tokens": st.integers(1, 40),
    "hard_floor": st.sampled_from([None, 0.4]),
})  # fmt: skip


def split_pool(pool, islands):
    most = min(pool["capacity"], pool["num_traces"])
    return make_settings(**pool, swap_size=min(4, pool["capacity"]), islands=min(islands, most))


@pytest.mark.parametrize("story", [json.loads(line) for line in GOLDEN.read_text().splitlines()])
def test_one_island_grows_the_tree_that_gambit_grew_before_there_were_islands(story):
    """The golden file was written by the last commit without islands; token counts stand for tokens."""
    watched = run_one(ScriptedEngine(**story["engine"]), make_settings(**story["settings"]))
    records = [json.loads(ev.to_json(event)) for event in watched.events]
    found = []
    for record in records:
        if record["event"] not in ("RunStarted", "Sample", "Waited", "Scored"):
            record.pop("island", None)  # neither this nor what follows stood in logs then
            for vote in record.get("votes", ()):
                assert vote.pop("forms") and vote.pop("islands") == 1
            found.append({**record, "tokens": len(record["tokens"])} if "tokens" in record else record)
    assert found == story["events"]


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 40))
def test_quotas_differ_by_at_most_one_and_add_up(capacity, num_traces, count):
    islands = Islands(min(count, capacity, num_traces), capacity, num_traces)
    for quota, total in ((islands.places, capacity), (islands.share, num_traces)):
        parts = [quota(island) for island in islands]
        assert sum(parts) == total and max(parts) - min(parts) <= 1 and min(parts) >= 1


@given(st.integers(1, 20), st.lists(st.integers(0, 19), max_size=60))
def test_no_two_traces_share_their_random_numbers(count, created):
    islands, seen = Islands(count, count, count), Counter()
    ids = []
    for island in (number % count for number in created):
        ids.append(islands.noise_id(island, seen[island]))
        seen[island] += 1
    assert len(set(ids)) == len(ids)


@settings(max_examples=300)
@given(schedules, pools, st.integers(2, 12))
def test_every_island_keeps_to_itself_and_completes_its_share(schedule, pool, count):
    wanted = split_pool(pool, count)
    islands = Islands(wanted.pool.islands, wanted.capacity, wanted.num_traces)

    def check(search, event):
        tree = search.record.tree
        check_tree(tree)  # no branch crosses islands
        active = Counter(trace.island for trace in tree.tree_view())
        assert all(active[island] <= islands.places(island) for island in islands)

    watched = run_one(ScriptedEngine(**schedule), wanted, check=check)
    completed = Counter(trace.island for trace in watched.search.record.tree.voters())
    if watched.search.result.stop_reason is StopReason.COMPLETED:
        assert all(completed[island] >= islands.share(island) for island in islands)


@settings(max_examples=300)
@given(schedules, pools, st.integers(2, 12))
def test_no_island_is_lost_to_memory_pressure_while_another_has_two(schedule, pool, count):
    """From the log, by independent code."""
    schedule = {**schedule, "kv_tokens": min(schedule["kv_tokens"], 150)}
    watched = run_one(ScriptedEngine(**schedule), split_pool(pool, count))
    island_of = {trace.id: trace.island for trace in watched.search.record.tree.traces}
    live = defaultdict(set)
    for event in watched.events:
        match event:
            case ev.Created(trace=trace) | ev.Branched(trace=trace):
                live[island_of[trace]].add(trace)
            case ev.Evicted(trace=trace, reason="pressure"):
                assert len(live[island_of[trace]]) >= 2, "the last live trace of an island became a ghost"
                live[island_of[trace]].discard(trace)
            case ev.Queued(trace=trace):
                assert all(len(mine) < 2 or not mine & running(watched.events, event) for mine in live.values())
            case (
                ev.Evicted(trace=trace) | ev.Pruned(trace=trace) | ev.Finished(trace=trace) | ev.Cancelled(trace=trace)
            ):
                live[island_of[trace]].discard(trace)


def running(events, until):
    """Traces that hold memory just before an event."""
    found = set()
    for event in events:
        if event is until:
            return found - {until.trace}
        match event:
            case ev.Admitted(trace=trace):
                found.add(trace)
            case (
                ev.Evicted(trace=trace)
                | ev.Pruned(trace=trace)
                | ev.Finished(trace=trace)
                | ev.Cancelled(trace=trace)
                | ev.Queued(trace=trace)
            ):
                found.discard(trace)
    raise AssertionError("not an event of this log")


# -- who gives way ---------------------------------------------------------------------------------------------------

SPARING = OnPressure(PressureAction.GHOST, spares_islands=True)


def order_of(*traces, waiting=()):
    """Traces as (id, island, score); the higher id was admitted later."""
    standings = {id_: standing(SPARING, island, score, id_, id_) for id_, island, score in traces}
    num_live = Counter([island for _, island, _ in traces] + list(waiting))
    return eviction_order(standings, standings.__getitem__, num_live)


def test_the_lowest_of_the_largest_island_goes_first_and_the_last_of_each_wait_as_in_plain_sampling():
    traces = [(0, 0, 0.1), (1, 1, 0.9), (2, 1, 0.5), (3, 1, 0.7), (4, 2, 0.2), (5, 2, 0.3)]
    assert order_of(*traces) == [2, 4, 3, 5, 1, 0]


def test_a_waiting_trace_keeps_its_island_alive():
    assert order_of((0, 0, 0.1), (1, 1, 0.9), waiting=[1]) == [1, 0]


def test_the_last_live_trace_of_an_island_is_queued():
    assert action_on(SPARING, 1) is PressureAction.QUEUE
    assert action_on(SPARING, 2) is PressureAction.GHOST
    assert action_on(OnPressure(PressureAction.GHOST), 1) is PressureAction.GHOST  # the paper's pool
    assert action_on(OnPressure(PressureAction.PRUNE), 1) is PressureAction.PRUNE


# -- on a real engine ------------------------------------------------------------------------------------------------

POOL = {
    "capacity": 8, "max_new_tokens": 40, "check_interval": 4, "warmup_tokens": 4,
    "sampling": Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5),
}  # fmt: skip


def searched(policy, kv_budget_tokens=None, wrap=lambda policy: policy, **changes):
    """The events and the finished search."""
    engine = start_local(kv_budget_tokens=kv_budget_tokens)
    wanted = make_settings(policy, **{**POOL, **changes})
    watched = make_search(engine, wanted, prompt=PROMPT, rule=RULE, stop_ids=STOPS, vote="majority", wrap=wrap)
    list(run_searches(engine, [watched.search]))
    engine.close()
    return watched


def tokens_of(watched):
    tree = watched.search.record.tree
    return {trace.id: tree.tokens_of(trace.id) for trace in tree.traces}


@pytest.mark.contract
@pytest.mark.parametrize("num_traces", [8, 12])
@pytest.mark.parametrize("kv_budget_tokens", [None, 16 * 12])
def test_an_island_for_each_place_is_self_consistency(kv_budget_tokens, num_traces):
    alone = searched("gambit", kv_budget_tokens, islands=8, num_traces=num_traces)
    plain = searched("sc", kv_budget_tokens, num_traces=num_traces)
    said, expected = (sorted(tokens_of(watched).values()) for watched in (alone, plain))
    if num_traces == 8:
        assert tokens_of(alone) == tokens_of(plain)
        votes = [dataclasses.replace(entry, islands=1) for entry in alone.search.result.votes]
        assert votes == list(plain.search.result.votes)
    assert len(said) == len(expected) == num_traces
    assert alone.search.result.counts.evicted == 0
    if kv_budget_tokens is not None:
        assert any(isinstance(event, ev.Queued) for event in alone.events), "the budget was meant to be tight"


class Alone:
    """A tournament of which one island alone is played."""

    def __init__(self, policy, island):
        self._policy, self._island = policy, island

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def decide(self, state, view):
        state, decisions = self._policy.decide(state, view)
        return state, [d for d in decisions if not isinstance(d, Start) or d.island == self._island]


@pytest.mark.contract
@pytest.mark.parametrize("island", range(3))
def test_an_islands_traces_are_the_same_wherever_its_neighbours_run(island):
    together = searched("gambit", islands=3).search.record.tree
    alone = searched("gambit", islands=3, wrap=lambda policy: Alone(policy, island)).search.record.tree
    mine = [together.tokens_of(trace.id) for trace in together.traces if trace.island == island]
    assert [alone.tokens_of(trace.id) for trace in alone.traces] == mine
    assert len(mine) > Islands(3, 8, 8).places(island), "nothing branched: the test shows nothing"


# -- settings --------------------------------------------------------------------------------------------------------


def islands_of(**config):
    return resolve(SearchConfig(**config), ModelDefaults(), 1000, is_probability=False)[0].pool.islands


def test_where_the_number_of_islands_comes_from():
    assert islands_of(islands=7, capacity=64) == 7
    assert islands_of(preset="paper") == 1
    assert islands_of(preset="paper", islands=4) == 4
    assert islands_of(policy="sc", capacity=64) == 1
    assert 1 < islands_of(capacity=64) <= 64
    assert islands_of(capacity=1) == 1
    with pytest.raises(UserError, match="islands = 9"):
        islands_of(islands=9, capacity=8)


def test_the_whole_pool_swaps_no_less_than_one_trace_on_each_island():
    def swaps(count):
        return Gambit.from_settings(make_settings(capacity=64, islands=count, swap_size=16)).tournament.swap_size

    assert [swaps(count) for count in (1, 2, 4, 16, 32, 64)] == [16, 8, 4, 1, 1, 1]

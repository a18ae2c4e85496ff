"""One search on several engines: the same traces, log and vote as on one, wherever its budgets end it."""

import dataclasses
import json
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.core import events as ev
from gambit.results.record import fold
from gambit.results.vote import Consensus
from gambit.search.choice import load_policy
from gambit.search.host import SearchHost
from gambit.search.merging import MergedSearch
from gambit.search.parts import ranges, split
from gambit.search.policies.base import requirements_of
from gambit.search.reporting import PartReporter, ReportTimes, StepGate
from gambit.search.spreading import run_parts
from gambit.solver.part import StartedPart
from scripted import ScriptedEngine
from searching import make_header, make_search, make_settings, run_one

QUESTION = "a = 17; b = 61; c = a * b; d = c - a; d?"
pools = st.fixed_dictionaries({
    "policy": st.sampled_from(["gambit", "gambit", "gambit", "sc", "best-of-n", "step"]),
    "capacity": st.integers(2, 10),
    "num_traces": st.integers(2, 14),
    "check_interval": st.integers(1, 9),
    "warmup_tokens": st.integers(0, 8),
    "max_new_tokens": st.integers(1, 30),
    "hard_floor": st.sampled_from([None, 0.4]),
    "islands": st.integers(1, 10),
})  # fmt: skip
scripts = st.fixed_dictionaries({
    "seed": st.integers(0, 10**6),
    "thought_chance": st.sampled_from([0.1, 0.4, 1.0]),
    "finish_chance": st.sampled_from([0.0, 0.02, 0.1, 0.4]),
})  # fmt: skip
ends = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"budget_tokens": st.integers(1, 200)}),
    st.fixed_dictionaries({"budget_traces": st.integers(1, 10)}),
    st.fixed_dictionaries({"consensus": st.sampled_from([Consensus(None, 1), Consensus(0.6, 3)])}),
)


def pool_settings(pool, end):
    policy, most = pool["policy"], min(pool["capacity"], pool["num_traces"])
    islands = min(pool["islands"], most) if policy == "gambit" else 1
    return make_settings(**{**pool, "islands": islands, "swap_size": min(4, pool["capacity"]), **end})


class SpreadRun:
    """A search on scripted engines, each with a thread of its own."""

    def __init__(self, wanted, script, num_engines, vote="score"):
        self.events = []
        self.tokens_computed = 0
        policy = load_policy(wanted.policy).from_settings(wanted)
        requirements = requirements_of(policy)
        parts = split(wanted, requirements.split_by, num_engines)
        self.num_parts = len(parts)
        self.merged = MergedSearch(
            make_header(wanted, vote), wanted, requirements, len(parts), self.events.append, lambda _: str.__eq__
        )
        times = ReportTimes(wanted.check_interval, wanted.consensus is not None or wanted.budget_traces is not None)
        engines = [ScriptedEngine(**script, own_noise=True) for _ in parts]
        hosts = [SearchHost(lambda engine=engine: engine) for engine in engines]

        def start(host, engine, settings, tell, allowed):
            gate = StepGate(allowed)
            reporter = PartReporter(tell, times, gate)

            def make():
                search = make_search(engine, settings, vote=vote).search
                callbacks = dataclasses.replace(
                    search._callbacks, on_event=reporter.on_event, after_step=reporter.after_step
                )
                search._callbacks = search._recorder._callbacks = callbacks
                return search

            return StartedPart(host.submit(make), reporter, gate)

        starts = [
            lambda tell, allowed, h=h, e=e, s=s: start(h, e, s, tell, allowed)
            for h, e, s in zip(hosts, engines, parts, strict=True)
        ]
        try:
            self.result = run_parts(self.merged, starts, lambda: False)
        finally:
            for host in hosts:
                host.close()
        self.tokens_computed = sum(len(tokens) for engine in engines for tokens in engine.emitted.values())


def plain(events):
    """A log without what differs between two runs, the events of one step in an order of their own."""
    found = []
    for event in events:
        record = json.loads(ev.to_json(event))
        if record["event"] in ("RunStarted", "Sample", "Waited"):
            continue
        if record["event"] == "Scored":
            rows = zip(record["traces"], record["scores"], record["num_tokens"], strict=True)
            found += [(record["step"], "Scored", json.dumps(row)) for row in rows]
        else:
            found.append((record.get("step", 1 << 40), record["event"], json.dumps(record)))
    return sorted(found)


@settings(max_examples=150, deadline=None)
@given(scripts, pools, ends, st.integers(2, 4))
def test_engines_together_record_what_one_engine_does(script, pool, end, num_engines):
    wanted = pool_settings(pool, end)
    alone = run_one(ScriptedEngine(**script, own_noise=True), wanted)
    spread = SpreadRun(wanted, script, num_engines)
    fold(spread.events)  # what a replay does
    spread.merged.record.tree.check_ended()
    result, expected = spread.result, alone.search.result
    if wanted.policy == "gambit" or wanted.num_traces <= wanted.capacity:
        assert plain(spread.events) == plain(alone.events)
        assert result.stop_reason is expected.stop_reason
        assert result.votes == expected.votes and result.tokens == expected.tokens
        assert result.counts == expected.counts and result.margin == expected.margin
    elif not end:  # places come free at other times: the same traces under other numbers
        assert said(spread.merged.record.tree) == said(alone.search.record.tree)
        assert Counter(e.weight for e in result.votes) == Counter(e.weight for e in expected.votes)
    if wanted.budget_tokens is not None:
        assert spread.tokens_computed <= wanted.budget_tokens, "an engine passed the budget of all"


def said(tree):
    return sorted(tree.tokens_of(trace.id) for trace in tree.traces)


@given(st.integers(1, 50), st.integers(1, 12))
def test_parts_are_neighbours_and_differ_by_at_most_one(total, count):
    parts = ranges(total, min(count, total))
    assert [number for part in parts for number in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1

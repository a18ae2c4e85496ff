"""One search on several engines: the same traces, log and vote as on one, wherever its budgets end it."""

import dataclasses
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.trust import THOUGHTS
from gambit.errors import EngineError, GambitWarning, UserError
from gambit.policies.base import requirements_of
from gambit.results.record import fold, replay_log
from gambit.results.vote import Consensus
from gambit.search.choice import load_policy
from gambit.search.host import SearchHost
from gambit.search.parts import MergedSearch, RunningPart, ranges, split
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from gambit.types import StopReason
from support.scripted import FunctionVerifier, ScriptedEngine, is_sound
from support.searching import check_ended, doubt_of, fallback, make_header, make_search, make_settings, plain, run_one

pytestmark = pytest.mark.contract
QUESTION = "a = 17; b = 5; c = a * b; d = c - a; d?"
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
        engines = [ScriptedEngine(**script, own_noise=True) for _ in parts]
        hosts = [SearchHost(lambda engine=engine: engine) for engine in engines]

        def start(host, engine, settings, report, allowed):
            part = RunningPart(settings, report, allowed)

            def make():
                search = make_search(engine, settings, vote=vote).search
                callbacks = dataclasses.replace(search._callbacks, on_event=part.on_event, after_step=part.after_step)
                search._callbacks = search.pool._callbacks = callbacks
                return search

            part.follow(host.submit(make))
            return part

        starts = [
            lambda report, allowed, h=h, e=e, s=s: start(h, e, s, report, allowed)
            for h, e, s in zip(hosts, engines, parts, strict=True)
        ]
        try:
            self.result = self.merged.run(starts, lambda: False)
        finally:
            for host in hosts:
                host.close()
        self.tokens_computed = sum(len(tokens) for engine in engines for tokens in engine.emitted.values())


@settings(max_examples=150, deadline=None)
@given(scripts, pools, ends, st.integers(2, 4))
def test_engines_together_record_what_one_engine_does(script, pool, end, num_engines):
    wanted = pool_settings(pool, end)
    alone = run_one(ScriptedEngine(**script, own_noise=True), wanted)
    spread = SpreadRun(wanted, script, num_engines)
    fold(spread.events)  # what a replay does
    check_ended(spread.merged.record.tree)
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


@settings(max_examples=100, deadline=None)
@given(scripts, pools, ends, st.sampled_from([60, 100]), st.integers(2, 3))
def test_when_memory_is_short_the_log_is_still_whole_and_counts_every_token(script, pool, end, kv_tokens, num_engines):
    """Each engine then has its own traces wait or lose their memory, at steps of its own."""
    wanted = pool_settings({**pool, "max_new_tokens": 12 + pool["max_new_tokens"]}, end)
    spread = SpreadRun(wanted, {**script, "kv_tokens": kv_tokens}, num_engines)
    fold(spread.events)
    check_ended(spread.merged.record.tree)
    [*_, last] = (event for event in spread.events if isinstance(event, ev.Sample))
    assert last.generated == spread.result.tokens.generated
    if wanted.budget_tokens is not None:
        assert spread.tokens_computed <= wanted.budget_tokens, "an engine passed the budget of all"


def said(tree):
    return sorted(tree.tokens_of(trace.id) for trace in tree.traces)


@given(st.integers(1, 50), st.integers(1, 12))
def test_parts_are_neighbours_and_differ_by_at_most_one(total, count):
    parts = ranges(total, min(count, total))
    assert [number for part in parts for number in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# -- solvers with the bundled model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def solvers():
    with Solver("pawn") as first, Solver("pawn") as second:
        yield first, second


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"islands": 5},
        {"islands": 16, "num_traces": 20},
        {"policy": "sc"},
        {"islands": 4, "consensus_stop": "certain", "vote": "majority"},
        {"islands": 4, "budget_tokens": 400},
        {"islands": 4, "budget_traces": 6},
        {"policy": "deepconf", "policy_options": {"warmup_traces": 4, "window_tokens": 8}},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_two_solvers_give_the_answer_of_one_and_a_log_that_replays(solvers, options, seed, tmp_path, recwarn):
    config = SearchConfig(capacity=16, seed=seed, warmup_tokens=5, check_interval=5, **options)
    alone = solvers[0].solve(QUESTION, config, out_dir=tmp_path / "alone")
    with SpreadSolver(solvers) as spread:
        result = spread.solve(QUESTION, config, out_dir=tmp_path / "spread")
    assert result.votes == alone.votes and result.traces == alone.traces
    assert (result.answer, result.tokens, result.counts) == (alone.answer, alone.tokens, alone.counts)
    assert result.stop_reason is alone.stop_reason and result.pool == alone.pool
    logs = [list(ev.read_log(tmp_path / name / "events.jsonl")) for name in ("alone", "spread")]
    assert plain(logs[0]) == plain(logs[1])
    header = dict(logs[1][0].environment)
    assert header.pop("engines") == (1 if "policy_options" in options else 2) and header == logs[0][0].environment
    replayed = replay_log(tmp_path / "spread" / "events.jsonl", str.__eq__)
    assert replayed.finding is None and replayed.result.votes == result.votes
    told = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "spread")]
    for each in told:
        del each["seconds"], each["out_dir"], each["warnings"], each["waiting"]
    assert told[0] == told[1]


def test_lengths_of_earlier_problems_count_for_all_engines(solvers, recwarn):
    config = SearchConfig(preset="auto", capacity=8, islands=2)
    questions = [QUESTION, "a = 5; b = 9; c = a + b; c?"]
    headers = []
    with Solver("pawn") as alone, SpreadSolver(solvers) as spread:
        for solver in (alone, spread):
            seen = []
            on_event = lambda _, event, seen=seen: seen.append(event) if isinstance(event, ev.RunStarted) else None  # noqa: E731
            list(solver.solve_many(questions, config, on_event=on_event))
            headers.append([event.settings for event in seen])
    assert headers[0] == headers[1] and headers[0][0] != headers[0][1]


def test_when_memory_is_short_every_engine_has_its_own_and_the_log_still_replays(tmp_path):
    config = SearchConfig(capacity=16, islands=4, warmup_tokens=5, check_interval=5)
    with Solver("pawn", kv_budget_tokens=256) as first, Solver("pawn", kv_budget_tokens=256) as second:
        result = SpreadSolver([first, second]).solve(QUESTION, config, out_dir=tmp_path / "run")
        again = SpreadSolver([first, second]).solve(QUESTION, config)
    assert result.counts.evicted or result.waiting.traces, "the budget was meant to be tight"
    assert result.votes == again.votes and result.counts == again.counts
    assert replay_log(tmp_path / "run" / "events.jsonl", str.__eq__).finding is None


ENDLESS = {"max_new_tokens": 400, "temperature": 50.0, "top_k": 0}  # noise: no trace ends by itself


def test_time_is_up_on_all_engines_at_once(solvers, tmp_path):
    config = SearchConfig(capacity=64, islands=8, budget_seconds=0.3, **ENDLESS)
    result = SpreadSolver(solvers).solve(QUESTION, config, out_dir=tmp_path / "run")
    assert result.stop_reason is StopReason.BUDGET_SECONDS and result.counts.cancelled
    assert replay_log(tmp_path / "run" / "events.jsonl", str.__eq__).finding is None
    assert solvers[0].solve(QUESTION, SearchConfig(policy="single")).stop_reason is StopReason.COMPLETED


def test_a_search_that_somebody_stops_gives_the_best_vote_so_far(solvers):
    seen = []
    config = SearchConfig(capacity=16, islands=4, check_interval=5, **ENDLESS)
    result = SpreadSolver(solvers).solve(
        QUESTION, config, on_event=seen.append, should_stop=lambda: any(isinstance(e, ev.Scored) for e in seen)
    )
    assert result.stop_reason is StopReason.INTERRUPTED and result.counts.cancelled
    fold(seen)


def test_what_goes_wrong_on_one_engine_ends_all_and_is_told(solvers, tmp_path):
    class Broken:
        plan = solvers[1].plan

        def start_part(self, request, *more):
            return solvers[1].start_part(dataclasses.replace(request, extractor=self.fail), *more)

        @staticmethod
        def fail(text):
            raise ValueError("no such answer")

    spread = SpreadSolver([solvers[0], Broken()])
    config = SearchConfig(capacity=8, islands=4)
    with pytest.raises(EngineError, match="no such answer"):
        spread.solve(QUESTION, config, out_dir=tmp_path / "run")
    assert replay_log(tmp_path / "run" / "events.jsonl", str.__eq__).result.stop_reason is StopReason.FAILED
    [failed] = spread.solve_many([QUESTION], config)
    assert failed.error and failed.stop_reason is StopReason.FAILED


def test_what_cannot_be_spread_is_said(solvers):
    with pytest.warns(GambitWarning, match="of 2 engines 1 can be used: there are 1 island"):
        SpreadSolver(solvers).solve(QUESTION, SearchConfig(capacity=4, islands=1))
    with pytest.warns(GambitWarning, match=r"by this method \(deepconf\)"):
        SpreadSolver(solvers).solve(QUESTION, SearchConfig(capacity=4, policy="deepconf"))
    with pytest.raises(UserError, match="concurrency 2"):
        next(SpreadSolver(solvers).solve_many([QUESTION], concurrency=2))
    [refused] = SpreadSolver(solvers).solve_many(["who are you?"])
    assert refused.error is not None


@pytest.mark.parametrize("options", [{}, {"consensus_stop": 0.5, "consensus_min_traces": 3}, {"budget_tokens": 300}])
def test_each_engine_has_a_verifier_and_their_scores_vote_together(options, tmp_path):
    config = SearchConfig(capacity=12, islands=4, check_interval=5, warmup_tokens=5, **options)

    def verified():
        return Solver("pawn", scorer=FunctionVerifier(is_sound))

    with verified() as first, verified() as second:
        alone = first.solve(QUESTION, config)
        result = SpreadSolver([first, second]).solve(QUESTION, config, out_dir=tmp_path / "run")
    assert result.votes == alone.votes and result.stop_reason is alone.stop_reason
    assert result.counts == alone.counts and result.tokens == alone.tokens
    assert result.verifier is not None and result.verifier.name == alone.verifier.name
    assert replay_log(tmp_path / "run" / "events.jsonl", str.__eq__).finding is None


WIDE = doubt_of(spread=(1e-6,) * len(THOUGHTS), pools=(fallback(0.0, 8, 8, 4),))  # everything is doubted


def test_islands_on_several_engines_stay_and_whoever_asked_is_told(solvers):
    """On one engine a search may divide its islands by the scores of all of them."""

    class Doubting:
        start_part, text_of = solvers[0].start_part, solvers[0].text_of

        def plan(self, *args):
            plan = solvers[0].plan(*args)
            return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, doubt=WIDE))

    config = SearchConfig(capacity=16, islands=4, check_interval=5, warmup_tokens=5)
    with pytest.warns(GambitWarning, match="would have gone on with 8 islands.*keeps its 4, so that --islands 8"):
        spread = SpreadSolver([Doubting(), solvers[1]]).solve(QUESTION, config)
    assert spread.votes == solvers[0].solve(QUESTION, config).votes and spread.num_islands == 4
    divided = SpreadSolver([Doubting()]).solve(QUESTION, config)
    assert divided.num_islands == 8 and "further apart" in divided.pool.why

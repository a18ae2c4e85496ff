"""A solver used where it cannot work, or with what it cannot take: a sentence at once, never a hang or a traceback."""

import dataclasses
import os
import signal
import threading

import pytest

from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.vote import VoteEntry
from gambit.search.choice import load_policy
from gambit.search.host import SearchHost
from gambit.solver.builder import request_of, requests_of
from gambit.storage.run_folder import EventSink
from gambit.tree import TraceState
from gambit.types import Problem, StopReason
from support.scripted import ScriptedEngine
from support.searching import check_ended, make_search, make_settings, run_one
from support.tables import table

SETTINGS = make_settings(capacity=3, max_new_tokens=6, num_traces=3)


@pytest.fixture
def host():
    host = SearchHost(lambda: ScriptedEngine(seed=0, finish_chance=0))
    yield host
    host.close()


def submit(host, number=1, check=lambda *_: None):
    return host.submit(lambda: make_search(host.engine, SETTINGS, number=number, check=check).search)


def test_a_forked_process_is_refused_and_its_parent_goes_on(host):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            submit(host)
            os._exit(1)
        except UserError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        finally:
            os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    assert submit(host).result.result(timeout=60).counts.roots == 3


def test_a_callback_that_begins_a_search_on_its_own_solver_is_refused_and_others_go_on(host):
    def callback(*_):
        submit(host, number=2)

    with pytest.raises(UserError, match="callback of this solver"):
        submit(host, check=callback).result.result(timeout=60)
    assert submit(host, number=3).result.result(timeout=60).counts.roots == 3


def test_a_callback_of_the_vote_is_refused_too(host):
    found = []

    def conclude():
        try:
            submit(host, number=2)
        except UserError as error:
            found.append(str(error))

    host._voting.submit(conclude).result(timeout=60)
    assert len(found) == 1 and "callback" in found[0]
    beside = threading.Thread(target=lambda: found.append(submit(host, number=4).result.result(timeout=60)))
    beside.start()
    beside.join(timeout=60)
    assert len(found) == 2, "another thread may begin one"


# -- types -----------------------------------------------------------------------------------------------------------


class Odd:
    """An object of no use."""


USER = {"role": "user", "content": "a?"}
WRONG_PROBLEMS = [
    b"x", bytearray(b"x"), None, 5, 1.5, True, float("nan"), {"role": "user"}, {"a"}, object, Odd(), 1j, range(3),
    [b"x"], ["x"], [None], [5], [[]], [[USER]], [{}], [{"role": "user"}], [{"content": "x"}],
    [{"role": 5, "content": "x"}], [{"role": "user", "content": None}], [{"role": "user", "content": b"x"}],
    [{"role": "user", "content": ["x"]}], [{"role": None, "content": "x"}], [USER, "x"], [USER, None], ("x",),
    [USER, {"role": "user", "content": 5}], memoryview(b"x"), frozenset(), len, lambda: "x", Problem, ...,
    [Problem("x")], {"question": "x"}, [{"role": "user", "text": "x"}], iter(["x"]), Exception("x"),
]  # fmt: skip
WRONG_OPTIONS = [{}, {"capacity": 2}, "gambit", 5, [], b"", True, SearchConfig, Odd(), ("capacity", 2), 0.5]


@table("problem", WRONG_PROBLEMS)
def test_a_problem_of_a_wrong_type_is_named(problem):
    for request in (
        lambda: request_of(problem, None, None, None, None),
        lambda: request_of(Problem(problem), None, None, None, None),
        lambda: list(requests_of([problem], None, None, None, None)),
    ):
        with pytest.raises(UserError, match=f"the problem is a {type(problem).__name__}: give a text"):
            request()


@table("options", WRONG_OPTIONS)
def test_options_of_a_wrong_type_are_named(options):
    with pytest.raises(UserError, match=f"the options are a {type(options).__name__}: give a SearchConfig"):
        request_of("x", options, None, None, None)
    if options:
        with pytest.raises(UserError, match="give a SearchConfig"):
            list(requests_of(["x"], options, None, None, None))


@table("problem", ["\ud800", "a\udfff", [{"role": "system", "content": "\ud800"}, USER], Problem("x\ud800y")])
def test_half_of_a_surrogate_pair_is_refused_before_a_search(problem):
    with pytest.raises(UserError, match="half of a surrogate pair"):
        request_of(problem, None, None, None, None)


@table("problem", ["x", [USER], (USER,), Problem("x"), Problem([USER]), Problem((USER,), id="a")])
def test_what_is_a_problem_is_taken(problem):
    assert request_of(problem, SearchConfig(), None, None, None).problem.last_message in ("x", "a?")


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_link_that_leads_nowhere_in_place_of_a_log_is_named_by_its_file(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"run/events\.jsonl exists already"):
        EventSink("p", tmp_path / "run", None)
    assert not (tmp_path / "elsewhere").exists()


# -- what speaks against a winner ------------------------------------------------------------------------------------


def warnings_of(host, *votes, islands=4):
    result = submit(host).result.result(timeout=60)
    pool = dataclasses.replace(SETTINGS.pool, islands=islands)
    return dataclasses.replace(result, votes=votes, pool=pool).vote_warnings


def entry(answer, weight, traces, islands):
    return VoteEntry(answer, weight, traces, traces, (answer,), islands)


def test_a_scorer_that_overrules_the_majority_is_named_with_its_figures(host):
    [found] = warnings_of(host, entry("5", 9.0, 12, 4), entry("7", 4.5, 20, 4))
    assert found.startswith("the scorer overrules the majority: '5' has 12 traces and '7' 20, by weight 9.00 to 4.50")
    assert warnings_of(host, entry("5", 9.0, 20, 4), entry("7", 4.5, 20, 4)) == (), "a tie overrules no majority"
    assert warnings_of(host) == ()


def test_islands_that_each_agree_with_themselves_alone_are_a_warning(host):
    apart = (entry("5", 9.0, 16, 1), entry("7", 8.0, 16, 1), entry("8", 7.0, 16, 2), entry("9", 7.0, 16, 2))
    [found] = warnings_of(host, *apart)
    assert found.startswith("only 1 of 4 islands found '5'") and "--policy sc" in found
    assert warnings_of(host, *apart, islands=16) == (), "small islands differ by chance"
    assert warnings_of(host, *apart, islands=1) == ()
    assert warnings_of(host, entry("5", 9.0, 40, 3), entry("7", 8.0, 24, 1)) == ()


# -- settings at their borders ---------------------------------------------------------------------------------------


BORDERS = [
    {"capacity": 1, "num_traces": 1, "swap_size": 1}, {"capacity": 2, "num_traces": 2, "swap_size": 2},
    {"capacity": 8, "num_traces": 1, "swap_size": 2}, {"capacity": 8, "num_traces": 1, "swap_size": 8},
    {"capacity": 8, "num_traces": 3, "swap_size": 8}, {"capacity": 8, "num_traces": 8, "swap_size": 8},
    {"capacity": 8, "num_traces": 8, "swap_size": 20}, {"capacity": 8, "num_traces": 40, "swap_size": 8},
    {"capacity": 8, "num_traces": 2, "swap_size": 2, "islands": 2},
    {"capacity": 8, "num_traces": 8, "swap_size": 8, "islands": 8},
    {"capacity": 5, "num_traces": 7, "swap_size": 5, "islands": 3},
]  # fmt: skip


@table("changes", BORDERS)
@table("warmup_tokens", [0, 1, 1000])
@table("check_interval", [1, 7])
def test_a_search_at_the_border_of_its_settings_ends_with_all_traces_accounted_for(
    changes, warmup_tokens, check_interval
):
    wanted = make_settings(**changes, warmup_tokens=warmup_tokens, check_interval=check_interval)
    for kv_tokens in (100_000, 150):
        search = run_one(ScriptedEngine(seed=3, kv_tokens=kv_tokens), wanted)
        check_ended(search.search.record.tree)
        counts = search.search.result.counts
        assert counts.completed >= wanted.num_traces or search.search.result.stop_reason is StopReason.EXHAUSTED
        assert counts.roots + counts.branched == sum(counts.by_end.values())


@pytest.mark.parametrize("num_traces", [1, 3])
def test_more_traces_than_wanted_are_complete_only_if_they_end_in_the_same_step(num_traces):
    """Seven of eight may be complete where one was wanted: a step ends for all traces at once."""
    engine = ScriptedEngine(seed=0, finish_chance=0)  # all end at their limit, in one step
    search = run_one(engine, make_settings(capacity=8, num_traces=num_traces, max_new_tokens=9))
    assert search.search.result.stop_reason is StopReason.COMPLETED and search.search.result.counts.completed == 8
    spread = run_one(ScriptedEngine(seed=3, finish_chance=0.05), make_settings(capacity=8, num_traces=num_traces))
    ends = [trace.ended_step for trace in spread.search.record.tree.in_state(TraceState.FINISHED)]
    assert sum(step < max(ends) for step in ends) < num_traces, "before the last step fewer than wanted were complete"


def test_a_model_without_an_end_token_fills_its_limit():
    search = run_one(ScriptedEngine(seed=0, finish_chance=0), make_settings(max_new_tokens=20), stop_ids=frozenset())
    finished = search.search.record.tree.in_state(TraceState.FINISHED)
    assert finished and all(trace.num_tokens == 20 for trace in finished)


def test_swaps_of_islands_are_rounded_to_the_nearest_and_never_none():
    """K is that of all islands: three swaps on two islands are two each, and one on four is one each."""
    for swaps, islands, each in ((3, 2, 2), (16, 4, 4), (1, 4, 1), (5, 2, 2), (7, 4, 2)):
        policy = load_policy("gambit").from_settings(make_settings(islands=islands, swap_size=swaps, capacity=8))
        assert policy.tournament.swap_size == each, (swaps, islands)

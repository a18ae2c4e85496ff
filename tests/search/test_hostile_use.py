"""A solver used where it cannot work, or with what it cannot take: a sentence at once, never a hang or a traceback."""

import dataclasses
import os
import signal
import threading

import pytest

from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.vote import VoteEntry
from gambit.search.host import SearchHost
from gambit.solver.builder import request_of, requests_of
from gambit.storage.run_folder import EventSink
from gambit.types import Problem
from support.scripted import ScriptedEngine
from support.searching import make_search, make_settings
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

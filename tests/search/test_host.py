"""The life of searches and solvers: several threads, overlapping calls, broken callbacks, cancelling and closing."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.errors import DeadEngineError, EngineError, UserError
from gambit.search.host import SearchHost
from gambit.solver import Solver
from gambit.types import StopReason
from support.scripted import ScriptedEngine
from support.searching import make_search, make_settings

QUICK = SearchConfig(capacity=4, check_interval=4, warmup_tokens=2, max_new_tokens=24, temperature=1.0, top_k=0)
PROBLEMS = [f"a={i}+{i + 1}" for i in range(6)]


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return str(tiny_folder)


def quiet(*args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Solver(*args, device="cpu", **options)


@pytest.fixture
def solver(folder):
    solver = quiet(folder)
    yield solver
    solver.close()


def facts(result):
    return result.answer, result.votes, result.tokens, result.counts, result.stop_reason


# -- a solver and several callers ------------------------------------------------------------------------------------


def test_threads_get_the_answers_that_they_would_get_alone(solver):
    alone = {problem: facts(solver.solve(problem, QUICK)) for problem in PROBLEMS}
    wanted = PROBLEMS * 4
    with ThreadPoolExecutor(4) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        together = list(pool.map(lambda problem: facts(solver.solve(problem, QUICK)), wanted))
    assert together == [alone[problem] for problem in wanted]


def test_solvers_may_be_made_in_several_threads_at_once(folder):
    with ThreadPoolExecutor(4) as pool:
        solvers = list(pool.map(lambda _: quiet(folder), range(4)))
    answers = {solver.solve(PROBLEMS[0], QUICK).answer for solver in solvers}
    for solver in solvers:
        solver.close()
    assert len(answers) == 1


def test_a_call_beside_an_open_iteration_runs_in_the_same_batch(solver):
    alone = [facts(solver.solve(problem, QUICK)) for problem in PROBLEMS[:3]]
    results = solver.solve_many(PROBLEMS[:2], QUICK, concurrency=2)
    first = next(results)
    beside = solver.solve(PROBLEMS[2], QUICK)
    found = {first.problem_id: facts(first)} | {r.problem_id: facts(r) for r in results}
    assert [found["0"], found["1"], facts(beside)] == alone


def test_leaving_an_iteration_frees_the_engine_and_leaves_complete_logs(solver, tmp_path):
    seen = []
    for _ in solver.solve_many(PROBLEMS, QUICK, concurrency=3, out_dir=tmp_path, on_event=lambda p, e: seen.append(e)):
        break
    assert solver.engine.step().kv_used_tokens == 0
    begun = sum(isinstance(event, ev.RunStarted) for event in seen)
    assert begun == sum(isinstance(event, ev.Voted) for event in seen) == 3
    assert solver.solve(PROBLEMS[0], QUICK).counts.completed == 4


def test_a_closed_solver_says_so(folder):
    solver = quiet(folder)
    results = solver.solve_many(PROBLEMS, QUICK, concurrency=2)
    next(results)
    solver.close()
    solver.close()
    with pytest.raises(UserError, match="closed"):
        solver.solve(PROBLEMS[0], QUICK)
    with pytest.raises(UserError, match="closed"):
        list(results)
    results.close()


def test_a_solver_whose_scorer_does_not_fit_leaves_no_thread_behind(folder):
    from gambit.scorers.base import ScorerInfo
    from gambit.scorers.simple import ConstantScorer

    class Misfit(ConstantScorer):
        info = ScorerInfo("misfit", hidden_size=7)

    before = set(threading.enumerate())
    with pytest.raises(UserError, match="7"):
        quiet(folder, scorer=Misfit())
    assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile


class BoomError(Exception):
    pass


def failing_after(count):
    seen = iter(range(count))

    def callback(*_):
        if next(seen, None) is None:
            raise BoomError("the caller's own mistake")
        return False

    return callback


@pytest.mark.parametrize("count", [0, 1, 9, 20])
@pytest.mark.parametrize("name", ["on_event", "should_stop"])
def test_a_callback_that_fails_ends_its_own_search_alone(solver, name, count):
    expected = facts(solver.solve(PROBLEMS[1], QUICK))
    others = solver.solve_many([PROBLEMS[1]] * 3, QUICK, concurrency=3)
    first = next(others)
    with pytest.raises(BoomError):
        solver.solve(PROBLEMS[0], QUICK, **{name: failing_after(count)})
    assert [facts(result) for result in (first, *others)] == [expected] * 3
    assert solver.engine.step().kv_used_tokens == 0


def test_in_an_iteration_the_failed_search_has_its_error_and_the_others_go_on(solver):
    def on_event(problem_id, event):
        if problem_id == "1" and isinstance(event, ev.Scored):
            raise BoomError("not this one")

    results = {r.problem_id: r for r in solver.solve_many(PROBLEMS, QUICK, concurrency=2, on_event=on_event)}
    assert [name for name, result in sorted(results.items()) if result.error] == ["1"]
    assert "not this one" in results["1"].error and results["1"].stop_reason is StopReason.FAILED


def test_an_engine_that_fails_fails_for_everybody_and_works_again(solver, monkeypatch):
    def fail():
        raise EngineError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(solver.engine, "step", fail)
        with pytest.raises(EngineError, match="out of memory"):
            list(solver.solve_many(PROBLEMS[:2], QUICK, concurrency=2))
    assert solver.solve(PROBLEMS[0], QUICK).counts.completed == 4


def test_an_engine_that_is_dead_before_a_search_begins_is_not_that_searchs_failure(solver, monkeypatch):
    def fail(specs):
        raise DeadEngineError("its process has died")

    with monkeypatch.context() as patched:
        patched.setattr(solver.engine, "submit", fail)
        with pytest.raises(DeadEngineError, match="has died"):
            list(solver.solve_many(PROBLEMS[:2], QUICK, concurrency=2))
    assert solver.solve(PROBLEMS[0], QUICK).counts.completed == 4


# -- an engine that has no room ---------------------------------------------------------------------------------------


class Crowd:
    """Searches of three traces on an engine that steps when it is told to; what ran at a time is remembered."""

    def __init__(self, most_traces, *lengths):
        self.engine = ScriptedEngine(finish_chance=0.0, most_traces=most_traces)
        self.may_step, self.at_a_time = threading.Semaphore(0), []
        self.has_begun = threading.Event()
        step = self.engine.step

        def watched_step():
            self.has_begun.set()
            self.may_step.acquire()
            self.at_a_time.append(sorted({key.search for key in (*self.engine.running, *self.engine.waiting)}))
            return step()

        self.engine.step = watched_step
        self.host = SearchHost(lambda: self.engine)
        self.tickets = [self.submit(number, length) for number, length in enumerate(lengths, start=1)]

    def submit(self, number, length, **options):
        wanted = make_settings(capacity=3, max_new_tokens=length, num_traces=3)
        return self.host.submit(lambda: make_search(self.engine, wanted, number=number).search, **options)

    def finish(self):
        self.may_step.release(1000)
        return [ticket.result.result(timeout=60).stop_reason for ticket in self.tickets]


@pytest.fixture
def crowd_of():
    crowds = []

    def make(*arguments):
        crowds.append(Crowd(*arguments))
        return crowds[-1]

    yield make
    for crowd in crowds:
        crowd.may_step.release(1000)
        crowd.host.close()


def test_a_search_begins_once_the_engine_has_a_place_for_a_trace_of_it(crowd_of):
    crowd = crowd_of(4, 5, 10, 5, 5)
    assert crowd.finish() == [StopReason.COMPLETED] * 4
    assert max(len(numbers) for numbers in crowd.at_a_time) == 2, "three traces and three: no place is left"
    assert [1, 2] in crowd.at_a_time and [2, 3] in crowd.at_a_time, "the next one joins while another goes on"
    assert [numbers[0] for numbers in crowd.at_a_time] == sorted(numbers[0] for numbers in crowd.at_a_time)


def test_an_engine_without_places_takes_all_at_once(crowd_of):
    crowd = crowd_of(None, 5, 5, 5, 5)
    crowd.finish()
    assert [1, 2, 3, 4] in crowd.at_a_time


def test_a_search_that_waits_for_room_can_be_called_off(crowd_of):
    crowd = crowd_of(3, 50, 5)
    assert crowd.has_begun.wait(timeout=60)
    crowd.tickets[1].cancel()
    crowd.may_step.release(3)
    called_off = crowd.tickets[1].result.result(timeout=60)
    assert called_off.stop_reason is StopReason.INTERRUPTED and not crowd.tickets[0].result.done()
    crowd.finish()


def test_searches_that_wait_for_room_get_their_end_when_the_host_closes(crowd_of):
    crowd = crowd_of(3, 50, 50, 50)
    closing = threading.Thread(target=crowd.host.close)
    closing.start()
    assert crowd.finish() == [StopReason.INTERRUPTED] * 3
    closing.join(timeout=60)


def test_a_part_of_a_search_does_not_wait_for_room(crowd_of):
    crowd = crowd_of(3, 20)
    assert crowd.has_begun.wait(timeout=60)
    crowd.tickets.append(crowd.submit(2, 5, may_wait=False))
    assert crowd.finish() == [StopReason.COMPLETED] * 2
    assert [1, 2] in crowd.at_a_time


# -- random interleavings --------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Hands searches to a host and remembers what it was promised."""

    host: SearchHost
    open: list = field(default_factory=list)
    number: int = 0

    def submit(self, length, callback=lambda *_: None):
        self.number += 1
        wanted = make_settings(capacity=3, max_new_tokens=length, num_traces=3)

        def make(number=self.number):
            return make_search(self.host.engine, wanted, number=number, check=callback).search

        self.open.append(self.host.submit(make))

    def break_one(self):
        self.submit(30, callback=failing_after(12))

    def cancel(self, which):
        if self.open:
            self.open[which % len(self.open)].cancel()

    def wait(self, which):
        if self.open:
            ticket = self.open.pop(which % len(self.open))
            error = ticket.result.exception(timeout=60)
            assert error is None or (ticket.failed_alone and isinstance(error, BoomError))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40)),
        st.tuples(st.just("break_one")),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("wait"), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(st.lists(actions, min_size=1, max_size=3), st.integers(0, 1000), st.booleans(), st.sampled_from([None, 1, 5]))
def test_any_interleaving_of_calls_ends_every_search_and_leaves_nothing_behind(stories, seed, closes_early, most):
    host = SearchHost(lambda: ScriptedEngine(seed=seed, finish_chance=0.03, most_traces=most))
    callers = [Caller(host, number=1000 * index) for index, _ in enumerate(stories)]

    def act(caller, story):
        for name, *arguments in story:
            getattr(caller, name)(*arguments)

    with ThreadPoolExecutor(len(stories)) as pool:
        list(pool.map(act, callers, stories))
    if closes_early:
        host.close()
    for caller in callers:
        while caller.open:
            caller.wait(0)
    assert not host.engine.running and not host.engine.waiting
    host.close()
    with pytest.raises(UserError, match="closed"):
        callers[0].submit(5)

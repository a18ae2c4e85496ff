"""Comparing answers within time and memory: what is asked of the grading process, and what becomes of it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gambit.answers import Equivalent, Grader, worker
from gambit.answers import grader as grading
from gambit.errors import EngineError, UserError
from gambit.results.vote import Ballot, VoteKind, VoteResult, count_votes
from support.tables import table

pytestmark = pytest.mark.system  # it starts and kills processes
READY = "print('{\"ready\": true}', flush=True);"
ASK = READY + "\nimport json\nwhile True:\n    request = json.loads(input())\n    "
EQUAL = "print(json.dumps({'equal': True}), flush=True)"
NEEDS_ALGEBRA = ("x+5", "5+x")


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(comparison_seconds=60.0) as shared:
        yield shared


def fake_worker(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    """Replaces the grading process; the list grows by one for each start."""
    starts: list[str] = []

    def command() -> list[str]:
        starts.append(code)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(grading, "worker_command", command)
    return starts


PATCHED_WORKER = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("worker", {worker.__file__!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
read = worker._readings
def readings(expression):
    for word, harm in HARMS.items():
        if word in expression:
            harm()
    return read(expression)
worker._readings = readings
HARMS = {{
    "m_1": lambda: bytearray(8 << 30),
    "s_1": lambda: time.sleep(1000),
    "c_1": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}}
worker.main()
"""


# -- answers --------------------------------------------------------------------------------------------------


def test_no_answer_is_never_right(grader: Grader) -> None:
    assert not grader.grade(None, "5")
    assert not grader.grade("", "")
    assert grader.grade("5.0", "5")


def test_plain_comparisons_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "worker_command", lambda: pytest.fail("a worker was started"))
    with Grader() as grader:
        assert grader.equivalent("0.5", r"\frac12")
        assert grader.equivalent("x = 10,800", "10,800")
        assert grader.equivalent("(1, 0.5]", r"(1, \frac12]")
        assert not grader.equivalent("184321", "184320")
        assert not grader.equivalent("12.5", r"\frac{37}{3}")
        assert not grader.equivalent("4210_5", "4210_6")
        assert not grader.equivalent("x" * 3000, "y")
        assert not grader.equivalent("", "5")


# -- time -----------------------------------------------------------------------------------------------------


def tally(answered: list[Ballot], equivalent: Equivalent) -> VoteResult:
    return count_votes(answered, VoteKind.MAJORITY, equivalent)


def ballots(*answers: str) -> list[Ballot]:
    return [Ballot(trace, answer, 1.0, trace) for trace, answer in enumerate(answers)]


ORDINARY = ("x+1", "1+x", "2x-1", r"\sqrt{x}", "x^2+2x", "x(x+2)")


def test_one_hostile_answer_costs_a_vote_one_comparison() -> None:
    with Grader(comparison_seconds=1.0, vote_seconds=1000.0) as grader:
        assert grader.equivalent(*NEEDS_ALGEBRA)
        vote = tally(ballots("9^{9^{9^9}}", *ORDINARY), grader.for_vote())
        assert grader.num_given_up == 1
        assert [entry.forms for entry in vote.entries if entry.traces == 2] == [("x+1", "1+x"), ("x^2+2x", "x(x+2)")]
        assert not grader.equivalent("9^{9^{9^9}}", "a+b")
        assert not grader.equivalent("[9^{9^{9^9}}]", "9^{9^{9^9}}")
        assert grader.equivalent("9^{9^{9^9}}", "$9^{9^{9^{9}}}$"), "it is compared by its spelling"


HOSTILE = ("9**9**9**9", r"\frac{1}{" * 180 + "2" + "}" * 180, "(" * 900 + "x" + ")" * 900, "\x00\ud800\n{\\}")


def test_hostile_answers_leave_the_process_alive() -> None:
    with Grader(comparison_seconds=1.0) as grader:
        assert grader.equivalent(*NEEDS_ALGEBRA)
        before = grader._process
        for hostile in HOSTILE:
            assert not grader.equivalent(hostile, "7+x")
            assert grader.equivalent(f"x+{len(hostile)}", f"{len(hostile)}+x"), "the comparison before has done harm"
        assert grader._process is before


@pytest.mark.parametrize("blamed", ["first", "second"])
def test_an_answer_that_cannot_be_read_is_not_asked_about_again(monkeypatch: pytest.MonkeyPatch, blamed: str) -> None:
    fake_worker(
        monkeypatch,
        ASK + f"slow = request[{blamed!r}] == 'b+1'\n    "
        f"print(json.dumps({{'gave_up': {blamed!r}}} if slow else {{'equal': True}}), flush=True)",
    )
    with Grader() as grader:
        other = "c+1" if blamed == "first" else "a+1"
        assert not grader.equivalent("b+1", other)
        assert not grader.equivalent("b+1", "d+1" if blamed == "first" else "a+2")
        assert grader.num_given_up == 1
        assert grader.equivalent(other, "a+3"), "the other is innocent"


def test_of_two_answers_that_cannot_be_compared_who_fails_twice_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "print(json.dumps({'gave_up': 'both'} if 'b+1' in request.values() else {'equal': True}), flush=True)"
    fake_worker(monkeypatch, ASK + answer)
    with Grader() as grader:
        assert [grader.equivalent("b+1", other) for other in ("c+1", "c+1", "d+1", "e+1", "f+1")] == [False] * 5
        assert grader.num_given_up == 2
        assert grader.equivalent("c+1", "d+1"), "they are innocent"


def returns(function: Callable[[], object]) -> bool:
    """Whether the function returns at all; what hangs does so for a thousand seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(120)
    return not thread.is_alive()


def test_a_vote_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fake_worker(monkeypatch, READY + "import time; time.sleep(10_000)")
    with Grader(comparison_seconds=1000.0) as grader:
        answers = [f"x+{number}" for number in range(30)]
        assert returns(lambda: tally(ballots(*answers), grader.for_vote(time.monotonic() + 0.5)))
        assert len(starts) <= 1
        assert len(tally(ballots(*answers, "0.5", "1/2"), grader.for_vote(time.monotonic())).entries) == 31


def test_a_vote_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, READY + "import time; time.sleep(10_000)")
    with Grader(comparison_seconds=1000.0, vote_seconds=0.5) as grader:
        assert returns(lambda: tally(ballots("x+1", "x+2", "x+3", "x+4"), grader.for_vote()))


def test_a_process_that_starts_slowly_does_not_hold_up_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fake_worker(monkeypatch, "import time; time.sleep(1.5);" + ASK + EQUAL)
    with Grader() as grader:
        assert not grader.equivalent(*NEEDS_ALGEBRA, deadline=time.monotonic() + 0.1)
        assert not grader.equivalent(*NEEDS_ALGEBRA, deadline=time.monotonic() + 0.1)
        assert grader.equivalent(*NEEDS_ALGEBRA), "it was not given up"
        assert (len(starts), grader.num_given_up) == (1, 0)


def test_a_busy_process_does_not_hold_up_another_threads_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, READY + "import time; time.sleep(10_000)")
    monkeypatch.setattr(grading, "GRACE_SECONDS", 0.1)
    with Grader(comparison_seconds=2.0) as grader:
        busy = threading.Thread(target=grader.equivalent, args=NEEDS_ALGEBRA)
        busy.start()
        assert not grader.equivalent("y+1", "1+y", deadline=time.monotonic() + 0.1)
        assert busy.is_alive()
        busy.join()


def test_what_was_compared_before_counts_after_the_deadline(grader: Grader) -> None:
    assert not grader.equivalent("(w+1)^2", "w^2+2w+1", deadline=time.monotonic() - 1.0)
    assert grader.equivalent("(w+1)^2", "w^2+2w+1")
    assert grader.equivalent("(w+1)^2", "w^2+2w+1", deadline=time.monotonic() - 1.0)


def test_a_hurried_comparison_is_no_answers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, ASK + "import time; time.sleep(0.5); print(json.dumps({'gave_up': 'first'}), flush=True)")
    with Grader() as grader:
        assert not grader.equivalent(*NEEDS_ALGEBRA, deadline=time.monotonic() + 1.0)
        assert not grader._strikes and not grader._cache


@table("name", ["comparison_seconds", "vote_seconds"])
def test_a_time_limit_must_be_positive(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is 0"):
        Grader(**{name: 0})


# -- memory and crashes ---------------------------------------------------------------------------------------


def test_what_harms_the_algebra_harms_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fake_worker(monkeypatch, PATCHED_WORKER)
    with Grader(comparison_seconds=2.0) as grader:
        for number, hostile in enumerate(("m_1", "s_1", "c_1"), start=1):  # memory, time, a crash
            assert not grader.equivalent(f"{hostile}+1", "x+y")
            assert not grader.equivalent("y+z", f"{hostile}+1")
            assert grader.num_given_up == number
            assert grader.equivalent(f"x+{number}", f"{number}+x"), "the comparison before has done harm"
        assert len(starts) == 1


def test_the_algebra_has_a_memory_limit() -> None:
    allocate = "worker._limit('RLIMIT_AS', worker.MEMORY_LIMIT_BYTES); bytearray(1 << 30)"
    code = PATCHED_WORKER.replace("worker.main()", allocate)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MemoryError" in run.stderr


def test_the_worker_bears_lower_limits_of_the_system() -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))\n"
    parent = subprocess.run(
        [sys.executable, "-c", limits + PARENT.format(then="", seconds=60.0)], capture_output=True, text=True
    )
    assert (parent.returncode, parent.stderr) == (0, "")


def test_a_worker_that_sleeps_forever_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "GRACE_SECONDS", 0.1)
    starts = fake_worker(monkeypatch, READY + "import time; time.sleep(10_000)")
    with Grader(comparison_seconds=0.2) as grader:
        assert not grader.equivalent(*NEEDS_ALGEBRA)
        assert grader._process is None
        assert not grader.equivalent(*reversed(NEEDS_ALGEBRA))
        assert (len(starts), grader.num_given_up) == (1, 1)
        monkeypatch.undo()
        grader._comparison_seconds = 60.0
        assert grader.equivalent("y+5", "5+y")


@pytest.mark.parametrize(
    "code",
    [
        "import time\nwhile True: print(1, end='', flush=True); time.sleep(0.01)",
        "\nwhile input(): print('equal', flush=True)",
        "\nwhile input(): print('[1]', flush=True)",
        "\nwhile input(): print('{}', flush=True)",
        "input(); import os; os._exit(3)",
    ],
    ids=["babbles", "nonsense", "no-object", "no-answer", "crashes"],
)
def test_a_worker_that_makes_no_sense_is_replaced(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(grading, "GRACE_SECONDS", 0.1)
    starts = fake_worker(monkeypatch, READY + code)
    with Grader(comparison_seconds=0.3) as grader:
        assert not grader.equivalent("x+5", "5+x")
        assert not grader.equivalent("x+6", "6+x")
        assert (len(starts), grader.num_given_up) == (2, 2)


def test_a_worker_that_died_while_idle_costs_nothing(grader: Grader) -> None:
    assert grader.equivalent("u+5", "5+u")
    assert grader._process is not None
    os.kill(grader._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, grader._process.pid, os.WEXITED | os.WNOWAIT)
    assert grader.equivalent("u+6", "6+u")
    assert grader.num_given_up == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [("raise SystemExit(1)", "did not start"), ('print(\'{"failed": "no sympy"}\')', "no sympy.*math-verify>=0.9")],
)
def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    fake_worker(monkeypatch, code)
    with Grader() as grader, pytest.raises(EngineError, match=message):
        grader.equivalent(*NEEDS_ALGEBRA)


def test_a_worker_that_takes_too_long_to_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, "import time; time.sleep(10_000)")
    with Grader(startup_seconds=0.3) as grader, pytest.raises(EngineError, match=r"did not start within 0\.3 s"):
        grader.equivalent(*NEEDS_ALGEBRA)


def test_the_memory_of_a_grader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, ASK + "print(json.dumps({'gave_up': 'both'}), flush=True)")
    with Grader(cache_size=3) as grader:
        assert not any(grader.equivalent(f"x+{i}", "z+1") for i in range(10))
        assert not any(grader.equivalent(f"x+{i}", f"y+{i}") for i in range(10))
        assert len(grader._cache) == len(grader._strikes) == 3


# -- threads and processes ------------------------------------------------------------------------------------


def test_any_thread_may_grade(grader: Grader) -> None:
    def check(i: int) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return grader.equivalent(f"x+{i}", f"{i}+x") and not grader.equivalent(f"x+{i}", f"x+{i + 1}")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(16)))


def test_a_closed_grader_starts_again(grader: Grader) -> None:
    assert grader.equivalent("v+5", "5+v")
    grader.close()
    assert grader._process is None
    assert grader.equivalent("v+6", "6+v")


PARENT = """
import sys, threading, time
from gambit.answers import Grader
grader = Grader(comparison_seconds=60.0)
assert grader.equivalent("x+5", "5+x")
grader._comparison_seconds = {seconds}
print(grader._process.pid, flush=True)
{then}
"""


def start_parent(then: str, seconds: float = 60.0) -> tuple[subprocess.Popen[str], list[int]]:
    """The parent, and its grading process with the child of that."""
    code = PARENT.format(then=then, seconds=seconds)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return parent, [pid, *map(int, children.read_text().split() if children.exists() else [])]


def is_running(pid: int) -> bool:
    """Zombies do not count: outside a test somebody reaps them."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else True
    return False


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


BUSY = "grader.equivalent('9^{9^{9^9}}', '7+x')"


@pytest.mark.parametrize("then", ["time.sleep(100)", BUSY], ids=["idle", "busy"])
def test_no_orphan_when_the_parent_is_killed(then: str) -> None:
    parent, workers = start_parent(then, seconds=2.0)
    time.sleep(0.5)  # long enough to be busy, too short for the deadline
    assert any(map(is_running, workers))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert eventually(lambda: not any(map(is_running, workers)))


def test_the_algebra_ends_also_where_its_process_is_killed() -> None:
    parent, (worker_pid, *children) = start_parent(BUSY, seconds=2.0)
    os.kill(worker_pid, signal.SIGKILL)
    assert eventually(lambda: not any(map(is_running, children)))
    parent.communicate()


@pytest.mark.parametrize("then", ["", "grader.close()"])
def test_no_orphan_when_the_parent_ends(then: str) -> None:
    parent, workers = start_parent(then)
    parent.communicate(timeout=60)
    assert parent.returncode == 0
    assert eventually(lambda: not any(map(is_running, workers)))


# -- algebra --------------------------------------------------------------------------------------------------

FORMS = (
    r"\frac{\sqrt{3}}{2}", "0.866", "0.8660254", "x^2+2x+1", "(x+1)^2", "2x+y=3", "y=3-2x", "2x+3", "3", "6 - 5i",
    "-5i + 6", r"\frac{1}{x}", "x^{-1}", "10^{20}",
)  # fmt: skip


def test_no_pair_that_math_verify_calls_equal_is_turned_away_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(a, b) for place, a in enumerate(FORMS) for b in FORMS[:place]]
    quick = [worker.compare(*pair) for pair in pairs]
    turned_away = [
        worker._clearly_differ(a.values, b.values)
        for first, second in pairs
        for a in worker._readings(first)
        for b in worker._readings(second)
    ]
    monkeypatch.setattr(worker, "_clearly_differ", lambda first, second: False)
    assert quick == [worker.compare(*pair) for pair in pairs]
    assert sum(quick) >= 5
    assert sum(turned_away) >= len(pairs) // 3


def test_a_number_too_large_for_a_float_is_turned_away() -> None:
    assert not any(worker.compare("10^{10^{10}}", form) for form in (r"\frac12", "6-5i", "(x+1)^2"))


# -- how a grader uses its process ----------------------------------------------------------------------------


class Stub:
    """A grading process that says what it is told to, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self.waits: list[tuple[float, float]] = []
        self.outcomes: list[bool | Exception] = []
        self.num_stops = 0
        self.is_dead = False

    def is_alive(self) -> bool:
        return not self.is_dead

    def wait_until_ready(self, deadline: float, startup_seconds: float) -> None:
        self.waits.append((deadline, startup_seconds))

    def compare(self, first: str, second: str, seconds: float) -> bool:
        self.asked.append((first, second, seconds))
        outcome = self.outcomes.pop(0) if self.outcomes else True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def stop(self) -> None:
        self.num_stops += 1


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """In a world in which time stands still at 100."""
    made = Stub()
    monkeypatch.setattr(grading, "WorkerProcess", lambda: made)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return made


def test_a_comparison_gets_its_time_and_no_more_than_half_of_what_is_left(stub: Stub) -> None:
    with Grader(comparison_seconds=5.0, startup_seconds=7.0) as grader:
        assert grader.equivalent("x+1", "1+x")
        assert grader.equivalent("x+2", "2+x", deadline=110.0)
        assert grader.equivalent("x+3", "3+x", deadline=104.0)
        assert not grader.equivalent("x+4", "4+x", deadline=100.0), "no time at all"
    assert stub.asked == [("1+x", "x+1", 5.0), ("2+x", "x+2", 5.0), ("3+x", "x+3", 2.0)]
    assert stub.waits[0][1] == 7.0 and [deadline for deadline, _ in stub.waits[1:]] == [110.0, 104.0]


def test_the_deadline_of_a_vote_is_the_earlier_of_the_two(stub: Stub) -> None:
    with Grader(vote_seconds=30.0) as grader:
        assert grader.for_vote()("x+1", "1+x") and grader.for_vote(120.0)("x+2", "2+x")
        assert grader.for_vote(200.0)("x+3", "3+x")
    assert [deadline for deadline, _ in stub.waits] == [130.0, 120.0, 130.0]


def test_a_pair_is_asked_about_once_whatever_the_order(stub: Stub) -> None:
    stub.outcomes = [False]
    with Grader() as grader:
        assert not grader.equivalent("x+1", "x+2") and not grader.equivalent("x+2", "x+1")
        assert not grader.equivalent("x+1", "x+2", deadline=99.0)
        assert len(stub.asked) == 1 and grader.num_given_up == 0


def test_less_than_a_second_is_no_answers_fault(stub: Stub) -> None:
    stub.outcomes = [grading.GaveUpError("first")] * 4
    with Grader(comparison_seconds=5.0) as grader:
        assert not grader.equivalent("1+x", "x+1", deadline=101.9) and not grader._strikes
        assert not grader.equivalent("1+x", "x+1", deadline=102.0) and grader._strikes == {"1+x": 2, "x+1": 0}
    with Grader(comparison_seconds=0.5) as grader:
        assert not grader.equivalent("2+x", "x+2") and grader._strikes == {"2+x": 2, "x+2": 0}, "its whole time"


@pytest.mark.parametrize(
    ("outcome", "strikes"),
    [
        (grading.GaveUpError("first"), (2, 0)),
        (grading.GaveUpError("second"), (0, 2)),
        (grading.GaveUpError("both"), (1, 1)),
        (EOFError(), (1, 1)),
    ],
)
def test_who_is_to_blame(stub: Stub, outcome: Exception, strikes: tuple[int, int]) -> None:
    stub.outcomes = [outcome]
    with Grader() as grader:
        assert not grader.equivalent("1+x", "x+1") and grader.num_given_up == 1
        assert (grader._strikes["1+x"], grader._strikes["x+1"]) == strikes
        assert stub.num_stops == isinstance(outcome, EOFError), "a process that is lost is dropped"


def test_a_process_that_died_while_idle_is_replaced(stub: Stub) -> None:
    with Grader() as grader:
        assert grader.equivalent("x+1", "1+x")
        stub.is_dead = True
        assert grader.equivalent("x+2", "2+x") and stub.num_stops == 1
    assert stub.num_stops == 2


def test_a_process_that_is_not_ready_in_time_is_kept_and_one_that_fails_is_not(stub: Stub) -> None:
    def not_yet(deadline: float, startup_seconds: float) -> None:
        raise TimeoutError

    def never(deadline: float, startup_seconds: float) -> None:
        raise EngineError("no")

    grader = Grader()
    stub.wait_until_ready = not_yet  # type: ignore[method-assign]
    assert not grader.equivalent("x+1", "1+x", deadline=101.0) and stub.num_stops == 0 and grader.num_given_up == 0
    stub.wait_until_ready = never  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        grader.equivalent("x+1", "1+x")
    assert stub.num_stops == 1 and grader._process is None


def test_several_expressions_of_one_pair_share_its_time(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.0, 100.0, 102.0, 105.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Grader(comparison_seconds=5.0) as grader:
        assert not grader.equivalent("(x+1, x+2)", "(1+x, 2+x)", deadline=200.0)
        assert stub.asked == [("1+x", "x+1", 3.0)] and grader.num_given_up == 1, "nothing is left for the second"


def test_only_so_much_is_remembered(stub: Stub) -> None:
    with Grader(cache_size=3) as grader:
        for number in range(3):
            assert grader.equivalent(f"x+{number}", f"{number}+x")
        assert len(grader._cache) == 3, "all that fits"
        assert grader.equivalent("x+3", "3+x")
        assert list(grader._cache) == [("1+x", "x+1"), ("2+x", "x+2"), ("3+x", "x+3")], "the oldest is forgotten"


# -- the process as its grader sees it ------------------------------------------------------------------------


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], grading.WorkerProcess]]:
    """Starts a process that runs a shell command, and ends it."""
    started: list[grading.WorkerProcess] = []

    def start(command: str) -> grading.WorkerProcess:
        monkeypatch.setattr(grading, "worker_command", lambda: ["sh", "-c", command])
        started.append(grading.WorkerProcess())
        return started[-1]

    yield start
    for each in started:
        each.stop()


def soon() -> float:
    return time.monotonic() + 0.1


def late() -> float:
    return time.monotonic() + 60.0


def test_a_process_may_become_ready_after_the_deadline_but_not_after_its_time_to_start(talking: Callable) -> None:
    silent = talking("sleep 100")
    with pytest.raises(TimeoutError):
        silent.wait_until_ready(soon(), 60.0)
    with pytest.raises(EngineError, match=r"^the grading process did not start within 0\.1 s \(TimeoutError\(\)\)$"):
        silent.wait_until_ready(late(), 0.1)
    with pytest.raises(EngineError, match=r"did not start within 60\.0 s \(EOFError\(\)\)"):
        talking("true").wait_until_ready(late(), 60.0)


def test_a_process_says_once_that_it_is_ready(talking: Callable) -> None:
    ready = talking("""echo '{"ready": true}'; sleep 100""")
    ready.wait_until_ready(late(), 60.0)
    ready.wait_until_ready(time.monotonic() - 1, 0.0)
    assert ready.is_alive()
    ready.stop()
    assert not ready.is_alive()


def test_a_process_that_lacks_something_says_what(talking: Callable) -> None:
    message = r"^the grading process cannot work \(no sympy\): pip install 'math-verify>=0\.9,<0\.10'$"
    with pytest.raises(EngineError, match=message):
        talking("""echo '{"failed": "no sympy"}'""").wait_until_ready(late(), 60.0)


@table(
    ("reply", "outcome"),
    [
        ('{"equal": true}', True),
        ('{"equal": false}', False),
        ('{"gave_up": "first"}', (2, 0)),
        ('{"gave_up": "second"}', (0, 2)),
        ('{"gave_up": "both"}', (1, 1)),
    ],
)
def test_a_reply_may_come_in_pieces(talking: Callable, reply: str, outcome: object) -> None:
    half = len(reply) // 2
    asked = talking(f"read line; printf '{reply[:half]}'; sleep 0.1; printf '{reply[half:]}\\n'; sleep 100")
    try:
        assert asked.compare("x", "y", 60.0) is outcome
    except grading.GaveUpError as error:
        assert error.strikes == outcome


def test_what_is_asked_is_one_line(talking: Callable) -> None:
    """The process repeats it as what went wrong."""
    echo = talking("""read line; echo "{\\"gave_up\\": \\"first\\", \\"line\\": $line}"; cat""")
    with pytest.raises(grading.GaveUpError):
        echo.compare("½", "a\nb", 2.5)
    echo._process.stdin.write(b"[]\n")
    with pytest.raises(ValueError, match=r"b'\[\]'"):
        echo._receive(late())


def test_a_comparison_gets_a_moment_more_than_its_seconds(talking: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    asked = talking("cat")
    monkeypatch.setattr(asked, "_receive", lambda deadline: deadlines.append(deadline) or {"equal": True})
    before = time.monotonic()
    asked.compare("x", "y", 5.0)
    assert before <= deadlines[0] - 5.0 - grading.GRACE_SECONDS <= time.monotonic()
    with pytest.raises(TimeoutError):
        grading.WorkerProcess._receive(talking("sleep 100"), soon())

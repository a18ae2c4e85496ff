"""The grading process from inside: how it reads, compares and reports, without a process of its own."""

import io
import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sympy import (
    Derivative,
    E,
    FiniteSet,
    Float,
    I,
    Integer,
    Integral,
    Interval,
    Limit,
    Product,
    Rational,
    Sum,
    Symbol,
    Tuple,
    exp,
    nan,
    oo,
    pi,
    sqrt,
    zoo,
)

from gambit.answers import worker

X = Symbol("x")


EXPRESSIONS = [
    (r"\frac{1}{2}", r"\frac{2}{4}", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\sqrt{8}", r"2\sqrt{3}", False),
    (r"1.4142136", r"\sqrt{2}", True),
    (r"1.41", r"\sqrt{2}", False),
    ("(x+1)^2", "x^2+2x+1", True),
    ("(x+1)^2", "x^2+2x+2", False),
    ("3t", "t*3", True),
    (r"\cos 60^\circ", r"\frac{1}{2}", True),
    ("2i+1", "1+2i", True),
    ("2i+1", "1-2i", False),
    ("3!^2", "36", True),
    (r"x=1 \lor x=2", "x=1, x=2", True),
    ("10^{-30}", "10^{-31}", False),
    (r"\infty", r"-\infty", False),
    ("y=2x", "2x-y=0", True),
    ("y=2x", "2x+y=0", False),
    ("$5$", "5", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    (r"\{1,2\}", r"\{2,3\}", False),
    (r"[0,1]\cup[1,2]", "[0,2]", True),
    (r"\int_0^1 x dx", r"\frac{1}{2}", True),
]


def test_expressions() -> None:
    wrong = [
        (first, second, is_equal)
        for first, second, is_equal in EXPRESSIONS
        if not (worker.compare(first, second) is is_equal and worker.compare(second, first) is is_equal)
    ]
    assert wrong == []


def test_values_that_tell_expressions_apart() -> None:
    def values(latex: str) -> object:
        (reading, *_) = worker._readings(latex)
        return reading.values

    assert values("3") == (3,)
    assert values(r"\infty") == (worker.INFINITE,) and values(r"-\infty") == (-worker.INFINITE,)
    assert values("x") is None, "it may be a word"
    assert values("x+x") == values("2x") != values("2y") and values("2X") == values("2x"), "case is not judged here"
    assert 1.0 <= values("2x")[0].real <= 3.0
    assert values(r"\{3,4\}") == (3, 4) and values("[3,4]") == (3, 4)
    assert values(r"\{3,x\}") is None
    assert values(r"\sum_{k=1}^{5} k") is None, "too costly"


def test_a_comparison_sets_no_alarm_of_its_own() -> None:
    """Its processor time is limited already; math-verify's own alarm works on a process's first thread alone."""
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(worker._verifies, FiniteSet(X, 3), FiniteSet(3, X)).result()


def test_what_would_take_long_has_no_value() -> None:
    limits = (X, 1, 3)
    for costly in (Derivative(X**2, X), Integral(X, limits), Limit(X, X, 1), Product(X, limits), Sum(X, limits)):
        assert worker._value(1 + costly) is None
    assert worker._value(1 / Symbol("x") * 0 + 5) == 5 and worker._value(zoo) is None and worker._value(nan) is None
    assert worker._value(oo + X) is None and worker._value(oo * X + I) is None, "only its real part has no bound"


def test_numbers_that_no_float_can_hold_still_differ() -> None:
    huge, larger = (worker._value(Integer(10) ** n) for n in (400, 401))
    assert huge.real >= worker.LARGE and worker._is_far(huge, (larger,)) and not worker._is_far(huge, (huge,))
    assert worker._value(-(Integer(10) ** 400)) == -huge
    assert worker._value(Integer(7)) == 7 and worker._value(7 * I) == 7j


FAR = [
    (1.0, (1.0005,), False),
    (1.0, (1.002,), True),
    (1.002, (1.0,), True),
    (0.0, (0.0005,), False),
    (0.0, (0.002,), True),
    (2000.0, (2001.0,), False),
    (2000.0, (2003.0,), True),
    (1.0, (5.0, 1.0), False),
    (1.0, (5.0, 6.0), True),
    (1.0, (), True),
]


def test_far_is_relative_to_the_larger_and_to_one() -> None:
    wrong = [(value, others, is_far) for value, others, is_far in FAR if worker._is_far(value, others) is not is_far]
    assert wrong == []


def test_one_part_without_a_partner_is_enough_to_differ() -> None:
    assert worker._clearly_differ((1.0, 2.0), (1.0,)) and worker._clearly_differ((1.0,), (1.0, 2.0))
    assert not worker._clearly_differ((1.0, 2.0), (2.0, 1.0))
    assert not worker._clearly_differ(None, (1.0,)) and not worker._clearly_differ((1.0,), None)


def test_exact_numbers_are_compared_exactly() -> None:
    same = worker._same_number
    assert same(Integer(2), Rational(4, 2)) is True and same(Integer(2), Integer(3)) is False
    assert same(sqrt(8), 2 * sqrt(2)) is True and same(sqrt(2), sqrt(3)) is None
    assert same(sqrt(2), Integer(1)) is None and same(Integer(1), sqrt(2)) is None
    assert same(Float(0.5), Rational(1, 2)) is True and same(Rational(1, 2), Float(0.5)) is True
    assert same(Float(0.333333), Rational(1, 3)) is None, "it may be rounded"
    assert same(X, Integer(1)) is None and same(Integer(1), X) is None
    assert same(FiniteSet(1), Integer(1)) is None


def test_what_is_rounded_may_be_off_by_more() -> None:
    near = Rational(355, 113)  # of pi, by 8e-8
    assert not worker._is_same(pi, near) and not worker._is_same(near, pi)
    assert worker._is_same(pi, Float(near)) and worker._is_same(Float(near), pi)
    assert not worker._is_same(pi, Float(3.1417)), "by 3e-5"
    assert worker._is_same(Integer(2), Integer(2)) and not worker._is_same(Integer(2), Integer(3))
    far_out = sqrt(2) * (1 + Rational(1, 10**13))
    assert worker._is_same(sqrt(2), far_out) and not worker._is_same(sqrt(2), sqrt(2) * (1 + Rational(1, 10**11)))
    assert worker._is_same(E, exp(1)) and not worker._is_same(pi, -pi)


def test_numbers_must_find_their_equals_on_both_sides() -> None:
    assert worker._agrees(FiniteSet(1, 2), FiniteSet(2, 1))
    assert not worker._agrees(FiniteSet(1), FiniteSet(1, 2)) and not worker._agrees(FiniteSet(1, 2), FiniteSet(1))
    assert worker._agrees(X, FiniteSet(1)) and worker._agrees(FiniteSet(1), X), "nothing to compare"
    assert not worker._agrees(Interval(0, 1), Interval(0, 2)) and worker._agrees(Interval(0, 1), Interval(0, 1))
    assert worker._agrees(Tuple(1, X), Tuple(1, X)) and not worker._agrees(Tuple(1, X), Tuple(2, X))
    assert worker._parts(Interval(0, oo)) == [0, oo] and worker._parts(X) == [X]


LATEX = {
    "$5$": "5",
    r"30^\circ": r"(30\cdot\pi/180)",
    r"x^\circ": r"(x\cdot\pi/180)",
    r"\theta^\circ": r"(\theta\cdot\pi/180)",
    r"(a+b)^\circ": r"((a+b)\cdot\pi/180)",
    "3!^2": "(3!)^2",
    "n!^2": "(n!)^2",
    r"1 \land 2 \lor 3": "1 , 2 , 3",
    r"\lambda": r"\lambda",
    "2i": "2 i ",
    "x_i": "x_i",
    "pi": "pi",
}


def test_the_parser_gets_what_it_can_read() -> None:
    assert {expression: worker._to_latex(expression) for expression in LATEX} == LATEX


# -- the process -----------------------------------------------------------------------------------------------------


def test_a_comparison_says_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = io.BytesIO()
    assert worker._compare_in_stages("x+1", "1+x", progress) and progress.getvalue() == b".."

    def readings(expression: str) -> None:
        if expression == "bad":
            raise ValueError
        if expression == "large":
            raise MemoryError

    monkeypatch.setattr(worker, "_readings", readings)
    progress = io.BytesIO()
    assert worker._compare_in_stages("good", "bad", progress) is False and progress.getvalue() == b"."
    with pytest.raises(MemoryError):
        worker._compare_in_stages("large", "good", progress)


class Exit(BaseException):
    """Instead of the end of the process."""


def algebra(monkeypatch: pytest.MonkeyPatch, *lines: str) -> tuple[bytes, list[float], int]:
    def leave(status: int) -> None:
        raise Exit(status)

    limits: list[float] = []
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(worker, "_limit_cpu", limits.append)
    progress = io.BytesIO()
    with pytest.raises(Exit) as exit_:
        worker._do_algebra(io.BytesIO("".join(f"{line}\n" for line in lines).encode()), progress)
    return progress.getvalue(), limits, exit_.value.args[0]


def test_the_child_answers_one_request_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = json.dumps({"first": "x+1", "second": "1+x", "seconds": 3.0})
    second = json.dumps({"first": "x+1", "second": "x", "seconds": 4.0})
    assert algebra(monkeypatch, first, second) == (b"..=..!", [3.0, 4.0], 0)
    assert algebra(monkeypatch, first, "nonsense") == (b"..=", [3.0], 1)


def test_the_processor_time_of_a_comparison_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, int]] = []
    monkeypatch.setattr(worker, "_limit", lambda name, value: limits.append((name, value)))
    monkeypatch.setattr(time, "process_time", lambda: 2.25)
    worker._limit_cpu(1.5)
    assert limits == [("RLIMIT_CPU", 5)], "what was used before does not count, and a second more is granted"


def test_a_limit_is_not_moved_above_the_systems_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hard = resource.RLIM_INFINITY
    moved: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: moved.append((kind, limits)))
    worker._limit("RLIMIT_CORE", 7)
    hard = 5
    worker._limit("RLIMIT_CORE", 7)
    hard = 9
    worker._limit("RLIMIT_CORE", 7)
    kind = resource.RLIMIT_CORE
    assert moved == [(kind, (7, resource.RLIM_INFINITY)), (kind, (5, 5)), (kind, (7, 9))]


class Child:
    """Gives the replies it is told to; None is a child that is out of time."""

    replies: list[dict[str, bool | str] | None]
    made = 0

    def __init__(self, replies: io.BytesIO) -> None:
        type(self).made += 1

    def ask(self, request: bytes, seconds: float) -> dict[str, bool | str] | None:
        assert json.loads(request)["seconds"] == seconds
        return self.replies.pop(0)

    def end(self) -> str:
        return "second"


def test_a_child_that_is_out_of_time_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_Child", Child)
    Child.made, Child.replies = 0, [{"equal": True}, {"equal": False}, None, {"equal": True}]
    replies = io.BytesIO()
    worker.serve([json.dumps({"seconds": float(number)}).encode() for number in range(4)], replies)
    said = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert said == [{"equal": True}, {"equal": False}, {"gave_up": "second"}, {"equal": True}] and Child.made == 2


def started(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, object]], list[tuple[str, int]], list[object]]:
    replies, limits, served = io.BytesIO(), [], []
    monkeypatch.setattr(worker, "_claim_stdout", lambda: replies)
    monkeypatch.setattr(worker, "_limit", lambda name, value: limits.append((name, value)))
    monkeypatch.setattr(worker, "serve", lambda requests, out: served.append((requests, out)))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(worker.logging, "disable", lambda level: None)  # it would silence the tests after this one
    worker.main()
    return [json.loads(line) for line in replies.getvalue().splitlines()], limits, served


def test_the_process_says_that_it_is_ready_once_it_has_compared_something(monkeypatch: pytest.MonkeyPatch) -> None:
    said, limits, served = started(monkeypatch)
    assert said == [{"ready": True}] and len(served) == 1 and served[0][1] is worker._claim_stdout()
    assert limits == [("RLIMIT_CORE", 0), ("RLIMIT_AS", worker.MEMORY_LIMIT_BYTES)]


def test_the_process_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(first: str, second: str) -> bool:
        raise ImportError("no module named sympy")

    monkeypatch.setattr(worker, "compare", compare)
    said, _, served = started(monkeypatch)
    assert said == [{"failed": "no module named sympy"}] and not served


def test_a_child_of_its_own_does_the_algebra(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Forked here; what it stumbles over is told by how many expressions it has read."""
    real = worker._readings

    def readings(expression: str) -> object:
        if expression == "slow":
            time.sleep(1000)
        if expression == "dead":
            os._exit(1)
        return real(expression)

    def asked(first: str, second: str, seconds: float) -> object:
        request = {"first": first, "second": second, "seconds": seconds}
        return child.ask(json.dumps(request).encode() + b"\n", seconds)

    monkeypatch.setattr(worker, "_readings", readings)
    for pair, stage in ((("slow", "x"), "first"), (("x", "slow"), "second"), (("dead", "x"), "first")):
        with open(os.devnull, "wb") as replies:  # noqa: PTH123
            child = worker._Child(replies)
        assert asked("x+1", "1+x", 60.0) == {"equal": True} and asked("x+1", "x", 60.0) == {"equal": False}
        assert asked(*pair, 60.0 if "dead" in pair else 0.5) is None and child.end() == stage


def test_a_library_that_prints_does_not_garble_the_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    reader, writer = os.pipe()
    monkeypatch.setattr(os, "dup", lambda descriptor: writer if descriptor == 1 else -1)
    monkeypatch.setattr(os, "dup2", lambda source, target: copied.append((source, target)))
    with worker._claim_stdout() as replies:
        worker._write(replies, {"equal": True})
    assert os.read(reader, 100) == b'{"equal": true}\n' and copied == [(2, 1)], "what is printed goes to stderr"
    os.close(reader)

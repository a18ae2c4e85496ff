import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.core.errors import EngineError, UserError
from gambit.text import _grader_worker, answers
from gambit.text.answers import AnswerKind, Grader, canonical, extractor_for

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "answers.jsonl").read_text().splitlines()]
READY = "print('{\"ready\": true}', flush=True);"
NEEDS_WORKER = ("x=5", "5")  # equal, but not by canonical form


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(deadline_seconds=20.0) as shared:
        yield shared


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{x+1}", "x+1"),
        (r"\boxed 5", "5"),
        (r"\boxed5.", "5"),
        (r"\boxed B.", "B"),
        (r"use the \boxed notation", None),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1}</think> it is \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> it is 2", "1"),
        (r"\boxed{2}</think>a</think>\boxed{3} b", "3"),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{4}, I write \boxed{}", "4"),
        (r"\boxed{12", None),
        (r"\boxed{3} or \boxed{\frac{1}{2}", "3"),
        (r"\boxed{\frac{1}{2} or \boxed{3}", "3"),
        ("no box", None),
        ("", None),
    ],
)
def test_boxed(text: str, expected: str | None) -> None:
    assert extractor_for(AnswerKind.BOXED)(text) == expected


def test_a_flood_of_unclosed_boxes_is_read_in_one_pass() -> None:
    start = time.monotonic()
    assert extractor_for(AnswerKind.BOXED)(r"\boxed{" * 50_000) is None
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\textbf{(D)}\ 12}", "D"),
        (r"\boxed{B. 12 apples}", "B"),
        (r"\boxed{b}", "B"),
        ("Answer: B", "B"),
        ("Answer: A\nNo: Answer: B", "B"),
        ("**Answer:** C", "C"),
        ("Answer: (C)", "C"),
        ("answer: b", "B"),
        ("the answer is **D**", "D"),
        ("The correct answer is option A.", "A"),
        ("The answer is B. Option A is wrong, since it", "B"),
        ("so the correct choice is D.", "D"),
        ("The answer is A because it fits", "A"),
        ("we exclude the others.\n(C)", "C"),
        ("so it must be (C).", "C"),
        ("long talk\n\n**B**", "B"),
        ("Answer: A</think>Answer: B", "B"),
        ("A circle has no corners", None),
        ("A", "A"),
        ("The answer is A circle", None),
        (r"\boxed{A circle}", None),
        ("the answer is Blue", None),
        ("the answer is 12", None),
        ("(A) one (B) two\nneither fits", None),
        ("", None),
    ],
)
def test_choice(text: str, expected: str | None) -> None:
    assert extractor_for(AnswerKind.CHOICE)(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{12} of 30", "12"),
        (r"\boxed{12 red apples}", "12"),
        (r"\boxed{3\pi}", r"3\pi"),
        ("It takes 3 of 12 days.", "12"),
        ("costs $1,234.50.", "1,234.50"),
        (r"costs \$5", "5"),
        ("the list 1,2", "2"),
        ("x = -3", "-3"),
        ("x = −3", "−3"),
        ("10-3", "3"),
        ("about 0.75", "0.75"),
        ("about .75", ".75"),
        ("exactly 3/4", "3/4"),
        (r"exactly \frac{3}{4} here", r"\frac{3}{4}"),
        ("a rise of 25%", "25%"),
        ("we get 7 on the 2nd try", "7"),
        ("call it x2 but 9 holds", "9"),
        ("it is 1e3", "1e3"),
        ("12</think>it is 5", "5"),
        ("12</think>it is five", None),
        ("nothing", None),
    ],
)
def test_number(text: str, expected: str | None) -> None:
    assert extractor_for(AnswerKind.NUMBER)(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{Paris} it is", "Paris"),
        ("Answer: Rome\nFinal answer: Paris.", "Paris"),
        ("**Answer:** Paris", "Paris"),
        ("Answer:\n\nParis\n", "Paris"),
        ("the answer is Paris", "Paris"),
        ("I think so\n\n  Paris  \n\n", "Paris"),
        ("answer: Rome</think>Paris", "Paris"),
        ("</think>\n", None),
        ("", None),
    ],
)
def test_text(text: str, expected: str | None) -> None:
    assert extractor_for(AnswerKind.TEXT)(text) == expected


def test_an_extractor_may_be_a_function_and_nothing_else() -> None:
    assert extractor_for(str.upper) is str.upper
    with pytest.raises(UserError, match=r"'box'.*boxed, choice"):
        extractor_for("box")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\frac{1}{2}", "1/2"),
        ("0.50", "1/2"),
        ("3½", "7/2"),
        ("1,234", "1234"),
        ("1,2", "1, 2"),
        ("1, 234", "1, 234"),
        ("(1,234)", "(1, 234)"),
        (r"111, \! 111", "111111"),
        (r"\left( 3, \frac{11 \pi}{8} \right]", r"(3, \frac{11\pi}{8}]"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("(b)", "B"),
        ("e", "e"),
        ("-0", "0"),
        ("1/0", "1/0"),
        ("1e99999", "1e99999"),
        ("$$", ""),
        ("5 m", "5 m"),
    ],
)
def test_canonical(answer: str, expected: str) -> None:
    assert canonical(answer) == expected


LATEX_PIECES = r"\frac \dfrac \sqrt \text{ \left \right \, \! \circ \pi \\ {,} e9 ** cm and"
pieces = st.sampled_from([*"0123456789,./-+ ()[]{}%$°½−πabE=^_\\\n", *LATEX_PIECES.split()])
answer_like = st.lists(pieces, max_size=14).map("".join) | st.text(max_size=20)


@given(answer_like)
def test_canonical_is_idempotent(answer: str) -> None:
    assert canonical(canonical(answer)) == canonical(answer)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_canonical_knows_rationals(top: int, bottom: int) -> None:
    assert canonical(f"{top}/{bottom}") == canonical(rf"\dfrac{{{top}}}{{{bottom}}}")
    assert canonical(f"{top:,}") == canonical(f"{top}.0") == str(top)
    assert canonical(f"{top}/{bottom}") != canonical(f"{top + 1}/{bottom}")


@pytest.mark.parametrize("kind", AnswerKind)
@pytest.mark.parametrize("filler", [" ", "*", "1", "1,", "answer is ", "answer:", "{", "(", "\n", "$"])
def test_extraction_is_quick_on_anything(kind: AnswerKind, filler: str) -> None:
    start = time.monotonic()
    extractor_for(kind)(f"the answer {filler * 20_000}!")
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize(
    "answer",
    ["1" * 5000, "1" * 2000, r"\text{" * 150 + "x" + "}" * 150, "½" * 2000, "½ " * 3000, "." * 1999 + "x", "1," * 999],
)
def test_canonical_is_quick_on_anything(answer: str) -> None:
    start = time.monotonic()
    assert canonical(canonical(answer)) == canonical(answer)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("pair", GOLDEN, ids=lambda pair: f"{pair['first']} | {pair['second']}")
def test_golden_pairs(grader: Grader, pair: dict[str, str | bool]) -> None:
    first, second = str(pair["first"]), str(pair["second"])
    assert grader.equivalent(first, second) is pair["equal"]
    assert grader.equivalent(second, first) is pair["equal"]


def perturbed(answer: str) -> str:
    """The last digit one up: 9 becomes 0."""
    return re.sub(r"([0-9])([^0-9]*)$", lambda match: f"{(int(match[1]) + 1) % 10}{match[2]}", answer)


@pytest.mark.parametrize("name", ["aime_2025", "hmmt_2024"])
def test_benchmark_answers(grader: Grader, shared_data: Path, name: str) -> None:
    golds = [json.loads(line)["answer"] for line in (shared_data / f"{name}.jsonl").read_text().splitlines()]
    assert len(golds) == 30
    assert [gold for gold in golds if not grader.grade(f" ${gold}$", gold)] == []
    assert [gold for gold in golds if grader.grade(perturbed(gold), gold)] == []
    assert grader.num_given_up == 0


def test_no_answer_is_never_right(grader: Grader) -> None:
    assert not grader.grade(None, "5")
    assert not grader.grade("", "")
    assert grader.grade("5.0", "5")


def test_plain_comparisons_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_worker_command", lambda: pytest.fail("a worker was started"))
    with Grader() as grader:
        assert grader.equivalent("0.5", r"\frac12")
        assert not grader.equivalent("184321", "184320")
        assert not grader.equivalent("12.5", r"\frac{37}{3}")
        assert not grader.equivalent("x" * 3000, "y")
        assert not grader.equivalent("", "5")


@pytest.fixture(scope="module")
def hasty_grader() -> Iterator[Grader]:
    with Grader(deadline_seconds=0.8) as shared:
        yield shared


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9**9",
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        r"\frac{1}{" * 180 + "2" + "}" * 180,
        "(" * 900 + "x" + ")" * 900,
        "\x00\ud800\n{\\}",
    ],
    ids=["python-power", "latex-power", "digits", "fractions", "parentheses", "bytes"],
)
def test_hostile_answers_end_at_the_deadline(hasty_grader: Grader, hostile: str) -> None:
    assert hasty_grader.equivalent(f"x=5+{len(hostile)}", str(5 + len(hostile))), "the comparison before has done harm"
    start = time.monotonic()
    assert not hasty_grader.equivalent(hostile, "7+x")
    assert time.monotonic() - start < 30.0
    start = time.monotonic()
    assert not hasty_grader.equivalent("7+x", hostile)
    assert time.monotonic() - start < 0.5, "the outcome was not remembered"


def fake_worker(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    """Replaces the grading process; the list grows by one for each start."""
    starts: list[str] = []

    def command() -> list[str]:
        starts.append(code)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(answers, "_worker_command", command)
    return starts


def test_a_worker_that_sleeps_forever_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fake_worker(monkeypatch, READY + "import time; time.sleep(1000)")
    with Grader(deadline_seconds=0.2) as grader:
        assert not grader.equivalent(*NEEDS_WORKER)
        assert grader._worker is None
        assert not grader.equivalent(*reversed(NEEDS_WORKER))
        assert (len(starts), grader.num_given_up) == (1, 1)
        monkeypatch.undo()
        assert not grader.equivalent(*NEEDS_WORKER)
        grader._deadline_seconds = 20.0
        assert grader.equivalent("y=5", "5")


def test_a_worker_that_babbles_without_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, READY + "import time; input()\nwhile True: print(1, end='', flush=True); time.sleep(0.01)")
    with Grader(deadline_seconds=0.2) as grader:
        assert not grader.equivalent(*NEEDS_WORKER)
        assert grader.num_given_up == 1


def test_a_worker_that_talks_nonsense_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, READY + "\nwhile input(): print('equal', flush=True)")
    with Grader() as grader:
        assert not grader.equivalent(*NEEDS_WORKER)
        assert grader.num_given_up == 1


def test_a_crashing_worker_counts_as_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = fake_worker(monkeypatch, READY + "input(); import os; os._exit(3)")
    with Grader() as grader:
        assert not grader.equivalent("x=5", "5")
        assert not grader.equivalent("x=6", "6")
        assert (len(starts), grader.num_given_up) == (2, 2)


def test_a_worker_that_died_while_idle_costs_nothing(grader: Grader) -> None:
    assert grader.equivalent("u=5", "5")
    assert grader._worker is not None
    grader._worker._process.kill()
    grader._worker._process.wait()
    assert grader.equivalent("u=6", "6")
    assert grader.num_given_up == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [("raise SystemExit(1)", "did not start"), ('print(\'{"failed": "no sympy"}\')', "no sympy.*math-verify==0.9.0")],
)
def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    fake_worker(monkeypatch, code)
    with Grader() as grader, pytest.raises(EngineError, match=message):
        grader.equivalent(*NEEDS_WORKER)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, READY + "\nwhile input(): print('{\"equal\": true}', flush=True)")
    with Grader(cache_size=3) as grader:
        assert all(grader.equivalent(f"x={i}", "z") for i in range(10))
        assert len(grader._cache) == 3


def test_a_deadline_must_be_positive() -> None:
    with pytest.raises(UserError, match=r"deadline_seconds is 0"):
        Grader(deadline_seconds=0)


def test_any_thread_may_grade(grader: Grader) -> None:
    def check(i: int) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return grader.equivalent(f"x={i}", str(i)) and not grader.equivalent(f"x={i}", str(i + 1))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(16)))


PARENT = """
import sys, threading, time
from gambit.text.answers import Grader
grader = Grader(deadline_seconds={deadline})
assert grader.equivalent("x=5", "5")
print(grader._worker._process.pid, flush=True)
{then}
"""


def start_parent(then: str, deadline: float = 20.0) -> tuple[subprocess.Popen[str], int]:
    code = PARENT.format(then=then, deadline=deadline)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def is_running(pid: int) -> bool:
    """Zombies do not count: outside a test somebody reaps them."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").is_dir() else True
    return False


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("then", ["time.sleep(100)", "grader.equivalent('10^{10^{10}}', '7+x')"], ids=["idle", "busy"])
def test_no_orphan_when_the_parent_is_killed(then: str) -> None:
    parent, worker = start_parent(then, deadline=1.0)
    time.sleep(0.3)  # long enough to be busy, too short for the deadline
    assert is_running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    assert eventually(lambda: not is_running(worker), seconds=10.0)


@pytest.mark.parametrize("then", ["", "grader.close()"])
def test_no_orphan_when_the_parent_ends(then: str) -> None:
    parent, worker = start_parent(then)
    parent.communicate(timeout=20)
    assert parent.returncode == 0
    assert eventually(lambda: not is_running(worker), seconds=5.0)


def test_a_closed_grader_starts_again(grader: Grader) -> None:
    assert grader.equivalent("v=5", "5")
    grader.close()
    assert grader._worker is None
    assert grader.equivalent("v=6", "6")


def test_the_worker_bears_lower_limits_of_the_system() -> None:
    limits = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 * 1024**3, 2 * 1024**3))\n"
    parent = subprocess.run(
        [sys.executable, "-c", limits + PARENT.format(then="", deadline=20.0)], capture_output=True, text=True
    )
    assert (parent.returncode, parent.stderr) == (0, "")


def test_plain_notation_is_read_as_latex() -> None:
    assert _grader_worker._to_latex("2*sqrt((1+sqrt(3))/2)") == r"2 \cdot \sqrt{(1+\sqrt{3})/2}"
    assert _grader_worker._to_latex("$sqrt(2$ + pi") == r"sqrt(2 + \pi "


FORMS = (
    r"\frac{3}{4}", "0.75", r"\frac{\sqrt{3}}{2}", "0.866", "x^2+2x+1", "(x+1)^2", "x = 3", "3", "y = 2x + 3", "2x+3",
    r"(3, \frac{\pi}{2})", r"\left(3, 1.570796\right)", "(-\\infty, 2)", "x < 2", "[0,1]", "(0,1)", "0, 1", "1, 0",
    r"\text{Evelyn}", "evelyn", "6 - 5i", "-5i + 6", r"\begin{pmatrix}1\\2\end{pmatrix}", r"10\%", "0.1", "10", "e^{x}",
    r"\frac{1}{x}", "x^{-1}", r"\int_0^1 x\,dx",
)  # fmt: skip


@pytest.mark.slow
def test_no_pair_that_math_verify_calls_equal_is_turned_away_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(first, second) for place, first in enumerate(FORMS) for second in FORMS[:place]]
    quick = [_grader_worker._compare_safely(*pair) for pair in pairs]
    turned_away = [
        _grader_worker._clearly_differ(a.values, b.values)
        for first, second in pairs
        for a in _grader_worker._readings(first)
        for b in _grader_worker._readings(second)
    ]
    monkeypatch.setattr(_grader_worker, "_clearly_differ", lambda first, second: False)
    assert quick == [_grader_worker._compare_safely(*pair) for pair in pairs]
    assert sum(quick) >= 10
    assert sum(turned_away) >= len(pairs) // 2

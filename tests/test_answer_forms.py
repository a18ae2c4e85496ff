"""The normal form of answers, and which answers are equal by golden/answers.jsonl."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.text.answers import Grader, canonical
from gambit.text.answers.forms import MAX_DEPTH, Group, Kind, Matrix, Value, read
from gambit.text.answers.relations import solution_of
from gambit.text.answers.units import split_unit

GOLDEN = [json.loads(line) for line in (Path(__file__).parent / "golden" / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(comparison_seconds=60.0) as shared:
        yield shared


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
        ("8 n^2", "8 n^2"),
        (r"5\text{ m}^2", "5 meter^2"),
        ("12 sq. ft.", "12 foot^2"),
        ("0.3333333", "0.3333333"),
        ("0.50000000", "1/2"),
        ("2 dozen", "24"),
        ("5 million people", "5000000"),
        ("20 sec", "20 second"),
        (r"3412_{\text{five}}", "3412_5"),
        (r"x \leq 4", r"x\in(-\infty, 4]"),
        ("4 > x", r"x\in(-\infty, 4)"),
        (r"\sqrt 3", r"\sqrt{3}"),
        ("2**10", "2^{10}"),
        ("**12**", "12"),
        ("No solution.", "no solution"),
        ("2*sqrt((1+sqrt(3))/2)", r"2\cdot\sqrt{(1+\sqrt{3})/2}"),
    ],
)
def test_canonical(answer: str, expected: str) -> None:
    assert canonical(answer) == expected


LATEX_PIECES = r"\frac \dfrac \sqrt \text{ \left \right \, \! \circ \pi \\ {,} e9 ** cm and or \pm \cup \in < \le sqrt("
pieces = st.sampled_from([*"0123456789,./-+ ()[]{}%$°½−πabE=^_\\\n:;|", *LATEX_PIECES.split(), r"\begin{pmatrix}", "&"])
answer_like = st.lists(pieces, max_size=14).map("".join) | st.text(max_size=20)


@given(answer_like)
def test_canonical_is_idempotent(answer: str) -> None:
    assert canonical(canonical(answer)) == canonical(answer)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_canonical_knows_rationals(top: int, bottom: int) -> None:
    assert canonical(f"{top}/{bottom}") == canonical(rf"\dfrac{{{top}}}{{{bottom}}}")
    assert canonical(f"{top:,}") == canonical(f"{top}.0") == str(top)
    assert canonical(f"{top}/{bottom}") != canonical(f"{top + 1}/{bottom}")


FLOODS = ("1", "½", "½ ", "1,", "a ", ".", "(", r"\text{", "~", "sqrt(", r"\frac{1}", "cm ", "cm/", "x=", "A1", "A 1,")
NORMALIZE = """
from gambit.text.answers import canonical
answers = [(flood * 2000)[:1990] + tail for flood in {floods!r} for tail in ("", "x", " cm", "_5", ")")]
for answer in [*answers, "1" * 5000, r"\\text{{" * 150 + "x" + "}}" * 150]:
    assert canonical(canonical(answer)) == canonical(answer)
"""


def test_no_answer_takes_long_to_normalize() -> None:
    """Some milliseconds each; a pattern that tries everything with everything takes for ever."""
    subprocess.run([sys.executable, "-c", NORMALIZE.format(floods=FLOODS)], check=True, timeout=120)


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("x = 12\\text{ cm}", Value("12", Kind.NUMBER, "centimeter", "x")),
        ("(3, 4]", Group((Value("3", Kind.NUMBER), Value("4", Kind.NUMBER)), "(", "]")),
        ("B and C", Group((Value("B", Kind.WORD), Value("C", Kind.WORD)))),
        (r"\begin{bmatrix}1&x\end{bmatrix}", Matrix(((Value("1", Kind.NUMBER), Value("x")),))),
        ("212_3", Value("212_3", Kind.WORD)),
        ("2x + y = 5", Value("2x+y=5")),
        ("y = 2x", Value("2x", name="y")),
        ("xy = 5", Value("xy=5")),
        ("AB = 5", Value("5", Kind.NUMBER, name="AB")),
    ],
)
def test_structure(answer: str, form: Value | Group | Matrix) -> None:
    assert read(answer) == form


def depth_of(form: Value | Group | Matrix) -> int:
    return 1 + max((depth_of(item) for item in form.items), default=0) if isinstance(form, Group) else 0


@pytest.mark.parametrize(("opening", "closing"), [(r"1, (", ")"), (r"1 \cup (2, ", ")"), (r"(1, \{2, ", r"\})")])
def test_structure_is_read_to_a_limited_depth(opening: str, closing: str) -> None:
    assert depth_of(read(f"{opening * 2}0{closing * 2}")) >= 2
    assert depth_of(read(f"{opening * 30}0{closing * 30}")) <= MAX_DEPTH + 2


def test_braces_that_only_group_are_no_structure() -> None:
    assert read("{3}") == read("(3)") == Value("3", Kind.NUMBER)
    assert read(r"\{3\}") == Group((Value("3", Kind.NUMBER),), r"\{", r"\}")
    assert not isinstance(read("[3]"), Group)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2 < x < 7", ("x", "(2, 7)")),
        (r"7 \ge x > 2", ("x", "(2, 7]")),
        ("2 < x < y", None),
        ("y < x < 2", None),
        ("y < x < z", None),
        ("2 < 3 < 4", None),
        ("2 < x > 7", None),
        ("x < 5", ("x", r"(-\infty, 5)")),
        ("5 < x", ("x", r"(5, \infty)")),
        ("x < y", None),
    ],
)
def test_inequalities_are_sets_where_their_bounds_are_constants(text: str, found: tuple[str, str] | None) -> None:
    assert solution_of(text) == found


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("30 miles per hour", ("30", "mile/hour")),
        (r"12\pi cm^2", (r"12\pi", "centimeter^2")),
        ("12 units", ("12", "")),
        ("7 small cats", ("7", "")),
        ("2 sin x", ("2 sin x", "")),
        ("east", ("east", "")),
        ("x min", ("x min", "")),
        (r"2\cos 15^\circ", (r"2\cos 15^\circ", "")),
        (r"5^\circ F", ("5", "fahrenheit")),
        ("9 am", ("9", "am")),
    ],
)
def test_units(answer: str, expected: tuple[str, str]) -> None:
    assert split_unit(answer) == expected


@pytest.mark.parametrize("pair", GOLDEN, ids=lambda pair: f"{pair['first']} | {pair['second']}")
def test_golden_pairs(grader: Grader, pair: dict[str, str | bool]) -> None:
    first, second = str(pair["first"]), str(pair["second"])
    assert grader.equivalent(first, second) is pair["equal"]
    assert grader.equivalent(second, first) is pair["equal"]
    assert grader.equivalent(first, first) is bool(canonical(first))


def perturbed(answer: str) -> str:
    """The last digit one up: 9 becomes 0."""
    return re.sub(r"([0-9])([^0-9]*)$", lambda match: f"{(int(match[1]) + 1) % 10}{match[2]}", answer)


@pytest.mark.parametrize(("name", "number"), [("aime_2025", 30), ("hmmt_2024", 30), ("math500_dev", 200)])
def test_benchmark_answers(grader: Grader, shared_data: Path, name: str, number: int) -> None:
    golds = [json.loads(line)["answer"] for line in (shared_data / f"{name}.jsonl").read_text().splitlines()]
    with_digits = [gold for gold in golds if re.search("[0-9]", gold)]
    assert len(golds) == number
    assert [gold for gold in golds if not grader.grade(f" ${gold}$.", gold)] == []
    assert [gold for gold in with_digits if grader.grade(perturbed(gold), gold)] == []
    assert grader.num_given_up == 0


def test_answers_are_normalized_without_symbolic_maths() -> None:
    code = (
        "import sys; from gambit.text.answers import Grader; assert Grader().equivalent('x = 5 cm', '5');"
        "assert not {'sympy', 'math_verify', 'latex2sympy2_extended', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

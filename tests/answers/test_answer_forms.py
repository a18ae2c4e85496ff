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

from gambit.answers import Grader, canonical
from gambit.answers.forms import MAX_ANSWER_LENGTH, MAX_DEPTH, Group, Kind, Matrix, Value, read, solution_of
from gambit.answers.spelling import split_unit
from support import GOLDEN as KEPT
from support.tables import table

GOLDEN = [json.loads(line) for line in (KEPT / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(comparison_seconds=60.0) as shared:
        yield shared


CANONICAL = {
    r"\frac{1}{2}": "1/2",
    "0.50": "1/2",
    "3½": "7/2",
    "1,234": "1234",
    "1,2": "1, 2",
    "1, 234": "1, 234",
    "(1,234)": "(1, 234)",
    r"111, \! 111": "111111",
    r"\left( 3, \frac{11 \pi}{8} \right]": r"(3, \frac{11\pi}{8}]",
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": r"\begin{pmatrix}1\\2\end{pmatrix}",
    "(b)": "B",
    "e": "e",
    "-0": "0",
    "1/0": "1/0",
    "1e99999": "1e99999",
    "$$": "",
    "5 m": "5 m",
    "8 n^2": "8 n^2",
    r"5\text{ m}^2": "5 meter^2",
    "12 sq. ft.": "12 foot^2",
    "0.3333333": "0.3333333",
    "0.50000000": "1/2",
    "2 dozen": "24",
    "5 million people": "5000000",
    "20 sec": "20 second",
    r"3412_{\text{five}}": "3412_5",
    r"x \leq 4": r"x\in(-\infty, 4]",
    "4 > x": r"x\in(-\infty, 4)",
    r"\sqrt 3": r"\sqrt{3}",
    "2**10": "2^{10}",
    "**12**": "12",
    "No solution.": "no solution",
    "90°": r"90^\circ",
    "28 percent": "28%",
    "20 degrees Fahrenheit": "20 fahrenheit",
    "x = 145 deg": r"x=145^\circ",
    "$5": "5 dollar",
    "$5$": "5",
    "-$5.50": "-11/2 dollar",
    "$x$ and $y$": "x, y",
    "√(2)": r"\sqrt{2}",
    "sqrt(2": "sqrt(2",
    "sqrt(sqrt(2)+1)": r"\sqrt{\sqrt{2}+1}",
    r"0.1\overline{6}": "1/6",
    r"2.\overline{3}": "7/3",
    r"-.\overline{45}": "-5/11",
    r"1.20\overline{5}": "217/180",
    r"-3\frac{1}{2}": "-7/2",
    "-3 1/2": "-7/2",
    r"\frac{1}{0}": r"\frac{1}{0}",
    "1.5 Million": "1500000",
    "-0.1234567": "-0.1234567",
    "-12.3456789": "-12.3456789",
    "0.12345": "2469/20000",
    "0.123456": "0.123456",
    "1/64": "1/64",
    "1/128": "1/128",
    "0.000001": "0.000001",
    "1" * 400: "1" * 400,
    "0" * 398 + ".5": "1/2",
    "0" * 399 + ".5": "0" * 399 + ".5",
    "0" * 397 + "1_2": "1_2",
    "0" * 398 + "1_2": "0" * 398 + "1_2",
    "12 345": "12345",
    "5,100,2": "5, 100, 2",
    "0101_2": "101_2",
    "000_2": "0_2",
    "-(1 01)_{2}": "-101_2",
    ".1_2": "0.1_2",
    "12_{ten}": "12",
    "12.50_{10}": "25/2",
    "1F base 16": "1F_16",
    "1G_{16}": "1G_{16}",
    "1G_{17}": "1G_17",
    "11_1": "11_1",
    "1,2_3": "1, 2_3",
    r"x \ne 3": r"x\in(-\infty, 3)\cup(3, \infty)",
    r"3 \le x": r"x\in[3, \infty)",
    r"-2 \le x < 7": r"x\in[-2, 7)",
    "x < 1 or x > 2": r"x\in(-\infty, 1)\cup(2, \infty)",
    "x < 1 or y > 2": r"x\in(-\infty, 1), y\in(2, \infty)",
    r"x < 1 \land y > 2": r"x<1\land y>2",
    "1 or 2": "1, 2",
    "2, 2": "2",
    r"\{2, 2, 3\}": r"\{2, 3\}",
    "(2, 2)": "(2, 2)",
    r"\langle 1, 2 \rangle": "(1, 2)",
    r"3 \pm \sqrt{2}": r"3+\sqrt{2}, 3-\sqrt{2}",
    r"\pm 2": "2, -2",
    r"\pm 1 \pm 2": r"\pm 1\pm 2",
    r"x = 2 + 3 = 5": "x=5",
    "2 + 3 = 5": "5",
    "a + b = 5": "a+b=5",
    "f(x) = 2": "f(x)=2",
    "(x, y) = (1, 2)": r"(x,y)\in(1, 2)",
    r"A = \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}": r"A=\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{pmatrix} 1, 2 \end{pmatrix}, 3": r"\begin{pmatrix}1, 2\end{pmatrix}, 3",
    "AB": "AB",
    "Yes": "yes",
    "3:20": "3:20",
    "2*sqrt((1+sqrt(3))/2)": r"2\cdot\sqrt{(1+\sqrt{3})/2}",
}


def test_canonical() -> None:
    assert {answer: canonical(answer) for answer in CANONICAL} == CANONICAL


def test_an_escaped_dollar_stays_one_beside_a_bare_one() -> None:
    assert canonical(r"$5 + \$6") == canonical(r"\$5 + \$6")


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
from gambit.answers import canonical
answers = [(flood * 2000)[:1990] + tail for flood in {floods!r} for tail in ("", "x", " cm", "_5", ")")]
for answer in [*answers, "1" * 5000, r"\\text{{" * 150 + "x" + "}}" * 150]:
    assert canonical(canonical(answer)) == canonical(answer)
"""


def test_no_answer_takes_long_to_normalize() -> None:
    """Some milliseconds each; a pattern that tries everything with everything takes for ever."""
    subprocess.run([sys.executable, "-c", NORMALIZE.format(floods=FLOODS)], check=True, timeout=120)


STRUCTURES = {
    "x = 12\\text{ cm}": Value("12", Kind.NUMBER, "centimeter", "x"),
    "(3, 4]": Group((Value("3", Kind.NUMBER), Value("4", Kind.NUMBER)), "(", "]"),
    "B and C": Group((Value("B", Kind.WORD), Value("C", Kind.WORD))),
    r"\begin{bmatrix}1&x\end{bmatrix}": Matrix(((Value("1", Kind.NUMBER), Value("x")),)),
    "212_3": Value("212_3", Kind.WORD),
    "2x + y = 5": Value("2x+y=5"),
    "y = 2x": Value("2x", name="y"),
    "xy = 5": Value("xy=5"),
    "AB = 5": Value("5", Kind.NUMBER, name="AB"),
}


def test_structure() -> None:
    assert {answer: read(answer) for answer in STRUCTURES} == STRUCTURES


def depth_of(form: Value | Group | Matrix) -> int:
    return 1 + max((depth_of(item) for item in form.items), default=0) if isinstance(form, Group) else 0


@table(("opening", "closing", "levels"), [(r"1, (", ")", 1), (r"1 \cup (2, ", ")", 2), (r"(1, \{2, ", r"\})", 2)])
def test_structure_is_read_to_a_limited_depth(opening: str, closing: str, levels: int) -> None:
    for times in (1, 2, 3, 4, 6, 30):
        expected = min(times * levels, MAX_DEPTH + 1)
        assert depth_of(read(f"{opening * times}0{closing * times}")) == expected


def test_an_answer_that_is_too_long_is_a_word() -> None:
    prose = "7 + " * 500 + "1"
    assert read(prose) == Value(prose, Kind.WORD)
    longest = "Xy" * (MAX_ANSWER_LENGTH // 2)
    assert canonical(longest) == longest.lower() and canonical(longest + "z") == longest + "z"
    longest = "x+" * (MAX_ANSWER_LENGTH // 2 - 1) + "yz"
    assert read(longest) == Value(longest, Kind.EXPRESSION)


def test_braces_that_only_group_are_no_structure() -> None:
    assert read("{3}") == read("(3)") == Value("3", Kind.NUMBER)
    assert read(r"\{3\}") == Group((Value("3", Kind.NUMBER),), r"\{", r"\}")
    assert not isinstance(read("[3]"), Group)


SOLUTIONS = {
    "2 < x < 7": ("x", "(2, 7)"),
    r"7 \ge x > 2": ("x", "(2, 7]"),
    "2 < x < y": None,
    "y < x < 2": None,
    "y < x < z": None,
    "2 < 3 < 4": None,
    "2 < x > 7": None,
    "x < 5": ("x", r"(-\infty, 5)"),
    "5 < x": ("x", r"(5, \infty)"),
    "x < y": None,
}


def test_inequalities_are_sets_where_their_bounds_are_constants() -> None:
    assert {text: solution_of(text) for text in SOLUTIONS} == SOLUTIONS


UNITS = {
    "30 miles per hour": ("30", "mile/hour"),
    r"12\pi cm^2": (r"12\pi", "centimeter^2"),
    "12 units": ("12", ""),
    "7 small cats": ("7", ""),
    "2 sin x": ("2 sin x", ""),
    "east": ("east", ""),
    "x min": ("x min", ""),
    r"2\cos 15^\circ": (r"2\cos 15^\circ", ""),
    r"5^\circ F": ("5", "fahrenheit"),
    r"5^\circ C": ("5", "celsius"),
    r"5^\circ": ("5", "degree"),
    "20 degrees Celsius": ("20", "celsius"),
    "20 degrees east": ("20", ""),
    "9 am": ("9", "am"),
    "3:20 P.M.": ("3:20", "pm"),
    r"28\ \%": ("28", "percent"),
    "%": ("%", ""),
    r"-\$5": ("-5", "dollar"),
    "€5": ("5", "euro"),
    "£ 5": ("5", "sterling"),
    "¥5": ("5", "yen"),
    "₹5": ("5", "rupee"),
    "30 m/s": ("30", "meter/second"),
    "30 km/h": ("30", "kilometer/hour"),
    "30 km/h/s": ("30 km/h/s", ""),
    "30 m": ("30 m", ""),
    "30 M": ("30 M", ""),
    "12 square feet": ("12", "foot^2"),
    "12 cubic cm": ("12", "centimeter^3"),
    "12 Cubic Inches": ("12", "inch^3"),
    "12 ft squared": ("12", "foot^2"),
    "12 cm^{3}": ("12", "centimeter^3"),
    "12 sq units": ("12", ""),
    "12 cm mm": ("12 cm", "millimeter"),
    "12 red apples.": ("12", ""),
    "3 ox": ("3 ox", ""),
    "3 times two": ("3 times two", ""),
    "3 4 cats": ("3 4 cats", ""),
    "two cats": ("two cats", ""),
    r"\frac{1}{2} cup sugar": (r"\frac{1}{2}", ""),
}


def test_units() -> None:
    assert {answer: split_unit(answer) for answer in UNITS} == UNITS


@table("form", sorted({pair.get("form", "others") for pair in GOLDEN}))
def test_golden_pairs(grader: Grader, form: str) -> None:
    """Each pair has its verdict in both orders, and each answer equals itself."""
    wrong = []
    for pair in GOLDEN:
        if pair.get("form", "others") == form:
            first, second = pair["first"], pair["second"]
            verdicts = (grader.equivalent(first, second), grader.equivalent(second, first))
            if verdicts != (pair["equal"],) * 2 or grader.equivalent(first, first) is not bool(canonical(first)):
                wrong.append((first, second, verdicts))
    assert wrong == []


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
        "import sys; from gambit.answers import Grader; assert Grader().equivalent('x = 5 cm', '5');"
        "assert not {'sympy', 'math_verify', 'latex2sympy2_extended', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

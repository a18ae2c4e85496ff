"""Where the final answer of a text is found."""

import subprocess
import sys

import pytest

from gambit.answers import AnswerKind, extractor_for
from gambit.errors import UserError
from support.tables import table

BOXED = {
    r"so \boxed{5}": "5",
    r"\boxed{1} and \boxed{2}": "2",
    r"\boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed {7}": "7",
    r"\fbox{x+1}": "x+1",
    r"\boxed 5": "5",
    r"\boxed5.": "5",
    r"\boxed B.": "B",
    r"use the \boxed notation": None,
    r"\boxed{\boxed{3}}": "3",
    r"\boxed{1}</think> it is \boxed{2}": "2",
    r"<think>\boxed{1}</think> it is 2": "1",
    r"\boxed{2}</think>a</think>\boxed{3} b": "3",
    r"\boxed{}": None,
    r"\boxed{ }": None,
    r"\boxed{4}, I write \boxed{}": "4",
    r"\boxed{4}, I write \boxed{.}": "4",
    r"\boxed{4} \boxed{~$,$ }": "4",
    r"\boxed{2X.}": "2X",
    r"\boxed{12": None,
    r"\boxed{3} or \boxed{\frac{1}{2}": "3",
    r"\boxed{\frac{1}{2} or \boxed{3}": "3",
    "no box": None,
    "": None,
    # Without a box, what is stated after the thinking.
    "</think>**Final Answer:** 48": "48",
    "</think>\nTherefore the answer is $\\frac{4}{9}$. We are done.": r"\frac{4}{9}",
    "</think>**Answer**: \\(8√10\\)": "8√10",
    "</think>The answer is \\[m+n = 279\\]": "m+n = 279",
    "</think>The answer is $5$ for one, but for all the answer is $12$.": "12",
    "</think>Final answer:\n\n279.": "279",
    "</think>The answer is 12 square units. Check it.": "12 square units",
    "</think>The answer is that nobody can know how many.": None,
    "</think>The answer is $7$: \\boxed{70": None,
    "<think>So the answer is 48": None,
    "the answer is 48": None,
    "\\boxed{3}</think>The answer is 4.": "3",
}


def test_boxed() -> None:
    assert {text: extractor_for(AnswerKind.BOXED)(text) for text in BOXED} == BOXED


CHOICES = {
    r"\boxed{B}": "B",
    r"\boxed{\text{(C)}}": "C",
    r"\boxed{\textbf{(D)}\ 12}": "D",
    r"\boxed{B. 12 apples}": "B",
    r"\boxed{b}": "B",
    r"\boxed{\text{Option C}}": "C",
    r"\boxed{\text{option (d)}}": "D",
    r"\boxed{\text{Choice B.}}": "B",
    "Answer: B": "B",
    "Answer: A\nNo: Answer: B": "B",
    "**Answer:** C": "C",
    "Answer: (C)": "C",
    "answer: b": "B",
    "the answer is **D**": "D",
    "The correct answer is option A.": "A",
    "The answer is B. Option A is wrong, since it": "B",
    "so the correct choice is D.": "D",
    "The answer is A because it fits": "A",
    "we exclude the others.\n(C)": "C",
    "so it must be (C).": "C",
    "long talk\n\n**B**": "B",
    "Answer: A</think>Answer: B": "B",
    "A circle has no corners": None,
    "A": "A",
    "The answer is A circle": None,
    r"\boxed{A circle}": None,
    "the answer is Blue": None,
    "the answer is 12": None,
    "(A) one (B) two\nneither fits": None,
    "": None,
}


def test_choice() -> None:
    assert {text: extractor_for(AnswerKind.CHOICE)(text) for text in CHOICES} == CHOICES


NUMBERS = {
    r"\boxed{12} of 30": "12",
    r"\boxed{12 red apples}": "12",
    r"\boxed{3\pi}": r"3\pi",
    "It takes 3 of 12 days.": "12",
    "costs $1,234.50.": "1,234.50",
    r"costs \$5": "5",
    "the list 1,2": "2",
    "x = -3": "-3",
    "x = −3": "−3",
    "10-3": "3",
    "about 0.75": "0.75",
    "about .75": ".75",
    "exactly 3/4": "3/4",
    r"exactly \frac{3}{4} here": r"\frac{3}{4}",
    "a rise of 25%": "25%",
    "we get 7 on the 2nd try": "7",
    "call it x2 but 9 holds": "9",
    "it is 1e3": "1e3",
    "in base five 3412_5": "3412_5",
    "in base twelve 91_{12}.": "91_{12}",
    "in all 12,345,678": "12,345,678",
    "they are 100,101,1022": "1022",
    "they are " + ",".join(map(str, range(100, 200))): "199",
    "12</think>it is 5": "5",
    "12</think>it is five": None,
    "nothing": None,
}


def test_number() -> None:
    assert {text: extractor_for(AnswerKind.NUMBER)(text) for text in NUMBERS} == NUMBERS


TEXTS = {
    r"\boxed{Paris} it is": "Paris",
    "Answer: Rome\nFinal answer: Paris.": "Paris",
    "**Answer:** Paris": "Paris",
    "Answer:\n\nParis\n": "Paris",
    "the answer is Paris": "Paris",
    "I think so\n\n  Paris  \n\n": "Paris",
    "answer: Rome</think>Paris": "Paris",
    "I think so\n\n**Paris**": "Paris",
    'It is\n"Paris."': "Paris",
    'It is\n"Paris".': "Paris",
    "The answer is **Paris**.": "Paris",
    "`Paris`": "Paris",
    "**MAX**": "MAX",
    "</think>\n": None,
    "": None,
}


def test_text() -> None:
    assert {text: extractor_for(AnswerKind.TEXT)(text) for text in TEXTS} == TEXTS


def test_an_extractor_may_be_a_function_and_nothing_else() -> None:
    assert extractor_for(str.upper) is str.upper
    with pytest.raises(UserError, match=r"'box'.*boxed, choice"):
        extractor_for("box")  # type: ignore[arg-type]


FLOODS = (
    " ", "*", "1", "1,", "100,101,", "1,000 ", "1/", "1.", "-", "answer is ", "answer:", "answer a", "answer a. ", "{",
    "(", "\n", "$", r"\boxed{", r"\boxed ", r"\boxed{}", r"\boxed{1}", r"\frac{1", "(A) ", "</think>",
)  # fmt: skip
READ_FLOODS = """
from gambit.answers import AnswerKind, extractor_for
for flood in {floods!r}:
    for tail in ("!", "1000!"):
        extractor_for(AnswerKind({kind!r}))("the answer " + flood * (300_000 // len(flood)) + tail)
extractor_for(AnswerKind({kind!r}))(r"\\boxed{{" * 50_000 + "}}" * 50_000)
"""


@pytest.mark.parametrize("kind", AnswerKind)
def test_extraction_is_linear(kind: AnswerKind) -> None:
    """A few seconds in all; a quadratic pattern takes at least ten minutes for one of these texts."""
    code = READ_FLOODS.format(floods=FLOODS, kind=str(kind))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@table(
    ("kind", "text"),
    [
        (AnswerKind.BOXED, rf"\boxed{{{'7' * 2001}}}"),
        (AnswerKind.CHOICE, rf"\boxed{{{' ' * 2000}B}}"),
        (AnswerKind.NUMBER, "7" * 2001),
        (AnswerKind.TEXT, "word " * 401),
        (AnswerKind.TEXT, f"answer: {'word ' * 401}"),
    ],
)
def test_what_is_longer_than_an_answer_can_be_is_none(kind: AnswerKind, text: str) -> None:
    assert extractor_for(kind)(text) is None


def test_an_overlong_box_leaves_the_one_before() -> None:
    assert extractor_for(AnswerKind.BOXED)(rf"\boxed{{5}} and \boxed{{{'7 + ' * 600}7}}") == "5"
    assert extractor_for(AnswerKind.BOXED)(rf"\boxed{{{'7' * 2000}}}") == "7" * 2000

"""Answers read and graded as a reader would, on texts made from the answers of the authors' problem files."""

import json
import lzma
from collections import Counter

import pytest

from gambit.answers import AnswerKind, Grader, extractor_for
from support.authors import FOLDER, SAMPLE, WHOLE

pytestmark = pytest.mark.contract
UNFINISHED = "nesting: unfinished box"
MOST_MISSED = 20
# A number that cannot be written down, an endless sum and an integral: none of them may hold up a vote.
HOSTILE = (
    r"9^{9^{9^9}}", "10000000!", r"2^{2^{100}}", "9**9**9", r"\int_0^1 e^{-x^{x^{x}}} \sin(\cos(x^{99})) dx",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}", "(" * 900 + "1" + ")" * 900, r"\frac{1}{" * 300 + "2" + "}" * 300,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    with lzma.open(FOLDER / "authors_answers.jsonl.xz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


def answer_of(row):
    kind = AnswerKind.CHOICE if row["set"] == "gpqa" else AnswerKind.BOXED
    return extractor_for(kind)(row["text"])


def test_the_rows_in_the_repository_are_the_whole_set():
    name = "authors_answers.jsonl.xz"
    assert WHOLE is None or (SAMPLE / name).read_bytes() == (WHOLE / name).read_bytes()


def test_rows_with_a_truth_and_a_closed_box_are_read_as_a_reader_would(rows, grader):
    judged = [row for row in rows if row["right"] is not None and row["kind"] != UNFINISHED]
    assert len(judged) == 2379
    missed = [row for row in judged if grader.grade(answer_of(row), row["gold"]) != row["right"]]
    assert len(missed) <= MOST_MISSED, Counter(row["kind"] for row in missed)


def test_an_unfinished_box_is_no_answer(rows):
    unfinished = [row for row in rows if row["kind"] == UNFINISHED]
    assert len(unfinished) == 30 and {answer_of(row) for row in unfinished} == {None}


def test_hostile_answers_are_wrong_and_the_next_one_is_graded(grader):
    for answer in HOSTILE:
        found = extractor_for(AnswerKind.BOXED)(rf"</think>\boxed{{{answer}}}")
        assert not grader.grade(found, "7")
    assert grader.grade(r"\frac{14}{2}", "7")

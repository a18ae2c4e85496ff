"""Answers that are JSON: one spelling for what is the same, and calls of tools."""

import json

import pytest

from gambit.answers import Grader, canonical
from gambit.answers.extract import extract_boxed
from gambit.answers.structured import answered_calls, calls_in, canonical_json, extract_json, read_json, with_calls
from gambit.types import Toolbox

TOOLS = Toolbox((), frozenset({"f", "g"}))


def hermes(*texts):
    return "thinking</think> so " + " ".join(f"<tool_call>{text}</tool_call>" for text in texts)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "b": [2, {"c": null}]}',
        ' {"b":[2.0,{"c":null}],"a":1e0}\n',
        '```json\n{"b": [2, {"c": null}], "a": 1}\n```',
    ],
)
def test_one_value_has_one_spelling(text):
    assert extract_json(f"hm {{ </think>{text}") == '{"a": 1, "b": [2, {"c": null}]}'


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "5", '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 100_000, '{"a": 1} so']
)
def test_what_is_no_object_is_no_answer(text):
    assert extract_json(text) is None


def test_json_is_compared_by_its_spelling_alone():
    texts = ['{"a": "1/2"}', '{"a": "0.5"}', '{"a": "X"}', '{"a": "x"}', '{"a":  1}', '[{"a": 1}]']
    with Grader() as grader:
        for text in texts:
            assert canonical(text) == text
            assert [grader.equivalent(text, other) for other in texts] == [text == other for other in texts]


def test_a_long_value_keeps_its_spaces():
    text = canonical_json({"text": "two  spaces " * 500})
    assert canonical(text) == text


def test_calls_are_read_after_the_thinking():
    call = '{"name": "f", "arguments": {"x": 1}}'
    assert calls_in(hermes(call), TOOLS) == [{"name": "f", "arguments": {"x": 1}}]
    assert calls_in(f"<tool_call>{call}</tool_call></think> no", TOOLS) == []
    assert calls_in(f"</think><tool_call>{call}", TOOLS) == [{"name": "f", "arguments": {"x": 1}}], "cut at its end tag"
    assert calls_in(hermes('{"name": "g"}'), TOOLS) == [{"name": "g", "arguments": {}}]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"name": "h"}', '{"name": 5}', '{"name": "f", "arguments": []}', '{"name": "f"']
)
def test_a_broken_call_is_none_and_no_answer_either(text):
    assert calls_in(hermes('{"name": "f"}', text), TOOLS) == []
    assert with_calls(extract_boxed, TOOLS)(hermes(text) + "\\boxed{5}") is None


def test_an_answer_of_calls_is_read_back():
    answer = with_calls(extract_boxed, TOOLS)(hermes('{"name": "g"}', '{"name": "f", "arguments": {"x": "é"}}'))
    assert answered_calls(answer) == [{"name": "f", "arguments": {"x": "é"}}, {"name": "g", "arguments": {}}]
    assert answer == canonical_json(json.loads(answer)) and "é" in answer
    assert answered_calls("5") == answered_calls(None) == answered_calls('{"a": 1}') == []
    assert with_calls(extract_boxed, TOOLS)("</think>\\boxed{5}") == "5"


def test_whole_numbers_are_integers():
    assert read_json("[1.0, -0.0, 2.5, 1e3]") == [1, 0, 2.5, 1000] and repr(read_json("1.0")) == "1"

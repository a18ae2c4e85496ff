"""Bodies that a hostile client sends: a 400 in one sentence that names the field, whatever the format."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.config.options import SearchConfig
from gambit.serve.http import ApiError, parse_object
from gambit.serve.requests import UNSUPPORTED, ChatFields, CompletionFields, RequestReader, ResponseFields
from gambit.serve.settings import NOBODY
from support.tables import table

pytestmark = pytest.mark.unit
USER = {"role": "user", "content": "a?"}
BODIES = {
    ChatFields: {"model": "M", "messages": [USER]},
    CompletionFields: {"model": "M", "prompt": "a?"},
    ResponseFields: {"model": "M", "input": "a?"},
}
READER = RequestReader(("M",), SearchConfig(budget_seconds=100, capacity=16, policy_options={}), 128, lambda _: 64)
ALL = tuple(BODIES)
TEXTS, NUMBERS, FLAGS = ["", "x", "\0", "1"], [0, -1, 10**30, 1.5, float("1e308")], [True, False]
THINGS = [[], {}, [[]], {"a": {}}, [None]]
LONG = "x" * 5000


def tool(**changes):
    return {"type": "function", "function": {"name": "f", **changes}}


# Fields with values that they do not take, by the formats that have them.
WRONG = [
    *((ALL, "model", value) for value in ["", 5, True, [], {}, ["M"], {"id": "M"}]),
    *((ALL, "n", value) for value in [0, -1, 129, 10**30, 1.5, "1", True, [], {}, "x"]),
    *((ALL, "temperature", value) for value in [-0.1, "0.5", True, [], {}, 1e308, -1e308]),
    *((ALL, "top_p", value) for value in [0, -1, 1.1, "1", True, [], {}]),
    *((ALL, "top_k", value) for value in [-2, 1.5, "1", True, [], {}, 10**30]),
    *((ALL, "min_p", value) for value in [-0.1, 1.1, "0", True, [], {}]),
    *((ALL, "seed", value) for value in [1.5, "1", True, [], {}, "x"]),
    *((ALL, "stop", value) for value in [5, True, {}, [5], [None], [""], ["a"] * 17, [["a"]], 1.5]),
    *((ALL, "stream", value) for value in [0, 1, "true", [], {}, "yes", 1.5]),
    *((ALL, "stream_options", value) for value in [5, "x", [], True, {"include_usage": 1}, {"x": 1}]),
    *((ALL, "user", value) for value in [5, True, [], {}, "x" * 513]),
    *((ALL, "safety_identifier", value) for value in [5, True, [], {}, "x" * 513]),
    *((ALL, "gambit", value) for value in [5, "x", True, [], ["a"], [["capacity", 2]]]),
    *((ALL, "nothing_of_this_name", value) for value in [5, "x", True, [], {}]),
    *(((ChatFields,), "messages", value) for value in [
        5, True, {}, [], [5], [[]], [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}],
        [{"role": "tool", "content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": {}}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": "x"}], [USER, {"role": "system", "content": "x"}],
        [{**USER, "name": "x"}], [{**USER, "tool_calls": [1]}], [{**USER, "type": "function_call"}], [USER, None],
    ]),
    *(((ChatFields, ResponseFields), "tools", value) for value in [
        5, "x", True, {}, [5], [[]], [None], [{}], [{"type": "function"}], [{"type": "web_search"}],
        [{"function": {"name": "f"}}], [tool(name="")], [tool(parameters=[])], [tool(x=1)],
        [tool(name=str(number)) for number in range(129)],
    ]),
    *(((ChatFields, ResponseFields), "tool_choice", value) for value in [5, "x", True, [], {}, {"type": "function"}]),
    *(((ChatFields, ResponseFields), "parallel_tool_calls", value) for value in [0, "x", [], {}]),
    *((ALL, "reasoning_effort", value) for value in ["", "x", 5, True, [], {}, "LOW"]),
    *((ALL, "thinking_token_budget", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ResponseFields,), "reasoning", value) for value in [5, "x", True, [], {"effort": "x"}, {"summary": "auto"}]),
    *(((ChatFields, CompletionFields), "max_tokens", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ChatFields,), "max_completion_tokens", value) for value in [0, -1, 1.5, "5", True, [], {}]),
    *(((ChatFields,), "chat_template_kwargs", value) for value in [5, "x", [], {"x": 1}, {"enable_thinking": 1}]),
    *(((CompletionFields,), "prompt", value) for value in [5, True, {}, [], ["a", "b"], [1, 2], [[1]], [None], [5]]),
    *(((ResponseFields,), "input", value) for value in [
        5, True, {}, [], [5], [{}], [{"role": "user"}], [{"type": "function_call_output"}],
        [{"role": "assistant", "content": "x"}], [{"role": "user", "content": [{"type": "input_image"}]}], [[]],
    ]),
    *(((ResponseFields,), "instructions", value) for value in [5, True, [], {}, ["x"]]),
    *(((ResponseFields,), "max_output_tokens", value) for value in [0, -1, 1.5, "5", True, []]),
    *(((ResponseFields,), "background", value) for value in [0, 1, "true", [], {}]),
    *(((ResponseFields,), "store", value) for value in [0, 1, "true", [], {}]),
    *(((ResponseFields,), "metadata", value) for value in [
        5, "x", [], {"a": 5}, {"a": None}, {"a": []}, {"x" * 65: "a"}, {"a": "x" * 513},
        {str(number): "" for number in range(17)},
    ]),
]  # fmt: skip
ROWS = [(kind, name, value) for kinds, name, value in WRONG for kind in kinds]
OPTIONS = [
    ("capacity", value) for value in [0, -1, 1.5, "x", [], {}, True, 10**30]
] + [
    ("islands", value) for value in [0, -1, 1.5, "x", [], {}, 10**30]
] + [
    (name, value) for name in ("swap_size", "check_interval", "num_traces", "first_traces", "budget_tokens")
    for value in [0, -1, "x", [], {}, 1.5]
] + [
    (name, value) for name in ("vote", "policy", "answer", "consensus_stop", "branch_point", "preset")
    for value in ["nothing", 5, [], {}]
] + [
    ("budget_seconds", value) for value in [-1, "x", [], {}]
] + [
    ("seed", 1), ("temperature", 0.5), ("max_new_tokens", 5), ("nothing_of_this_name", 1), ("__class__", 1), ("", 1),
]  # fmt: skip


def test_there_are_hundreds():
    assert len(ROWS) + len(OPTIONS) > 300


def refused(kind, **fields):
    with pytest.raises(ApiError) as caught:
        READER.read(kind, {**BODIES[kind], **fields}, NOBODY)
    error = caught.value
    assert error.status == (404 if error.code == "model_not_found" else 400), error.message
    assert "\n" not in error.message and len(error.message) < 1000 and error.message.encode()
    assert "Error" not in error.message and "pydantic" not in error.message, "a sentence, and no exception's name"
    return error


@table(("kind", "name", "value"), ROWS)
def test_a_field_of_a_wrong_type_or_size_is_named(kind, name, value):
    error = refused(kind, **{name: value})
    assert name in error.message and (error.param or "").startswith(name), error.message


@table(("name", "value"), OPTIONS)
def test_a_wrong_option_of_the_search_is_named(name, value):
    assert name in refused(ChatFields, gambit={name: value}).message


@table("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_is_named_in_every_format(name):
    for kind in ALL:
        if name not in {field.alias or own for own, field in kind.model_fields.items()}:
            assert refused(kind, **{name: "surely not this"}).param == name


# -- fuzz: more of it in `make test-all` -----------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({field.alias or name for kind in ALL for name, field in kind.model_fields.items()} | set(UNSUPPORTED))
OF_A_SEARCH = sorted(SearchConfig.model_fields)


@given(st.sampled_from(ALL), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), values, max_size=5))
def test_any_object_is_a_request_or_an_error_of_its_sender(kind, fields):
    try:
        READER.read(kind, {**BODIES[kind], **fields}, NOBODY)
    except ApiError as error:
        assert error.status in (400, 403, 404) and len(error.message) < 2000 and "\n" not in error.message


@given(st.dictionaries(st.sampled_from(OF_A_SEARCH) | st.text(max_size=8), values, max_size=5))
def test_any_options_of_a_search_are_taken_or_refused(options):
    try:
        READER.read(ChatFields, {**BODIES[ChatFields], "gambit": options}, NOBODY)
    except ApiError as error:
        assert error.status in (400, 403) and "gambit" in (error.param or "gambit")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass"))
       | values.map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_an_object_or_an_error_of_their_sender(body):
    try:
        found = parse_object(body)
    except ApiError as error:
        assert error.status == 400 and error.message.encode()
    else:
        assert isinstance(found, dict) and json.dumps(found, ensure_ascii=False).encode(), "all of it can be sent again"

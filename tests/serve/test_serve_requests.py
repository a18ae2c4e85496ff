"""What `gambit serve` reads from requests: every field is used, or refused by name; and whose turn it is."""

import asyncio
import dataclasses
import json

import pytest

from gambit.config.effort import Effort
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.serve.http import ApiError, parse_object
from gambit.serve.queue import AdmissionQueue
from gambit.serve.requests import (
    UNSUPPORTED,
    ChatFields,
    CompletionFields,
    RequestReader,
    ResponseFields,
)
from gambit.serve.settings import NOBODY, ApiKey, check_binding, check_keys, key_of, read_keys
from support.tables import table

QUESTION = [{"role": "user", "content": "a?"}]


def capacity_of(config):
    return 1 if config.policy == "single" else config.capacity or 64


@pytest.fixture
def reader():
    base = SearchConfig(budget_seconds=100, capacity=16, policy_options={})
    return RequestReader(("M", "org/M"), base, 128, capacity_of)


def chat(reader, **fields):
    return reader.read(ChatFields, {"model": "M", "messages": QUESTION, **fields}, NOBODY)


def refusal(reader, **fields):
    with pytest.raises(ApiError) as refused:
        chat(reader, **fields)
    assert refused.value.status == 400
    return refused.value


# -- adapters --------------------------------------------------------------------------------------------------------


def test_adapters_are_model_ids_and_an_option_and_no_folder_of_the_server_is_one(reader):
    reader = dataclasses.replace(reader, adapters=("math", "law"))
    assert {"math", "law:sc", "M"} <= set(reader.ids)
    assert (
        chat(reader, model="math").config.lora == chat(reader, model="M", gambit={"lora": "math"}).config.lora == "math"
    )
    law = chat(reader, model="law:single").config
    assert (law.lora, law.policy) == ("law", "single")
    assert chat(reader).config.lora is None
    for wrong in ({"gambit": {"lora": "/etc"}}, {"model": "math", "gambit": {"lora": "law"}}, {"gambit": {"lora": 3}}):
        assert refusal(reader, **wrong).param == "gambit.lora"


# -- what is used ----------------------------------------------------------------------------------------------------


def test_every_supported_field_reaches_the_search(reader):
    ask = chat(
        reader, model="org/M:sc", max_completion_tokens=500, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.1, seed=5,
        n=3, stop="\n", user="alice", stream=True, stream_options={"include_usage": True},
        chat_template_kwargs={"enable_thinking": False},
        gambit={"capacity": 32, "budget_tokens": 9000, "vote": "majority", "answer": "number"},
    )  # fmt: skip
    config = ask.config
    assert (config.policy, config.max_new_tokens, config.temperature, config.seed) == ("sc", 500, 0.7, 5)
    assert (config.top_p, config.top_k, config.min_p, config.enable_thinking) == (0.9, 0, 0.1, False)
    assert (config.capacity, config.budget_tokens, config.budget_seconds, config.answer) == (32, 9000, 100, "number")
    assert (ask.fields.n, ask.fields.stop, ask.user, ask.fields.stream, ask.fields.stream_options.include_usage) == (
        3,
        ["\n"],
        "alice",
        True,
        True,
    )
    assert ask.question == "a?" and ask.warnings == ()


def test_null_and_defaults_ask_for_nothing(reader):
    nulls = dict.fromkeys([*UNSUPPORTED, "temperature", "n", "stop", "seed", "gambit", "user"])
    harmless = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert chat(reader, **nulls).config.policy == chat(reader, **harmless).config.policy == "gambit"


def test_roles_and_parts(reader):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": None, "refusal": None},
        {"role": "user", "content": [{"type": "text", "text": "and c?"}]},
    ]
    asked = [(m["role"], m["content"]) for m in chat(reader, messages=messages).question]
    assert asked == [("system", "be brief"), ("user", "a?"), ("assistant", "b"), ("user", "and c?")]


def test_a_policy_comes_with_the_id_or_in_gambit_but_not_twice(reader):
    assert chat(reader, model="M:single").config.policy == "single"
    assert chat(reader, gambit={"policy": "step"}).config.policy == "step"
    assert chat(reader, model="M:sc", gambit={"policy": "sc"}).config.policy == "sc"
    assert refusal(reader, model="M:sc", gambit={"policy": "gambit"}).param == "gambit.policy"


def test_rounds_may_be_half_the_requests_and_half_the_servers(reader):
    asked = chat(reader, gambit={"first_traces": 4, "consensus_stop": 0.6}).config
    assert (asked.first_traces, asked.consensus.fraction) == (4, 0.6)
    settled = dataclasses.replace(reader, base=reader.base.model_copy(update={"consensus_stop": 0.9}))
    assert chat(settled, gambit={"first_traces": 4}).config.consensus.fraction == 0.9


def test_budgets_are_the_least_of_request_server_and_key(reader):
    fields = {"model": "M", "messages": QUESTION}
    limits = ApiKey(name="a", key="a", budget_tokens=1000, budget_seconds=7)
    assert reader.read(ChatFields, {**fields, "gambit": {"budget_tokens": 10}}, limits).config.budget_tokens == 10
    capped = reader.read(
        ChatFields, {**fields, "gambit": {"budget_tokens": 5000, "budget_seconds": 900}}, limits
    ).config
    assert (capped.budget_tokens, capped.budget_seconds) == (1000, 7)
    assert reader.read(ChatFields, fields, NOBODY).config.budget_seconds == 100


def test_responses_take_a_string_or_messages(reader):
    fields = {"model": "M", "input": "a?", "instructions": "be brief", "max_output_tokens": 9, "background": True}
    ask = reader.read(ResponseFields, {**fields, "metadata": {"k": "v"}, "text": {"format": {"type": "text"}}}, NOBODY)
    assert [m["role"] for m in ask.question] == ["system", "user"] and ask.config.max_new_tokens == 9
    assert ask.fields.background and ask.fields.store and ask.fields.metadata == {"k": "v"}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a?"}]}
    assert reader.read(ResponseFields, {"model": "M", "input": [item]}, NOBODY).question == "a?"


def test_an_effort_sizes_the_search_in_all_three_formats(reader):
    open_reader = dataclasses.replace(reader, base=SearchConfig())
    sizes = {}
    for name in ("none", "minimal", "low", "medium", "high", "xhigh"):
        for kind, body in (
            (ChatFields, {"messages": QUESTION, "reasoning_effort": name}),
            (CompletionFields, {"prompt": "a?", "reasoning_effort": name}),
            (ResponseFields, {"input": "a?", "reasoning": {"effort": name}}),
            (ChatFields, {"messages": QUESTION, "gambit": {"effort": name}}),
        ):
            config = open_reader.read(kind, {"model": "M", **body}, NOBODY).config
            sizes.setdefault(name, set()).add(
                (config.policy, config.capacity, config.first_traces, config.consensus_stop, config.thinking_tokens)
            )
        assert config.enable_thinking  # only a request's own `none` switches it off
    low, medium, high = (
        ("single", None, None, "off", 4096),
        ("gambit", 16, 4, 0.8, None),
        ("gambit", None, None, "off", None),
    )
    assert sizes == {"none": {low}, "minimal": {low}, "low": {low}, "medium": {medium}, "high": {high}, "xhigh": {high}}
    assert not chat(reader, reasoning_effort="none").config.enable_thinking


def test_an_object_may_be_required_and_a_schema(reader):
    assert chat(reader, response_format={"type": "json_object"}).config.answer == "json"
    assert chat(reader, response_format={"type": "text"}).config.answer == "boxed"
    text = {"format": {"type": "json_object"}, "verbosity": "medium"}
    assert reader.read(ResponseFields, {"model": "M", "input": "a?", "text": text}, NOBODY).config.answer == "json"
    flat = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"b": {}, "a": {}}}}
    named = {"type": "json_schema", "json_schema": {name: flat[name] for name in ("name", "schema")}}
    by_chat = chat(reader, response_format=named).config
    by_response = reader.read(ResponseFields, {"model": "M", "input": "a?", "text": {"format": flat}}, NOBODY).config
    for missing in ("name", "schema"):
        rest = {name: flat[name] for name in flat if name != missing}
        with pytest.raises(ApiError, match=f"text.format.{missing} is missing"):
            reader.read(ResponseFields, {"model": "M", "input": "a?", "text": {"format": rest}}, NOBODY)
    assert by_chat.answer == "json" and by_chat.json_schema == by_response.json_schema == json.dumps(flat["schema"])


def test_an_effort_replaces_the_servers_pool_and_leaves_what_the_request_gives(reader):
    base = SearchConfig(capacity=8, num_traces=32, policy="sc", seed=5, thinking_tokens=900, islands=2)
    sized = dataclasses.replace(reader, base=base)
    plain, high = chat(sized).config, chat(sized, reasoning_effort="high").config
    assert (plain.capacity, plain.num_traces, high.capacity, high.num_traces) == (8, 32, 8, 32)
    medium = chat(sized, reasoning_effort="medium").config
    assert (medium.policy, medium.capacity, medium.num_traces, medium.islands, medium.seed) == ("sc", 8, None, None, 5)
    low = chat(sized, reasoning_effort="low", thinking_token_budget=77).config
    assert (low.policy, low.capacity, low.thinking_tokens) == ("single", None, 77)
    assert chat(sized, reasoning_effort="medium", gambit={"capacity": 12}).config.capacity == 12
    assert chat(sized, thinking_token_budget=50).config.thinking_tokens == 50


def test_the_servers_effort_is_for_requests_that_name_neither_method_nor_size(reader):
    usual = dataclasses.replace(reader, base=SearchConfig().with_usual(Effort.MEDIUM))
    assert chat(usual).config.first_traces == 4
    assert chat(usual, model="M:sc").config.first_traces is None
    assert chat(usual, gambit={"capacity": 3}).config.first_traces is None
    assert chat(usual, gambit={"vote": "majority"}).config.first_traces == 4
    assert chat(usual, model="M:sc", reasoning_effort="medium").config.first_traces == 4
    assert chat(usual, reasoning_effort="high").config.capacity is None


def test_a_key_has_a_highest_effort(reader):
    limited = ApiKey(name="a", key="a", max_effort=Effort.MEDIUM)
    open_reader = dataclasses.replace(reader, base=SearchConfig())

    def read(**fields):
        return open_reader.read(ChatFields, {"model": "M", "messages": QUESTION, **fields}, limited)

    assert read().config.capacity == read(model="M:sc").config.capacity == 16 and not read().warnings
    capped = read(reasoning_effort="high")
    assert capped.config.capacity == 16 and "above the highest of this key" in capped.warnings[0]
    assert read(reasoning_effort="low").config.policy == "single"
    assert read(gambit={"capacity": 16}).config.capacity == 16
    for fields in ({"gambit": {"capacity": 17}}, {"gambit": {"num_traces": 17}}):
        with pytest.raises(ApiError, match="the highest effort of this key is medium"):
            read(**fields)


# -- what is refused -------------------------------------------------------------------------------------------------

ASKING = {
    "logit_bias": {"5": 1}, "parallel_tool_calls": False, "presence_penalty": 0.5, "frequency_penalty": -1,
    "repetition_penalty": 1.1, "length_penalty": 2, "priority": 1, "service_tier": "flex", "best_of": 2,
    "use_beam_search": True, "ignore_eos": True, "min_tokens": 5, "stop_token_ids": [1], "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "prompt_logprobs": 1, "guided_json": {},
    "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "g", "structured_outputs": {"json": {}},
    "tools": [{"type": "function"}], "tool_choice": "required", "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "functions": [{}], "function_call": {"name": "f"},
    "response_format": {"type": "json_object"}, "logprobs": True,
    "top_logprobs": 2, "audio": {"voice": "a"}, "modalities": ["text", "audio"], "prediction": {"type": "content"},
    "store": True, "metadata": {"a": "b"}, "verbosity": "low", "web_search_options": {},
    "moderation": {}, "echo": True, "add_generation_prompt": False, "continue_final_message": True,
    "include_reasoning": False, "conversation": "c", "context_management": [1], "max_tool_calls": 1,
    "previous_response_id": "r", "prompt": "p", "include": ["x"], "suffix": "s", "truncation": "auto",
    "reasoning": {"effort": "high"}, "text": {"format": {"type": "json_schema"}},
}  # fmt: skip


def test_whatever_is_not_supported_is_refused_by_name(reader):
    assert set(ASKING) == set(UNSUPPORTED)
    for name, value in ASKING.items():
        own = name in ChatFields.model_fields
        kind, body = (CompletionFields, {"prompt": "a?"}) if own else (ChatFields, {"messages": QUESTION})
        with pytest.raises(ApiError) as caught:
            reader.read(kind, {"model": "M", **body, name: value}, NOBODY)
        refused = caught.value
        assert refused.param == name and name in refused.message


MISTAKES = [
    ({"nonsense": 1}, "nonsense"),
    ({"max_token": 1}, "max_token"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "model": "M:single"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"user": "u" * 513}, "user"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "b"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "b"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "a", "name": "bob"}]}, "messages[0].name"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    ({"gambit": {"capacity": 0}}, "gambit.capacity"),
    ({"gambit": {"first_traces": 4}}, "gambit.first_traces"),
    ({"gambit": {"capacity": 129}}, "gambit.capacity"),
    ({"gambit": {"num_traces": 200_000}}, "gambit.num_traces"),
    ({"gambit": {"seed": 1}}, "gambit.seed"),
    ({"gambit": {"max_new_tokens": 1}}, "gambit.max_new_tokens"),
    ({"gambit": {"policy": "nonsense"}}, "gambit"),
    ({"gambit": {"policy": "os:system"}}, "gambit.policy"),
    ({"gambit": {"policy": "/tmp/x.py:X"}}, "gambit.policy"),
    ({"gambit": {"colour": 1}}, "gambit"),
    ({"gambit": []}, "gambit"),
]


def test_mistakes_are_named(reader):
    for fields, param in MISTAKES:
        assert refusal(reader, **fields).param == param, fields


@table(
    ("fields", "sentence"),
    [
        ({"max_token": 1}, "unknown parameter 'max_token': did you mean 'max_tokens'?"),
        ({"n": True}, "n = true: must be a valid integer"),
        (
            {"stop": ["a"] * 17},
            'stop = ["a", "a", "a", "a", "a", "a", "a", "a", "a", "a",…: must have at most 16 items',
        ),
        ({"stop": 5}, "stop must be a string or an array"),
        ({"messages": ["hi"]}, 'messages[0] = "hi": must be an object'),
        ({"messages": []}, "messages must end with a user message, or after one with a tool's result"),
        ({"model": None}, "model is missing: `GET /v1/models` lists them"),
        ({"tools": [1]}, "tools[0] = 1: must be an object"),
        ({"top_p": 0}, "top_p = 0.0: input should be greater than 0"),
    ],
)
def test_a_mistake_is_one_sentence(reader, fields, sentence):
    assert refusal(reader, **fields).message == sentence


def test_the_other_formats_refuse_too(reader):
    for name in set(UNSUPPORTED) - {"prompt"}:
        with pytest.raises(ApiError, match=name):
            reader.read(CompletionFields, {"model": "M", "prompt": "a?", name: ASKING[name]}, NOBODY)
    for prompt in (None, ["a", "b"], [1, 2], []):
        with pytest.raises(ApiError, match="prompt"):
            reader.read(CompletionFields, {"model": "M", "prompt": prompt}, NOBODY)
    for name in set(UNSUPPORTED) - set(ResponseFields.model_fields):
        with pytest.raises(ApiError, match=name):
            reader.read(ResponseFields, {"model": "M", "input": "a?", name: ASKING[name]}, NOBODY)
    for given in (None, [{"type": "function_call_output"}], [{"type": "message", "role": "assistant", "content": "a"}]):
        with pytest.raises(ApiError):
            reader.read(ResponseFields, {"model": "M", "input": given}, NOBODY)
    with pytest.raises(ApiError, match="store"):
        reader.read(ResponseFields, {"model": "M", "input": "a?", "background": True, "store": False}, NOBODY)


@table(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b"\xff",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_requests_are_refused(body):
    with pytest.raises(ApiError) as refused:
        parse_object(body)
    assert refused.value.status == 400 and len(refused.value.message) < 300


HALF = r"\ud800"  # of a surrogate pair, as JSON writes it
USER = r'{"role": "user", "content": "a?"}'


@table(
    "body",
    [
        rf'{{"messages": [{{"role": "system", "content": "{HALF}"}}, {USER}]}}',
        rf'{{"input": "a?", "metadata": {{"{HALF}": "a"}}}}',
        rf'{{"messages": [{USER}], "user": "\udfff{HALF}"}}',
        rf'{{"messages": [{USER}], "stop": ["a", "{HALF}"]}}',
        rf'{{"messages": [{USER}], "{HALF}": 1}}',
        b'{"prompt": "\xed\xa0\x80"}',
    ],
)
def test_text_that_cannot_be_encoded_is_refused_at_the_door(body):
    with pytest.raises(ApiError, match=r"not JSON: .* at line 1 column") as refused:
        parse_object(body if isinstance(body, bytes) else body.encode())
    assert refused.value.status == 400
    assert parse_object(rb'{"prompt": "\ud83d\ude00 \u2028 \u0000"}') == {"prompt": "\U0001f600 \u2028 \x00"}


# -- keys and addresses ----------------------------------------------------------------------------------------------


def test_keys_are_read_with_their_limits_and_found_by_what_is_presented(tmp_path):
    (tmp_path / "keys.yaml").write_text("alice: sk-a\nbob: {key: sk-b, max_running: 2, budget_tokens: 100}\n")
    alice, bob = check_keys(read_keys(tmp_path / "keys.yaml"))
    assert key_of("sk-b", (alice, bob)) is bob and bob.max_running == 2 and bob.budget_tokens == 100
    assert key_of("sk-a", (alice, bob)) is alice and key_of("", (alice, bob)) is None
    assert b"sk-a" not in alice.digest


@pytest.mark.parametrize("text", ["", "[a]", "a: {key: secret-x, max_running: 0}", "a: {max_running: 1}", "a: 5", "{",
                                  "a: 'secret-x", "a: secret-x\na: other"])  # fmt: skip
def test_a_wrong_file_of_keys_is_refused_without_showing_a_key(tmp_path, text):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        read_keys(tmp_path / "keys.yaml")
    assert "secret-x" not in str(refused.value)


def test_two_names_of_one_key_are_refused():
    with pytest.raises(UserError, match="same key"):
        check_keys([ApiKey(name="a", key="x"), ApiKey(name="b", key="x")])


def test_other_machines_are_let_in_with_a_key_alone_unless_somebody_insists():
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_binding(host, has_keys=False, no_auth=False)
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(UserError, match="--api-key"):
            check_binding(host, has_keys=False, no_auth=False)
        check_binding(host, has_keys=True, no_auth=False)
        check_binding(host, has_keys=False, no_auth=True)


# -- whose turn it is ------------------------------------------------------------------------------------------------


def in_loop(function):
    async def body():
        function()

    asyncio.run(body())


A, B = ApiKey(name="a", key="a"), ApiKey(name="b", key="b")


def test_keys_take_turns_however_many_one_of_them_sends():
    def body():
        queue = AdmissionQueue(1, 100, 100)
        first = queue.join(A, 1)
        of_a = [queue.join(A, 1) for _ in range(3)]
        of_b = [queue.join(B, 1) for _ in range(2)]
        order, waiting = [], {*of_a, *of_b}
        running = first
        while waiting:
            queue.leave(running)
            [running] = queue.running
            waiting.discard(running)
            order.append(running.key.name)
        assert order == ["b", "a", "b", "a", "a"]

    in_loop(body)


def test_the_key_with_the_fewest_running_traces_goes_first():
    def body():
        queue = AdmissionQueue(10, 64, 100)
        large, small = queue.join(A, 60), queue.join(B, 4)
        next_a, next_b = queue.join(A, 4), queue.join(B, 4)
        queue.leave(small)
        assert next_b.turn.done() and not next_a.turn.done()
        queue.leave(large)
        assert next_a.turn.done() and queue.num_traces == 8

    in_loop(body)


def test_a_search_larger_than_the_server_runs_alone_and_is_not_passed_for_ever():
    def body():
        queue = AdmissionQueue(10, 8, 100)
        small = queue.join(A, 4)
        giant = queue.join(B, 20)
        later = queue.join(A, 4)
        assert small.turn.done() and not giant.turn.done() and not later.turn.done()
        queue.leave(small)
        assert giant.turn.done() and not later.turn.done()
        queue.leave(giant)
        assert later.turn.done()

    in_loop(body)


def test_limits_of_a_key_and_of_the_line():
    def body():
        queue = AdmissionQueue(10, 100, 2)
        tight = ApiKey(name="tight", key="t", max_running=1, max_waiting=1)
        running, waiting = queue.join(tight, 1), queue.join(tight, 1)
        assert running.turn.done() and not waiting.turn.done()
        with pytest.raises(ApiError) as refused:
            queue.join(tight, 1)
        assert refused.value.status == 429 and int(refused.value.headers["retry-after"]) >= 1
        assert queue.join(A, 1).turn.done() and queue.num_waiting == 1
        queue.leave(waiting)
        queue.leave(waiting)
        assert queue.num_waiting == 0 and len(queue.running) == 2

    in_loop(body)


def test_a_turn_that_nobody_waits_for_is_passed_on():
    def body():
        queue = AdmissionQueue(1, 100, 100)
        running, gone, next_one = (queue.join(A, 1) for _ in range(3))
        gone.turn.cancel()
        queue.leave(running)
        assert next_one.turn.done() and queue.running == {next_one}

    in_loop(body)

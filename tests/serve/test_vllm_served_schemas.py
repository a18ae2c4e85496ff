"""Answers held to a JSON schema on vLLM, through the real openai client; hostile schemas cost their own request."""

import json
from contextlib import suppress
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from gambit.config.options import SearchConfig
from gambit.solver import Solver
from support.engine_setups import HAS_VLLM
from support.serving import serving
from support.tiny import save_worded

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
FAST = {"kv_cache_memory_bytes": 64 << 20, "own_process": False, "self_check": False}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["sun", "rain"]
    degrees: int = Field(ge=0, le=9)
    is_windy: bool


SCHEMA = Weather.model_json_schema()
QUESTION = [{"role": "user", "content": "the weather?"}]
SHORT = {"thinking_token_budget": 8}  # a random model ends its thinking by chance alone


def named(schema):
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = str(save_worded(tmp_path_factory.mktemp("worded")))
    base = SearchConfig(policy="sc", capacity=4, seed=0, max_new_tokens=100)
    with (
        Solver(folder, engine="vllm", scorer="confidence", engine_options=FAST) as solver,
        serving(solver, base, served_names=("tiny",)) as running,
    ):
        yield running


def ask(served, schema=SCHEMA, **fields):
    extra = {**SHORT, **fields.pop("extra_body", {})}
    given = {"model": "tiny", "messages": QUESTION, "response_format": named(schema), "extra_body": extra, **fields}
    return served.client().chat.completions.create(**given)


def test_answers_fit_the_schema_and_traces_vote_over_them(served):
    reply = ask(served, extra_body={"gambit": {"capacity": 16}})
    votes = reply.gambit["votes"]
    for vote in votes:
        Weather.model_validate_json(vote["answer"])
    assert sum(vote["traces"] for vote in votes) == 16 and votes[0]["traces"] > 1
    assert json.loads(reply.choices[0].message.content) == json.loads(votes[0]["answer"])
    record = served.record_of(reply.gambit["search_id"])
    assert json.loads(record.started.environment["json_schema"]) == SCHEMA
    again = record.vote(lambda first, second: first == second)
    assert again.answer == record.voted.answer == reply.gambit["answer"]
    chunks = list(ask(served, extra_body={"gambit": {"capacity": 16}}, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == reply.choices[0].message.content


def test_clients_parse_answers_of_both_formats_into_their_types(served):
    client, extra = served.client(), {**SHORT, "seed": 3}
    reply = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Weather, extra_body=extra)
    assert isinstance(reply.choices[0].message.parsed, Weather)
    response = client.responses.parse(model="tiny", input="the weather?", text_format=Weather, extra_body=extra)
    assert response.output_parsed == reply.choices[0].message.parsed and response.text.format.name == "Weather"
    with client.responses.stream(model="tiny", input="the weather?", text_format=Weather, extra_body=extra) as stream:
        list(stream)
        assert stream.get_final_response().output_parsed == response.output_parsed


EAGER = {"policy": "gambit", "capacity": 8, "num_traces": 12, "warmup_tokens": 1, "check_interval": 2, "swap_size": 2,
         "hard_floor": 0.0, "boundary": "stride:3"}  # fmt: skip


def test_children_that_branch_in_thinking_answer_by_the_schema(served):
    reply = ask(served, extra_body={"thinking_token_budget": 30, "gambit": EAGER})
    assert reply.gambit["counts"]["branched"] > 0, reply.gambit["counts"]
    assert all(Weather.model_validate_json(vote["answer"]) for vote in reply.gambit["votes"])
    tree = served.record_of(reply.gambit["search_id"]).tree
    assert any(trace.parent is not None and trace.answer for trace in tree.traces)


def test_without_thinking_the_whole_text_is_the_answer_and_children_branch_in_it(served):
    reply = ask(served, extra_body={"gambit": {**EAGER, "enable_thinking": False}, "thinking_token_budget": None})
    assert reply.gambit["counts"]["branched"] > 0, reply.gambit["counts"]
    message = reply.choices[0].message
    assert not hasattr(message, "reasoning") and Weather.model_validate_json(message.content)
    assert sum(vote["traces"] for vote in reply.gambit["votes"]) == 12


def test_an_answer_that_is_cut_off_abstains(served):
    with pytest.raises(openai.UnprocessableEntityError, match="JSON that fits the schema: raise the limits"):
        ask(served, max_completion_tokens=12)


def test_an_object_is_written_where_any_will_do(served):
    closed = {"type": "json_object"}
    seen = 0
    for seed in range(8):
        try:
            reply = ask(served, response_format=closed, seed=seed, max_completion_tokens=400)
        except openai.UnprocessableEntityError:
            continue
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
        assert served.record_of(reply.gambit["search_id"]).started.environment["json_schema"] == '{"type": "object"}'
        seen += 1
    assert seen, "a random model may write a long object, but not eight times"


def nested(levels):
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def with_field(**field):
    return {"type": "object", "properties": {"a": field}, "required": ["a"], "additionalProperties": False}


HOSTILE = {  # by what the sentence says
    "huge": (with_field(type="string", description="x" * 70_000), "65,536 bytes"),
    "deep": (nested(40), "32 levels"),
    "too deep to write": (nested(60), "levels|not JSON"),
    "remote": (with_field(**{"$ref": "https://example.org/schema.json"}), "only those inside it"),
    "file": (with_field(**{"$ref": "file:///etc/passwd"}), "only those inside it"),
    "lost": (with_field(**{"$ref": "#/$defs/none"}), "cannot be compiled"),
    "itself": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "cannot be compiled|complex"),
    "states": (with_field(type="string", pattern="^(a?){3000}(a|aa|aaa){3000}b{1,5000}$"), "more than 1 s"),
    "broken pattern": (with_field(type="string", pattern="(a"), "cannot be compiled"),
    "array": ({"type": "array", "items": {}}, 'the type "object"'),
    "no type": ({}, 'the type "object"'),
    "unknown type": (with_field(type="strin"), "cannot be compiled"),
    "type is a number": (with_field(type=5), "cannot be compiled"),
    "properties are a list": ({"type": "object", "properties": []}, "holds no schemas"),
    "a text for a schema": ({"type": "object", "properties": {"a": "b"}}, "in place of a schema"),
    "nothing fits": (with_field(enum=[]), "cannot be compiled"),
    "keyword": ({"type": "object", "patternProperties": {"^a": {}}}, "keyword 'patternProperties'"),
    "not": (with_field(**{"not": {"type": "string"}}), "keyword 'not'"),
    "multipleOf": (with_field(type="integer", multipleOf=7), "keyword 'multipleOf'"),
    "format": (with_field(type="string", format="regex"), "format 'regex'"),
    "two": (with_field(type="string", pattern="^a", maxLength=9), "pattern or format beside a length"),
    "all": (with_field(allOf=[{"type": "string"}, {"enum": ["a"]}]), "allOf of several"),
    "beside": (with_field(anyOf=[{"type": "string"}], minimum=5), "beside 'anyOf'"),
}  # fmt: skip


ENDLESS = [  # compiled in no time, and never written to the end
    with_field(type="string", pattern="^((a|b|ab)*c{1,900}){1,900}$"),
    with_field(type="string", minLength=10**9),
    with_field(type="array", items={"type": "integer"}, minItems=10**9),
    {"$ref": "#/$defs/a", "$defs": {"a": with_field(**{"$ref": "#/$defs/a"})}},
]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_schema_is_a_400_that_names_its_field(served, kind):
    schema, sentence = HOSTILE[kind]
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        ask(served, schema)
    assert refused.value.param == "response_format.json_schema.schema" or "not JSON" in str(refused.value)
    client = served.client()
    flat = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="the weather?", text=flat, stream=True)
    assert refused.value.param == "text.format.schema" or "not JSON" in str(refused.value)


@pytest.mark.parametrize("schema", [True, "object", None, 5, [SCHEMA]])
def test_a_schema_that_is_no_object_is_named(served, schema):
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(served, schema)


def test_the_server_goes_on_after_all_of_them(served):
    for schema in [*(schema for schema, _ in HOSTILE.values()), *ENDLESS]:
        with suppress(openai.BadRequestError, openai.UnprocessableEntityError):
            assert ask(served, schema).choices
    assert Weather.model_validate_json(ask(served).choices[0].message.content)
    with served.http() as http:
        assert http.get("/health").status_code == 200


def test_a_lost_process_costs_one_request(served):
    checker = served.solver.engine.schemas
    checker.check(json.dumps(SCHEMA))
    checker._process._process.kill()
    checker._process._process.wait()
    assert ask(served, {**SCHEMA, "title": "again"}).choices, "another one is started"


def test_mistakes_beside_a_schema_are_named(served):
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields, param in (
        ({"tools": tools}, "tools"),
        ({"extra_body": {"gambit": {"json_schema": "{}"}}}, "gambit.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {**named(SCHEMA), "json_schema": {"schema": SCHEMA}}}, "response_format.json_schema.name"),
        ({"response_format": {**named(SCHEMA), "type": "text"}}, "response_format"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            ask(served, **fields)
        assert refused.value.param == param, refused.value


def test_the_embedded_engine_holds_answers_to_no_schema(pawn_solver):
    with (
        serving(pawn_solver) as running,
        pytest.raises(openai.BadRequestError, match="local holds no answers") as refused,
    ):
        running.ask(response_format=named(SCHEMA))
    assert refused.value.param == "response_format.json_schema.schema"

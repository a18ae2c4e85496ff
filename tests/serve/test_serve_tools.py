"""Tools through the real openai client: traces vote over calls, and the winner's is returned, whole and as a stream."""

import json

import openai
import pytest

from gambit.config.options import SearchConfig
from support.serving import EASY, serving
from support.speaking import TEMPLATE, speaking_solver


def call(name, written):
    inside = written if isinstance(written, str) else json.dumps({"name": name, "arguments": written})
    return f"<tool_call>\n{inside}\n</tool_call>"


PARIS, ROME = {"city": "Paris", "days": 1}, {"city": "Rome", "days": 2}
PARIS_AGAIN = '{"arguments": {"days": 1.0, "city": "Paris"}, "name": "weather"}'
BROKEN = ['{"name": "weather", "arguments": {"city"', '{"name": "weather", "arguments": "Paris"}', '{"arguments": {}}',
          '{"name": "sell_all", "arguments": {}}', "[]", '{"name": "weather", "arguments": {"days": NaN}}']  # fmt: skip
PAIR = call("weather", PARIS) + "\n" + call("weather", ROME)
THINKS = "so we have the sum</think>\n\n"
SPOKEN = {  # by the last word of the question: what each trace says
    "vote": [THINKS + call("weather", ROME), THINKS + "let us check " + call("weather", PARIS),
             THINKS + call("weather", PARIS_AGAIN), THINKS + "\\boxed{5}"],
    "pair": [THINKS + PAIR, THINKS + call("weather", ROME) + call("weather", PARIS) + call("weather", ROME)],
    "broken": [*(THINKS + call("", each) for each in BROKEN), THINKS + call("weather", ROME)],
    "inside": [call("weather", PARIS) + "</think>\n\n\\boxed{7}"],
    "object": [THINKS + '{"b": 2.0, "a": [1]}', THINKS + '```json\n{"a": [1], "b": 2}\n```', THINKS + '{"a": 1}',
               THINKS + "b is 2"],
    "none": [THINKS + "\\boxed{5}"],
}  # fmt: skip


def say(prompt, noise):
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if "<|im_start|>tool\n" in last:  # the result of a tool has come back
        return THINKS + f"It is {last.partition('>tool')[2].split('<')[0].strip()}. \\boxed{{21}}"
    texts = SPOKEN[last.split("<|im_end|>")[0].split()[-1]]
    return texts[noise % len(texts)]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "clock")
]
FLAT = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}]


@pytest.fixture(scope="module")
def speaking(tiny_folder):
    with speaking_solver(str(tiny_folder), say) as (solver, engine):
        base = SearchConfig(policy="sc", capacity=8, seed=0)
        with serving(solver, base, served_names=("talker",)) as running:
            running.engine = engine
            yield running


def ask(speaking, word, **fields):
    messages = [{"role": "user", "content": f"please {word}"}]
    return speaking.ask(**{"model": "talker", "messages": messages, "tools": TOOLS, **fields})


def made(message):
    return [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or []]


def test_traces_vote_over_calls_however_they_are_written(speaking):
    reply = ask(speaking, "vote")
    [choice] = reply.choices
    assert made(choice.message) == [("weather", PARIS)] and choice.finish_reason == "tool_calls"
    assert choice.message.content in (None, "let us check") and choice.message.reasoning == "so we have the sum"
    votes = {vote["answer"]: vote["traces"] for vote in reply.gambit["votes"]}
    assert sorted(votes.values()) == [2, 2, 4] and votes["5"] == 2, "Paris twice as often as Rome or an answer"
    assert '{"type": "function", "function": {"name": "weather"' in speaking.engine.prompts[-1]
    assert "boxed" not in speaking.engine.prompts[-1], "a request to box the answer would keep it from calling"


def test_the_log_of_a_vote_over_calls_is_replayed(speaking):
    record = speaking.record_of(ask(speaking, "vote").gambit["search_id"])
    again = record.vote(lambda first, second: False)
    assert again.answer == record.voted.answer == json.dumps([{"arguments": PARIS, "name": "weather"}])


@pytest.mark.parametrize("word", ["vote", "pair"])
def test_a_stream_of_calls_is_put_together_by_the_client(speaking, word):
    whole = ask(speaking, word).choices[0]
    messages = [{"role": "user", "content": f"please {word}"}]
    with speaking.client().chat.completions.stream(model="talker", messages=messages, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert made(final.message) == made(whole.message) and final.finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == len(final.message.tool_calls)
    assert len({each.id for each in final.message.tool_calls}) == len(final.message.tool_calls)


def test_parallel_calls_have_no_order_and_can_be_switched_off(speaking):
    reply = ask(speaking, "pair")
    assert made(reply.choices[0].message) == [("weather", PARIS), ("weather", ROME)]
    assert [vote["traces"] for vote in reply.gambit["votes"]] == [8], "in any order, and each once"
    assert len(made(ask(speaking, "pair", parallel_tool_calls=False).choices[0].message)) == 1


def test_calls_that_are_broken_or_of_no_tool_abstain(speaking):
    reply = ask(speaking, "broken", extra_body={"gambit": {"capacity": 7}})
    assert made(reply.choices[0].message) == [("weather", ROME)]
    assert reply.gambit["abstained"] == len(BROKEN)


def test_a_choice_of_tools_decides_which_calls_count(speaking):
    assert ask(speaking, "none").choices[0].message.content == "\\boxed{5}"
    required = ask(speaking, "vote", tool_choice="required")
    assert required.gambit["abstained"] == 2 and made(required.choices[0].message) == [("weather", PARIS)]
    named = {"type": "function", "function": {"name": "clock"}}
    missing = ask(speaking, "vote", tool_choice=named)
    assert not missing.choices[0].message.tool_calls and missing.gambit["answer"] is None and missing.gambit["warnings"]
    assert ask(speaking, "none", tool_choice="none").choices[0].message.content == "\\boxed{5}"
    assert "weather" not in speaking.engine.prompts[-1]
    assert ask(speaking, "inside").choices[0].message.content == "\\boxed{7}", "thoughts of a call are no call"


def test_traces_vote_over_objects_however_they_are_written(speaking):
    objects = {"response_format": {"type": "json_object"}, "tools": openai.NOT_GIVEN}
    reply = ask(speaking, "object", **objects)
    assert reply.choices[0].message.content == '{"a": [1], "b": 2}' and reply.gambit["abstained"] == 2
    assert "boxed" not in speaking.engine.prompts[-1]
    chunks = ask(speaking, "object", **objects, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply.choices[0].message.content
    client, text = speaking.client(), {"format": {"type": "json_object"}}
    response = client.responses.create(model="talker", input="please object", text=text)
    assert response.output_text == reply.choices[0].message.content and response.text.format.type == "json_object"
    with pytest.raises(openai.UnprocessableEntityError, match="no trace ended with a JSON object"):
        ask(speaking, "none", **objects)


def test_a_loop_of_calls_and_results_ends_with_an_answer(speaking):
    messages = [{"role": "user", "content": "please vote"}]
    asked = ask(speaking, "vote", messages=messages).choices[0].message
    again = {**asked.model_dump(), "provider_specific_fields": {"refusal": None, "reasoning": "x"}}  # as LiteLLM
    messages += [again, {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "name": "weather", "content": "sunny"}]
    answer = ask(speaking, "vote", messages=messages).choices[0]
    assert answer.message.content == "It is sunny. \\boxed{21}" and answer.finish_reason == "stop"
    assert '"arguments": {"city": "Paris", "days": 1}' in speaking.engine.prompts[-1], "arguments as an object"


def test_responses_call_tools_and_take_their_results(speaking):
    client, asked = speaking.client(), [{"role": "user", "content": "please pair"}]
    first = client.responses.create(model="talker", input=asked, tools=FLAT)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in calls] == [PARIS, ROME] and first.status == "completed"
    assert first.tools[0].name == "weather" and not first.output_text
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "rain"} for item in calls]
    second = client.responses.create(model="talker", input=[*asked, *first.output, *results], tools=FLAT)
    assert second.output_text == "It is rain. \\boxed{21}"
    with client.responses.stream(model="talker", input=asked, tools=FLAT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [c.arguments for c in calls]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [item.arguments for item in calls]
    assert [event.output_index for event in done] == [1, 2]


def test_a_model_that_takes_no_tools_is_named(pawn_solver):
    question = [{"role": "user", "content": EASY}]
    with serving(pawn_solver) as running, pytest.raises(openai.BadRequestError, match="takes no tools"):
        running.ask(tools=TOOLS, messages=question)


@pytest.mark.parametrize("other", ["<function>", "<tool_call><function=NAME>"])
def test_models_that_write_calls_otherwise_are_named(tiny_folder, other):
    template = TEMPLATE.replace("<tool_call>", other)
    with (
        speaking_solver(str(tiny_folder), say, template) as (solver, _),
        serving(solver) as running,
        pytest.raises(openai.BadRequestError, match="does not write calls of tools as JSON"),
    ):
        running.ask(tools=TOOLS)


MISTAKES = [
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions of one name"),
    ({"tool_choice": {"type": "function", "function": {"name": "sell"}}}, "not among tools"),
    ({"tool_choice": "required", "tools": []}, "not among tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "user message"),
]


def test_mistakes_with_tools_are_named(speaking):
    for fields, sentence in MISTAKES:
        with pytest.raises(openai.BadRequestError, match=sentence):
            ask(speaking, "vote", **fields)
    bad = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "[1"}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [bad]},
        {"role": "user", "content": "y"},
    ]
    with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
        ask(speaking, "vote", messages=turns)

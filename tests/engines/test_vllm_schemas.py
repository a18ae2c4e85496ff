"""Answers held to a JSON schema on vLLM: from the end of thinking on, across branches, whatever the scheduling."""

import json
from functools import partial

import pytest

from gambit.answers.structured import extract_json
from gambit.engines.base import SearchSpec
from gambit.errors import UserError
from gambit.text.boundary import boundary_rule
from gambit.text.prompts import stop_ids
from gambit.types import OnPressure, PressureAction, TraceKey
from support.engine_setups import GREEDY, HAS_VLLM, SAMPLED, finish, spec, start_own_vllm, tokens_of
from support.tiny import save_worded, word_tokenizer

pytestmark = [pytest.mark.system, pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")]
FIELDS = {"kind": {"enum": ["sun", "rain"]}, "degrees": {"type": "integer", "minimum": 10, "maximum": 99}}
SCHEMA = json.dumps({"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False})
SLOW = '"type": "string", "pattern": "^(a?){3000}(a|aa|aaa){3000}b{1,5000}$"'
TOKENIZER = word_tokenizer()
RULE = boundary_rule(TOKENIZER)
STOPS = stop_ids(TOKENIZER)
PROMPT = tuple(TOKENIZER.encode("so we have the sum", add_special_tokens=False))
WAYS = {
    "sync": {},
    "async": {"async_scheduling": True},
    "plain": {"async_scheduling": True, "short_cuts": False},
    "apart": {"async_scheduling": True, "own_process": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_worded(tmp_path_factory.mktemp("worded"))


def fits(text):
    found = json.loads(extract_json(text))
    return found.keys() == FIELDS.keys() and found["kind"] in ("sun", "rain") and 10 <= found["degrees"] <= 99


def said(steps):
    return {i: TOKENIZER.decode([t for t in tokens if t not in STOPS]) for i, tokens in tokens_of(steps).items()}


def grown(folder, **options):
    """A search that thinks, one that answers at once and one without a schema, with children, in one batch."""
    engine, found = start_own_vllm(model=folder, **options), {1: [], 2: [], 3: []}
    for search, schema, after in ((1, SCHEMA, RULE.think_end), (2, SCHEMA, None), (3, None, None)):
        engine.open(SearchSpec(search, PROMPT, RULE, STOPS, json_schema=schema, answer_after=after))
        engine.submit([spec(i, search=search, sampling=SAMPLED if i else GREEDY, tokens=90) for i in range(3)])
    while any(map(engine.progress, found)):
        progress = {search: engine.progress(search) for search in found}
        if 10 not in said(found[2]) and progress[2].get(0) and progress[2][0].num_tokens == 6:
            child = partial(spec, tokens=90, sampling=GREEDY)
            engine.submit([child(10, search=2, inherited=4, parent=TraceKey(2, 0))])  # in its answer
            engine.submit([child(10, search=1, inherited=5, given=(RULE.think_end,), parent=TraceKey(1, 0))])
            prefix = tuple(engine.tokens(TraceKey(2, 0)))[:5]
            engine.submit([child(11, search=2, inherited=5, prefix=prefix)])  # of a parent that is gone
        for search, step in engine.step().searches.items():
            found[search].append(step)
    engine.close()
    return {search: said(steps) for search, steps in found.items()}


@pytest.fixture(scope="module")
def plainly(folder):
    return grown(folder)


def test_answers_fit_from_the_end_of_thinking_on(plainly):
    thinking, at_once, free = plainly[1], plainly[2], plainly[3]
    assert fits(thinking[10]) and thinking[10].startswith(thinking[0].partition("</think>")[0][:3])
    assert all("{" in text and fits(text) for text in at_once.values()) and set(at_once) == {0, 1, 2, 10, 11}
    assert at_once[0] == at_once[10] == at_once[11], "a greedy child goes on like its parent"
    assert not any(extract_json(text) for text in free.values()), "its neighbours say what they like"
    assert all(fits(text) for text in thinking.values() if "</think>" in text)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sync"])
def test_every_way_of_scheduling_gives_the_same_answers(folder, plainly, way):
    assert grown(folder, **WAYS[way]) == plainly


def test_neighbours_without_a_schema_are_not_changed(folder, plainly):
    engine = start_own_vllm(model=folder)
    engine.open(SearchSpec(3, PROMPT, RULE, STOPS))
    engine.submit([spec(i, search=3, sampling=SAMPLED if i else GREEDY, tokens=90) for i in range(3)])
    assert said(finish(engine, 3)) == plainly[3]
    engine.close()


def test_a_trace_that_is_queued_goes_on_within_its_schema(folder):
    engine = start_own_vllm(model=folder, kv_budget_tokens=5 * 32)
    long = json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{60}$"}},
                       "required": ["a"], "additionalProperties": False})  # fmt: skip
    engine.open(SearchSpec(1, PROMPT, RULE, STOPS, json_schema=long))
    engine.submit([spec(i, tokens=110, on_pressure=OnPressure(PressureAction.QUEUE)) for i in range(4)])
    steps = finish(engine)
    engine.close()
    assert any(step.evicted for step in steps)
    assert all(len(json.loads(text)["a"]) == 60 for text in said(steps).values())


def test_a_grammar_that_breaks_down_in_the_engine_ends_its_traces_alone(folder):
    engine = start_own_vllm(model=folder)
    for search, schema in ((1, "no schema at all"), (2, SCHEMA), (3, None)):
        engine.open(SearchSpec(search, PROMPT, RULE, STOPS, json_schema=schema))
        engine.submit([spec(i, search=search, sampling=SAMPLED, tokens=90) for i in range(2)])
    found = {1: [], 2: [], 3: []}
    while any(map(engine.progress, found)):
        for search, step in engine.step().searches.items():
            found[search].append(step)
    engine.close()
    assert set(said(found[1]).values()) == {""} and all(map(fits, said(found[2]).values()))


def test_confidence_is_finite_where_a_schema_leaves_one_token(folder):
    engine = start_own_vllm(model=folder)
    engine.open(SearchSpec(1, PROMPT, RULE, STOPS, json_schema=SCHEMA, confidence_window=4))
    engine.submit([spec(0, tokens=90)])
    (end,) = [end for step in finish(engine) for end in step.finished]
    engine.close()
    assert 0 < end.confidence.lowest <= end.confidence.mean < 40


def test_a_schema_is_checked_by_the_compiler_of_the_engine(folder):
    engine = start_own_vllm(model=folder)
    engine.check_schema(SCHEMA)
    with pytest.raises(UserError, match="is too complex: compiling it takes more than 1 s"):
        engine.check_schema(SCHEMA.replace('"enum": ["sun", "rain"]', SLOW))
    with pytest.raises(UserError, match='cannot be compiled: Unsupported type "strin"'):
        engine.check_schema(SCHEMA.replace("integer", "strin"))
    process = engine.schemas._process._process
    engine.close()
    assert process.poll() is not None, "it ends with the engine"

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gambit.errors import UserError
from gambit.models.files import end_ids
from gambit.text.boundary import (
    AFTER_NEWLINE,
    THINKING,
    BoundaryRule,
    ThoughtTables,
    advance,
    boundaries,
    boundary_rule,
)
from gambit.text.prompts import DEFAULT_SYSTEM_PROMPT, EncodedPrompt, encode_problem, rule_for, stop_ids
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import ChatMessage
from support.tables import table
from support.tiny import CHAT_TEMPLATE, tiny_sentencepiece_tokenizer, word_tokenizer

# "a" plain, "n" a newline, "N" a blank line, "e" ends with a newline, "s" starts with one, "T" closes the thinking
LETTERS = "anNesT"
RULE = BoundaryRule(
    vocab_size=8,
    blank_line=frozenset({2}),
    ends_newline=frozenset({1, 2, 3}),
    starts_newline=frozenset({1, 2, 4}),
    think_end=5,
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + NO_SYSTEM
OPENS_THINKING = CHAT_TEMPLATE + "<think>\n"


@table(
    ("stream", "expected"),
    [
        ("aNa", [1]),
        ("aNNa", [1]),
        ("aNaN", [1, 3]),
        ("anna", [2]),
        ("annna", [2]),
        ("annnna", [2]),
        ("aesa", [2]),
        ("aseaa", []),
        ("anaa", []),
        ("nana", []),
        ("anN", [2]),
        ("aNn", [1]),
        ("aNnaN", [1, 4]),
        ("aNnan", [1]),
        ("N", [0]),
        ("ns", [1]),
        ("aNaTaNa", [1]),
        ("anTn", []),
        ("", []),
    ],
)
def test_boundaries_of_a_stream(stream: str, expected: list[int]) -> None:
    found, flags = boundaries(RULE, [LETTERS.index(letter) for letter in stream])
    assert found == expected
    assert bool(flags & THINKING) == ("T" not in stream)


def test_without_a_think_tag_thoughts_count_everywhere() -> None:
    stream = [LETTERS.index(letter) for letter in "aTaN"]
    assert boundaries(RULE, stream)[0] == []
    assert boundaries(rule_for(RULE, thinks=False), stream)[0] == [3]
    assert rule_for(RULE, thinks=True) is RULE


@given(st.lists(st.lists(st.integers(0, 11), min_size=9, max_size=9), min_size=1, max_size=20), st.booleans())
def test_rows_advance_like_scalars(steps: list[list[int]], has_think_tag: bool) -> None:
    rule = RULE if has_think_tag else replace(RULE, think_end=None)
    tables = ThoughtTables(rule)
    one_by_one = [THINKING] * 9
    flags = np.array(one_by_one, dtype=np.uint8)
    for tokens in steps:
        flags, is_boundary = tables.advance_rows(flags, np.array(tokens, dtype=np.int32), np.ones(9, np.int64))
        moved = [advance(rule, before, token, 1) for before, token in zip(one_by_one, tokens, strict=True)]
        one_by_one = [after for after, _ in moved]
        assert flags.tolist() == one_by_one
        assert is_boundary.tolist() == [boundary for _, boundary in moved]


def test_rows_take_padding_for_plain_tokens_and_leave_their_input_alone() -> None:
    flags = np.array([THINKING | AFTER_NEWLINE] * 3, dtype=np.uint8)
    before = flags.copy()
    new, is_boundary = ThoughtTables(RULE).advance_rows(flags, np.array([-1, -7, 10**6]), np.ones(3, np.int64))
    assert new.tolist() == [THINKING] * 3
    assert not is_boundary.any()
    assert (flags == before).all()


@cache
def tiny() -> PreTrainedTokenizerFast:
    return word_tokenizer()


def test_rule_of_a_byte_level_tokenizer() -> None:
    tokenizer = tiny()
    rule = boundary_rule(tokenizer)
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    assert rule.blank_line == {i for i, text in texts.items() if "\n\n" in text} != set()
    assert rule.ends_newline == {i for i, text in texts.items() if text.endswith("\n")}
    assert rule.starts_newline == {i for i, text in texts.items() if text.startswith("\n")}
    assert rule.think_end == tokenizer.convert_tokens_to_ids("</think>")
    assert rule.vocab_size == len(tokenizer)


def test_rule_of_a_sentencepiece_tokenizer() -> None:
    tokenizer = tiny_sentencepiece_tokenizer()
    rule = boundary_rule(tokenizer)
    newline, blank = tokenizer.convert_tokens_to_ids("<0x0A>"), tokenizer.convert_tokens_to_ids(".\n\n")
    assert rule.ends_newline == {newline, blank}
    assert rule.starts_newline == {newline}
    assert rule.blank_line == {blank}
    assert rule.think_end is None
    assert boundaries(rule, tokenizer.encode("a\n\nb\nb", add_special_tokens=False))[0] == [2]


def test_thoughts_of_real_text() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("so we check.\n\nthen x is 5.\n\n</think>\n\nanswer is 5.\n\n", add_special_tokens=False)
    found, flags = boundaries(boundary_rule(tokenizer), ids)
    assert [tokenizer.decode(ids[: i + 1]).count("\n\n") for i in found] == [1, 2]
    assert not flags & THINKING


def test_thoughts_that_are_lines_end_at_every_newline_but_at_an_empty_line_once() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("so x is 5.\nthen y.\n\n\nso z\n", add_special_tokens=False)
    found, _ = boundaries(boundary_rule(tokenizer, name="line"), ids)
    texts = [tokenizer.decode(ids[: i + 1]) for i in found]
    assert len(found) == 3 and all(text.endswith("\n") for text in texts)
    assert len(boundaries(boundary_rule(tokenizer), ids)[0]) == 1


def test_a_boundary_rule_that_nothing_knows_is_refused_by_name() -> None:
    for name in ("paragraph", "stride:", "stride:0", "stride:-3", "stride:1.5", "stride:9999999"):
        with pytest.raises(UserError, match=f"unknown boundary rule '{name}': use blank-line, .*stride:32"):
            boundary_rule(tiny(), name=name)


def test_thoughts_by_the_authors_rule_end_at_every_token_with_a_blank_line_and_after_the_thinking_too() -> None:
    tokenizer = tiny()
    text = "so we check.\n\n\n\nthen x\n\n</think>\n\nanswer is 5.\n\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    found, flags = boundaries(boundary_rule(tokenizer, name="blank-line-token"), ids)
    assert found == [i for i, token in enumerate(ids) if "\n\n" in tokenizer.decode([token])]
    assert len(found) > len(boundaries(boundary_rule(tokenizer), ids)[0]) and flags & THINKING
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert len(newline) == 1 and boundaries(boundary_rule(tokenizer), newline * 2)[0] == [1]
    assert boundaries(boundary_rule(tokenizer, name="blank-line-token"), newline * 2)[0] == []


def test_thoughts_that_are_sentences_end_with_the_blank_after_a_full_stop() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("so x is 3.14 then. is it y? no.\n\nso z", add_special_tokens=False)
    found, _ = boundaries(boundary_rule(tokenizer, name="sentence"), ids)
    assert len(found) == 3
    texts = [tokenizer.decode(ids[: i + 1]) for i in found]
    assert [text.count("?") for text in texts] == [0, 1, 1] and not any(text.endswith("3.") for text in texts)


@pytest.mark.parametrize("stride", [1, 4, 32])
def test_thoughts_of_a_stride_have_its_length_until_the_thinking_ends(stride: int) -> None:
    tokenizer = tiny()
    rule = boundary_rule(tokenizer, name=f"stride:{stride}")
    plain, end = rule.vocab_size - 1, rule.think_end
    tokens = [plain] * 70 + [end] + [plain] * 70
    found, flags = boundaries(rule, tokens)
    assert found == list(range(stride - 1, 70, stride)) and not flags & THINKING
    rows, tables = np.array([THINKING], np.uint8), ThoughtTables(rule)
    marks = []
    for length, token in enumerate(tokens, 1):
        rows, is_boundary = tables.advance_rows(rows, np.array([token]), np.array([length]))
        marks += [length - 1] * bool(is_boundary[0])
    assert marks == found


class _WithoutNewlines:
    """A tokenizer whose decoder leaves the raw vocabulary strings, as transformers 5 does for some models."""

    unk_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {"aĊĊ": 0, "b": 1}

    def batch_decode(self, rows: list[list[int]], **_: bool) -> list[str]:
        return [["aĊĊ", "b"][row[0]] for row in rows]

    def convert_tokens_to_ids(self, token: str) -> None:
        return None


def test_a_tokenizer_without_newlines_is_refused() -> None:
    with pytest.raises(UserError, match="load_tokenizer"):
        boundary_rule(_WithoutNewlines())  # type: ignore[arg-type]


def test_a_byte_level_tokenizer_that_calls_itself_llama_is_loaded_right(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "LlamaTokenizerFast"}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode("so x\n\ny", add_special_tokens=False) == tiny().encode("so x\n\ny", add_special_tokens=False)
    assert boundary_rule(loaded) == boundary_rule(tiny())


def test_a_tokenizer_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no tokenizer at '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


def text_of(prompt: EncodedPrompt, tokenizer: Tokenizer | None = None) -> str:
    return (tokenizer or tiny()).decode(list(prompt.token_ids))


def test_a_problem_becomes_a_chat_with_the_system_prompt() -> None:
    prompt = encode_problem(tiny(), "let x = 5")
    assert text_of(prompt) == (
        f"<|im_start|>system\n{DEFAULT_SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\nlet x = 5<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt.thinks, prompt.notes) == (True, ())
    assert r"\boxed{}" in DEFAULT_SYSTEM_PROMPT
    assert "system" not in text_of(encode_problem(tiny(), "let x = 5", system_prompt=None))


def test_messages_are_taken_as_given() -> None:
    messages: list[ChatMessage] = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert text_of(encode_problem(tiny(), messages)).count("system") == 1
    assert "be short" in text_of(encode_problem(tiny(), messages))
    assert DEFAULT_SYSTEM_PROMPT in text_of(encode_problem(tiny(), messages[1:]))
    assert len(messages) == 4


@table("template", [NO_SYSTEM, REFUSES_SYSTEM])
def test_without_a_system_role_the_user_turn_carries_the_system_prompt(template: str) -> None:
    tokenizer = word_tokenizer(chat_template=template)
    prompt = encode_problem(tokenizer, "let x = 5")
    assert text_of(prompt, tokenizer) == f"[user] {DEFAULT_SYSTEM_PROMPT}\n\nlet x = 5\n[assistant] "


def test_messages_a_template_refuses_are_the_users_mistake() -> None:
    tokenizer = word_tokenizer(chat_template="{{ raise_exception('never') }}")
    with pytest.raises(UserError, match="never"):
        encode_problem(tokenizer, "let x = 5")


def test_disabled_thinking_closes_the_block_and_counts_thoughts_everywhere() -> None:
    prompt = encode_problem(tiny(), "let x = 5", enable_thinking=False)
    assert text_of(prompt).endswith("<think>\n\n</think>\n\n")
    assert not prompt.thinks
    assert rule_for(boundary_rule(tiny()), thinks=prompt.thinks).think_end is None


def test_a_template_that_opens_the_block_is_left_alone() -> None:
    tokenizer = word_tokenizer(chat_template=OPENS_THINKING)
    prompt = encode_problem(tokenizer, "let x = 5")
    assert prompt.thinks
    assert text_of(prompt, tokenizer).count("<think>") == 1


def test_a_model_without_think_tags_does_not_think() -> None:
    tokenizer = word_tokenizer(think_tags=False)
    assert not encode_problem(tokenizer, "let x = 5").thinks
    assert boundary_rule(tokenizer).think_end is None


def test_a_template_that_cannot_stop_thinking_is_noted() -> None:
    tokenizer = word_tokenizer(chat_template=NO_SYSTEM)
    prompt = encode_problem(tokenizer, "let x = 5", enable_thinking=False)
    assert prompt.thinks
    assert "cannot switch thinking off" in prompt.notes[0]
    assert encode_problem(tokenizer, "let x = 5").notes == ()


def test_tags_in_the_problem_do_not_count() -> None:
    assert encode_problem(tiny(), "what does </think>").thinks


def test_without_a_chat_template_the_prompt_is_plain_and_noted() -> None:
    tokenizer = word_tokenizer(chat_template=None)
    prompt = encode_problem(tokenizer, "let x = 5")
    assert text_of(prompt, tokenizer) == f"{DEFAULT_SYSTEM_PROMPT}\n\nlet x = 5\n\n"
    assert "no chat template" in prompt.notes[0]


@table("problem", ["", " \n", [], [{"role": "user", "content": " "}], [{"role": "assistant", "content": "hi"}]])
def test_an_empty_problem_is_the_users_mistake(problem: str | list[ChatMessage]) -> None:
    with pytest.raises(UserError, match="problem"):
        encode_problem(tiny(), problem)


def test_stop_ids_collect_every_end_of_turn(tmp_path: Path) -> None:
    eos, im_end = tiny().eos_token_id, tiny().convert_tokens_to_ids("<|im_end|>")
    assert stop_ids(tiny()) == stop_ids(tiny(), end_ids(str(tmp_path))) == {eos, im_end}
    for configured, expected in (("null", set()), ("7", {7}), ("[0, 9]", {0, 9})):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {configured}}}')
        assert stop_ids(tiny(), end_ids(str(tmp_path))) == {eos, im_end} | expected


def test_end_is_no_stop_where_it_only_closes_a_channel() -> None:
    plain, harmony = word_tokenizer(more_special=("<|end|>",)), word_tokenizer(more_special=("<|end|>", "<|channel|>"))
    assert plain.convert_tokens_to_ids("<|end|>") in stop_ids(plain)
    assert harmony.convert_tokens_to_ids("<|end|>") not in stop_ids(harmony)


@pytest.fixture(scope="module")
def qwen(shared_tokenizers: Path) -> Tokenizer:
    return load_tokenizer(str(shared_tokenizers / "qwen3"))


@pytest.fixture(scope="module")
def deepseek(shared_tokenizers: Path) -> Tokenizer:
    return load_tokenizer(str(shared_tokenizers / "deepseek-r1-0528-qwen3-8b"))


@pytest.fixture(params=["qwen", "deepseek"])
def real(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


def test_boundaries_of_real_tokenizers(real: Tokenizer) -> None:
    rule = boundary_rule(real)
    assert (len(rule.blank_line), rule.think_end) == (565, 151668)
    ids = real.encode("So.\n\nThen:\n\n\nwait\n \nok\n</think>\n\n5\n\n", add_special_tokens=False)
    found, flags = boundaries(rule, ids)
    assert [real.decode([ids[i]]) for i in found] == [".\n\n", ":\n\n\n"]
    assert not flags & THINKING


def test_prompts_of_real_tokenizers(real: Tokenizer) -> None:
    prompt = encode_problem(real, "Let $x = 5$.\n\nWhat is x?")
    text = text_of(prompt, real)
    assert DEFAULT_SYSTEM_PROMPT in text
    assert "Let $x = 5$.\n\nWhat is x?" in text
    assert text.endswith(("<|im_start|>assistant\n", "<｜Assistant｜>"))
    assert (prompt.thinks, prompt.notes) == (True, ())


def test_stop_ids_of_real_tokenizers(qwen: Tokenizer, deepseek: Tokenizer) -> None:
    assert stop_ids(qwen) == {151643, 151645}
    assert stop_ids(deepseek, [151643]) == {151643, 151645}


def test_real_templates_close_the_block_only_where_they_can(qwen: Tokenizer, deepseek: Tokenizer) -> None:
    prompt = encode_problem(qwen, "x?", enable_thinking=False)
    assert (prompt.thinks, prompt.notes) == (False, ())
    assert 151668 in prompt.token_ids
    prompt = encode_problem(deepseek, "x?", enable_thinking=False)
    assert prompt.thinks
    assert "cannot switch thinking off" in prompt.notes[0]


def test_importing_is_light() -> None:
    code = (
        "import sys, gambit.answers, gambit.results.vote, gambit.text.prompts;"
        "assert not {'torch', 'transformers', 'math_verify', 'sympy', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""A tokenizer.json that says everything is read without transformers, to the same ids and texts."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from gambit.models.files import locate
from gambit.text.tokenizers import JsonTokenizer, load_tokenizer, read_tokenizer_json
from support.tiny import tiny_tokenizer

TEXTS = ["a = 17; b = 61; c = a * b; c?", "<think>\na = 3\n\n</think> \\boxed{7}", "", "héllo\n\n\n  x", "<|end|>"]
CHAT = [{"role": "user", "content": " a = 1; a? "}]


@pytest.fixture(params=["pawn", "tiny"])
def folder(request, tmp_path) -> Path:
    if request.param == "pawn":
        return Path(locate("pawn"))
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_ids_and_texts_are_those_of_transformers(folder):
    ours, theirs = read_tokenizer_json(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    assert (ours.eos_token_id, ours.unk_token_id) == (theirs.eos_token_id, theirs.unk_token_id)
    assert ours.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids) == theirs.decode(ids)
        assert ours.convert_tokens_to_ids(text) == theirs.convert_tokens_to_ids(text)
    rows = [theirs.encode(text, add_special_tokens=False) for text in TEXTS]
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert ours.batch_decode(rows, **options) == theirs.batch_decode(rows, **options)
    render = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(CHAT, **render) == theirs.apply_chat_template(CHAT, **render)


def test_a_template_has_what_transformers_gives_it(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}{{ m | tojson }}{{ eos_token }}{% break %}{% endif %}{% endfor %}"
        "{% if tools is not none or enable_thinking %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}"
        "{{ strftime_now('%%') }}"
    )
    tokenizer.save_pretrained(tmp_path)
    ours, theirs = read_tokenizer_json(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    render = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(CHAT, **render) == theirs.apply_chat_template(CHAT, **render)
    with pytest.raises(TemplateError, match="no user"):
        ours.apply_chat_template(CHAT, **render, enable_thinking=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"add_bos_token": True},
        {"clean_up_tokenization_spaces": True},
        {"eos_token": {"content": "<eos>", "lstrip": True}},
        {"eos_token": "<new>"},
        {"extra_special_tokens": ["<new>"]},
        {"additional_special_tokens": ["<new>"]},
        {"added_tokens_decoder": {"0": {"content": "<eos>"}}},
    ],
)
def test_what_transformers_would_add_to_is_left_to_it(tmp_path, changes):
    tiny_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    assert isinstance(load_tokenizer(str(tmp_path)), JsonTokenizer)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert read_tokenizer_json(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_files_that_cannot_be_read_are_left_to_transformers(tmp_path, name, content):
    tiny_tokenizer().save_pretrained(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    assert read_tokenizer_json(tmp_path) is None


def test_the_tokenizers_of_the_papers_models_are_left_to_transformers(shared_tokenizers):
    for name in ("qwen3", "deepseek-r1-0528-qwen3-8b"):
        assert read_tokenizer_json(shared_tokenizers / name) is None

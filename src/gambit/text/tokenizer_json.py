"""Reads tokenizers that are described in full by a tokenizer.json, without the second that transformers takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gambit.types import ChatMessage

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Backend

# Classes of transformers that take tokenizer.json as it stands.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Settings with which transformers would change what tokenizer.json says.
CHANGES = ("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "split_special_tokens", "auto_map")


class JsonTokenizer:
    """A tokenizer.json with the special tokens and the chat template that stand beside it."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self.chat_template = chat_template

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str, /) -> int | None:
        index = self._backend.token_to_id(tokens)
        return self.unk_token_id if index is None else index

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], /) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> list[str]:
        assert not clean_up_tokenization_spaces, "text is given back as it was"
        return self._backend.decode_batch([list(each) for each in sequences], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[ChatMessage], /, *, tokenize: bool, add_generation_prompt: bool, **options: bool
    ) -> str:
        assert not tokenize and self.chat_template is not None
        names = {"messages": list(conversation), "tools": None, "documents": None, **self._special_tokens, **options}
        return self._template.render(**names, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _template(self) -> Template:
        return _compiled(self.chat_template or "")


def read_tokenizer_json(folder: Path) -> JsonTokenizer | None:
    """None where transformers would do more than these files say, or where they cannot be read."""
    from tokenizers import Tokenizer as Backend

    try:
        config: dict[str, Any] = dict(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")))
        template = _chat_template(folder, config)
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError):
        return None
    special_tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    if not _is_plain(config, special_tokens, template):
        return None
    try:
        backend = Backend.from_str(content)
    except Exception:  # the library raises nothing more precise; transformers then says what is wrong
        return None
    backend.no_truncation()
    backend.no_padding()
    named = {*special_tokens.values(), *(config.get("extra_special_tokens") or ())}
    if any(backend.token_to_id(token) is None for token in named):
        return None  # transformers would add it
    return JsonTokenizer(backend, special_tokens, template)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A template of several parts is no text; `_is_plain` then leaves the tokenizer to transformers."""
    beside = folder / "chat_template.jinja"
    return beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")


def _is_plain(config: Mapping[str, Any], special_tokens: Mapping[str, object], template: str | None) -> bool:
    extra = [*(config.get("extra_special_tokens") or ()), *(config.get("additional_special_tokens") or ())]
    return (
        config.get("tokenizer_class") in PLAIN_CLASSES
        and not any(config.get(name) for name in (*CHANGES, "added_tokens_decoder", "additional_special_tokens"))
        and all(isinstance(token, str) for token in (*special_tokens.values(), *extra))
        and (template is None or (isinstance(template, str) and "generation %}" not in template))
    )


def _compiled(template: str) -> Template:
    """As transformers compiles chat templates, but for tools and marks of the assistant's turns, which are not used."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)

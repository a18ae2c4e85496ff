"""The tokenizer interface, and loading a tokenizer that returns texts as they were.

A tokenizer that its tokenizer.json describes in full is read without transformers, whose import takes a second.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from gambit.errors import UserError
from gambit.types import ChatMessage

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Backend

# Classes of transformers that take tokenizer.json as it stands.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Settings with which transformers would depart from tokenizer.json.
CHANGES = (
    "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "split_special_tokens", "auto_map",
    "added_tokens_decoder", "additional_special_tokens",
)  # fmt: skip


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that are used here."""

    @property
    def chat_template(self) -> str | Mapping[str, str] | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_tokens_to_ids(self, tokens: str, /) -> int | None: ...
    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], /) -> str: ...
    def batch_decode(
        self, sequences: Sequence[Sequence[int]], /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> list[str]: ...
    def apply_chat_template(
        self, conversation: Sequence[ChatMessage], /, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> str: ...


def load_tokenizer(name_or_path: str, **options: str | bool | None) -> Tokenizer:
    """Loads a tokenizer that returns texts as they were.

    transformers 5 lets LlamaTokenizer replace the byte-level rules of tokenizer.json for models that merely name that
    class, DeepSeek-R1-0528-Qwen3-8B among them (huggingface/transformers#45488): spaces and newlines are lost, and
    with them every thought boundary. Reading tokenizer.json as it stands is the cure.
    """
    plain = None if options else read_tokenizer_json(Path(name_or_path))
    if plain is not None and not _is_garbled(plain):
        return plain
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        if _is_garbled(tokenizer):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name_or_path, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {name_or_path!r}: give a model's folder or its hub name ({error})") from error
    if _is_garbled(tokenizer):
        raise UserError(f"the tokenizer of {name_or_path!r} loses spaces and newlines: check its tokenizer.json")
    return tokenizer


def _is_garbled(tokenizer: Tokenizer) -> bool:
    """Returns True if a byte-level vocabulary, which always holds the newline as Ċ, does not decode it to a newline."""
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    return newline not in (None, tokenizer.unk_token_id) and tokenizer.decode([newline]) != "\n"


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the id of `text` if the vocabulary holds it as one token and encoding yields just that, else None."""
    index = tokenizer.convert_tokens_to_ids(text)
    if index is None or index == tokenizer.unk_token_id:
        return None
    return index if tokenizer.encode(text, add_special_tokens=False) == [index] else None


class JsonTokenizer:
    """A tokenizer.json with the special tokens and the chat template that stand beside it."""

    def __init__(self, backend: "Backend", special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self.chat_template = chat_template
        self.bos_token = special_tokens.get("bos_token")
        ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
        self.eos_token_id, self.unk_token_id = ids.get("eos_token"), ids.get("unk_token")

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
        assert not clean_up_tokenization_spaces, "texts are returned as they were"
        return self._backend.decode_batch([list(each) for each in sequences], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: Sequence[ChatMessage], /, *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> str:
        assert not tokenize
        names = {"messages": list(conversation), "tools": None, "documents": None, **self._special_tokens, **options}
        return self._template.render(**names, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _template(self) -> "Template":
        """The compiled template, without transformers' extensions for tools and assistants' turns, which go unused."""
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        assert self.chat_template is not None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def read_tokenizer_json(folder: Path) -> JsonTokenizer | None:
    """Reads a folder's tokenizer; None if its files cannot be read, or if transformers would add to them."""
    from tokenizers import Tokenizer as Backend

    try:
        config: dict[str, Any] = dict(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")))
        beside = folder / "chat_template.jinja"
        template = beside.read_text(encoding="utf-8") if beside.is_file() else config.get("chat_template")
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError):
        return None
    special_tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    named = [*special_tokens.values(), *(config.get("extra_special_tokens") or ())]
    if not _is_plain(config, named, template):
        return None
    try:
        backend = Backend.from_str(content)
    except Exception:  # the library raises nothing more precise; transformers then reports the reason
        return None
    backend.no_truncation()
    backend.no_padding()
    if any(backend.token_to_id(token) is None for token in named):
        return None  # transformers would add it
    return JsonTokenizer(backend, special_tokens, template)


def _is_plain(config: Mapping[str, Any], named_tokens: Sequence[object], template: object) -> bool:
    """Returns True if transformers would add nothing to the files. A template of several parts is no text."""
    return (
        config.get("tokenizer_class") in PLAIN_CLASSES
        and not any(config.get(name) for name in CHANGES)
        and all(isinstance(token, str) for token in named_tokens)
        and (template is None or (isinstance(template, str) and "generation %}" not in template))
    )

"""The tokenizer interface, and loading a tokenizer that gives text back as it was."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gambit.errors import UserError
from gambit.text.tokenizer_json import read_tokenizer_json
from gambit.types import ChatMessage


class Tokenizer(Protocol):
    """What we need of a transformers tokenizer."""

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
        self, conversation: Sequence[ChatMessage], /, *, tokenize: bool, add_generation_prompt: bool, **options: bool
    ) -> str: ...


def load_tokenizer(name_or_path: str, **options: str | bool | None) -> Tokenizer:
    """A tokenizer that gives text back as it was.

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
    """Whether a byte-level vocabulary, which always holds the newline as Ċ, does not decode it to a newline."""
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    return newline not in (None, tokenizer.unk_token_id) and tokenizer.decode([newline]) != "\n"


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of `text` if the vocabulary holds it as one token and encoding yields just that."""
    index = tokenizer.convert_tokens_to_ids(text)
    if index is None or index == tokenizer.unk_token_id:
        return None
    return index if tokenizer.encode(text, add_special_tokens=False) == [index] else None

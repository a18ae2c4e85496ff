"""Token ids as the bytes they stand for, so that text can be cut at any token."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gambit.errors import UserError
from gambit.events import RunStarted
from gambit.models import files as models
from gambit.text.tokenizers import Tokenizer, load_tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
REPLACEMENT = "\ufffd"


class TokenText:
    """The bytes of each token id of a run; of an id that no tokenizer explains, its number."""

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._lengths = np.zeros(max(pieces, default=0) + 1, dtype=np.int64)
        for token, piece in pieces.items():
            self._lengths[token] = len(piece)

    def join(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, tokens))

    def offsets(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Returns the end of each token; the first entry is 0, before all of them."""
        ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._lengths[ids])])


class NoText(TokenText):
    """The text of traces that are shown without their texts: every token is empty."""

    def __init__(self) -> None:
        super().__init__({})

    def join(self, tokens: Sequence[int]) -> bytes:
        return b""

    def offsets(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        return np.zeros(len(tokens) + 1, dtype=np.int64)


def read_tokens(tokens: Iterable[int], tokenizer: Tokenizer | None) -> TokenText:
    """Returns the text of tokens, or without a tokenizer their numbers."""
    ids = sorted(set(tokens))
    if tokenizer is None:
        return TokenText({token: b"%d " % token for token in ids})
    return TokenText(_pieces(tokenizer, ids))


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, bytes]:
    """Decodes each id behind another one, since SentencePiece tokenizers drop the space of what comes first."""
    anchor = tokenizer.encode("1", add_special_tokens=False)[-1:]
    rows = [anchor, *([*anchor, token] for token in ids)]
    lead, *texts = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces = {token: text.removeprefix(lead) for token, text in zip(ids, texts, strict=True)}
    partial = [token for token, text in pieces.items() if REPLACEMENT in text]  # half a character has no text
    raw = _raw_bytes(tokenizer, partial)
    return {token: raw.get(token, text.encode()) for token, text in pieces.items()}


def _raw_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, bytes]:
    """Returns the bytes of tokens that are no whole characters, as the vocabulary writes them."""
    if not ids:
        return {}
    missing, byte_of = set(ids), _byte_level_alphabet()
    found: dict[int, bytes] = {}
    for name, token in tokenizer.get_vocab().items():
        if token not in missing:
            continue
        if match := BYTE_TOKEN.fullmatch(name):
            found[token] = bytes.fromhex(match[1])
        elif all(char in byte_of for char in name):
            found[token] = bytes(byte_of[char] for char in name)
    return found


def _byte_level_alphabet() -> dict[str, int]:
    """Maps characters to the bytes that byte-level BPE writes as them: the unprintable ones in order from 256 on."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet, spare = set(ByteLevel.alphabet()), itertools.count(256)
    return {chr(byte) if chr(byte) in alphabet else chr(next(spare)): byte for byte in range(256)}


def tokenizer_of(started: RunStarted, given: str | None) -> Tokenizer:
    """Returns the tokenizer that the log names, or the one given instead."""
    named = given or model_of(started)
    if named is None:
        raise UserError("the log does not name a model: give --tokenizer")
    return load_tokenizer(models.locate(named))


def model_of(started: RunStarted) -> str | None:
    """Returns the model that the log names, as it is found here."""
    engine = started.environment.get("engine")
    named = engine.get("model") if isinstance(engine, dict) else None
    if not isinstance(named, str):
        return None
    is_elsewhere = _is_bundled(named) and not Path(named).is_dir()  # its path is another on every machine
    return models.BUNDLED if is_elsewhere else named


def model_name(model: str) -> str:
    """Returns a model's name for pages, which are shown to people whom the folders of this machine do not concern."""
    return models.BUNDLED if _is_bundled(model) else Path(model).name if Path(model).is_absolute() else model


def _is_bundled(model: str) -> bool:
    return Path(model).parts[-3:] == ("gambit", "pawn", "model")

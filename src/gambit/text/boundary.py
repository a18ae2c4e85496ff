"""Thoughts in a stream of tokens: the rules of a tokenizer, and the detector that follows them token by token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from gambit.errors import UserError
from gambit.text.tokenizers import Tokenizer, single_token

THINK_START = "<think>"
THINK_END = "</think>"
BLANK_LINE, LINE = "blank-line", "line"
BOUNDARY_RULES = (BLANK_LINE, LINE)
# The detector remembers of a trace no more than these flags.
THINKING, AFTER_BOUNDARY, AFTER_NEWLINE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """The token ids that end a thought: a blank line, in one token or made of two newlines; or any end of a line."""

    vocab_size: int
    blank_line: frozenset[int]  # every newline, where thoughts are lines
    ends_newline: frozenset[int]
    starts_newline: frozenset[int]
    think_end: int | None
    start: int = THINKING  # the flags before a trace's first generated token


def check_boundary_rule(name: str) -> None:
    """Raises unless thoughts can be cut so."""
    if name not in BOUNDARY_RULES:
        raise UserError(f"unknown boundary rule {name!r}: use {' or '.join(BOUNDARY_RULES)}")


def boundary_rule(tokenizer: Tokenizer, vocab_size: int | None = None, name: str = BLANK_LINE) -> BoundaryRule:
    """Returns a tokenizer's rule of this name. The model's padded rows (`vocab_size`) are never boundaries."""
    check_boundary_rule(name)
    end = "\n" if name == LINE else "\n\n"
    vocab = tokenizer.get_vocab()
    size = max(vocab.values()) + 1 if vocab_size is None else vocab_size
    texts = _newline_texts(tokenizer, {token: index for token, index in vocab.items() if index < size})
    rule = BoundaryRule(
        vocab_size=size,
        blank_line=frozenset(i for i, text in texts.items() if end in text),
        ends_newline=frozenset(i for i, text in texts.items() if text.endswith("\n")),
        starts_newline=frozenset(i for i, text in texts.items() if text.startswith("\n")),
        think_end=single_token(tokenizer, THINK_END),
    )
    if not rule.blank_line and not (rule.ends_newline and rule.starts_newline):
        raise UserError("no token of this tokenizer decodes to a newline, so no thought would ever end: load it with "
                        "gambit.api.load_tokenizer, or use a model whose vocabulary has newlines")  # fmt: skip
    return rule


def _newline_texts(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> dict[int, str]:
    """Returns the texts with newlines by id. To decode the 2,000 likely ids takes 1 % of decoding all 150,000."""
    likely = [i for token, i in vocab.items() if "Ċ" in token or "\n" in token or token == "<0x0A>"]
    ids = likely or list(vocab.values())  # an unknown way to write newlines: decode everything
    rows = [[i] for i in ids]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {i: text for i, text in zip(ids, texts, strict=True) if "\n" in text}


def advance(rule: BoundaryRule, flags: int, token: int) -> tuple[int, bool]:
    """Returns the flags after `token`, and True if it is the boundary of a thought."""
    if not flags & THINKING or token == rule.think_end:
        return 0, False
    completes_pair = bool(flags & AFTER_NEWLINE) and token in rule.starts_newline
    is_blank = token in rule.blank_line or completes_pair
    after = THINKING | AFTER_BOUNDARY * is_blank | AFTER_NEWLINE * (token in rule.ends_newline)
    return after, is_blank and not flags & AFTER_BOUNDARY


def boundaries(rule: BoundaryRule, tokens: Iterable[int]) -> tuple[list[int], int]:
    """Returns the indices of the boundary tokens among a trace's generated tokens, and the flags after the last."""
    flags, found = rule.start, []
    for index, token in enumerate(tokens):
        flags, is_boundary = advance(rule, flags, token)
        if is_boundary:
            found.append(index)
    return found, flags


def continued(rule: BoundaryRule, prefix: Iterable[int]) -> BoundaryRule:
    """Returns the rule of traces that go on after a prefix, whose think block may be closed already."""
    return replace(rule, start=boundaries(rule, prefix)[1])


class ThoughtTables:
    """`advance` for a whole batch: one look-up for the kind of each token, one for the change that it makes."""

    def __init__(self, rule: BoundaryRule) -> None:
        self._outside = np.uint64(rule.vocab_size)
        # A bit set for each id. The last entry stands for every id outside the vocabulary.
        self._kinds = np.zeros(rule.vocab_size + 1, np.uint8)
        think_end = frozenset() if rule.think_end is None else frozenset({rule.think_end})
        for bit, ids in enumerate((rule.blank_line, rule.ends_newline, rule.starts_newline, think_end)):
            self._kinds[list(ids)] |= 1 << bit
        self._changes = np.zeros(8 * 16, np.uint8)  # by flags and kind: the new flags, and a bit for a boundary
        kinds, examples = (found.tolist() for found in np.unique(self._kinds, return_index=True))
        for flags, (kind, token) in product(range(8), zip(kinds, examples, strict=True)):
            after, is_boundary = advance(rule, flags, token)
            self._changes[flags << 4 | kind] = after | is_boundary << 3

    def advance_rows(
        self, flags: NDArray[np.uint8], tokens: NDArray[np.integer]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns new flags and boundary marks. Ids outside the vocabulary (padding, -1) count as plain tokens."""
        kinds = self._kinds.take(np.minimum(tokens.astype(np.uint64), self._outside))
        changes = self._changes.take(flags << 4 | kinds)
        return changes & np.uint8(7), changes > 7

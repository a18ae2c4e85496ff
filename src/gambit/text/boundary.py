"""Thoughts in a stream of tokens: the rules of a tokenizer, and the detector that follows them token by token."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from gambit.errors import UserError
from gambit.text.tokenizers import Tokenizer, single_token

THINK_START = "<think>"
THINK_END = "</think>"
BLANK_LINE, BLANK_LINE_TOKEN, LINE, SENTENCE = "blank-line", "blank-line-token", "line", "sentence"
BOUNDARY_RULES = (BLANK_LINE, BLANK_LINE_TOKEN, LINE, SENTENCE)
_STRIDE = re.compile(r"stride:([1-9]\d{0,5})")
_SENTENCE_END = re.compile(r"[.!?][\"')\]*]*\s")
_OPEN_SENTENCE_END = re.compile(r"[.!?][\"')\]*]*$")
# The detector remembers of a trace no more than these flags.
THINKING, AFTER_BOUNDARY, AFTER_NEWLINE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """The token ids that end a thought: a blank line, in one token or made of two newlines; or what its name says.

    For sentences, a full stop and the blank after it take the places of the two newlines.
    """

    vocab_size: int
    blank_line: frozenset[int]  # every newline, where thoughts are lines
    ends_newline: frozenset[int]
    starts_newline: frozenset[int]
    think_end: int | None
    start: int = THINKING  # the flags before a trace's first generated token
    counts_runs: bool = False  # each boundary token of a run ends a thought, not the first alone
    stride: int = 0  # tokens of a thought, where thoughts are cut by their length


def check_boundary_rule(name: str) -> None:
    """Raises unless thoughts can be cut so."""
    if name not in BOUNDARY_RULES and _STRIDE.fullmatch(name) is None:
        raise UserError(f"unknown boundary rule {name!r}: use {', '.join(BOUNDARY_RULES)}, or stride:32 for 32 tokens")


def boundary_rule(tokenizer: Tokenizer, name: str = BLANK_LINE) -> BoundaryRule:
    """Returns a tokenizer's rule of this name. The model's padded rows are never boundaries."""
    check_boundary_rule(name)
    known = tokenizer.get_vocab()
    size = max(known.values()) + 1
    think_end = single_token(tokenizer, THINK_END)
    if (stride := _STRIDE.fullmatch(name)) is not None:
        return BoundaryRule(size, frozenset(), frozenset(), frozenset(), think_end, stride=int(stride[1]))
    if name == SENTENCE:
        return _sentence_rule(tokenizer, known, size, think_end)
    end = "\n" if name == LINE else "\n\n"
    texts = _newline_texts(tokenizer, known)
    rule = BoundaryRule(
        vocab_size=size,
        blank_line=frozenset(i for i, text in texts.items() if end in text),
        ends_newline=frozenset(i for i, text in texts.items() if text.endswith("\n")),
        starts_newline=frozenset(i for i, text in texts.items() if text.startswith("\n")),
        think_end=think_end,
    )
    if name == BLANK_LINE_TOKEN:  # the authors' rule: answers have thoughts too, and a pair of newlines is none
        none: frozenset[int] = frozenset()
        rule = replace(rule, ends_newline=none, starts_newline=none, think_end=None, counts_runs=True)
    if not rule.blank_line and not (rule.ends_newline and rule.starts_newline):
        raise UserError("no token of this tokenizer decodes to a newline, so no thought would ever end: load it with "
                        "gambit.api.load_tokenizer, or use a model whose vocabulary has newlines")  # fmt: skip
    return rule


def _newline_texts(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> dict[int, str]:
    """Returns the texts with newlines by id. To decode the 2,000 likely ids takes 1 % of decoding all 150,000."""
    likely = [i for token, i in vocab.items() if "Ċ" in token or "\n" in token or token == "<0x0A>"]
    ids = likely or list(vocab.values())  # an unknown way to write newlines: decode everything
    return {i: text for i, text in _texts(tokenizer, ids).items() if "\n" in text}


def _sentence_rule(tokenizer: Tokenizer, vocab: Mapping[str, int], size: int, think_end: int | None) -> BoundaryRule:
    """Returns the rule by which a thought ends at the blank after `.`, `!` or `?`, so that 3.14 is not cut."""
    # Pieces of SentencePiece lose their blanks where they are decoded alone.
    blanks = {i for token, i in vocab.items() if token.startswith(("Ġ", "▁", "Ċ", " ", "\n")) or token == "<0x0A>"}
    texts = _texts(tokenizer, list(vocab.values()))
    return BoundaryRule(
        size,
        blank_line=frozenset(i for i, text in texts.items() if _SENTENCE_END.search(text)),
        ends_newline=frozenset(i for i, text in texts.items() if _OPEN_SENTENCE_END.search(text)),
        starts_newline=frozenset(blanks | {i for i, text in texts.items() if text[:1].isspace()}),
        think_end=think_end,
    )


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> dict[int, str]:
    rows = [[i] for i in ids]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return dict(zip(ids, texts, strict=True))


def advance(rule: BoundaryRule, flags: int, token: int, length: int) -> tuple[int, bool]:
    """Returns the flags after `token`, and True if it is the boundary of a thought. `length`: of the trace with it."""
    if not flags & THINKING or token == rule.think_end:
        return 0, False
    if rule.stride:
        return THINKING, length % rule.stride == 0
    completes_pair = bool(flags & AFTER_NEWLINE) and token in rule.starts_newline
    is_blank = token in rule.blank_line or completes_pair
    begins_run = is_blank and not rule.counts_runs
    after = THINKING | AFTER_BOUNDARY * begins_run | AFTER_NEWLINE * (token in rule.ends_newline)
    return after, is_blank and not flags & AFTER_BOUNDARY


def boundaries(rule: BoundaryRule, tokens: Iterable[int]) -> tuple[list[int], int]:
    """Returns the indices of the boundary tokens among a trace's generated tokens, and the flags after the last."""
    flags, found = rule.start, []
    for index, token in enumerate(tokens):
        flags, is_boundary = advance(rule, flags, token, index + 1)
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
        self._stride = rule.stride
        # A bit set for each id. The last entry stands for every id outside the vocabulary.
        self._kinds = np.zeros(rule.vocab_size + 1, np.uint8)
        think_end = frozenset() if rule.think_end is None else frozenset({rule.think_end})
        for bit, ids in enumerate((rule.blank_line, rule.ends_newline, rule.starts_newline, think_end)):
            self._kinds[list(ids)] |= 1 << bit
        self._changes = np.zeros(8 * 16, np.uint8)  # by flags and kind: the new flags, and a bit for a boundary
        kinds, examples = (found.tolist() for found in np.unique(self._kinds, return_index=True))
        for flags, (kind, token) in product(range(8), zip(kinds, examples, strict=True)):
            after, is_boundary = advance(rule, flags, token, 0)
            self._changes[flags << 4 | kind] = after | is_boundary << 3

    def advance_rows(
        self, flags: NDArray[np.uint8], tokens: NDArray[np.integer], lengths: NDArray[np.integer]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Returns new flags and boundary marks; `lengths` are those of the traces with these tokens.

        Ids outside the vocabulary (padding, -1) count as plain tokens.
        """
        kinds = self._kinds.take(np.minimum(tokens.astype(np.uint64), self._outside))
        changes = self._changes.take(flags << 4 | kinds)
        is_boundary = changes > 7
        if self._stride:
            is_boundary &= lengths % self._stride == 0
        return changes & np.uint8(7), is_boundary

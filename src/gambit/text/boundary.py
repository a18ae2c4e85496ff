"""Where a thought ends: the rules of a tokenizer and the detector that follows them token by token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gambit.errors import UserError
from gambit.text.tokenizers import Tokenizer, single_token

THINK_START = "<think>"
THINK_END = "</think>"
BLANK_LINE, LINE = "blank-line", "line"
BOUNDARY_RULES = (BLANK_LINE, LINE)


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """All the detector remembers of a trace; the default is the state at the beginning of an answer."""

    is_thinking: bool = True
    after_boundary: bool = False
    after_newline: bool = False


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Which token ids end a thought: a blank line, in one token or made of two newlines; or any end of a line."""

    vocab_size: int
    blank_line: frozenset[int]  # every newline, where thoughts are lines
    ends_newline: frozenset[int]
    starts_newline: frozenset[int]
    think_end: int | None
    start: ThoughtState = ThoughtState()  # before a trace's first generated token


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
    """Texts of the ids that may hold a newline; decoding the 2,000 likely ones takes 1 % of decoding all 150,000."""
    likely = [i for token, i in vocab.items() if "Ċ" in token or "\n" in token or token == "<0x0A>"]
    ids = likely or list(vocab.values())  # an unknown way to write newlines: decode everything
    rows = [[i] for i in ids]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {i: text for i, text in zip(ids, texts, strict=True) if "\n" in text}


THINKING, AFTER_BOUNDARY, AFTER_NEWLINE = 1, 2, 4


def pack(state: ThoughtState) -> int:
    return THINKING * state.is_thinking + AFTER_BOUNDARY * state.after_boundary + AFTER_NEWLINE * state.after_newline


def unpack(flags: int) -> ThoughtState:
    return ThoughtState(bool(flags & THINKING), bool(flags & AFTER_BOUNDARY), bool(flags & AFTER_NEWLINE))


def advance(rule: BoundaryRule, state: ThoughtState, token: int) -> tuple[ThoughtState, bool]:
    """The state after `token`, and whether it is the boundary of a thought."""
    if not state.is_thinking or token == rule.think_end:
        return ThoughtState(is_thinking=False), False
    completes_pair = state.after_newline and token in rule.starts_newline
    is_blank = token in rule.blank_line or completes_pair
    return ThoughtState(True, is_blank, token in rule.ends_newline), is_blank and not state.after_boundary


def boundaries(rule: BoundaryRule, tokens: Iterable[int]) -> tuple[list[int], ThoughtState]:
    """Indices of the boundary tokens among a trace's generated tokens, and the state after the last."""
    state, found = rule.start, []
    for index, token in enumerate(tokens):
        state, is_boundary = advance(rule, state, token)
        if is_boundary:
            found.append(index)
    return found, state


def continued(rule: BoundaryRule, prefix: Iterable[int]) -> BoundaryRule:
    """For traces that go on after a prefix, whose think block may be closed already."""
    return replace(rule, start=boundaries(rule, prefix)[1])


class ThoughtTables:
    """`advance` for a whole batch: one look-up for the kind of each token, one for the step it makes."""

    __slots__ = ("_kinds", "_outside", "_steps")

    def __init__(self, rule: BoundaryRule) -> None:
        self._outside = np.uint64(rule.vocab_size)
        self._kinds = _token_kinds(rule)
        representatives = _representatives(self._kinds)
        self._steps = np.zeros(8 * 16, dtype=np.uint8)  # by flags and kind: the new flags, and a bit for a boundary
        for flags in range(8):
            for kind, token in representatives.items():
                state, is_boundary = advance(rule, unpack(flags), token)
                self._steps[flags << 4 | kind] = pack(state) | is_boundary << 3

    def advance_rows(
        self, flags: NDArray[np.uint8], tokens: NDArray[np.integer]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """New flags and boundary marks; ids outside the vocabulary (padding, -1) count as plain tokens."""
        kinds = self._kinds.take(np.minimum(tokens.astype(np.uint64), self._outside))
        steps = self._steps.take(flags << 4 | kinds)
        return steps & np.uint8(7), steps > 7


def _token_kinds(rule: BoundaryRule) -> NDArray[np.uint8]:
    """A bit set per id; the extra last entry stands for every id outside the vocabulary."""
    kinds = np.zeros(rule.vocab_size + 1, dtype=np.uint8)
    think_end = frozenset() if rule.think_end is None else frozenset({rule.think_end})
    for bit, ids in enumerate((rule.blank_line, rule.ends_newline, rule.starts_newline, think_end)):
        kinds[np.fromiter(ids, dtype=np.int64, count=len(ids))] |= 1 << bit
    return kinds


def _representatives(kinds: NDArray[np.uint8]) -> dict[int, int]:
    values, first = np.unique(kinds, return_index=True)
    return {int(kind): int(token) for kind, token in zip(values, first, strict=True)}

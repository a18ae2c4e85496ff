"""Problem -> token ids, think tags, stop ids and the thought-boundary detector; never runs a model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from gambit.errors import UserError

DEFAULT_SYSTEM_PROMPT = r"Please reason step by step, and put your final answer within \boxed{}."
THINK_START = "<think>"
THINK_END = "</think>"
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|return|>")
HARMONY_CHANNEL = "<|channel|>"


class ChatMessage(TypedDict):
    role: str
    content: str


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


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """Which token ids end a thought: a blank line, in one token or made of two newlines."""

    name: ClassVar[str] = "blank-line"
    vocab_size: int
    blank_line: frozenset[int]
    ends_newline: frozenset[int]
    starts_newline: frozenset[int]
    think_end: int | None


def boundary_rule(tokenizer: Tokenizer, vocab_size: int | None = None) -> BoundaryRule:
    """`vocab_size` is the model's, whose padded rows have no text and are never boundaries."""
    vocab = tokenizer.get_vocab()
    size = max(vocab.values()) + 1 if vocab_size is None else vocab_size
    texts = _newline_texts(tokenizer, {token: index for token, index in vocab.items() if index < size})
    rule = BoundaryRule(
        vocab_size=size,
        blank_line=frozenset(i for i, text in texts.items() if "\n\n" in text),
        ends_newline=frozenset(i for i, text in texts.items() if text.endswith("\n")),
        starts_newline=frozenset(i for i, text in texts.items() if text.startswith("\n")),
        think_end=single_token(tokenizer, THINK_END),
    )
    if not rule.blank_line and not (rule.ends_newline and rule.starts_newline):
        raise UserError("no token of this tokenizer decodes to a newline, so no thought would ever end: load it with "
                        "gambit.prompts.load_tokenizer, or use a model whose vocabulary has newlines")  # fmt: skip
    return rule


def _newline_texts(tokenizer: Tokenizer, vocab: Mapping[str, int]) -> dict[int, str]:
    """Texts of the ids that may hold a newline; decoding the 2,000 likely ones takes 1 % of decoding all 150,000."""
    likely = [i for token, i in vocab.items() if "Ċ" in token or "\n" in token or token == "<0x0A>"]
    ids = likely or list(vocab.values())  # an unknown way to write newlines: decode everything
    rows = [[i] for i in ids]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {i: text for i, text in zip(ids, texts, strict=True) if "\n" in text}


def single_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of `text` if the vocabulary holds it as one token and encoding yields just that."""
    index = tokenizer.convert_tokens_to_ids(text)
    if index is None or index == tokenizer.unk_token_id:
        return None
    return index if tokenizer.encode(text, add_special_tokens=False) == [index] else None


@dataclass(frozen=True, slots=True)
class ThoughtState:
    """All the detector remembers of a trace; the state before its first generated token is the default."""

    is_thinking: bool = True
    after_boundary: bool = False
    after_newline: bool = False


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
    state, found = ThoughtState(), []
    for index, token in enumerate(tokens):
        state, is_boundary = advance(rule, state, token)
        if is_boundary:
            found.append(index)
    return found, state


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


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: tuple[int, ...]
    thinks: bool  # the model will think before it answers
    notes: tuple[str, ...]  # warnings the caller shows once


def rule_for(rule: BoundaryRule, prompt: EncodedPrompt) -> BoundaryRule:
    """Where the prompt has closed the think block already, thoughts count everywhere."""
    return rule if prompt.thinks else replace(rule, think_end=None)


def encode_problem(
    tokenizer: Tokenizer,
    problem: str | Sequence[ChatMessage],
    *,
    system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
    enable_thinking: bool = True,
    add_think_tag: bool = False,
) -> EncodedPrompt:
    """`add_think_tag` opens the think block for the model where the chat template leaves that to it."""
    messages = _with_system(_messages(problem), system_prompt)
    notes: list[str] = []
    if tokenizer.chat_template is None:
        text = _plain_prompt(messages)
        notes.append("the tokenizer has no chat template: the problem is given as plain text, without turns")
    else:
        text = _render(tokenizer, messages, _template_options(tokenizer, enable_thinking, notes))
    if add_think_tag:
        text = _open_thinking(tokenizer, text, notes)
    ids = tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)
    return EncodedPrompt(tuple(ids), _will_think(tokenizer, text), tuple(notes))


def _messages(problem: str | Sequence[ChatMessage]) -> list[ChatMessage]:
    messages = [ChatMessage(role="user", content=problem)] if isinstance(problem, str) else list(problem)
    if not messages or messages[-1]["role"] != "user":
        raise UserError(f"the problem must end with a user message, not with {messages[-1:]}")
    if not messages[-1]["content"].strip():
        raise UserError(f"the problem is empty ({messages[-1]['content']!r}): give it some text")
    return messages


def _with_system(messages: list[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    if not system_prompt or any(message["role"] == "system" for message in messages):
        return messages
    return [ChatMessage(role="system", content=system_prompt), *messages]


def _template_options(tokenizer: Tokenizer, enable_thinking: bool, notes: list[str]) -> dict[str, bool]:
    if "enable_thinking" in str(tokenizer.chat_template):
        return {"enable_thinking": enable_thinking}
    if not enable_thinking and single_token(tokenizer, THINK_END) is not None:
        notes.append("the chat template cannot switch thinking off (no enable_thinking in it): the model may think")
    return {}


def _render(tokenizer: Tokenizer, messages: list[ChatMessage], options: dict[str, bool]) -> str:
    """Templates without a system role either raise or skip the message; then the first user turn carries it."""
    from jinja2 import TemplateError

    systems = [message["content"].strip() for message in messages if message["role"] == "system"]
    try:
        text = _apply(tokenizer, messages, options)
        if all(system in text for system in systems):
            return text
    except TemplateError as error:
        if not systems:
            raise UserError(f"the chat template refuses these messages ({error}): {messages}") from error
    return _render(tokenizer, _fold_system(messages), options)


def _apply(tokenizer: Tokenizer, messages: list[ChatMessage], options: dict[str, bool]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def _fold_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    systems = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    first = next(index for index, message in enumerate(rest) if message["role"] == "user")
    folded = ChatMessage(role="user", content="\n\n".join([*systems, rest[first]["content"]]))
    return [*rest[:first], folded, *rest[first + 1 :]]


def _plain_prompt(messages: Sequence[ChatMessage]) -> str:
    return "\n\n".join(message["content"] for message in messages) + "\n\n"


def _open_thinking(tokenizer: Tokenizer, text: str, notes: list[str]) -> str:
    if text.rstrip().endswith((THINK_START, THINK_END)):
        return text
    if single_token(tokenizer, THINK_START) is None:
        notes.append(f"add_think_tag has no effect: {THINK_START} is no token of this model")
        return text
    return f"{text}{THINK_START}\n"


def _will_think(tokenizer: Tokenizer, text: str) -> bool:
    return not text.rstrip().endswith(THINK_END) and single_token(tokenizer, THINK_END) is not None


def stop_ids(tokenizer: Tokenizer, generation_eos: int | Sequence[int] | None) -> frozenset[int]:
    """Every id that ends a turn: the tokenizer's, the generation config's, and the usual end-of-turn tokens."""
    given = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or ())
    # In the harmony format <|end|> only closes one channel, and the answer comes in the next.
    is_harmony = single_token(tokenizer, HARMONY_CHANNEL) is not None
    names = [name for name in END_OF_TURN if not (is_harmony and name == "<|end|>")]
    found = [tokenizer.eos_token_id, *given, *(single_token(tokenizer, name) for name in names)]
    return frozenset(index for index in found if index is not None)

"""Pawn's tokens, in bijection with text: a number, or an operator with its spaces, is one."""

import re
from string import ascii_lowercase

from benchmarks.pawn.traces import BOUNDARY, CHECK, THINK_END, WAIT

from gambit.pawn.puzzles import MODULUS

PAD, END, UNKNOWN, USER, ASSISTANT, THINK = "<pad>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>", "<think>"
SPECIAL = (PAD, END, UNKNOWN, USER, ASSISTANT)
OPERATORS = (" = ", " + ", " - ", " * ", "; ")
VOCABULARY = (
    *SPECIAL,
    *(THINK, THINK_END, BOUNDARY, "\n", WAIT, "\\boxed{", "}", "?"),
    *OPERATORS,
    *ascii_lowercase,
    *map(str, range(MODULUS)),
    CHECK,  # last: version 1 had all the others, in this order
)
ID = {token: index for index, token in enumerate(VOCABULARY)}

# Longest first; any other character is a piece of its own and becomes <unk>.
PIECE = re.compile(
    r"<\|user\|>|<\|assistant\|>|<\|end\|>|</?think>|\n\n|Wait, |Check: |\\boxed\{| [-=+*] |; |\d+|[\s\S]"
)

# The generation prompt opens the think tag; a system prompt would only be noise to this model.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '<|user|>' + message.content | trim }}"
    "{%- elif message.role == 'assistant' %}{{ '<|assistant|>' + message.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{%- endif %}"
)


def encode(text: str) -> list[int]:
    """Encodes canonical text as the Hugging Face tokenizer does, without loading it."""
    return [ID.get(piece, ID[UNKNOWN]) for piece in PIECE.findall(text)]


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[index] for index in ids)


def render_prompt(puzzle_text: str) -> str:
    """Renders one user message as the chat template does."""
    return f"{USER}{puzzle_text}{ASSISTANT}{THINK}\n"

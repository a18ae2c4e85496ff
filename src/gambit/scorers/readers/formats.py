"""How each family of verifiers wants to be asked: a reading becomes the tokens whose last one carries the score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gambit.errors import UserError
from gambit.scorers.readers.base import ThoughtReading
from gambit.text.boundary import THINK_END, THINK_START
from gambit.text.prompts import DEFAULT_SYSTEM_PROMPT
from gambit.text.tokenizers import Tokenizer, single_token
from gambit.types import ChatMessage

QWEN_STEP = "<extra_0>"
SHEPHERD_STEP = "ки"
GOOD, BAD = "+", "-"


class PromptFormat(Protocol):
    """Encodes readings. A thought's tokens begin like those of the thoughts before it, so that a cache has most."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        """Tokens up to and with the one whose hidden state is scored."""


@dataclass(frozen=True, slots=True)
class GeneratorTokens:
    """The generator's own tokens, for verifiers that share its tokenizer: prompt and trace as they are."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        return [*reading.question.prompt_tokens, *reading.tokens]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Qwen2.5-Math-PRM: one assistant turn with a special token after each step."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        chat = _rendered(self.tokenizer, [_system(), *reading.question.messages])
        steps = "".join(f"{step}{QWEN_STEP}" for step in plain_steps(reading))
        return self.tokenizer.encode(chat + steps, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class LineSteps:
    """Skywork-o1-Open-PRM: problem and steps as plain lines, each line and each newline encoded by itself."""

    tokenizer: Tokenizer
    bos_token: str

    def encode(self, reading: ThoughtReading) -> list[int]:
        newline = self._ids("\n")[-1]
        tokens = self._ids(f"{self.bos_token}{reading.question.text}\n")
        for line in "\n".join(plain_steps(reading)).split("\n"):
            tokens += [*(self._ids(line) if line else ()), newline]
        return tokens

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class TaggedSteps:
    """Math-Shepherd: numbered steps after the problem, each with a tag at its end that `+` or `-` would follow."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        steps = [step if step.startswith("Step ") else f"Step {number}: {step}"
                 for number, step in enumerate(plain_steps(reading), start=1)]  # fmt: skip
        text = "\n".join(f"{step} {SHEPHERD_STEP}" for step in steps)
        return self.tokenizer.encode(f"{reading.question.text} {text}", add_special_tokens=True)


@dataclass(frozen=True, slots=True)
class StepTurns:
    """RLHFlow: each step is a turn of the user's, and the assistant answers `+` or `-`; the last answer is open."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        first, *others = plain_steps(reading)
        turns = [ChatMessage(role="user", content=f"{reading.question.text} {first}")]
        for step in others:
            turns += [ChatMessage(role="assistant", content=GOOD), ChatMessage(role="user", content=step)]
        return self.tokenizer.encode(_rendered(self.tokenizer, turns), add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ChatSoFar:
    """A plain sequence classifier: the chat with all that was said as the assistant's turn, scored at its end."""

    tokenizer: Tokenizer

    def encode(self, reading: ThoughtReading) -> list[int]:
        said = ChatMessage(role="assistant", content="\n\n".join(plain_steps(reading)))
        chat = _rendered(self.tokenizer, [*reading.question.messages, said], is_open=False)
        return self.tokenizer.encode(chat, add_special_tokens=False)


def plain_steps(reading: ThoughtReading) -> list[str]:
    """Thoughts without think tags and blank margins. One of nothing else is no step, unless it is the newest."""
    texts = [text.replace(THINK_START, "").replace(THINK_END, "").strip() for text in reading.thoughts]
    return [*filter(None, texts[:-1]), texts[-1]]


def good_and_bad(tokenizer: Tokenizer) -> tuple[int, int]:
    """The ids of `+` and `-`, as an answer begins with them."""
    plus, minus = (tokenizer.encode(sign, add_special_tokens=False)[-1] for sign in (GOOD, BAD))
    return plus, minus


def check_step_token(tokenizer: Tokenizer, text: str, folder: object) -> None:
    if single_token(tokenizer, text) is None:
        raise UserError(f"{folder}: its tokenizer has no token {text}, which this format marks steps with")


def _system() -> ChatMessage:
    return ChatMessage(role="system", content=DEFAULT_SYSTEM_PROMPT)


def _rendered(tokenizer: Tokenizer, messages: Sequence[ChatMessage], *, is_open: bool = True) -> str:
    """`is_open`: the assistant's turn begins at its end."""
    if tokenizer.chat_template is None:
        raise UserError("the verifier's tokenizer has no chat template, which its format needs")
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open)

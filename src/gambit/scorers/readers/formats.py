"""How each family of verifiers wants to be asked: a reading becomes the tokens whose last one carries the score."""

from __future__ import annotations

from typing import Protocol

from gambit.scorers.readers.base import ThoughtReading


class PromptFormat(Protocol):
    """Encodes readings; the encoding of a thought begins with that of the thoughts before it, so that it is cached."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        """Tokens up to and with the one whose hidden state is scored."""


class GeneratorTokens:
    """The generator's own tokens, for verifiers that share its tokenizer: prompt and trace as they are."""

    def encode(self, reading: ThoughtReading) -> list[int]:
        return [*reading.question.prompt_tokens, *reading.tokens]

"""A problem to search, and models that a package brings along by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from gambit.core.errors import UserError


class ChatMessage(TypedDict):
    """One turn of a chat, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, as text or as chat messages, and what the model's answer is to begin with."""

    question: str | Sequence[ChatMessage]
    id: str = "problem"
    prefix_tokens: tuple[int, ...] = ()  # of the answer: traces continue it, and it counts as part of them

    def __post_init__(self) -> None:
        """An id names a problem's folder, and must not lead out of the run's."""
        if self.id in ("", ".", "..") or any(mark in self.id for mark in "/\\\0"):
            raise UserError(f"the id {self.id!r} cannot name a problem's folder: leave out '/' and '\\', and use "
                            "letters, digits, '.', '_' and '-'")  # fmt: skip

    @property
    def last_message(self) -> str:
        """The text of the question, or of its last message."""
        if isinstance(self.question, str):
            return self.question
        return self.question[-1]["content"] if self.question else ""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a package brings along, asked for by its name (entry-point group `gambit.models`)."""

    folder: Path
    check_question: Callable[[str], object]  # raises UserError for a question that the model was not made for

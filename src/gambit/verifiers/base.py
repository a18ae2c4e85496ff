"""The protocol of verifiers that read thoughts: questions, readings, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from gambit.config.trust import ScorerTrust
from gambit.types import Aggregation, ChatMessage


class ReadingKey(NamedTuple):
    """The address of a reading: the trace, and how many of its tokens were read."""

    search: int
    trace: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """The problem of a search: as chat turns, for verifiers with their own format, and as the generator's tokens."""

    messages: tuple[ChatMessage, ...]  # the system prompt is left out: it instructs the generator
    prompt_tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        """Returns the turns of the user, joined."""
        return "\n\n".join(message["content"] for message in self.messages if message["role"] == "user")


@dataclass(frozen=True, slots=True)
class ThoughtReading:
    """One finished thought with everything before it.

    A trace is read at the end of each thought, that is up to and with the boundary token. It is read once more at its
    own end (without its stop token), if anything follows its last thought.
    """

    key: ReadingKey
    question: Question
    tokens: tuple[int, ...]  # of the trace, inherited ones included, up to the end of the newest thought
    ends: tuple[int, ...]  # how many of `tokens` each of its thoughts ends after; the last is len(tokens)
    thoughts: tuple[str, ...]  # their texts, as many as `ends`
    extends: ReadingKey | None = None  # the reading before this one on its lineage, whose keys and values can be reused


class ReadingScore(NamedTuple):
    """The score of one reading, and its cost."""

    score: float  # of the newest thought, higher is better
    num_tokens: int  # that were computed for it; those taken from a cache are not


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """The description of a verifier and of its scores."""

    name: str  # the model, as the user named it
    format: str  # the family, as `--scorer verifier:FORMAT:FOLDER` names it
    runs_on: str  # transformers, vllm, http
    device: str
    is_probability: bool = True
    aggregation: Aggregation = Aggregation.LAST  # each score is about all thoughts so far
    context_tokens: int | None = None  # the longest reading, where it is known
    trust: ScorerTrust | None = None  # None: it was never evaluated


@runtime_checkable
class Verifier(Protocol):
    """A verifier. Calls come from one thread; a reading's score depends on that reading alone."""

    @property
    def info(self) -> VerifierInfo:
        """Returns its description."""

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        """Returns one score per reading, in their order; None for a reading longer than its context.

        Readings of one trace may be in the same call.
        """

    def close(self) -> None:
        """Frees memory and ends processes."""

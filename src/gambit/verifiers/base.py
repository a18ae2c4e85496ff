"""The protocol of verifiers that read thoughts: what they get, and what they give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from gambit.config.trust import ScorerTrust
from gambit.types import Aggregation, ChatMessage


class ReadingKey(NamedTuple):
    """A reading's address: the trace, and how many of its tokens were read."""

    search: int
    trace: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """What a search asks: as chat turns for verifiers with a format of their own, and as the generator's tokens."""

    messages: tuple[ChatMessage, ...]  # the system prompt is left out: it tells the generator how to write
    prompt_tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        """The turns of the user, joined."""
        return "\n\n".join(message["content"] for message in self.messages if message["role"] == "user")


@dataclass(frozen=True, slots=True)
class ThoughtReading:
    """One finished thought with everything before it.

    A trace is read at the end of each thought, that is up to and with the boundary token, and once more at its own end
    (without its stop token), if anything was said after its last thought.
    """

    key: ReadingKey
    question: Question
    tokens: tuple[int, ...]  # of the trace, inherited ones included, up to the end of the newest thought
    ends: tuple[int, ...]  # how many of `tokens` each of its thoughts ends after; the last is len(tokens)
    thoughts: tuple[str, ...]  # their texts, as many as `ends`
    extends: ReadingKey | None = None  # the reading before this one on its lineage, whose keys and values can be reused


class ReadingScore(NamedTuple):
    """What a verifier says about one reading, and what it cost."""

    score: float  # of the newest thought, higher is better
    num_tokens: int  # that were computed for it; those taken from a cache are not


@dataclass(frozen=True, slots=True)
class VerifierInfo:
    """What a verifier is and what its numbers mean."""

    name: str  # the model, as it was asked for
    format: str  # the family, as `--scorer verifier:FORMAT:FOLDER` names it
    runs_on: str  # transformers, vllm, http
    device: str
    is_probability: bool = True
    aggregation: Aggregation = Aggregation.LAST  # each score is about all thoughts so far
    context_tokens: int | None = None  # the longest reading, where it is known
    trust: ScorerTrust | None = None  # None: nobody judged it


@runtime_checkable
class Verifier(Protocol):
    """A verifier. Calls come from one thread; a reading's score depends on that reading alone."""

    @property
    def info(self) -> VerifierInfo:
        """What it is."""

    def read(self, readings: Sequence[ThoughtReading]) -> Sequence[ReadingScore | None]:
        """One score per reading, in their order; None for one that is longer than its context.

        Readings of one trace may be in the same call.
        """

    def close(self) -> None:
        """Give back memory and processes."""

"""Slim-SC: of two traces that think the same thought, one is pruned."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from gambit.config.presets import SearchSettings
from gambit.errors import UserError
from gambit.policies.base import (
    Decision,
    PoolView,
    Prune,
    Requirements,
    ScoreUse,
    ThoughtNeed,
    ThoughtSplit,
    ThoughtView,
    Wake,
    top_up,
)
from gambit.results.vote import VoteKind
from gambit.tree import LIVE
from gambit.types import OnPressure, PressureAction

STATES = "states"
SENTENCE_THRESHOLD = 0.95  # the paper's, for all-mpnet-base-v2
MARKER_TOKENS = 25  # the paper's shortest thought
POLL_STEPS = 25  # markers are looked for in text, not at every token
FEWEST_COSINES = 20  # before a percentile of them means anything
DIGITS = 6  # in which redundancies and nearest cosines tie, so that no machine's rounding decides

Vectors = npt.NDArray[np.float64]


class Variant(StrEnum):
    """Which of two like traces goes."""

    DIVERSITY = "diversity"  # the one whose own thoughts are more alike, per thought
    RANDOM = "random"  # a coin


class SlimScOptions(BaseModel):
    """Options of Slim-SC."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Variant = Field(Variant.DIVERSITY, description="which of a pair goes: diversity or random")
    embedder: str = Field(STATES, description="states (the engine's own), or a sentence-transformers model by name")
    split: ThoughtSplit | None = Field(
        None, description="markers or blank_lines; default: markers for a sentence model, blank_lines for states"
    )
    min_thought_tokens: int | None = Field(
        None, ge=1, description=f"shortest thought; default: {MARKER_TOKENS} for markers, 1 for blank_lines"
    )
    threshold: float | None = Field(
        None, ge=-1, le=1, description=f"cosine; default: {SENTENCE_THRESHOLD} for a sentence model, else by percentile"
    )
    threshold_percentile: float = Field(
        99.0, ge=0, le=100, description="for states: of each thought's largest cosine during the delay"
    )
    delay_tokens: int = Field(
        500, ge=0, description="of a trace before its thoughts are tested: 20 thoughts of 25 tokens"
    )
    embedding_size: int = Field(64, ge=1, le=256, description="numbers per projected state")

    @property
    def uses_states(self) -> bool:
        return self.embedder == STATES

    @property
    def lacking(self) -> str | None:
        """What a search with these options needs and this machine does not have."""
        return None if self.uses_states else lacking_for(self.embedder)

    @property
    def need(self) -> ThoughtNeed:
        split = self.split or (ThoughtSplit.BLANK_LINES if self.uses_states else ThoughtSplit.MARKERS)
        shortest = MARKER_TOKENS if split is ThoughtSplit.MARKERS else 1
        return ThoughtNeed(split, self.min_thought_tokens or shortest, None if self.uses_states else self.embedder)


@dataclass(frozen=True, slots=True)
class SlimScState:
    """The thoughts of the traces that still reason, and what the delay taught."""

    thoughts: Mapping[int, Vectors] = field(default_factory=dict)  # trace -> [n, size]
    cosines: tuple[float, ...] = ()  # largest of each thought, during the delay
    threshold: float | None = None  # None while it is still being learnt


class Nearest(NamedTuple):
    """The most similar thought of another trace."""

    trace: int
    cosine: float


@dataclass(frozen=True, slots=True)
class SlimSc:
    """Slim-SC: thought pruning for efficient self-consistency (Hong et al. 2025).

    Each new thought is compared by cosine with those of the other traces that still reason, the ones that came at the
    same time included. Above the threshold one of the two traces is pruned: in the diversity variant the one with the
    larger (mean pairwise cosine of its own thoughts ÷ their number), on a tie the one with fewer thoughts, then the one
    whose new thought it is; in the random variant a coin decides. A trace is tested once it has said `delay_tokens`.
    The survivors' majority wins, the answer of the shortest trace on a tie.

    Ours: the delay counts tokens, not seconds, so that a run can be repeated; every new thought is tested. As a prune
    needs two traces that reason, one is always left. Without a sentence model the engine's boundary states, projected,
    stand for the thoughts; 0.95 means nothing there, so the threshold is a percentile of what the delay showed. With
    states and markers a thought is the mean of the boundary states in it. docs/policies.md compares it with theirs.
    """

    name: ClassVar[str] = "slim-sc"
    default_vote: ClassVar[VoteKind] = VoteKind.CONCISE
    Options: ClassVar[type[SlimScOptions]] = SlimScOptions
    num_traces: int
    capacity: int
    seed: int = 0
    options: SlimScOptions = field(default_factory=SlimScOptions)

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> SlimSc:
        options = settings.options_of(SlimScOptions)
        return cls(settings.num_traces, settings.capacity, settings.sampling.seed, options)

    @property
    def wake(self) -> Wake:
        if self.options.need.split is ThoughtSplit.MARKERS:
            return Wake(every_steps=POLL_STEPS, on_completion=True)
        return Wake(on_boundary=True, on_completion=True)

    @property
    def requirements(self) -> Requirements:
        size = self.options.embedding_size if self.options.uses_states else 0
        return Requirements(scores=ScoreUse.NEVER, has_fixed_size=True, thoughts=self.options.need, embedding_size=size)

    def initial_state(self) -> SlimScState:
        fixed = None if self.options.uses_states else SENTENCE_THRESHOLD
        return SlimScState(threshold=fixed if self.options.threshold is None else self.options.threshold)

    def decide(self, state: SlimScState, view: PoolView) -> tuple[SlimScState, list[Decision]]:
        reasoning = {trace.id for trace in view.traces if trace.is_thinking and trace.state in LIVE}
        new = [thought for thought in view.thoughts if thought.trace in reasoning]
        known = {trace: vectors for trace, vectors in state.thoughts.items() if trace in reasoning}
        round_ = _Round(self, _with(known, new), list(state.cosines), state.threshold)
        for thought in new:
            round_.judge(thought)
        kept = {trace: vectors for trace, vectors in round_.thoughts.items() if trace not in round_.pruned}
        started = top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.QUEUE))
        prunes = [Prune(trace, "similar") for trace in round_.pruned]
        return SlimScState(kept, tuple(round_.cosines), round_.threshold), [*prunes, *started]

    def victim(self, thoughts: Mapping[int, Vectors], new: int, other: int) -> int:
        """Which of two traces goes; `new` is the one whose thought was found too like the other's."""
        if self.options.variant is Variant.RANDOM:
            coin = random.Random(f"{self.seed}/{new}/{other}/{len(thoughts[new])}")
            return coin.choice((new, other))
        return max(new, other, key=lambda trace: (redundancy(thoughts[trace]), -len(thoughts[trace]), trace == new))


@dataclass(slots=True)
class _Round:
    """One call of `decide`: all its thoughts are there when the first is judged, and leave with their trace at the end.

    So a trace that is to go still covers what is like it: a pair with one in it prunes nobody else.
    """

    policy: SlimSc
    thoughts: Mapping[int, Vectors]
    cosines: list[float]
    threshold: float | None
    pruned: list[int] = field(default_factory=list)

    def judge(self, thought: ThoughtView) -> None:
        found = nearest(self.thoughts, thought.trace, np.array(thought.vector))
        if found is None or not self._exceeds(found.cosine, thought.num_tokens):
            return
        if thought.trace not in self.pruned and found.trace not in self.pruned:
            self.pruned.append(self.policy.victim(self.thoughts, thought.trace, found.trace))

    def _exceeds(self, cosine: float, num_tokens: int) -> bool:
        """Whether a thought is tested and found too like another; until then its cosine only teaches the threshold."""
        options = self.policy.options
        is_early = num_tokens < options.delay_tokens
        if self.threshold is None and (is_early or len(self.cosines) < FEWEST_COSINES):
            self.cosines.append(round(cosine, DIGITS))
            return False
        if self.threshold is None:
            # A thought that reaches the percentile is too like: where the traces are much alike, that is a cosine of 1.
            self.threshold = float(np.percentile(self.cosines, options.threshold_percentile)) - 10**-DIGITS
        return not is_early and cosine > self.threshold


def _with(known: Mapping[int, Vectors], new: Sequence[ThoughtView]) -> dict[int, Vectors]:
    """The thoughts of each trace, the new ones last."""
    found = dict(known)
    for thought in new:
        vector = np.array([thought.vector])
        found[thought.trace] = np.vstack((found[thought.trace], vector)) if thought.trace in found else vector
    return found


def nearest(thoughts: Mapping[int, Vectors], trace: int, vector: npt.NDArray[np.float64]) -> Nearest | None:
    """Among the thoughts of other traces; the lowest id on a tie."""
    largest = {other: float((known @ vector).max()) for other, known in thoughts.items() if other != trace}
    if not largest:
        return None
    other = min(largest, key=lambda other: (-round(largest[other], DIGITS), other))
    return Nearest(other, min(largest[other], 1.0))


def redundancy(own: Vectors) -> float:
    """Mean pairwise cosine of a trace's thoughts, divided by their number; 0 where there is no pair."""
    count = len(own)
    if count == 1:
        return 0.0
    pairwise = (own @ own.T)[np.triu_indices(count, k=1)]
    return round(float(pairwise.mean()) / count, DIGITS)


Vector = tuple[float, ...]
Embed = Callable[[Sequence[str]], Sequence[Vector]]
PACKAGE = "sentence_transformers"


def lacking_for(name: str) -> str | None:
    """What is missing on this machine to load a sentence model with."""
    if find_spec(PACKAGE) is not None:
        return None
    return (f"embedder = {name!r}: {PACKAGE} is not installed: pip install sentence-transformers, "
            "or use embedder=states")  # fmt: skip


@functools.lru_cache(maxsize=1)
def load_embedder(name: str) -> Embed:
    """The embedder behind a hub name or a folder; it stays loaded for the next search."""
    if (missing := lacking_for(name)) is not None:
        raise UserError(missing)
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the sentence model {name!r}: {str(error).partition(chr(10))[0]}") from error

    def embed(texts: Sequence[str]) -> list[tuple[float, ...]]:
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return [tuple(map(float, vector)) for vector in vectors]

    return embed

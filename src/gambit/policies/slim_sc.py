"""Slim-SC: of two traces that think the same thought, one is pruned; how live traces are cut into thoughts for it."""

import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from gambit.config.options import CheckedModel
from gambit.config.presets import SearchSettings
from gambit.errors import UserError, first_line
from gambit.policies.base import (
    Decision,
    Outcome,
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
from gambit.types import OnPressure, PressureAction, ThoughtScore, TokensOf

STATES = "states"
SENTENCE_THRESHOLD = 0.95  # the paper's, for all-mpnet-base-v2
MARKER_TOKENS = 25  # the paper's shortest thought
POLL_STEPS = 25  # markers are looked for in text, not at every token
FEWEST_COSINES = 20  # before a percentile of them means anything
DIGITS = 6  # in which redundancies and nearest cosines tie, so that no machine's rounding decides

Vectors = npt.NDArray[np.float64]


class Variant(StrEnum):
    """The rule by which one of two like traces goes."""

    DIVERSITY = "diversity"  # the one whose own thoughts are more alike, per thought
    RANDOM = "random"  # a coin


class SlimScOptions(CheckedModel):
    """Options of Slim-SC."""

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
        """A package that these options need and this machine does not have; None if there is none."""
        return None if self.uses_states else lacking_for(self.embedder)

    @property
    def need(self) -> ThoughtNeed:
        split = self.split or (ThoughtSplit.BLANK_LINES if self.uses_states else ThoughtSplit.MARKERS)
        shortest = MARKER_TOKENS if split is ThoughtSplit.MARKERS else 1
        return ThoughtNeed(split, self.min_thought_tokens or shortest, None if self.uses_states else self.embedder)


@dataclass(frozen=True, slots=True)
class SlimScState:
    """The thoughts of the traces that still reason, and the cosines that were seen during the delay."""

    thoughts: Mapping[int, Vectors] = field(default_factory=dict)  # trace -> [n, size]
    cosines: tuple[float, ...] = ()  # largest of each thought, during the delay
    threshold: float | None = None  # None while it is still being learnt


class Nearest(NamedTuple):
    """The most similar thought of another trace."""

    trace: int
    cosine: float


@dataclass(frozen=True, slots=True)
class SlimSc:
    """Slim-SC (Hong et al. 2025): of two traces that have the same thought one is pruned.

    Each new thought is compared by cosine with those of the other traces that still reason, the ones that came at the
    same time included. Above the threshold one of the two traces is pruned: in the diversity variant the one with the
    larger (mean pairwise cosine of its own thoughts ÷ their number), on a tie the one with fewer thoughts, then the one
    whose new thought it is; in the random variant a coin decides. A trace is tested once it has `delay_tokens` tokens.
    The survivors' majority wins, the answer of the shortest trace on a tie.

    Ours: the delay counts tokens, not seconds, so that a run can be repeated; every new thought is tested. As a prune
    needs two traces that reason, one is always left. Without a sentence model the engine's boundary states, projected,
    stand for the thoughts; 0.95 means nothing there, so the threshold is a percentile of what the delay showed. With
    states and markers a thought is the mean of the boundary states in it. docs/differences.md compares it with theirs.
    """

    name: ClassVar[str] = "slim-sc"
    default_vote: ClassVar[VoteKind] = VoteKind.CONCISE
    Options: ClassVar[type[SlimScOptions]] = SlimScOptions
    num_traces: int
    capacity: int
    seed: int = 0
    options: SlimScOptions = field(default_factory=SlimScOptions)

    @classmethod
    def from_settings(cls, settings: SearchSettings) -> Self:
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

    @classmethod
    def idle(cls, options: SlimScOptions, outcome: Outcome) -> str | None:
        short = outcome.too_short(options.delay_tokens, "delay")
        return None if short is None else f"{short}, so that hardly any were compared (lower delay_tokens)"

    def initial_state(self) -> SlimScState:
        fixed = None if self.options.uses_states else SENTENCE_THRESHOLD
        return SlimScState(threshold=fixed if self.options.threshold is None else self.options.threshold)

    def decide(self, state: SlimScState, view: PoolView) -> tuple[SlimScState, list[Decision]]:
        """Judges all new thoughts against those of the others.

        All are there when the first is judged, and leave with their trace at the end: a trace that is to go still
        covers what is like it, and a pair with one in it prunes no other.
        """
        reasoning = {trace.id for trace in view.traces if trace.is_thinking and trace.state in LIVE}
        new = [thought for thought in view.thoughts if thought.trace in reasoning]
        known = {trace: vectors for trace, vectors in state.thoughts.items() if trace in reasoning}
        thoughts, cosines, threshold = _with(known, new), list(state.cosines), state.threshold
        pruned: list[int] = []
        for thought in new:
            found = nearest(thoughts, thought.trace, np.array(thought.vector))
            if found is None:
                continue
            is_early = thought.num_tokens < self.options.delay_tokens
            if threshold is None and (is_early or len(cosines) < FEWEST_COSINES):
                cosines.append(round(found.cosine, DIGITS))  # it only teaches the threshold
                continue
            if threshold is None:
                threshold = self.learned_threshold(cosines)
            is_like = not is_early and found.cosine > threshold
            if is_like and thought.trace not in pruned and found.trace not in pruned:
                pruned.append(self.victim(thoughts, thought.trace, found.trace))
        kept = {trace: vectors for trace, vectors in thoughts.items() if trace not in pruned}
        started = top_up(view, self.capacity, self.num_traces, OnPressure(PressureAction.QUEUE))
        prunes = [Prune(trace, "similar") for trace in pruned]
        return SlimScState(kept, tuple(cosines), threshold), [*prunes, *started]

    def learned_threshold(self, cosines: Sequence[float]) -> float:
        """Returns the percentile, lowered by a digit: a thought that reaches it is too like, even if it is 1."""
        return float(np.percentile(cosines, self.options.threshold_percentile) - 10**-DIGITS)

    def victim(self, thoughts: Mapping[int, Vectors], new: int, other: int) -> int:
        """Returns which of two traces goes; a thought of `new` was found too like one of the other."""
        if self.options.variant is Variant.RANDOM:
            coin = random.Random(f"{self.seed}/{new}/{other}/{len(thoughts[new])}")
            return coin.choice((new, other))
        return max(new, other, key=lambda trace: (redundancy(thoughts[trace]), -len(thoughts[trace]), trace == new))


def _with(known: Mapping[int, Vectors], new: Sequence[ThoughtView]) -> dict[int, Vectors]:
    """Returns the thoughts of each trace, the new ones last."""
    found = dict(known)
    for thought in new:
        vector = np.array([thought.vector])
        found[thought.trace] = np.vstack((found[thought.trace], vector)) if thought.trace in found else vector
    return found


def nearest(thoughts: Mapping[int, Vectors], trace: int, vector: npt.NDArray[np.float64]) -> Nearest | None:
    """Returns the nearest among the thoughts of other traces, the lowest id on a tie; None if there is no other."""
    largest = {other: float((known @ vector).max()) for other, known in thoughts.items() if other != trace}
    if not largest:
        return None
    other = min(largest, key=lambda other: (-round(largest[other], DIGITS), other))
    return Nearest(other, min(largest[other], 1.0))


def redundancy(own: Vectors) -> float:
    """Returns the mean pairwise cosine of a trace's thoughts, divided by their number; 0 if there is no pair."""
    count = len(own)
    if count == 1:
        return 0.0
    pairwise = (own @ own.T)[np.triu_indices(count, k=1)]
    return round(float(pairwise.mean()) / count, DIGITS)


Vector = tuple[float, ...]
Embed = Callable[[Sequence[str]], Sequence[Vector]]
PACKAGE = "sentence_transformers"


def lacking_for(name: str) -> str | None:
    """Returns what to install to load a sentence model; None if all is there."""
    if find_spec(PACKAGE) is not None:
        return None
    return (f"embedder = {name!r}: {PACKAGE} is not installed: pip install sentence-transformers, "
            "or use embedder=states")  # fmt: skip


@functools.lru_cache(maxsize=1)
def load_embedder(name: str) -> Embed:
    """Returns the embedder behind a hub name or a folder; it stays loaded for the next search."""
    if (missing := lacking_for(name)) is not None:
        raise UserError(missing)
    from sentence_transformers import SentenceTransformer

    try:
        model = SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the sentence model {name!r}: {first_line(error)}") from error

    def embed(texts: Sequence[str]) -> list[Vector]:
        vectors = model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return [tuple(map(float, vector)) for vector in vectors]

    return embed


# -- thoughts of live traces ------------------------------------------------------------------------------------


Decode = Callable[[Sequence[int]], str]

# Slim-SC's discourse markers, each after a character that is neither letter nor digit (of any script, as theirs).
MARKERS = ("Wait", "Oh wait", "But wait", "Another", "But another", "perhaps another", "alternative", "Alternative")
_MARKER = re.compile(rf"(?<=[\W_])(?:{'|'.join(MARKERS)})")


_Cut = tuple[int, int, int, list[Vector]]  # trace, start, end, and the states of the boundaries in between


@dataclass(slots=True)
class _Open:
    """The thought that a trace is in the middle of."""

    start: int = 0
    boundaries: list[tuple[int, Vector | None]] = field(default_factory=list)  # position, state

    def close(self, trace: int, end: int) -> _Cut:
        """Returns the thought up to a position; the next one begins there."""
        states = [state for at, state in self.boundaries if at <= end and state is not None]
        self.boundaries = [boundary for boundary in self.boundaries if boundary[0] > end]
        start, self.start = self.start, end
        return trace, start, end, states


class ThoughtReader:
    """Follows the traces of one search; `collect` returns each thought once."""

    def __init__(self, need: ThoughtNeed, tokens_of: TokensOf, decode: Decode | None, embed: Embed | None) -> None:
        assert need.embedder is None or embed is not None, "a text embedder was declared, none is there"
        self._need = need
        self._tokens_of = tokens_of
        self._decode = decode
        self._embed = embed if need.embedder is not None else None
        self._open: dict[int, _Open] = {}

    def note(self, scored: Iterable[ThoughtScore]) -> None:
        """Takes in boundaries that the engine reported."""
        for thought in scored:
            self._open.setdefault(thought.trace, _Open()).boundaries.append((thought.num_tokens, thought.embedding))

    def collect(self, live: Sequence[int]) -> tuple[ThoughtView, ...]:
        """Returns the thoughts of these traces that ended since the last call, by trace; the others are forgotten.

        A piece under the smallest size is dropped, as in Slim-SC; it does not become part of the next thought.
        """
        self._open = {trace: self._open.get(trace, _Open()) for trace in live}
        cuts = [open_.close(trace, end) for trace, open_ in self._open.items() for end in self._ends(trace, open_)]
        return self._embedded([cut for cut in cuts if cut[2] - cut[1] >= self._need.min_tokens])

    def _ends(self, trace: int, open_: _Open) -> list[int]:
        """Returns the positions at which thoughts of a trace have ended."""
        if self._need.split is ThoughtSplit.BLANK_LINES:
            return [end for end, _ in open_.boundaries]
        lengths = marker_lengths(self._tokens_of(trace, open_.start), self._text)
        return [open_.start + end for end in accumulate(lengths)]

    def _text(self, tokens: Sequence[int]) -> str:
        assert self._decode is not None, "thoughts are read as text, and nothing here can decode"
        return self._decode(tokens)

    def _embedded(self, cuts: list[_Cut]) -> tuple[ThoughtView, ...]:
        if self._embed is not None:
            texts = [self._text(self._tokens_of(trace, at)[: end - at]).strip() for trace, at, end, _ in cuts]
            vectors = self._embed(texts) if texts else []
            return tuple(ThoughtView(cut[0], cut[2], v) for cut, v in zip(cuts, vectors, strict=True))
        # A thought without a boundary in it has no state to stand for it.
        return tuple(ThoughtView(trace, end, _mean(states)) for trace, _, end, states in cuts if states)


def marker_lengths(tokens: Sequence[int], decode: Decode) -> list[int]:
    """Returns the lengths of the thoughts that end in `tokens`, each before the token in which a marker begins.

    A marker in the first token is the one that these tokens begin with.
    """
    places = [found.start() for found in _MARKER.finditer(decode(tokens))]
    if not places:
        return []
    ends = sorted({0, *(_token_at(place, tokens, decode) for place in places)})
    return [end - start for start, end in pairwise(ends)]


def _token_at(place: int, tokens: Sequence[int], decode: Decode) -> int:
    """Returns the token that a character of the text belongs to: the first one whose text ends behind it."""
    low, high = 0, len(tokens) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(tokens[: middle + 1])) > place else (middle + 1, high)
    return low


def _mean(states: Sequence[Vector]) -> Vector:
    mean = np.mean(states, axis=0)
    return tuple((mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist())

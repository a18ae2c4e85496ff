"""Cuts live traces into thoughts and embeds them, for policies that compare thoughts; never compares any itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gambit.core.types import ThoughtScore
from gambit.search.policies.base import ThoughtNeed, ThoughtSplit, ThoughtView

Vector = tuple[float, ...]
Decode = Callable[[Sequence[int]], str]
Embed = Callable[[Sequence[str]], Sequence[Vector]]

# Slim-SC's discourse markers, each after a character that is neither letter nor digit.
MARKERS = ("Wait", "Oh wait", "But wait", "Another", "But another", "perhaps another", "alternative", "Alternative")
_MARKER = re.compile(rf"(?<=[^0-9A-Za-z])(?:{'|'.join(MARKERS)})")


@dataclass(frozen=True, slots=True)
class _Cut:
    """A thought that is to be embedded."""

    trace: int
    start: int
    end: int
    states: tuple[Vector, ...]  # of the boundaries in it


@dataclass(slots=True)
class _Open:
    """The thought a trace is in the middle of."""

    start: int = 0
    boundaries: list[tuple[int, Vector | None]] = field(default_factory=list)  # position, state

    def take(self, end: int) -> tuple[Vector, ...]:
        """The states up to a position, which are then forgotten."""
        taken = tuple(state for at, state in self.boundaries if at <= end and state is not None)
        self.boundaries = [boundary for boundary in self.boundaries if boundary[0] > end]
        return taken


class ThoughtReader:
    """Follows the traces of one search; `collect` gives each thought once."""

    def __init__(
        self,
        need: ThoughtNeed,
        tokens_of: Callable[[int, int], Sequence[int]],
        decode: Decode | None,
        embed: Embed | None,
    ) -> None:
        assert need.embedder is None or embed is not None, "a text embedder was declared, none is there"
        self._need = need
        self._tokens_of = tokens_of
        self._decode = decode
        self._embed = embed if need.embedder is not None else None
        self._open: dict[int, _Open] = {}

    def note(self, scored: Iterable[ThoughtScore]) -> None:
        """Boundaries that the engine reported."""
        for thought in scored:
            self._open.setdefault(thought.trace, _Open()).boundaries.append((thought.num_tokens, thought.embedding))

    def collect(self, live: Sequence[int]) -> tuple[ThoughtView, ...]:
        """Thoughts of these traces that ended since the last call, by trace; the others are forgotten."""
        self._open = {trace: self._open.get(trace, _Open()) for trace in live}
        cut = self._at_boundaries if self._need.split is ThoughtSplit.BLANK_LINES else self._at_markers
        cuts = [found for trace in live for found in cut(trace, self._open[trace])]
        return self._embedded(cuts)

    def _at_boundaries(self, trace: int, open_: _Open) -> Iterable[_Cut]:
        for end, _ in list(open_.boundaries):
            if end - open_.start >= self._need.min_tokens:
                yield _Cut(trace, open_.start, end, open_.take(end))
                open_.start = end

    def _at_markers(self, trace: int, open_: _Open) -> Iterable[_Cut]:
        tokens = self._tokens_of(trace, open_.start)
        while (length := next_marker(tokens, self._text, self._need.min_tokens)) is not None:
            end = open_.start + length
            yield _Cut(trace, open_.start, end, open_.take(end))
            open_.start, tokens = end, tokens[length:]

    def _text(self, tokens: Sequence[int]) -> str:
        assert self._decode is not None, "thoughts are read as text, and nothing here can decode"
        return self._decode(tokens)

    def _embedded(self, cuts: list[_Cut]) -> tuple[ThoughtView, ...]:
        if self._embed is not None:
            texts = [self._text(self._tokens_of(cut.trace, cut.start)[: cut.end - cut.start]) for cut in cuts]
            vectors = self._embed(texts) if texts else []
            return tuple(ThoughtView(cut.trace, cut.end, v) for cut, v in zip(cuts, vectors, strict=True))
        # A thought without a boundary in it has no state to stand for it.
        return tuple(ThoughtView(cut.trace, cut.end, _mean(cut.states)) for cut in cuts if cut.states)


def next_marker(tokens: Sequence[int], decode: Decode, min_tokens: int) -> int | None:
    """How many tokens the thought has that `tokens` begin with: up to the next marker, but at least `min_tokens`."""
    if len(tokens) <= min_tokens:
        return None
    found = _MARKER.search(decode(tokens), len(decode(tokens[:min_tokens])))
    if found is None:
        return None
    low, high = min_tokens, len(tokens) - 1  # the marker begins in the first token whose text ends behind its start
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(tokens[: middle + 1])) > found.start() else (middle + 1, high)
    return low


def _mean(states: Sequence[Vector]) -> Vector:
    mean = np.mean(states, axis=0)
    return tuple((mean / max(float(np.linalg.norm(mean)), 1e-12)).tolist())

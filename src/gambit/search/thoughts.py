"""Cuts live traces into thoughts and embeds them, for policies that compare thoughts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from gambit.policies.base import ThoughtNeed, ThoughtSplit, ThoughtView
from gambit.policies.slim_sc import Embed, Vector
from gambit.types import ThoughtScore

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

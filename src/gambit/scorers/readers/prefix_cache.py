"""Keys and values of what a verifier has read, shared between all readings that begin alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Segment:
    """Some tokens that follow those of its parent, with their keys and values by layer: [2, 1, heads, tokens, size]."""

    tokens: tuple[int, ...]
    layers: tuple[torch.Tensor, ...]
    parent: Segment | None = None
    children: dict[int, Segment] = field(default_factory=dict)  # by first token
    last_used: int = 0
    score: float | None = None  # of its last token, where it was asked for

    @property
    def num_bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def lineage(self) -> list[Segment]:
        """From the first token on; the root holds none."""
        path: list[Segment] = []
        segment: Segment | None = self
        while segment is not None and segment.parent is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]

    def cut(self, length: int) -> Segment:
        """Split in two, so that a sibling can begin in the middle; gives the first part, this one becomes the rest."""
        assert self.parent is not None and 0 < length < len(self.tokens)
        first = Segment(
            self.tokens[:length],
            tuple(layer[..., :length, :].clone() for layer in self.layers),
            self.parent,
            {self.tokens[length]: self},
            self.last_used,
        )
        self.parent.children[self.tokens[0]] = first
        self.tokens, self.parent = self.tokens[length:], first
        self.layers = tuple(layer[..., length:, :].clone() for layer in self.layers)
        return first


class PrefixCache:
    """A radix tree of token sequences; what was not used for longest goes first when it is full."""

    def __init__(self, max_bytes: int) -> None:
        self._root = Segment((), ())
        self._max_bytes = max_bytes
        self._clock = 0
        self.used_bytes = 0

    def find(self, tokens: Sequence[int]) -> tuple[Segment, int]:
        """The segment that ends the longest known beginning of `tokens`, and its length.

        That is all of them only where the score of the last is known too, so that equal readings get equal scores.
        """
        self._clock += 1
        segment, length = self._root, 0
        while (child := segment.children.get(tokens[length])) is not None:
            is_known = child.score is not None and len(child.tokens) == len(tokens) - length
            common = _num_common(child.tokens, tokens[length : None if is_known else -1])
            if common == 0:
                break
            segment = child if common == len(child.tokens) else child.cut(common)
            segment.last_used = self._clock
            length += common
            if length == len(tokens):
                break
        return segment, length

    def add(self, parent: Segment, tokens: Sequence[int], layers: Sequence[torch.Tensor], score: float) -> None:
        """Remember what follows a segment that `find` gave last, and the score of its last token."""
        if (known := parent.children.get(tokens[0])) is not None:  # it begins with the last token, the only one here
            if len(known.tokens) == 1:
                known.score = score
            return
        segment = Segment(tuple(tokens), tuple(layers), parent, last_used=self._clock, score=score)
        parent.children[tokens[0]] = segment
        self.used_bytes += segment.num_bytes
        self._evict()

    def _evict(self) -> None:
        while self.used_bytes > self._max_bytes:
            idle = [leaf for leaf in self._leaves() if leaf.tokens and leaf.last_used < self._clock]
            if not idle:
                return
            oldest = min(idle, key=lambda leaf: leaf.last_used)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.tokens[0]]
            self.used_bytes -= oldest.num_bytes

    def _leaves(self) -> Iterator[Segment]:
        left = [self._root]
        while left:
            segment = left.pop()
            left += segment.children.values()
            if not segment.children:
                yield segment


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))

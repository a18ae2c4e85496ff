"""What the other traces of a problem tell about one, as they run: closeness, support, agreement.

A search calls this as thoughts and traces end; the training of a stack replays collected traces through it. Branches of
one root are no independent witnesses: a trace is compared with those of other roots, and each root counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
NEAREST = 3  # roots


@dataclass(slots=True)
class _Told:
    """What one trace has told so far."""

    root: int
    ends: list[int] = field(default_factory=list)  # tokens up to the end of each thought with a vector
    vectors: list[Vector] = field(default_factory=list)
    answer: int | None = None  # its number among the answers given, once it is complete and has one
    is_complete: bool = False


class PoolFeatures:
    """Follows the traces of one problem. Everything is told before anything is asked about the same moment."""

    def __init__(self, is_same: Callable[[str, str], bool]) -> None:
        self._is_same = is_same
        self._told: dict[int, _Told] = {}
        self._given: list[str] = []  # answers in the order they came
        self._kinds: list[int] = []  # of those that were compared so far: which of the different ones
        self._different: list[str] = []

    # -- what happens ------------------------------------------------------------------------------------------

    def join(self, trace: int, root: int | None = None) -> None:
        """`root`: of the tree it is a branch of; None: it is one itself. A second call changes nothing."""
        self._told.setdefault(trace, _Told(trace if root is None else root))

    def branch(self, child: int, parent: int, inherited: int) -> None:
        """A child begins with its parent's thoughts; the parent has joined."""
        told = self._told[parent]
        count = sum(end <= inherited for end in told.ends)
        self._told[child] = _Told(told.root, told.ends[:count], told.vectors[:count])

    def thought(self, trace: int, num_tokens: int, vector: Vector | None) -> None:
        """`vector`: of length 1; None where states are not compared."""
        if vector is not None:
            self._told[trace].ends.append(num_tokens)
            self._told[trace].vectors.append(vector)

    def end(self, trace: int, answer: str | None) -> None:
        told = self._told[trace]
        told.is_complete = True
        if answer:
            told.answer = len(self._given)
            self._given.append(answer)

    def keep(self, is_there: Callable[[int], bool]) -> None:
        """Forget the traces that left the pool without coming to an end."""
        self._told = {trace: told for trace, told in self._told.items() if is_there(trace)}

    def _kind(self, answer: int) -> int:
        """Answers are compared in the order they came, and not before somebody asks: that takes time."""
        while len(self._kinds) <= answer:
            self._kinds.append(self._kind_of(self._given[len(self._kinds)]))
        return self._kinds[answer]

    def _kind_of(self, answer: str) -> int:
        for kind, known in enumerate(self._different):
            if answer == known or self._is_same(answer, known):
                return kind
        self._different.append(answer)
        return len(self._different) - 1

    # -- what it tells -----------------------------------------------------------------------------------------

    def closeness(self, trace: int) -> float:
        """The mean cosine of its latest thought to the nearest latest thoughts of three other roots; 0 if alone."""
        own = self._told[trace]
        others = [told for told in self._others(trace) if told.vectors]
        if not own.vectors or not others:
            return 0.0
        cosines = np.stack([told.vectors[-1] for told in others]) @ own.vectors[-1]
        nearest: dict[int, float] = {}
        for told, cosine in zip(others, cosines.tolist(), strict=True):
            nearest[told.root] = max(cosine, nearest.get(told.root, -1.0))
        return float(np.mean(sorted(nearest.values())[-NEAREST:]))

    def support(self, trace: int) -> float:
        """Whether it is like those that ended with a frequent answer: how frequent the answers of the three are that
        have been nearest to where it is now, less how frequent answers are on average; 0 as long as none has ended."""
        own = self._told[trace]
        others = [told for told in self._others(trace) if told.answer is not None and told.vectors]
        if not own.vectors or not others:
            return 0.0
        weights = _weights(others)
        answers = np.array([self._kind(told.answer) for told in others if told.answer is not None])
        frequency = (weights * (answers[:, None] == answers)).sum(axis=1) / weights.sum()
        nearness = np.array([float((np.stack(told.vectors) @ own.vectors[-1]).max()) for told in others])
        nearest = np.argsort(nearness, kind="stable")[-NEAREST:]
        return float(frequency[nearest].mean() - np.average(frequency, weights=weights))

    def agreement(self, trace: int) -> float:
        """Of a complete trace: log odds that a root that has ended gave the same answer; 0 while it runs."""
        return self.agreement_later(trace)()

    def agreement_later(self, trace: int) -> Callable[[], float]:
        """The same, of who has ended by now; the answers are compared when it is called."""
        own = self._told[trace]
        if not own.is_complete:
            return float  # that is 0
        return partial(self._agreement, own, [told for told in self._others(trace) if told.is_complete])

    def _agreement(self, own: _Told, others: list[_Told]) -> float:
        weights = _weights(others)
        is_same = np.array([self._is_equal(own, told) for told in others], np.bool_)
        same = float(weights[is_same].sum())
        return math.log((same + 0.5) / (float(weights.sum()) - same + 0.5))

    def _is_equal(self, own: _Told, other: _Told) -> bool:
        if own.answer is None or other.answer is None:
            return False
        return self._kind(own.answer) == self._kind(other.answer)

    def _others(self, trace: int) -> list[_Told]:
        root = self._told[trace].root
        return [told for told in self._told.values() if told.root != root]


def mean_confidences(confidences: npt.ArrayLike, ends: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[thought]: of a trace's thoughts so far, each counting by its tokens; `ends`: tokens up to the end of each."""
    lengths = np.diff(np.asarray(ends, np.float64), prepend=0.0)
    found: npt.NDArray[np.float64] = np.cumsum(np.asarray(confidences, np.float64) * lengths) / np.cumsum(lengths)
    return found


def _weights(told: list[_Told]) -> npt.NDArray[np.float64]:
    """Each root counts once, however many of its branches there are."""
    counts: dict[int, int] = {}
    for each in told:
        counts[each.root] = counts.get(each.root, 0) + 1
    return np.array([1 / counts[each.root] for each in told], np.float64)

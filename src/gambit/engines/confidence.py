"""Token confidence of live traces and DeepConf's stop rule, the same on every engine."""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gambit.scorers.memory import grown
from gambit.types import StopRule, TraceConfidence

Key = TypeVar("Key", bound=Hashable)
BOTTOM_SHARE = 0.1  # of a trace's windows: DeepConf's "bottom 10 %"
_FIRST_TOKENS = 256

TRACK = np.dtype([
    ("count", np.int64),  # tokens measured
    ("unseen", np.int64),  # inherited tokens before them that were not measured
    ("window", np.int64),
    ("window_total", np.float64),  # over the last `window` tokens, fewer at the start
    ("threshold", np.float64),  # −∞ without a stop rule
])  # fmt: skip


def summarise(confidences: npt.NDArray[np.float32], window: int) -> TraceConfidence:
    """Folds the confidences of a trace's tokens. A window slides by one token; only full ones count."""
    count = len(confidences)
    if count == 0:
        return TraceConfidence(0, 0.0, 0.0, 0.0, 0.0)
    width = min(window, count)
    sums = np.concatenate(([0.0], np.cumsum(confidences, dtype=np.float64)))
    means = (sums[width:] - sums[:-width]) / width
    num_bottom = max(1, int(BOTTOM_SHARE * len(means)))
    bottom = np.partition(means, num_bottom - 1)[:num_bottom]
    return TraceConfidence(count, float(sums[-1] / count), float(means[-1]), float(bottom.mean()), float(means.min()))


class ConfidenceTracks(Generic[Key]):
    """The confidences of tracked traces, in two tables, so that a step costs a few array operations.

    Every token's confidence is kept: a child takes over its parent's up to the branch, wherever that was, and the
    lowest tenth of the windows is known only at the end.
    """

    def __init__(self) -> None:
        self._slot_of: dict[Key, int] = {}
        self._free: list[int] = []
        self._tracks = np.zeros(0, TRACK)
        self._tokens = np.zeros((0, _FIRST_TOKENS), np.float32)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._slot_of

    def add(
        self,
        key: Key,
        window: int,
        rule: StopRule | None,
        inherited: int = 0,
        parent: Key | None = None,
        num_given: int = 0,
    ) -> None:
        """Begins a track. Given tokens, and those inherited from a parent that is gone, do not count."""
        slot = self._take_slot()
        self._slot_of[key] = slot
        track = self._tracks[slot]
        track["count"], track["unseen"], track["window_total"] = 0, inherited + num_given, 0.0
        track["window"] = window if rule is None else rule.window_tokens
        track["threshold"] = -np.inf if rule is None else rule.threshold
        if parent not in self._slot_of:
            return
        source = self._slot_of[parent]
        unseen = int(self._tracks["unseen"][source])
        count = max(inherited - unseen, 0)
        assert count <= self._tracks["count"][source], "a child inherits tokens that its parent does not have"
        track["count"], track["unseen"] = count, min(unseen, inherited) + num_given
        self._tokens[slot, :count] = self._tokens[source, :count]
        start = max(count - int(track["window"]), 0)
        track["window_total"] = self._tokens[slot, start:count].sum(dtype=np.float64)

    def fold(self, keys: Sequence[Key], confidences: npt.NDArray[np.float32]) -> list[Key]:
        """Adds a token to each of these traces; returns those whose stop rule ends them with it."""
        slots = np.fromiter((self._slot_of[key] for key in keys), np.int64, len(keys))
        track = self._tracks[slots]
        count, window = track["count"], track["window"]
        self._tokens = grown(self._tokens, len(self._tokens), int(count.max(initial=0)) + 1)
        leaving = np.where(count >= window, self._tokens[slots, np.maximum(count - window, 0)], 0.0)
        self._tokens[slots, count] = confidences
        total = track["window_total"] + confidences - leaving
        self._tracks["window_total"][slots], self._tracks["count"][slots] = total, count + 1
        is_low = (count + 1 >= window) & (total / window < track["threshold"])
        return [keys[at] for at in np.flatnonzero(is_low)]

    def pick(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        """Returns the positions of the traces that are tracked."""
        return np.fromiter((at for at, key in enumerate(keys) if key in self._slot_of), np.int64)

    def end(self, key: Key) -> TraceConfidence | None:
        """Ends a track and returns its summary; None for a trace that was not tracked."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        self.forget(key)
        return summarise(self._tokens[slot, : self._tracks["count"][slot]], int(self._tracks["window"][slot]))

    def forget(self, key: Key) -> None:
        if (slot := self._slot_of.pop(key, None)) is not None:
            self._free.append(slot)

    def _take_slot(self) -> int:
        if not self._free:
            have = len(self._tracks)
            self._tracks = grown(self._tracks, have + 1)
            self._tokens = grown(self._tokens, len(self._tracks), self._tokens.shape[1])
            self._free = list(range(have, len(self._tracks)))
        return self._free.pop()


def fold_thoughts(
    rows: npt.NDArray[np.void], confidences: npt.NDArray[np.float32], is_boundary: npt.NDArray[np.bool_]
) -> None:
    """Folds in the confidence of each row's new token. The mean of a thought is known at its boundary."""
    rows["confidence_total"] += confidences
    rows["confidence_count"] += 1
    mean = rows["confidence_total"] / rows["confidence_count"]
    rows["thought_confidence"] = np.where(is_boundary, mean, rows["thought_confidence"])
    for name in ("confidence_total", "confidence_count"):
        rows[name][is_boundary] = 0

"""What a history scorer remembers: a slot per scored thought, shared by branches, counted; it knows no engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gambit.errors import EngineError
from gambit.scorers.base import HistoryScorer, PastThoughts, ThoughtBatch

Key = TypeVar("Key", bound=Hashable)
Slots = npt.NDArray[np.int64]
_FIRST = 64  # slots; doubled whenever they run out


class SlotCounts:
    """Slot numbers by reference count; a number is free again when nobody holds it."""

    def __init__(self) -> None:
        self._refs = np.zeros(_FIRST, np.int64)
        self._free: list[int] = list(range(_FIRST - 1, -1, -1))  # the lowest is taken first: memory stays small

    @property
    def num_used(self) -> int:
        return len(self._refs) - len(self._free)

    def take(self) -> int:
        if not self._free:
            have = len(self._refs)
            self._refs = np.concatenate((self._refs, np.zeros(have, np.int64)))
            self._free = list(range(2 * have - 1, have - 1, -1))
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def share(self, slots: Slots) -> None:
        assert (self._refs[slots] > 0).all(), "a slot that nobody holds cannot be shared"
        self._refs[slots] += 1

    def release(self, slots: Slots) -> None:
        assert (self._refs[slots] > 0).all(), "a slot is given back once"
        self._refs[slots] -= 1
        self._free += slots[self._refs[slots] == 0].tolist()


@dataclass(slots=True, eq=False)
class History:
    """The scored thoughts of one trace, oldest first; earlier ones are never changed."""

    _slots: Slots = field(default_factory=lambda: np.zeros(16, np.int64))
    count: int = 0

    @property
    def slots(self) -> Slots:
        return self._slots[: self.count]

    def append(self, slot: int) -> None:
        if self.count == len(self._slots):
            self._slots = np.concatenate((self._slots, np.zeros_like(self._slots)))
        self._slots[self.count] = slot
        self.count += 1


class Histories(Generic[Key]):
    """The histories of traces, by whatever names an engine has for them.

    A child holds its parent's slots from the moment it begins, so that the parent may advance, end and be forgotten.
    """

    def __init__(self) -> None:
        self._of: dict[Key, History] = {}
        self._counts = SlotCounts()

    @property
    def num_used(self) -> int:
        return self._counts.num_used

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, key: Key, source: Key | None, count: int) -> None:
        """A trace whose first `count` thoughts are those of `source`."""
        assert key not in self._of
        if count == 0:
            self._of[key] = History()
            return
        found = None if source is None else self._of.get(source)
        if found is None or found.count < count:
            raise lost_history(key, source, count)
        slots = found.slots[:count].copy()
        self._counts.share(slots)
        self._of[key] = History(slots, count)

    def extend(self, keys: Sequence[Key], max_past: int) -> PastRows:
        """One more thought for each trace; it is to be scored with what this gives."""
        own = [self.reserve() for _ in keys]
        past = self.past(keys, own, max_past)
        for key, slot in zip(keys, own, strict=True):
            self.append(key, slot)
        return past

    def reserve(self) -> int:
        """A slot for a thought that is about to be scored; `append` or `give_back` settles what becomes of it."""
        return self._counts.take()

    def append(self, key: Key, slot: int) -> None:
        self._of[key].append(slot)

    def give_back(self, slots: Sequence[int]) -> None:
        self._counts.release(np.array(slots, np.int64))

    def end(self, key: Key) -> None:
        """Forget a trace; slots that no other one holds are free. What was forgotten before stays so."""
        history = self._of.pop(key, None)
        if history is not None:
            self._counts.release(history.slots)

    def end_where(self, is_over: Callable[[Key], bool]) -> None:
        for key in [key for key in self._of if is_over(key)]:
            self.end(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._of

    def past(self, keys: Sequence[Key], own: Sequence[int], max_past: int) -> PastRows:
        """What a scorer has to know of traces whose next thoughts are to be scored into the slots `own`."""
        histories = [self._of[key] for key in keys]
        counts = np.fromiter((history.count for history in histories), np.int64, len(keys))
        lengths = np.minimum(counts, max_past)
        slots = np.zeros((len(keys), int(lengths.max(initial=0))), np.int64)
        for row, history, length in zip(slots, histories, lengths.tolist(), strict=True):
            row[:length] = history.slots[history.count - length :]
        return PastRows(slots, lengths, counts, np.array(own, np.int64))


def lost_history(key: Hashable, source: Hashable | None, count: int) -> EngineError:
    whose = "a trace that it does not name" if source is None else f"{source}, of which so many are not known"
    return EngineError(f"{key} continues after {count} scored thoughts of {whose}: a child names its live parent, or "
                       "with a prefix `history_of`, in a search that keeps histories")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PastRows:
    """`PastThoughts` before they go to a device: plain arrays, which cross a process border."""

    slots: Slots  # [n, most]
    lengths: Slots  # [n], how many of them are the trace's
    positions: Slots  # [n]
    own: Slots  # [n]

    def to(self, device: torch.device) -> PastThoughts:
        packed = np.concatenate((self.slots, np.stack((self.lengths, self.positions, self.own), axis=1)), axis=1)
        rows = on_device(packed, device)
        most = self.slots.shape[1]
        mask = torch.arange(most, device=device) < rows[:, most, None]
        return PastThoughts(rows[:, :most], mask, rows[:, most + 1], rows[:, most + 2])


def on_device(array: Slots, device: torch.device) -> torch.Tensor:
    """From pinned memory, since a copy from anywhere else may wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ThoughtMemory:
    """A history scorer with the memory its slots are in; it grows when a higher slot is used."""

    def __init__(self, scorer: HistoryScorer, num_slots: int = _FIRST) -> None:
        self._scorer = scorer
        self._memory = scorer.memory(num_slots)

    @property
    def num_slots(self) -> int:
        return self._memory.shape[2]

    @property
    def max_past(self) -> int:
        return self._scorer.max_past

    def score(self, thoughts: ThoughtBatch, past: PastRows) -> torch.Tensor:
        self._reserve(int(past.own.max(initial=-1)) + 1)
        return self._scorer.score_next(thoughts, self._memory, past.to(thoughts.states.device))

    def _reserve(self, num_slots: int) -> None:
        if num_slots > self.num_slots:
            more = max(num_slots, self.num_slots * 3 // 2) - self.num_slots
            self._memory = torch.cat((self._memory, self._scorer.memory(more)), dim=2)

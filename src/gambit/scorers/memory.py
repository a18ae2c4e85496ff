"""The memory of a history scorer: a slot for each scored thought, shared by branches."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gambit.errors import EngineError
from gambit.scorers.base import HistoryScorer, PastThoughts, ThoughtBatch

Key = TypeVar("Key", bound=Hashable)
Element = TypeVar("Element", bound=np.generic)
Slots = npt.NDArray[np.int32]  # narrow, since they go to the device step by step
Numbers = npt.NDArray[np.int64]
_FIRST = 64  # slots; doubled whenever they run out


def grown(array: npt.NDArray[Element], *shape: int) -> npt.NDArray[Element]:
    """Returns an array with room for this shape. A dimension that is too small at least doubles; zeros fill it."""
    sizes = [max(needed, 2 * have) if needed > have else have for have, needed in zip(array.shape, shape, strict=True)]
    if sizes == list(array.shape):
        return array
    larger = np.zeros(sizes, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


@dataclass(frozen=True, slots=True)
class PastRows:
    """`PastThoughts` before they are copied to a device: plain arrays, which cross a process border."""

    slots: Slots  # [n, most]
    lengths: Numbers  # [n], how many of them are the trace's
    positions: Numbers  # [n]
    own: Slots  # [n]

    def to(self, device: torch.device) -> PastThoughts:
        slots = on_device(self.slots, device).long()
        packed: Numbers = np.stack((self.lengths, self.positions, self.own.astype(np.int64)))
        numbers = on_device(packed, device)
        mask = torch.arange(slots.shape[1], device=device) < numbers[0, :, None]
        return PastThoughts(slots, mask, numbers[1], numbers[2])


class Histories(Generic[Key]):
    """The scored thoughts of traces, which an engine names by keys of its own.

    A child holds its parent's slots from the moment it begins, so that the parent may advance, end and be forgotten.
    All traces are in one table, so that a step over many of them costs a few array operations.
    """

    def __init__(self) -> None:
        self._holders = np.zeros(0, np.int64)  # by slot: the number of traces that hold it
        self._free_slots = np.zeros(0, np.int32)  # a stack: freed last, taken first, so that memory stays small
        self._row: dict[Key, int] = {}
        self._free_rows: list[int] = []
        self._slots = np.zeros((0, 16), np.int32)  # a row per trace, oldest thought first
        self._length = np.zeros(0, np.int64)  # of each row; numbers after it have no meaning

    @property
    def num_used(self) -> int:
        """The number of slots that a trace holds or a thought is about to fill."""
        return len(self._holders) - len(self._free_slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._row

    def begin(self, key: Key, source: Key | None, count: int) -> None:
        """Adds a trace whose first `count` thoughts are those of `source`."""
        assert key not in self._row
        origin = None if source is None else self._row.get(source)
        if count and (origin is None or self._length[origin] < count):
            raise lost_history(key, source, count)
        row = self._row[key] = self._take_row()
        self._length[row] = count
        if count:
            self._slots[row, :count] = shared = self._slots[origin, :count]
            self._holders[shared] += 1

    def extend(self, keys: Sequence[Key], max_past: int) -> PastRows:
        """Adds a thought to each trace; returns the past thoughts to score it with."""
        past = self.propose(keys, max_past)
        self.append(keys, past.own)
        return past

    def propose(self, keys: Sequence[Key], max_past: int) -> PastRows:
        """Returns the past thoughts for the traces' next ones, and takes slots that `append` or `give_back` settles."""
        rows = self._rows(keys)
        lengths = self._length[rows]
        return PastRows(self._latest(rows, max_past), np.minimum(lengths, max_past), lengths, self._take(len(keys)))

    def append(self, keys: Sequence[Key], slots: Slots) -> None:
        rows = self._rows(keys)
        at = self._length[rows]
        self._slots = grown(self._slots, len(self._slots), int(at.max(initial=0)) + 1)
        self._slots[rows, at] = slots
        self._length[rows] = at + 1

    def give_back(self, slots: Slots) -> None:
        assert (self._holders[slots] > 0).all(), "a slot is released once"
        self._holders[slots] -= 1
        self._free_slots = np.concatenate((self._free_slots, slots[self._holders[slots] == 0]))

    def end(self, key: Key) -> None:
        """Forgets a trace and frees the slots that no other one holds. A trace that is forgotten already stays so."""
        row = self._row.pop(key, None)
        if row is not None:
            self.give_back(self._slots[row, : self._length[row]])
            self._free_rows.append(row)

    def end_where(self, is_over: Callable[[Key], bool]) -> None:
        for key in [key for key in self._row if is_over(key)]:
            self.end(key)

    def _rows(self, keys: Sequence[Key]) -> Numbers:
        return np.fromiter(map(self._row.__getitem__, keys), np.int64, len(keys))

    def _latest(self, rows: Numbers, max_past: int) -> Slots:
        """Returns the last `max_past` slots of each row or all it has, from the left."""
        lengths = self._length[rows]
        longest = int(lengths.max(initial=0))
        if longest <= max_past:
            return self._slots[:, :longest][rows]
        first = np.maximum(lengths - max_past, 0)
        return np.take_along_axis(self._slots[rows], first[:, None] + np.arange(max_past), axis=1)

    def _take(self, count: int) -> Slots:
        while count > len(self._free_slots):
            have = len(self._holders)
            self._holders = grown(self._holders, max(2 * have, _FIRST))
            fresh = np.arange(have, len(self._holders), dtype=np.int32)
            self._free_slots = np.concatenate((fresh[::-1], self._free_slots))
        rest = len(self._free_slots) - count
        taken, self._free_slots = self._free_slots[rest:].copy(), self._free_slots[:rest]
        self._holders[taken] = 1
        return taken

    def _take_row(self) -> int:
        if not self._free_rows:
            have = len(self._length)
            self._length = grown(self._length, have + 1)
            self._slots = grown(self._slots, len(self._length), self._slots.shape[1])
            self._free_rows = list(range(have, len(self._length)))
        return self._free_rows.pop()


def lost_history(key: Hashable, source: Hashable | None, count: int) -> EngineError:
    """Returns the error for a trace whose inherited thoughts are not known."""
    whose = "a trace that it does not name" if source is None else f"{source}, of which so many are not known"
    return EngineError(f"{key} continues after {count} scored thoughts of {whose}: a child names its live parent, or "
                       "with a prefix `history_of`, in a search that keeps histories")  # fmt: skip


def on_device(array: Slots | Numbers, device: torch.device) -> torch.Tensor:
    """Copies an array to a device, from pinned memory: a copy from anywhere else may wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class ThoughtMemory:
    """A history scorer with the memory that holds its slots. It grows when a higher slot is used."""

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
        num_slots = int(past.own.max(initial=-1)) + 1
        if num_slots > self.num_slots:
            more = max(num_slots, self.num_slots * 3 // 2) - self.num_slots
            self._memory = torch.cat((self._memory, self._scorer.memory(more)), dim=2)
        return self._scorer.score_next(thoughts, self._memory, past.to(thoughts.states.device))

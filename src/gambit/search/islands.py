"""How a pool is split into islands: places, traces to complete and random numbers of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Islands:
    """An island is a small search of its own: it shares the engine and the vote with the others, and nothing else.

    One island is the paper's pool; as many islands as places are self-consistency.
    """

    count: int
    capacity: int
    num_traces: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def places(self, island: int) -> int:
        """Most of its traces that are in the pool at once; islands differ by at most one."""
        return _part(self.capacity, self.count, island)

    def share(self, island: int) -> int:
        """How many traces it has to complete."""
        return _part(self.num_traces, self.count, island)

    def noise_id(self, island: int, ordinal: int) -> int:
        """Of an island's traces in the order of their creation; the same whatever happens on other islands.

        With one island these are the traces' ids, and with a root on each too.
        """
        return island + self.count * ordinal

    def are_complete(self, completed: Iterable[int]) -> bool:
        """`completed`: the islands of the completed traces, one entry each."""
        counts = [0] * self.count
        for island in completed:
            counts[island] += 1
        return all(counts[island] >= self.share(island) for island in self)


def _part(total: int, count: int, index: int) -> int:
    return total // count + (index < total % count)

"""How a pool is split into islands: places, traces to complete and random numbers of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gambit.config.presets import SearchSettings


@dataclass(frozen=True, slots=True)
class Islands:
    """An island is a small search of its own: it shares the engine and the vote with the others, and nothing else.

    One island is the paper's pool; as many islands as places are self-consistency.
    """

    count: int
    capacity: int
    num_traces: int
    played: range | None = None  # those that are searched here; None: all
    first_noise: int = 0

    @classmethod
    def of(cls, settings: SearchSettings) -> Islands:
        pool, part = (settings.islands, settings.capacity, settings.num_traces), settings.part
        return cls(*pool) if part is None else cls(*pool, part.islands, part.first_trace)

    def __iter__(self) -> Iterator[int]:
        """The islands that are searched here."""
        return iter(range(self.count) if self.played is None else self.played)

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
        return self.first_noise + island + self.count * ordinal

    @property
    def num_wanted(self) -> int:
        """Traces that have to be completed here."""
        return sum(map(self.share, self))

    def are_complete(self, completed: Iterable[int]) -> bool:
        """`completed`: the islands of the completed traces, one entry each."""
        counts = [0] * self.count
        for island in completed:
            counts[island] += 1
        return all(counts[island] >= self.share(island) for island in self)


def _part(total: int, count: int, index: int) -> int:
    return total // count + (index < total % count)

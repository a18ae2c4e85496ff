"""How many KV blocks each search holds, a block that several of its traces share counted once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence


class BlockUsage:
    """Blocks by trace and by search, updated with the blocks that traces got since the last update.

    Valid only where a running trace keeps its blocks and new ones are appended: a trace may hold thousands.
    """

    def __init__(self) -> None:
        self._search_of: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._holders: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by search: traces that hold a block
        self._all: Counter[int] = Counter()  # a prompt may be shared by several searches

    def update(self, running: Mapping[str, int], blocks_from: Callable[[str, int], Sequence[int]]) -> None:
        """`running`: searches by request; `blocks_from(request, n)`: its blocks without the first n."""
        self.forget([request for request in self._blocks if request not in running])
        for request, search in running.items():
            self._search_of[request] = search
            blocks = self._blocks.setdefault(request, [])
            if new := blocks_from(request, len(blocks)):
                blocks += new
                self._holders[search].update(new)
                self._all.update(new)

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            blocks = self._blocks.pop(request, None)
            if blocks is None:
                continue
            search = self._search_of.pop(request)
            _release(self._all, blocks)
            _release(self._holders[search], blocks)
            if not self._holders[search]:
                del self._holders[search]

    def simulate_evictions(self) -> EvictionSimulation:
        return EvictionSimulation(self._search_of, self._blocks, self._holders, self._all)


class EvictionSimulation:
    """What each search would hold after some evictions; the usage itself stays as it is."""

    def __init__(
        self,
        search_of: Mapping[str, int],
        blocks: Mapping[str, Sequence[int]],
        holders: Mapping[int, Counter[int]],
        everyone: Counter[int],
    ) -> None:
        self.used = {search: len(held) for search, held in holders.items()}  # blocks
        self._search_of = search_of
        self._blocks = blocks
        self._holders = holders
        self._all = everyone
        self._gone: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._gone_from_all: Counter[int] = Counter()

    def evict(self, request: str) -> int:
        """Evict one trace more; returns how many blocks that would free."""
        search, blocks = self._search_of[request], self._blocks[request]
        self.used[search] -= _count_freed(self._holders[search], self._gone[search], blocks)
        return _count_freed(self._all, self._gone_from_all, blocks)


def _count_freed(holders: Counter[int], gone: Counter[int], blocks: Iterable[int]) -> int:
    gone.update(blocks)
    return sum(gone[block] == holders[block] for block in blocks)


def _release(holders: Counter[int], blocks: Iterable[int]) -> None:
    for block in blocks:
        holders[block] -= 1
        if not holders[block]:
            del holders[block]

"""Counts KV cache in ref-counted blocks, shared prefixes once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


class KvBlocks:
    """The KV blocks of one engine. A block belongs to the search that allocated it and may be shared within it."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = capacity_tokens // block_tokens
        self.used_by: Counter[int] = Counter()
        self._refs: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        self._next_id = 0

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._refs)

    @property
    def used_tokens(self) -> int:
        return len(self._refs) * self.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def allocate(self, count: int, search: int) -> list[int] | None:
        """New blocks, or None when there are not enough."""
        if count > self.num_free:
            return None
        blocks = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        self._refs.update(dict.fromkeys(blocks, 1))
        self._owner.update(dict.fromkeys(blocks, search))
        self.used_by[search] += count
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block] == 0:
                del self._refs[block]
                self.used_by[self._owner.pop(block)] -= 1

"""Trees of traces as a search makes them, laid out at once: block tables with a wanted factor of sharing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PROMPT_BLOCKS = 10
BISECTIONS = 12
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tree:
    """Traces of equal length; a block of several traces has one number."""

    table: Table  # [traces, blocks]
    turnover: float  # traces that were replaced by branches of others, per block that all have grown by

    @property
    def num_unique(self) -> int:
        return len(np.unique(self.table))

    @property
    def sharing(self) -> float:
        return float(self.table.size / self.num_unique)

    def tokens(self, block_tokens: int, vocab_size: int, seed: int) -> npt.NDArray[np.int64]:
        """[traces, tokens]: random, the same in the same block. Different seeds share nothing."""
        rng = np.random.default_rng(seed)
        said = rng.integers(5, vocab_size, size=(int(self.table.max()) + 1, block_tokens))
        return said[self.table].reshape(len(self.table), -1)


def grow(traces: int, blocks: int, turnover: float, islands: int = 1, seed: int = 0) -> Tree:
    """All traces grow by a block at a time; now and then one is replaced by a branch of another of its island."""
    rng = np.random.default_rng(seed)
    size = traces // islands
    table = np.zeros((traces, blocks), np.int32)
    table[:, :PROMPT_BLOCKS] = np.arange(1, PROMPT_BLOCKS + 1)
    for block in range(PROMPT_BLOCKS, blocks):
        for _ in range(rng.poisson(turnover)):
            pruned = int(rng.integers(traces))
            parent = pruned // size * size + int(rng.integers(size))
            table[pruned, :block] = table[parent % traces, :block]
        table[:, block] = np.arange(traces) + 1 + PROMPT_BLOCKS + (block - PROMPT_BLOCKS) * traces
    numbers = np.unique(table)
    table = (np.searchsorted(numbers, table) + 1).astype(np.int32)  # without gaps: memory is made for the highest
    return Tree(table[rng.permutation(traces)], turnover)


def grow_shared(traces: int, blocks: int, sharing: float, islands: int = 1, seed: int = 0) -> Tree:
    """Draws a tree with the turnover that gives this factor, as far as islands allow it."""
    if sharing <= 1:
        return Tree(np.arange(1, traces * blocks + 1, dtype=np.int32).reshape(traces, blocks), 0.0)
    low, high = 1e-4, float(traces)
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if grow(traces, blocks, middle, islands, seed).sharing < sharing else (low, middle)
    return grow(traces, blocks, (low * high) ** 0.5, islands, seed)

"""How many blocks each pair of traces has in common, from the beginning."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd numbers of 64 random bits


def prefix_hashes(block_table: torch.Tensor, most_blocks: int) -> torch.Tensor:
    """[traces, most_blocks + 1]: of each trace's first 0, 1, 2, … blocks. Cells after its last block do not matter.

    A block may be in two tables behind different blocks of equal content, and comparing the blocks themselves would
    then not be monotone: hashes of whole prefixes are, up to chance in 64 bits.
    """
    blocks = block_table[:, :most_blocks].long()
    mixed = blocks * _MIX[0] + torch.arange(blocks.shape[1], device=blocks.device) * _MIX[1]
    mixed = (mixed ^ (mixed >> 31)) * _MIX[2]
    return pad((mixed ^ (mixed >> 29)).cumsum(1), (1, 0))


def common_blocks(hashes: torch.Tensor, full_blocks: torch.Tensor) -> torch.Tensor:
    """[traces, traces], by binary search. `full_blocks`: of each trace, how many may be shared."""
    high = full_blocks.minimum(full_blocks[:, None]).long()
    low = torch.zeros_like(high)
    for _ in range((hashes.shape[1] - 1).bit_length()):
        middle = (low + high + 1) // 2
        found = hashes.gather(1, middle)  # `middle` is symmetric: the other trace's hash is across the diagonal
        is_equal = found == found.T
        low, high = middle.where(is_equal, low), high.where(is_equal, middle - 1)
    return low


def full_blocks(num_tokens: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Blocks of computed tokens; the token being computed is not among them."""
    return ((num_tokens - 1) // block_tokens).clamp(min=0)

"""Triton kernels of forest attention: blocks that traces have in common, and the merge of partial results."""

from __future__ import annotations

import torch

from gambit.engines.vllm.compat.kernels import tl, triton
from gambit.engines.vllm.forest.plan import ForestPlan

TILE_TRACES = 64
TILE_HEADS = 8
# Not specialised for numbers that change with the traces: kernels would be compiled in the middle of a search.


@triton.jit(do_not_specialize=["count", "hashes_stride", "num_halvings"])  # type: ignore[untyped-decorator]
def _common_blocks(  # type: ignore[no-untyped-def]
    hashes, full_blocks, common, count, hashes_stride, num_halvings, tile: tl.constexpr
):
    """Of one trace with a tile of traces, by binary search."""
    row = tl.program_id(0)
    others = tl.program_id(1) * tile + tl.arange(0, tile)
    is_trace = others < count
    low = tl.zeros((tile,), dtype=tl.int64)
    high = tl.minimum(tl.load(full_blocks + row), tl.load(full_blocks + others, mask=is_trace, other=0)).to(tl.int64)
    own = hashes + row.to(tl.int64) * hashes_stride
    theirs = hashes + others.to(tl.int64) * hashes_stride
    for _ in range(num_halvings):
        middle = (low + high + 1) // 2
        is_equal = tl.load(own + middle, mask=is_trace, other=0) == tl.load(theirs + middle, mask=is_trace, other=0)
        low = tl.where(is_equal, middle, low)
        high = tl.where(is_equal, high, middle - 1)
    tl.store(common + row.to(tl.int64) * count + others, low, mask=is_trace)


def common_blocks(hashes: torch.Tensor, full_blocks: torch.Tensor) -> torch.Tensor:
    """As `common_prefix.common_blocks`, in one launch."""
    count = len(hashes)
    common = torch.empty((count, count), dtype=torch.int64, device=hashes.device)
    grid = (count, triton.cdiv(count, TILE_TRACES))
    halvings = (hashes.shape[1] - 1).bit_length()
    _common_blocks[grid](hashes, full_blocks, common, count, hashes.stride(0), halvings, TILE_TRACES)
    return common


@triton.jit(do_not_specialize=["lse_stride"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial, lse, parts, part_starts, merged, num_heads, partial_stride, partial_head_stride, lse_stride,
    merged_stride, merged_head_stride, tile_heads: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Of one trace and a tile of heads: sums in float32, with the largest weight so far as the unit."""
    row = tl.program_id(0)
    heads = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    is_head = heads < num_heads
    columns = tl.arange(0, width)
    cells = heads[:, None] * partial_head_stride + columns[None, :]
    top = tl.full((tile_heads,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((tile_heads,), dtype=tl.float32)
    summed = tl.zeros((tile_heads, width), dtype=tl.float32)
    for place in range(tl.load(part_starts + row), tl.load(part_starts + row + 1)):
        part = tl.load(parts + place).to(tl.int64)
        weight = tl.load(lse + heads * lse_stride + part, mask=is_head, other=0.0)
        values = tl.load(partial + part * partial_stride + cells, mask=is_head[:, None], other=0.0).to(tl.float32)
        new_top = tl.maximum(top, weight)
        fading, weight = tl.exp(top - new_top), tl.exp(weight - new_top)
        summed = summed * fading[:, None] + values * weight[:, None]
        total = total * fading + weight
        top = new_top
    summed = summed / tl.where(total > 0.0, total, 1.0)[:, None]  # padding has no parts
    out = merged + row.to(tl.int64) * merged_stride + heads[:, None] * merged_head_stride + columns[None, :]
    tl.store(out, summed.to(merged.dtype.element_ty), mask=is_head[:, None])


def merge(partial: torch.Tensor, lse: torch.Tensor, plan: ForestPlan, merged: torch.Tensor) -> None:
    """Into `merged` [traces, heads, width], whose width is a power of two. `partial`, `lse` as in `merge.merge`."""
    count, (_, heads, width) = len(plan.part_starts) - 1, partial.shape
    _merge[(count, triton.cdiv(heads, TILE_HEADS))](
        partial, lse, plan.parts, plan.part_starts, merged, heads, partial.stride(0), partial.stride(1),
        lse.stride(0), merged.stride(0), merged.stride(1), TILE_HEADS, width,
    )  # fmt: skip

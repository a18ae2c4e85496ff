"""Triton kernels: a two-layer scorer, and forest attention's common prefixes and merge."""

import warnings

import numpy as np
import torch

from gambit.engines.vllm.compat.core import HAS_TRITON, device_view, tl, triton
from gambit.engines.vllm.forest import ForestPlan
from gambit.engines.vllm.messages import Floats
from gambit.engines.vllm.scoring import ReadScores, Score, device_mark
from gambit.errors import GambitWarning
from gambit.scorers.base import TwoLayers

TILE_ROWS, TILE_WIDTH, TILE_HIDDEN = 64, 16, 128  # of 256 rows and 512 units: 128 programs, nearly all of an H200
NUM_WARPS, NUM_STAGES = 4, 3
SLOTS = 8  # steps whose scores may be unread; two or three are
TIMED_EVERY = 16  # launches: a mark on the model's stream costs a little
MOST_ERROR = 1e-2  # of a score, against the scorer itself, whose own products may be rounded


@triton.jit  # type: ignore[untyped-decorator]
def _two_layers(  # type: ignore[no-untyped-def]
    states, w1, w1_rest, b1, w2, sums, num_rows, hidden, width, states_stride, sums_stride,
    tile_rows: tl.constexpr, tile_width: tl.constexpr, tile_hidden: tl.constexpr,
):  # fmt: skip
    """Computes what a tile of the first layer's units adds to the result of a tile of rows."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    units = tl.program_id(1) * tile_width + tl.arange(0, tile_width)
    parts = tl.arange(0, tile_hidden)
    is_row, is_unit = rows < num_rows, units < width
    inner = tl.zeros((tile_rows, tile_width), dtype=tl.float32)
    for start in range(0, hidden, tile_hidden):
        at = start + parts
        is_part = at < hidden
        x = tl.load(
            states + rows[:, None].to(tl.int64) * states_stride + at[None, :],
            mask=is_row[:, None] & is_part[None, :], other=0.0,
        )  # fmt: skip
        weights, is_weight = units[None, :] * hidden + at[:, None], is_unit[None, :] & is_part[:, None]
        inner = tl.dot(x, tl.load(w1 + weights, mask=is_weight, other=0.0), inner, input_precision="ieee")
        inner = tl.dot(x, tl.load(w1_rest + weights, mask=is_weight, other=0.0), inner, input_precision="ieee")
    inner = tl.maximum(inner + tl.load(b1 + units, mask=is_unit, other=0.0)[None, :], 0.0)
    outer = tl.sum(inner * tl.load(w2 + units, mask=is_unit, other=0.0)[None, :], axis=1)
    tl.store(sums + tl.program_id(1) * sums_stride + rows, outer, mask=is_row)


class FusedScorer:
    """A two-layer scorer as one kernel on the model's own stream, which writes its result into host memory.

    It needs no second stream, no copy and no wait of its own: the tokens that vLLM waits for are sampled after it.
    With the same scorer on a second stream an H200 is idle for 0.17 ms more of every step (0.25 instead of 0.08).
    """

    def __init__(self, layers: TwoLayers, most_rows: int, dtype: torch.dtype) -> None:
        """`dtype`: that of the states to come."""
        # Tensor cores take both factors in one dtype: what it cannot hold of a weight is a weight of its own.
        self._w1 = layers.w1.to(dtype).contiguous()
        self._w1_rest = (layers.w1 - self._w1.float()).to(dtype).contiguous()
        self._b1 = layers.b1.contiguous()
        self._w2, self._b2 = layers.w2.reshape(-1).contiguous(), np.float32(layers.b2.item())
        self._is_logit = layers.is_logit
        self._most_rows = most_rows
        self._width, self._hidden = self._w1.shape
        self._num_tiles = -(-self._width // TILE_WIDTH)
        is_cuda = self._w1.is_cuda
        self._sums = torch.zeros(SLOTS, self._num_tiles, most_rows, device="cpu", pin_memory=is_cuda)
        self._sums_on_device = device_view(self._sums) if is_cuda else self._sums
        self._num_launches = 0

    def score(self, states: torch.Tensor) -> ReadScores:
        """Launches the kernel on the current stream; returns a function that reads the scores and the seconds.

        The scores are there as soon as anything is that was launched after them: a step's tokens.
        """
        slot, is_timed = self._num_launches % SLOTS, states.is_cuda and self._num_launches % TIMED_EVERY == 0
        self._num_launches += 1
        began = device_mark() if is_timed else None
        self._launch(states, self._sums_on_device[slot])
        ended = device_mark() if is_timed else None
        sums = self._sums[slot, :, : len(states)]

        def read() -> tuple[Floats, float]:
            scores: Floats = sums.numpy().sum(0, dtype=np.float32) + self._b2
            if self._is_logit:  # the sigmoid, without overflow
                scores = ((np.tanh(scores / 2) + 1) / 2).astype(np.float32, copy=False)
            if began is None or ended is None:
                return scores, 0.0
            ended.synchronize()
            return scores, TIMED_EVERY * began.elapsed_time(ended) / 1000

        return read

    def _launch(self, states: torch.Tensor, sums: torch.Tensor) -> None:
        states = states if states.stride(-1) == 1 else states.contiguous()
        grid = (triton.cdiv(len(states), TILE_ROWS), self._num_tiles)
        _two_layers[grid](
            states, self._w1, self._w1_rest, self._b1, self._w2, sums, len(states), self._hidden, self._width,
            states.stride(0), self._most_rows, tile_rows=TILE_ROWS, tile_width=TILE_WIDTH, tile_hidden=TILE_HIDDEN,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip


def fused(layers: TwoLayers, most_rows: int, like: torch.Tensor, score: Score) -> FusedScorer | None:
    """Returns the kernel if it compiles and scores random states as the scorer itself does; else None, with a warning.

    `like`: [1, hidden], as the states to come.
    """
    try:
        if not HAS_TRITON:
            raise RuntimeError("vLLM finds no Triton here")
        scorer = FusedScorer(layers, most_rows, like.dtype)
        for num_rows in sorted({1, most_rows // 2 + 1, most_rows}):
            states = torch.randn(num_rows, like.shape[1], device=like.device).to(like.dtype)
            read, expected = scorer.score(states), score(states).float().cpu().numpy()
            found, _ = read()
            error = float(np.abs(found - expected).max())
            if not error < MOST_ERROR * (1 if layers.is_logit else 1 + float(np.abs(found).max())):
                raise RuntimeError(f"scores of {num_rows} rows are wrong by {error:.3g}")
    except Exception as error:
        warnings.warn(f"the scorer is not fused into one kernel: {error}", GambitWarning, stacklevel=2)
        return None
    return scorer


# -- forest attention -------------------------------------------------------------------------------------------------

TILE_TRACES = 64
TILE_HEADS = 8
# Not specialised for numbers that change with the traces: kernels would be compiled in the middle of a search.


@triton.jit(do_not_specialize=["count", "hashes_stride", "num_halvings"])  # type: ignore[untyped-decorator]
def _common_blocks_kernel(  # type: ignore[no-untyped-def]
    hashes, full_blocks, common, count, hashes_stride, num_halvings, tile: tl.constexpr
):
    """Counts the blocks that one trace has in common with each of a tile of traces, by binary search."""
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


def common_blocks_on_gpu(hashes: torch.Tensor, full_blocks: torch.Tensor) -> torch.Tensor:
    """Returns what `forest.common_blocks` does, in one launch."""
    count = len(hashes)
    common = torch.empty((count, count), dtype=torch.int64, device=hashes.device)
    grid = (count, triton.cdiv(count, TILE_TRACES))
    halvings = (hashes.shape[1] - 1).bit_length()
    _common_blocks_kernel[grid](hashes, full_blocks, common, count, hashes.stride(0), halvings, TILE_TRACES)
    return common


@triton.jit(do_not_specialize=["lse_stride"])  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial, lse, parts, part_starts, merged, num_heads, partial_stride, partial_head_stride, lse_stride,
    merged_stride, merged_head_stride, tile_heads: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Merges one trace and a tile of heads: sums in float32, with the largest weight so far as the unit."""
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
    """Merges `partial` [parts, heads, width] by `lse` [heads, parts] into `merged` [traces, heads, width].

    The width is a power of two.
    """
    count, (_, heads, width) = len(plan.part_starts) - 1, partial.shape
    _merge_kernel[(count, triton.cdiv(heads, TILE_HEADS))](
        partial, lse, plan.parts, plan.part_starts, merged, heads, partial.stride(0), partial.stride(1),
        lse.stride(0), merged.stride(0), merged.stride(1), TILE_HEADS, width,
    )  # fmt: skip

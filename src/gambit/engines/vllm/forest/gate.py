"""Whether forest attention makes a decode step faster: what it saves a step, from a few constants of an H200.

Fitted to benchmarks/results/forest_speed_*.json, and on the careful side of them: where a figure varied, the one that
speaks for stock attention is taken. `benchmarks/forest_speed.py --parts start,gate` checks them on whole steps. On a
GPU with less bandwidth (H100) attention takes longer and the rest does not: there it would pay earlier than this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gambit.engines.vllm.messages import Sharing

READ_RATE = 4.3e9  # bytes a millisecond: keys and values from the GPU's memory
# What it costs to read a block for one more trace, with 1 for the first: part of it is still in the L2 cache. 0.47 with
# 8 traces, 0.6 with 64, 0.7 to 1 with 112 and more.
READ_AGAIN = 0.45
# A stretch without a branch is read by one multiprocessor for each KV head; 47 and 56 GB/s were measured where one such
# stretch was all there was to wait for. Stock attention splits the keys of a trace among several.
STRETCH_RATE = 5e7  # bytes a millisecond, of one KV head
LAYER_MS = 0.01  # of a layer: gathering queries and merging parts
TRACE_MS = 3e-4  # of a layer and trace: its parts, and tiles of its nodes that are not full
STEP_MS = 0.4  # of a step: bringing the plan up to date, and now and then a new one, which takes 3
LAUNCH_MS = 0.15  # of a layer without a CUDA graph of the whole step: the host launches its kernels one by one
FEWEST_TRACES = 16  # no graphs are captured for fewer, and none was measured to gain


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Attention layers of one shape, on one GPU."""

    num_layers: int
    token_bytes: int  # keys and values of a token in one layer
    num_kv_heads: int


def saved_ms(sharing: Sharing, kinds: Iterable[LayerKind], *, has_graphs: bool) -> float:
    """Milliseconds by which forest attention makes a decode step shorter; below 0: longer."""
    return sum(kind.num_layers * _saved_ms(sharing, kind, has_graphs) for kind in kinds) - STEP_MS


def pays(sharing: Sharing, kinds: Iterable[LayerKind], *, has_graphs: bool) -> bool:
    return sharing.num_traces >= FEWEST_TRACES and saved_ms(sharing, kinds, has_graphs=has_graphs) > 0


def _saved_ms(sharing: Sharing, kind: LayerKind, has_graphs: bool) -> float:
    """Of one layer."""
    read_ms = sharing.unique_tokens * kind.token_bytes / READ_RATE
    again_ms = READ_AGAIN * sharing.duplicated_tokens * kind.token_bytes / READ_RATE
    # How long the longest stretch is, only the plan on the GPU knows; at most as long as the longest trace.
    stretch_ms = sharing.longest_tokens * kind.token_bytes / kind.num_kv_heads / STRETCH_RATE
    own_ms = LAYER_MS + TRACE_MS * sharing.num_traces + (0 if has_graphs else LAUNCH_MS)
    return read_ms + again_ms - max(read_ms, stretch_ms) - own_ms

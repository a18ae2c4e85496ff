"""A scorer's kernels as CUDA graphs: recorded once, launched by one call.

Launching them one by one costs the host more than they cost the device: 0.6 ms of a step on an H200's host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

SMALLEST = 8  # rows; batches are padded to the next recorded size


class Recording(Protocol):
    def replay(self) -> None: ...


Score = Callable[[torch.Tensor], torch.Tensor]  # of states
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Recording, torch.Tensor]]


class RecordedScorer:
    """Scores of states alone. What it returns is overwritten by the next call: copy it on the same stream."""

    def __init__(self, score: Score, like: torch.Tensor, most_rows: int, record: Recorder) -> None:
        """`like`: [1, hidden], of the dtype and device of the states to come."""
        self._states = like.new_zeros(most_rows, like.shape[1])
        self._sizes = sizes_up_to(most_rows)
        self._recordings = [record(partial(score, self._states[:size])) for size in self._sizes]

    def score(self, states: torch.Tensor) -> torch.Tensor:
        rows = len(states)
        self._states[:rows].copy_(states)
        recording, scores = self._recordings[bisect_left(self._sizes, rows)]
        recording.replay()
        return scores[:rows]


def sizes_up_to(most: int) -> list[int]:
    """Powers of two and what lies halfway: at most half of a batch is padding, and there are few recordings."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return [*(each for each in sizes if each < most), most]


def cuda_recorder(stream: torch.cuda.Stream) -> Recorder:
    """As CUDA graphs that share their memory: they are replayed on one stream, one after the other."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        with torch.inference_mode(), tensor_cores():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries set themselves up in a first call, which must not be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = work()
        return graph, result

    return record


@contextmanager
def tensor_cores() -> Iterator[None]:
    """float32 products with factors of 11 bits, and the states have 8 (bf16).

    In full precision a few multiprocessors are busy with them for a third of a millisecond, beside the model's own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

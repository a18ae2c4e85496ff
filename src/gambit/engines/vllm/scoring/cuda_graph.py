"""A scorer's kernels recorded once and launched by one call; knows no vLLM.

Launching them one by one costs the host more than they cost the device: 0.6 ms of a step on an H200's host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from gambit.scorers.base import Scorer, ThoughtBatch

SMALLEST = 8  # rows; batches are padded to the next recorded size


class Recording(Protocol):
    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Recording, torch.Tensor]]


class RecordedScorer:
    """Scores of states alone. What it returns is overwritten by the next call: copy it on the same stream."""

    def __init__(self, scorer: Scorer, like: torch.Tensor, most_rows: int, record: Recorder) -> None:
        """`like`: [1, hidden], of the dtype and device of the states to come."""
        self._states = like.new_zeros(most_rows, like.shape[1])
        self._sizes = sizes_up_to(most_rows)
        nothing = torch.zeros(1, device=like.device)  # the confidence that such a scorer does not look at

        def scores(size: int) -> torch.Tensor:
            return scorer.score(ThoughtBatch(self._states[:size], nothing.expand(size)))

        self._recordings = [record(lambda size=size: scores(size)) for size in self._sizes]  # type: ignore[misc]

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
    """float32 products with factors of 11 bits, which bf16 states have anyway less than.

    In full precision a few multiprocessors are busy with them for a third of a millisecond, beside the model's own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Copies of a step's row values from the device to the host, on a stream beside the model's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.vllm.messages import RowValues


class SideStream:
    """A stream of its own on a GPU: what runs there holds up neither the sampling nor the next forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_apart(self) -> bool:
        return self._stream is not None

    @property
    def stream(self) -> torch.cuda.Stream:
        assert self._stream is not None
        return self._stream

    @contextmanager
    def reading(self, *tensors: torch.Tensor) -> Iterator[None]:
        """What follows runs on this stream, after what the main one has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self._stream)  # its memory may be given away on the main stream meanwhile


class PendingScores(Protocol):
    """Scores that a kernel writes where the host reads them."""

    def read(self) -> tuple[npt.NDArray[np.float32], float]:
        """One per row, and the seconds they took."""


class DeviceRows:
    """Row values of one step; reading them waits for their copy, and nothing before that waits."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._sent: list[tuple[tuple[str, ...], list[int], torch.Tensor]] = []  # names, widths, host memory
        self._marks: list[Any] = []  # when a part began and ended on the device
        self._scores: PendingScores | None = None

    @property
    def is_empty(self) -> bool:
        return not self._sent and self._scores is None

    def expect(self, scores: PendingScores) -> None:
        self._scores = scores

    @contextmanager
    def computed(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Work on these, timed."""
        with self._side.reading(*tensors):
            self._mark()
            yield
            self._mark()

    def send(self, columns: Mapping[str, torch.Tensor]) -> None:
        """One number per row, or several (an embedding): all in one copy."""
        if not columns:
            return
        parts = [column.float() if column.dim() > 1 else column.float()[:, None] for column in columns.values()]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        host = joined.to("cpu", non_blocking=True)  # into pinned memory
        self._sent.append((tuple(columns), [part.shape[1] for part in parts], host))

    def values(self, waited: float = 0.0) -> RowValues:
        """`waited`: seconds for which the host had nothing to do but wait for this step."""
        if self._side.is_apart and self._marks:
            self._marks[-1].synchronize()
        found: dict[str, npt.NDArray[np.float32]] = {}
        seconds = self._seconds()
        for names, widths, host in self._sent:
            parts = np.split(host.numpy(), np.cumsum(widths)[:-1], axis=1) if len(names) > 1 else [host.numpy()]
            found |= dict(zip(names, parts, strict=True))
        flat = {name: part[:, 0] for name, part in found.items() if name != "embeddings"}
        if self._scores is not None:
            flat["scores"], seconds_scores = self._scores.read()
            seconds += seconds_scores
        return RowValues(
            flat.get("scores"),
            flat.get("confidences"),
            flat.get("greedy"),
            seconds,
            found.get("embeddings"),
            waited,
        )

    def _mark(self) -> None:
        if not self._side.is_apart:
            self._marks.append(time.perf_counter())
            return
        # Waiting for one sleeps instead of asking the driver again and again.
        self._marks.append(torch.cuda.Event(enable_timing=True, blocking=True))  # type: ignore[no-untyped-call]
        self._marks[-1].record()

    def _seconds(self) -> float:
        """Of the device, once it has passed the last mark."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._side.is_apart:
            return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1000
        return float(sum(end - begin for begin, end in pairs))

"""What a worker knows of the requests in its batch: what they ask for, and the noise that draws their next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.sampling import Filters, filters_of, sample, uniforms
from gambit.engines.vllm.messages import TraceTask

NOISE = np.dtype([
    ("noise_key", np.uint64),
    ("prompt_tokens", np.int64),
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("min_p", np.float32),
])  # fmt: skip


class RowSampling:
    """Draws each row's token with the noise of its seed, trace and position."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noise: dict[str, tuple[float, ...]] = {}  # the fields of NOISE
        self._num_cached: Mapping[str, int] = {}  # tokens in the cache, by request of this step
        self._num_new: Mapping[str, int] = {}  # tokens that this step adds to them
        self._rows: list[str] = []
        self._table = np.zeros(0, NOISE)
        self._filters: Filters | None = None
        self._checked: set[str] = set()  # requests of the self-check
        self._measured: set[str] = set()  # requests whose confidence is measured
        self._embedded: dict[str, int] = {}  # requests whose thoughts are embedded, and in how many numbers

    @property
    def wants_confidence(self) -> bool:
        return bool(self._measured)

    @property
    def embedding_size(self) -> int:
        return max(self._embedded.values(), default=0)

    @property
    def has_checks(self) -> bool:
        return bool(self._checked)

    def update(self, finished: Iterable[str], new: Iterable[tuple[str, TraceTask | None]]) -> None:
        """Requests that have ended, and new ones; a task is None for a request that vLLM made to warm up."""
        for request in finished:
            self._noise.pop(request, None)
            self._checked.discard(request)
            self._measured.discard(request)
            self._embedded.pop(request, None)
        for request, task in new:
            if task is not None:
                self._add(request, task)

    def _add(self, request: str, task: TraceTask) -> None:
        self._noise[request] = tuple(getattr(task, name) for name in NOISE.fields or ())
        if task.is_check:
            self._checked.add(request)
        if task.confidence_window:
            self._measured.add(request)
        if task.embedding_size:
            self._embedded[request] = task.embedding_size

    def place(self, num_cached: Mapping[str, int], num_new: Mapping[str, int]) -> None:
        """Where the rows of a step stand, in tokens."""
        self._num_cached, self._num_new = num_cached, num_new

    def known(self, rows: list[str]) -> list[str] | None:
        """The rows; None for those that model runner V2 makes up to warm its kernels."""
        return rows if rows and rows[0] in self._noise else None

    def draw(self, logits: torch.Tensor, rows: list[str]) -> torch.Tensor:
        if rows != self._rows or self._filters is None:
            self._rows = rows
            self._table = np.array([self._noise[request] for request in rows], NOISE)
            self._filters = filters_of(self._table, self._device)
        positions = self._column(self._num_cached) + self._column(self._num_new) - self._table["prompt_tokens"]
        uniform = torch.from_numpy(uniforms(self._table["noise_key"], positions)).float()
        return sample(logits, self._filters, uniform.to(self._device, non_blocking=True))

    def _column(self, numbers: Mapping[str, int]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(numbers.__getitem__, self._rows), np.int64, len(self._rows))

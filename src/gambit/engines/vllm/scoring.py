"""Scores and embeddings of a step's rows, computed on the device from their hidden states."""

from __future__ import annotations

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.sampling import Filters, filters_of, sample, uniforms
from gambit.engines.states import LayerChoice, embed
from gambit.engines.vllm.messages import RowValues, ThoughtRows, TraceTask
from gambit.errors import GambitWarning
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.memory import ThoughtMemory, on_device

if TYPE_CHECKING:
    from gambit.engines.vllm.kernels import FusedScorer


USUAL_THOUGHTS = 256  # of a trace: memory for so many is allocated at the start, for more it grows


@dataclass(frozen=True, slots=True)
class StepRows:
    """What is asked for in one step."""

    thoughts: ThoughtRows | None  # for a scorer with histories: the rows that may end a thought
    row_ids: Callable[[], list[str]]  # requests in row order
    embedding_size: int
    is_reported: bool  # by this rank; others need not score with the fused kernel


class RowScoring:
    """Scores every row of every step: which rows end a thought is known on the host only, one step later."""

    def __init__(self, scorer: Scorer, num_layers: int, device: torch.device, most_rows: int) -> None:
        self.scorer = scorer.to(device)
        self.layers = LayerChoice.of(self.scorer.info.layers, num_layers)
        self.side = SideStream(device)
        self.fused: FusedScorer | None = None
        self.recorded: RecordedScorer | None = None
        # Once: whether an object has a protocol takes Python long to find out.
        self._split = self.scorer if isinstance(self.scorer, SplitScorer) else None
        self._reads_states = self._split is not None or not self.scorer.info.needs_confidence
        self._most_rows = most_rows
        self._memory = self._allocate_memory(self.scorer) if isinstance(self.scorer, HistoryScorer) else None
        self._no_confidence = torch.zeros(1, device=device)

    def _allocate_memory(self, scorer: HistoryScorer) -> ThoughtMemory:
        return ThoughtMemory(scorer, self._most_rows * min(scorer.max_past + 1, USUAL_THOUGHTS))

    # -- faster ways to launch a scorer ------------------------------------------------------------------------

    def fuse(self, like: torch.Tensor) -> None:
        """Make a scorer of two layers one kernel. `like`: [1, hidden], as the states to come."""
        layers = getattr(self.scorer, "two_layers", None)
        if layers is not None:
            from gambit.engines.vllm.kernels import fused  # needs vLLM's Triton

            self.fused = fused(layers, self._most_rows, like, self._plain_scores)

    def record(self, like: torch.Tensor) -> None:
        """Make all its kernels one launch."""
        if self.fused is not None or not self.side.is_apart or not getattr(self.scorer, "is_recordable", False):
            return
        try:
            recorder = cuda_recorder(self.side.stream)
            self.recorded = RecordedScorer(self._plain_scores, like, self._most_rows, recorder)
        except RuntimeError as error:
            warnings.warn(
                f"the scorer is run kernel by kernel: it cannot be recorded ({error})", GambitWarning, stacklevel=2
            )

    # -- one step ----------------------------------------------------------------------------------------------

    def read(self, states: torch.Tensor, inner: list[torch.Tensor], rows: DeviceRows, asked: StepRows) -> None:
        """On the model's own stream where one kernel makes the scores, else on a stream beside it."""
        scored = self.layers.join(states, inner)
        if self.fused is not None and asked.is_reported:
            rows.expect(self.fused.score(scored))
        if self.fused is None or asked.embedding_size:
            with rows.computed(states, scored):
                rows.send(self._columns(states, scored, asked))

    def _columns(self, states: torch.Tensor, scored: torch.Tensor, asked: StepRows) -> dict[str, torch.Tensor]:
        """`scored` is what the scorer reads: states of its layers."""
        columns = {}
        if self.fused is None and self._reads_states:
            columns["scores"] = self._scores(scored, asked)
        if asked.embedding_size:
            columns["embeddings"] = embed(states, asked.embedding_size)
        return columns

    def _scores(self, states: torch.Tensor, asked: StepRows) -> torch.Tensor:
        """Of every row; a scorer that remembers thoughts looks only at rows that may end one."""
        if self.recorded is not None:
            return self.recorded.score(states)
        if self._memory is None:
            return self._plain_scores(states)
        scores = torch.zeros(len(states), device=states.device)
        if (wanted := asked.thoughts) is not None and wanted.requests:
            row_of = {request: row for row, request in enumerate(asked.row_ids())}
            rows = on_device(np.array([row_of[request] for request in wanted.requests]), states.device)
            thoughts = ThoughtBatch(states[rows], self._no_confidence.expand(len(rows)))
            scores[rows] = self._memory.score(thoughts, wanted.past)
        return scores

    def _plain_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Of a scorer that also needs confidences, the part of the states: the scheduler does the rest."""
        if self._split is not None:
            return self._split.part(states)
        return self.scorer.score(ThoughtBatch(states, self._no_confidence.expand(len(states))))


# -- sampling --------------------------------------------------------------------------------------------------------


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

    def update(self, finished: Iterable[str], new: Mapping[str, object]) -> None:
        """Forgets requests that have ended and adds new ones, but for those that vLLM made to warm up."""
        for request in finished:
            self._noise.pop(request, None)
            self._checked.discard(request)
            self._measured.discard(request)
            self._embedded.pop(request, None)
        for request, task in new.items():
            if isinstance(task, TraceTask):
                self._add(request, task)

    def _add(self, request: str, task: TraceTask) -> None:
        asked = task.spec.sampling
        self._noise[request] = (
            task.noise_key, task.prompt_tokens, asked.temperature, asked.top_p, asked.top_k, asked.min_p
        )  # fmt: skip
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


# -- copies to the host ----------------------------------------------------------------------------------------------


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


# -- CUDA graphs -----------------------------------------------------------------------------------------------------
#
# Launching them one by one costs the host more than they cost the device: 0.6 ms of a step on an H200's host.


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

"""Scores and embeddings of a step's rows, computed on the device from their hidden states, and their tokens."""

import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gambit.engines.sampling import Filters, filters_of, sample, uniforms
from gambit.engines.states import LayerChoice, embed
from gambit.engines.vllm.messages import Floats, RowValues, ThoughtRows, TraceTask
from gambit.errors import GambitWarning
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.memory import ThoughtMemory, on_device

if TYPE_CHECKING:
    from gambit.engines.vllm.kernels import FusedScorer


USUAL_THOUGHTS = 256  # of a trace: memory for so many is allocated at the start, for more it grows
Score = Callable[[torch.Tensor], torch.Tensor]  # scores of states
ReadScores = Callable[[], tuple[Floats, float]]  # scores that a kernel writes where the host reads them, and seconds


class RowScoring:
    """Scores every row of every step: which rows end a thought is known on the host only, one step later."""

    def __init__(self, scorer: Scorer, num_layers: int, device: torch.device, most_rows: int) -> None:
        self.scorer = scorer.to(device)
        self.layers = LayerChoice.of(self.scorer.info.layers, num_layers)
        # What runs on a stream of its own holds up neither the sampling nor the next forward pass.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.fused: FusedScorer | None = None
        self.recorded: Score | None = None
        # Once: whether an object has a protocol takes Python long to find out.
        self._split = self.scorer if isinstance(self.scorer, SplitScorer) else None
        self._reads_states = self._split is not None or not self.scorer.info.needs_confidence
        self._most_rows = most_rows
        self._memory: ThoughtMemory | None = None
        if isinstance(self.scorer, HistoryScorer):
            self._memory = ThoughtMemory(self.scorer, most_rows * min(self.scorer.max_past + 1, USUAL_THOUGHTS))
        self._no_confidence = torch.zeros(1, device=device)

    # -- faster ways to launch a scorer ------------------------------------------------------------------------

    def fuse(self, like: torch.Tensor) -> None:
        """Makes a scorer of two layers one kernel. `like`: [1, hidden], as the states to come."""
        layers = getattr(self.scorer, "two_layers", None)
        if layers is not None:
            from gambit.engines.vllm.kernels import fused  # needs vLLM's Triton

            self.fused = fused(layers, self._most_rows, like, self._plain_scores)

    def record(self, like: torch.Tensor) -> None:
        """Makes all kernels of the scorer one launch, where they run on a stream of their own."""
        if self.fused is not None or self.stream is None or not getattr(self.scorer, "is_recordable", False):
            return
        try:
            self.recorded = recorded(self._plain_scores, like, self._most_rows, cuda_recorder(self.stream))
        except RuntimeError as error:
            warnings.warn(
                f"the scorer is run kernel by kernel: it cannot be recorded ({error})", GambitWarning, stacklevel=2
            )

    # -- one step ----------------------------------------------------------------------------------------------

    def read(
        self,
        states: torch.Tensor,
        inner: list[torch.Tensor],
        values: "DeviceValues",
        row_ids: Callable[[], list[str]],
        thoughts: ThoughtRows | None,
        *,
        embedding_size: int,
        is_reported: bool,
    ) -> None:
        """Computes the scores and embeddings of a step's rows and adds them to `values`.

        One kernel runs on the model's own stream, anything else on a stream beside it. `row_ids`: the requests in row
        order. `thoughts`: the rows that may end a thought, for a scorer with histories. `is_reported`: by this rank;
        others need not score with the fused kernel.
        """
        scored = self.layers.join(states, inner)
        if self.fused is not None and is_reported:
            values.expect(self.fused.score(scored))
        if self.fused is not None and not embedding_size:
            return
        with values.computed(states, scored):
            columns = {}
            if self.fused is None and self._reads_states:
                columns["scores"] = self._scores(scored, row_ids, thoughts)
            if embedding_size:
                columns["embeddings"] = embed(states, embedding_size)
            values.send(columns)

    def _scores(
        self, states: torch.Tensor, row_ids: Callable[[], list[str]], thoughts: ThoughtRows | None
    ) -> torch.Tensor:
        """Returns a score for every row; a scorer that remembers thoughts looks only at rows that may end one."""
        if self.recorded is not None:
            return self.recorded(states)
        if self._memory is None:
            return self._plain_scores(states)
        scores = torch.zeros(len(states), device=states.device)
        if thoughts is not None and thoughts.requests:
            row_of = {request: row for row, request in enumerate(row_ids())}
            rows = on_device(np.array([row_of[request] for request in thoughts.requests]), states.device)
            batch = ThoughtBatch(states[rows], self._no_confidence.expand(len(rows)))
            scores[rows] = self._memory.score(batch, thoughts.past)
        return scores

    def _plain_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Returns scores of states alone; where confidences are needed too, the scheduler completes them."""
        if self._split is not None:
            return self._split.part(states)
        return self.scorer.score(ThoughtBatch(states, self._no_confidence.expand(len(states))))


# -- sampling --------------------------------------------------------------------------------------------------------


NOISE = np.dtype([
    ("noise_key", np.uint64), ("prompt_tokens", np.int64), ("temperature", np.float32), ("top_p", np.float32),
    ("top_k", np.int64), ("min_p", np.float32),
])  # fmt: skip


class RowSampling:
    """Draws each row's token with the noise of its seed, trace and position."""

    def __init__(self, device: torch.device) -> None:
        self.has_checks = False  # a trace of the self-check runs
        self.needs_confidence = False  # a trace runs whose confidence is measured
        self.embedding_size = 0  # the largest of those that run
        self._device = device
        self._tasks: dict[str, TraceTask] = {}
        self._lengths: Mapping[str, int] = {}
        self._rows: list[str] = []
        self._table = np.zeros(0, NOISE)
        self._filters: Filters | None = None

    def update(self, finished: Set[str], new: Mapping[str, object]) -> None:
        """Forgets requests that have ended and adds new ones, but for those that vLLM made to warm up."""
        if not finished and not new:
            return
        for request in finished:
            self._tasks.pop(request, None)
        self._tasks |= {request: task for request, task in new.items() if isinstance(task, TraceTask)}
        tasks = self._tasks.values()
        self.has_checks = any(task.is_check for task in tasks)
        self.needs_confidence = any(task.confidence_window for task in tasks)
        self.embedding_size = max((task.embedding_size for task in tasks), default=0)

    def place(self, lengths: Mapping[str, int]) -> None:
        """Sets how many tokens each request of a step has once it is computed, the prompt included."""
        self._lengths = lengths

    def known(self, rows: list[str]) -> list[str] | None:
        """Returns the rows; None for those that model runner V2 makes up to warm its kernels."""
        return rows if rows and rows[0] in self._tasks else None

    def draw(self, logits: torch.Tensor, rows: list[str]) -> torch.Tensor:
        if rows != self._rows or self._filters is None:
            self._rows = rows
            self._table = np.array([_noise_row(self._tasks[request]) for request in rows], NOISE)
            self._filters = filters_of(self._table, self._device)
        lengths = np.fromiter(map(self._lengths.__getitem__, rows), np.int64, len(rows))
        positions = lengths - self._table["prompt_tokens"]
        uniform = torch.from_numpy(uniforms(self._table["noise_key"], positions)).float()
        return sample(logits, self._filters, uniform.to(self._device, non_blocking=True))


def _noise_row(task: TraceTask) -> tuple[float, ...]:
    """Returns the fields of NOISE."""
    given = task.spec.sampling
    return task.noise_key, task.prompt_tokens, given.temperature, given.top_p, given.top_k, given.min_p


# -- copies to the host ----------------------------------------------------------------------------------------------


def device_mark(*, blocking: bool = False) -> torch.cuda.Event:
    """Records on the current stream a mark that the device passes when it has come so far."""
    mark = torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


class DeviceValues:
    """Row values of one step; reading them waits for their copy, and nothing before that waits."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """`stream`: on which they are computed; None on a CPU."""
        self._stream = stream
        self._columns: dict[str, torch.Tensor] = {}  # memory of the host, filled when the device is done
        self._marks: list[Any] = []  # when work began and ended on the device, by turns
        self._read_scores: ReadScores | None = None

    @property
    def is_empty(self) -> bool:
        return not self._columns and self._read_scores is None

    def expect(self, read_scores: ReadScores) -> None:
        """Takes scores that a kernel will have written when the step's tokens are there."""
        self._read_scores = read_scores

    @contextmanager
    def computed(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Runs and times work on these, on the stream, after what the main one has been given so far."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
            yield
            self._marks.append(time.perf_counter())
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Waiting for such a mark sleeps instead of asking the driver again and again.
            self._marks.append(device_mark(blocking=True))
            yield
            self._marks.append(device_mark(blocking=True))
        for tensor in tensors:
            tensor.record_stream(self._stream)  # its memory may be given away on the main stream meanwhile

    def send(self, columns: Mapping[str, torch.Tensor]) -> None:
        """Copies columns to the host, all in one copy: one number per row each, or several (an embedding)."""
        if not columns:
            return
        wide = [column.float() if column.dim() > 1 else column.float()[:, None] for column in columns.values()]
        joined = wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)
        host = joined.to("cpu", non_blocking=True)  # into pinned memory
        start = 0
        for name, column in columns.items():
            width = column.shape[1] if column.dim() > 1 else 1
            self._columns[name] = host[:, start : start + width] if column.dim() > 1 else host[:, start]
            start += width

    def values(self, waited: float = 0.0) -> RowValues:
        """Returns what was sent. `waited`: seconds for which the host had nothing to do but wait for this step."""
        if self._stream is not None and self._marks:
            self._marks[-1].synchronize()
        found = {name: column.numpy() for name, column in self._columns.items()}
        seconds = self._seconds()
        if self._read_scores is not None:
            found["scores"], seconds_scores = self._read_scores()
            seconds += seconds_scores
        scores, confidences, greedy = (found.get(name) for name in ("scores", "confidences", "greedy"))
        return RowValues(scores, confidences, greedy, seconds, found.get("embeddings"), waited)

    def _seconds(self) -> float:
        """Returns how long the device worked, once it has passed the last mark."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._stream is None:
            return float(sum(end - begin for begin, end in pairs))
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1000


# -- CUDA graphs -----------------------------------------------------------------------------------------------------
#
# Launching them one by one costs the host more than they cost the device: 0.6 ms of a step on an H200's host.


SMALLEST = 8  # rows; batches are padded to the next recorded size
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]  # a replay, and its result


def recorded(score: Score, like: torch.Tensor, most_rows: int, record: Recorder) -> Score:
    """Records a scorer of states alone for some batch sizes; returns a function that replays it.

    What it returns is overwritten by the next call: copy it on the same stream. `like`: [1, hidden], of the dtype and
    device of the states to come.
    """
    memory = like.new_zeros(most_rows, like.shape[1])
    sizes = sizes_up_to(most_rows)
    recordings = [record(partial(score, memory[:size])) for size in sizes]

    def replayed(states: torch.Tensor) -> torch.Tensor:
        rows = len(states)
        memory[:rows].copy_(states)
        replay, scores = recordings[bisect_left(sizes, rows)]
        replay()
        return scores[:rows]

    return replayed


def sizes_up_to(most: int) -> list[int]:
    """Returns powers of two and what lies halfway: at most half of a batch is padding, and recordings are few."""
    sizes, size = [], SMALLEST
    while size < most:
        sizes += [size, size + size // 2]
        size *= 2
    return [*(each for each in sizes if each < most), most]


def cuda_recorder(stream: torch.cuda.Stream) -> Recorder:
    """Returns a recorder of CUDA graphs that share their memory: they are replayed on one stream, one by one."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        with torch.inference_mode(), tensor_cores():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()  # libraries set themselves up in a first call, which must not be recorded
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = work()
        return graph.replay, result

    return record


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Multiplies float32 with factors of 11 bits; the states have 8 (bf16).

    In full precision a few multiprocessors are busy with them for a third of a millisecond, beside the model's own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

"""vLLM's worker with Gambit's scorer on its device: one score per row and step; it never waits for the device."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gambit.core.errors import GambitWarning
from gambit.engines.shared.layers import LayerChoice
from gambit.engines.shared.projection import Projection
from gambit.engines.shared.sampling import Filters, filters_of, sample, token_confidence, uniforms
from gambit.engines.vllm.compat import adapter
from gambit.engines.vllm.inside.histories import ThoughtOrders
from gambit.engines.vllm.messages import GambitConfig, Order
from gambit.engines.vllm.scoring.cuda_graph import RecordedScorer, cuda_recorder
from gambit.engines.vllm.scoring.fused_kernel import FusedScorer, fused
from gambit.engines.vllm.scoring.host_copy import DeviceRows, SideStream
from gambit.scorers.base import HistoryScorer, ScorerInfo, SplitScorer, ThoughtBatch
from gambit.scorers.memory import ThoughtMemory, on_device

USUAL_THOUGHTS = 256  # of a trace: memory for so many is there from the start, for more it grows
NOISE = np.dtype([
    ("noise_key", np.uint64),
    ("prompt_tokens", np.int64),
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("min_p", np.float32),
])  # fmt: skip


class _AsyncRows(adapter.AsyncModelRunnerOutput):
    """An output that is still being computed, with the rows' values on their way beside it."""

    def __init__(self, inner: Any, rows: DeviceRows) -> None:
        self._inner = inner
        self._rows = rows

    def get_output(self) -> Any:
        began = time.perf_counter()
        output = self._inner.get_output()
        waited = time.perf_counter() - began
        return adapter.attach_rows(output, self._rows.values(waited))


@dataclass(frozen=True, slots=True)
class _StatesPart:
    """Of a scorer that also needs confidences, what it makes of states; the scheduler does the rest."""

    scorer: SplitScorer

    @property
    def info(self) -> ScorerInfo:
        return self.scorer.info

    def to(self, device: torch.device) -> _StatesPart:
        return _StatesPart(self.scorer.to(device))

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return self.scorer.part(thoughts.states)


class GambitWorker(adapter.Worker):
    """Scores every row of every step: which rows end a thought is known on the host only, one step later."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        adapter.follow_parent()
        result = super().load_model(*args, **kwargs)
        config: GambitConfig = self.vllm_config.additional_config
        # Before vLLM measures what memory is left, so that the scorer is counted.
        self._scorer = config.scorer.to(self.device)
        # What is computed of a thought here: all, unless its score needs more than states.
        self._device_scorer: Any = _StatesPart(self._scorer) if isinstance(self._scorer, SplitScorer) else self._scorer
        self._layers = LayerChoice.of(self._scorer.info.layers, adapter.num_layers(self.vllm_config))
        if self._layers.inner:
            adapter.ask_for_layers(self.model_runner, self._layers.inner)
        self._memory = self._allocate_memory() if isinstance(self._scorer, HistoryScorer) else None
        self._exact_noise = config.exact_noise
        self._noise = _Noise(self.device)
        self._side = SideStream(self.device)
        self._recorded: RecordedScorer | None = None
        self._fused: FusedScorer | None = None
        self._nothing = torch.zeros(1, device=self.device)  # the confidence of thoughts that nobody asks for it
        self._thoughts: ThoughtOrders | None = None  # of the step under way
        self._confidences: torch.Tensor | None = None
        self._rows: list[str] | None = None  # of the step whose tokens are about to be sampled; None: vLLM warms up
        self._projection = Projection(self.device)
        # Always: a later search may ask for confidence, and what nobody asks for costs one call per step.
        adapter.tap_sampler(self.model_runner, self._see_logits)
        return result

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model_config
        width = model.get_hidden_size() * len(self._layers.numbers)
        like = torch.zeros(1, width, dtype=model.dtype, device=self.device)
        most_rows = self.vllm_config.scheduler_config.max_num_seqs
        layers = getattr(self._scorer, "two_layers", None)
        if self.vllm_config.additional_config.fused_scorer and layers is not None:
            # Before vLLM is ready: from then on it complains of kernels that are compiled, and its seed is set.
            self._fused = fused(layers, most_rows, like, self._plain_scores)
        result = super().compile_or_warm_up_model(*args, **kwargs)
        if self._fused is None and self._side.is_apart and getattr(self._scorer, "is_recordable", False):
            self._recorded = self._record_scorer(like, most_rows)
        return result

    def _plain_scores(self, states: torch.Tensor) -> torch.Tensor:
        return self._device_scorer.score(ThoughtBatch(states, self._nothing.expand(len(states))))

    def _record_scorer(self, like: torch.Tensor, most_rows: int) -> RecordedScorer | None:
        if self.model_config.enforce_eager:
            return None
        try:
            return RecordedScorer(self._device_scorer, like, most_rows, cuda_recorder(self._side.stream))
        except RuntimeError as error:
            warnings.warn(
                f"the scorer is run kernel by kernel: it cannot be recorded ({error})", GambitWarning, stacklevel=2
            )
            return None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if copies := adapter.copies_of(scheduler_output):
            self._copy_blocks(copies)
        self._noise.follow(scheduler_output, wants_positions=self._exact_noise)
        self._thoughts = adapter.thoughts_of(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    @torch.inference_mode()
    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """After the steps that were launched before, and before the one to come: all are on one stream."""
        sources, targets = on_device(np.array(copies).T.copy(), self.device)
        for blocks in adapter.blocks_by_layer(self.model_runner):
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        states = adapter.sampled_states(self.model_runner)
        if states is None:
            return super().sample_tokens(grammar_output)
        rows = DeviceRows(self._side)
        self._read(states, rows)
        late = self._check(states)
        if self._looks_at_logits:
            self._rows = self._noise.known(adapter.row_ids(self.model_runner))
        output = super().sample_tokens(grammar_output)
        self._rows = None
        if self._confidences is not None:
            late["confidences"], self._confidences = self._confidences, None
        if late:
            with rows.computed(*late.values()):
                rows.send(late)
        if output is None or rows.is_empty or not self.is_driver_worker:
            return output
        if isinstance(output, adapter.AsyncModelRunnerOutput):
            return _AsyncRows(output, rows)
        return adapter.attach_rows(output, rows.values()) if output.req_ids else output

    def _read(self, states: torch.Tensor, rows: DeviceRows) -> None:
        """What is made of states: scores among the model's own work where one kernel makes them, all else beside it."""
        scored = self._layers.join(states, adapter.inner_states(self.model_runner))
        if self._fused is not None and self.is_driver_worker:  # nobody asks the others
            rows.expect(self._fused.score(scored))
        if self._fused is None or self._noise.embedding_size:
            with rows.computed(states, scored):
                rows.send(self._score(states, scored))

    def _score(self, states: torch.Tensor, scored: torch.Tensor) -> dict[str, torch.Tensor]:
        """`scored` is what the scorer reads: states of its layers."""
        columns = {}
        has_no_part = self._scorer.info.needs_confidence and not isinstance(self._device_scorer, _StatesPart)
        if self._fused is None and not has_no_part:
            columns["scores"] = self._scores(scored)
        if size := self._noise.embedding_size:
            columns["embeddings"] = self._projection.embed(states, size)
        return columns

    def _check(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the states would make greedy. Not beside the model: its output layer may talk to other ranks."""
        logits = adapter.compute_logits(self.model_runner, states) if self._noise.num_checks else None
        return {} if logits is None else {"greedy": logits.argmax(-1)}

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        """Of every row; a scorer that remembers thoughts looks only at rows that may end one."""
        if self._recorded is not None:
            return self._recorded.score(states)
        if self._memory is None:
            return self._plain_scores(states)
        scores = torch.zeros(len(states), device=states.device)
        if self._thoughts is not None and self._thoughts.requests:
            row_of = {request: row for row, request in enumerate(adapter.row_ids(self.model_runner))}
            rows = on_device(np.array([row_of[request] for request in self._thoughts.requests]), states.device)
            thoughts = ThoughtBatch(states[rows], self._nothing.expand(len(rows)))
            scores[rows] = self._memory.score(thoughts, self._thoughts.past)
        return scores

    def _allocate_memory(self) -> ThoughtMemory:
        most = min(self._scorer.max_past + 1, USUAL_THOUGHTS)
        return ThoughtMemory(self._scorer, self.vllm_config.scheduler_config.max_num_seqs * most)

    @property
    def _wants_confidence(self) -> bool:
        return self._scorer.info.needs_confidence or self._noise.wants_confidence

    @property
    def _looks_at_logits(self) -> bool:
        return self._exact_noise or self._wants_confidence

    def _see_logits(self, logits: torch.Tensor) -> None:
        """Between the forward pass and vLLM's sampler."""
        if self._rows is None or logits is None:  # nobody wants to know, or this rank has no logits
            return
        if self._wants_confidence:
            self._confidences = token_confidence(logits)
        if self._exact_noise:
            tokens = self._noise.draw(logits, self._rows)
            # vLLM samples greedily then; infinity wins whatever the dtype.
            logits.scatter_(1, tokens[:, None], float("inf"))


class _Noise:
    """Follows what is scheduled, to draw each row's token with the noise of (seed, trace, position)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: dict[str, tuple[float, ...]] = {}  # the fields of NOISE
        self._computed: dict[str, int] = {}  # tokens in the cache, by request of this step
        self._counts: dict[str, int] = {}  # tokens that this step adds to them
        self._rows: list[str] = []
        self._table = np.zeros(0, NOISE)
        self._filters: Filters | None = None
        self._checks: set[str] = set()
        self._doubtful: set[str] = set()  # requests whose confidence somebody wants
        self._embedded: dict[str, int] = {}  # requests whose thoughts shall be embedded, and in how many numbers

    @property
    def wants_confidence(self) -> bool:
        return bool(self._doubtful)

    @property
    def embedding_size(self) -> int:
        return max(self._embedded.values(), default=0)

    @property
    def num_checks(self) -> int:
        return len(self._checks)

    def follow(self, scheduled: Any, *, wants_positions: bool) -> None:
        for request in scheduled.finished_req_ids:
            self._of.pop(request, None)
            self._checks.discard(request)
            self._doubtful.discard(request)
            self._embedded.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            order = Order.unpack(new.sampling_params.extra_args)
            if order is not None:
                self._of[new.req_id] = _record(order)
                if order.is_check:
                    self._checks.add(new.req_id)
                if order.confidence_window:
                    self._doubtful.add(new.req_id)
                if order.embedding_size:
                    self._embedded[new.req_id] = order.embedding_size
        if not wants_positions:
            return
        known = scheduled.scheduled_cached_reqs
        self._computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        self._counts = scheduled.num_scheduled_tokens

    def known(self, rows: list[str]) -> list[str] | None:
        """The rows, but for those that model runner V2 makes up to warm its kernels."""
        return rows if rows and rows[0] in self._of else None

    def draw(self, logits: torch.Tensor, rows: list[str]) -> torch.Tensor:
        if rows != self._rows or self._filters is None:
            self._rows = rows
            self._table = np.array([self._of[request] for request in rows], NOISE)
            self._filters = filters_of(self._table, self._device)
        positions = self._column(self._computed) + self._column(self._counts) - self._table["prompt_tokens"]
        uniform = torch.from_numpy(uniforms(self._table["noise_key"], positions)).float()
        return sample(logits, self._filters, uniform.to(self._device, non_blocking=True))

    def _column(self, numbers: dict[str, int]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(numbers.__getitem__, self._rows), np.int64, len(self._rows))


def _record(order: Order) -> tuple[float, ...]:
    return tuple(getattr(order, name) for name in NOISE.names)

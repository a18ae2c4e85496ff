"""vLLM's worker with Gambit's scorer on its device: scores of every row, sampling noise, copies of blocks."""

import time
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from gambit.engines.sampling import token_confidence
from gambit.engines.vllm.compat import model_runner
from gambit.engines.vllm.compat.core import join_front, num_layers
from gambit.engines.vllm.messages import DecodeAttention, GambitConfig, ThoughtRows, WorkerStep, attached, unpacked
from gambit.engines.vllm.scoring import DeviceValues, RowSampling, RowScoring
from gambit.scorers.memory import on_device

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class _AsyncRows(AsyncModelRunnerOutput):
    """An output that is still being computed, with the rows' values on their way beside it."""

    def __init__(self, inner: Any, values: DeviceValues) -> None:
        self._inner = inner
        self._values = values

    def get_output(self) -> Any:
        began = time.perf_counter()
        output = self._inner.get_output()
        waited = time.perf_counter() - began
        return model_runner.attach_rows(output, self._values.values(waited))


class GambitWorker(Worker):
    """Launches scores and noise with each step and does not wait for the device."""

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        join_front()
        config: GambitConfig = self.vllm_config.additional_config
        self._has_forest = config.attention is not DecodeAttention.STOCK
        if self._has_forest:
            from gambit.engines.vllm.compat import forest  # here: a version that was not tried needs none of its names

            forest.register()
        result = super().load_model(*args, **kwargs)
        most_rows = self.vllm_config.scheduler_config.max_num_seqs
        # Before vLLM measures what memory is left, so that the scorer is counted.
        self._scoring = RowScoring(config.scorer, num_layers(self.vllm_config), self.device, most_rows)
        if self._scoring.layers.inner:
            model_runner.request_layers(self.model_runner, self._scoring.layers.inner)
        self._forest: Any = None
        self._exact_noise = config.exact_noise
        self._sampling = RowSampling(self.device)
        self._thoughts: ThoughtRows | None = None  # of the step under way
        self._confidences: torch.Tensor | None = None
        self._rows: list[str] | None = None  # of the step whose tokens are about to be sampled; None: vLLM warms up
        # Always: a later search may need confidences, and where nothing is needed it costs one call per step.
        self.model_runner.sampler = model_runner.SamplerTap(self.model_runner.sampler, self._see_logits)
        return result

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        model, config = self.model_config, self.vllm_config.additional_config
        width = model.get_hidden_size() * len(self._scoring.layers.numbers)
        like = torch.zeros(1, width, dtype=model.dtype, device=self.device)
        if config.fused_scorer:
            # Before vLLM is ready: from then on it warns of kernels that are compiled, and its seed is set.
            self._scoring.fuse(like)
        if self._has_forest:
            from gambit.engines.vllm.compat import forest

            self._forest = forest.ForestSwitch(self.model_runner, config.attention)
            self._forest.check()
        result = super().compile_or_warm_up_model(*args, **kwargs)
        if not model.enforce_eager:
            self._scoring.record(like)
            if self._forest is not None:
                self._forest.capture(self.model_runner)
        return result

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = attached(scheduler_output, WorkerStep) or WorkerStep([], None, None)  # none while vLLM warms up
        if step.copies:
            self._copy_blocks(step.copies)
        self._note_rows(scheduler_output)
        if self._forest is not None:
            self._forest.choose(step.sharing, list(scheduler_output.num_scheduled_tokens))
        self._thoughts = step.thoughts
        return super().execute_model(scheduler_output, *args, **kwargs)

    @torch.inference_mode()
    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies blocks after the steps that were launched before and before the one to come: all on one stream."""
        sources, targets = on_device(np.array(copies).T.copy(), self.device)
        for blocks in model_runner.blocks_by_layer(self.model_runner):
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    def _note_rows(self, scheduled: Any) -> None:
        """Takes in which requests are new, which have ended, and where the rows of the step stand."""
        new = scheduled.scheduled_new_reqs
        tasks = {each.req_id: unpacked(each.sampling_params.extra_args) for each in new}
        self._sampling.update(scheduled.finished_req_ids, tasks)
        if self._exact_noise:
            known = scheduled.scheduled_cached_reqs
            cached = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
            cached |= {each.req_id: each.num_computed_tokens for each in new}
            counts = scheduled.num_scheduled_tokens
            self._sampling.place({request: cached[request] + count for request, count in counts.items()})

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        states = model_runner.sampled_states(self.model_runner)
        if states is None:
            return super().sample_tokens(grammar_output)
        values = DeviceValues(self._scoring.stream)
        self._scoring.read(
            states, model_runner.inner_states(self.model_runner), values, self._row_ids, self._thoughts,
            embedding_size=self._sampling.embedding_size, is_reported=self.is_driver_worker,
        )  # fmt: skip
        late = {}
        if self._sampling.has_checks:
            # A second pass through the output layer. Not beside the model: the layer may talk to other ranks.
            logits = self.model_runner.model.compute_logits(states)
            if logits is not None:  # this rank has logits
                late["greedy"] = logits.argmax(-1)
        if self._exact_noise or self._needs_confidence:
            self._rows = self._sampling.known(self._row_ids())
        output = super().sample_tokens(grammar_output)
        self._rows = None
        if self._confidences is not None:
            late["confidences"], self._confidences = self._confidences, None
        if late:
            with values.computed(*late.values()):
                values.send(late)
        if output is None or values.is_empty or not self.is_driver_worker:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return _AsyncRows(output, values)
        return model_runner.attach_rows(output, values.values()) if output.req_ids else output

    def _row_ids(self) -> list[str]:
        return model_runner.row_ids(self.model_runner)

    @property
    def _needs_confidence(self) -> bool:
        return self._scoring.scorer.info.needs_confidence or self._sampling.needs_confidence

    def _see_logits(self, logits: torch.Tensor) -> None:
        """Runs between the forward pass and vLLM's sampler: measures confidences and draws the tokens."""
        if self._rows is None or logits is None:  # nothing is needed, or this rank has no logits
            return
        if self._needs_confidence:
            self._confidences = token_confidence(logits)
        if self._exact_noise:
            tokens = self._sampling.draw(logits, self._rows)
            # vLLM samples greedily then; infinity wins whatever the dtype.
            logits.scatter_(1, tokens[:, None], float("inf"))

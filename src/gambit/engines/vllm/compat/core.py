"""vLLM's engine core behind its client, in this process or in one of its own."""

from __future__ import annotations

import queue
from copy import copy
from functools import lru_cache
from typing import Any, ClassVar

from vllm.envs import disable_envs_cache
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from gambit.engines.vllm.compat.config import EngineSetup, sampling_params
from gambit.engines.vllm.messages import StepReport, TraceTask
from gambit.errors import EngineError

_POLL_SECONDS = 0.5
_KNOWN_PARAMS = 64  # ways to sample that are used at a time: one or two for each search


class VllmCore:
    """Sends traces to vLLM's engine core and receives a report for each step.

    Not through LLMEngine: its output processor makes several objects per token and request, which is more than the
    whole of Gambit's own work per step.
    """

    # vLLM's process groups belong to the process: a core that is shut down would take them from the others in it, so
    # that only the last may.
    _here: ClassVar[list[VllmCore]] = []

    def __init__(self, setup: EngineSetup, *, own_process: bool) -> None:
        self._exact_noise = setup.gambit.exact_noise
        self._seeds_vllm = not self._exact_noise and setup.has_seeded_noise
        self._num_added = 0
        self._params = lru_cache(_KNOWN_PARAMS)(sampling_params)
        if own_process:  # vLLM caches the environment once it has started a core in this process
            disable_envs_cache()
        self._client = EngineCoreClient.make_client(
            multiprocess_mode=own_process,
            asyncio_mode=False,
            vllm_config=setup.raw,
            executor_class=Executor.get_class(setup.raw),
            log_stats=False,
        )
        if not own_process:
            self._here.append(self)

    def add(self, task: TraceTask, request_id: str, tokens: list[int], max_tokens: int, stop_ids: list[int]) -> None:
        # With Gambit's own noise the token is decided before vLLM samples, which then takes the highest logit.
        sampling = (0.0, 1.0, 0, 0.0) if self._exact_noise else task.sampling
        params = copy(self._params(*sampling, tuple(stop_ids)))  # a new one is checked field by field
        params.max_tokens, params.extra_args = max_tokens, task.pack()
        if self._seeds_vllm:
            params.seed = task.noise_key >> 1  # signed there
        self._num_added += 1
        self._client.add_request(self._request(request_id, tokens, params))

    def _request(self, request_id: str, tokens: list[int], params: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(self._num_added),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def abort(self, request_ids: list[str]) -> None:
        self._client.abort_requests(request_ids)

    def step(self) -> StepReport | None:
        """The report of the next engine step; None when there is none yet."""
        outputs = self._next_outputs().outputs
        packed = outputs[0].kv_transfer_params if outputs else None
        return None if packed is None else StepReport.unpack(packed)

    def _next_outputs(self) -> EngineCoreOutputs:
        waiting: queue.Queue[Any] | None = getattr(self._client, "outputs_queue", None)
        if waiting is None:
            return self._client.get_output()
        # A core that was killed sends nothing, and get_output() would wait for it for ever.
        while waiting.empty() and not self._client.resources.engine_dead:
            try:
                first = waiting.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(first, Exception):
                raise first
            return first
        if waiting.empty():
            raise EngineError("the vLLM engine process has died")
        return self._client.get_output()

    def close(self) -> None:
        if self not in self._here or len(self._here) == 1:
            self._client.shutdown()
        else:
            self._client.engine_core.model_executor.shutdown()
            if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
                finalizer.detach()
        if self in self._here:
            self._here.remove(self)

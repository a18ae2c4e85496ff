"""vLLM's engine core behind its client, in this process or in one of its own."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import lru_cache
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from gambit.engines.base import EngineInfo
from gambit.engines.vllm.messages import GambitConfig, Message, StepReport, TraceTask, packed, unpacked
from gambit.errors import EngineError

__all__ = ["HAS_TRITON", "EngineSetup", "VllmCore", "device_view", "tl", "triton"]  # Triton as vLLM finds it
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
        asked = task.spec.sampling
        sampling = (asked.temperature, asked.top_p, asked.top_k, asked.min_p)
        params = self._new_params(task, (0.0, 1.0, 0, 0.0) if self._exact_noise else sampling, tuple(stop_ids))
        params.max_tokens = max_tokens
        if self._seeds_vllm:
            params.seed = task.noise_key >> 1  # signed there
        self._add(request_id, tokens, params)

    def send(self, message: Message) -> None:
        """Sends a message in a request that the scheduler does not add."""
        self._add(type(message).__name__, [0], self._new_params(message))

    def _new_params(self, message: Message, sampling: Any = (0.0, 1.0, 0, 0.0), stop_ids: tuple[int, ...] = ()) -> Any:
        params = copy(self._params(*sampling, stop_ids))  # a new one is checked field by field
        params.extra_args = packed(message)
        return params

    def _add(self, request_id: str, tokens: list[int], params: Any) -> None:
        self._num_added += 1
        request = EngineCoreRequest(
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
        self._client.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self._client.abort_requests(request_ids)

    def step(self) -> StepReport | None:
        """Returns the report of the next engine step; None when there is none yet."""
        outputs = self._next_outputs().outputs
        report = unpacked(outputs[0].kv_transfer_params) if outputs else None
        assert report is None or isinstance(report, StepReport)
        return report

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


# -- configuration ---------------------------------------------------------------------------------------------------


VERSION: str = vllm.__version__.partition("+")[0]


def device_type() -> str:
    """What this vLLM is built for: "cpu" or "cuda"."""
    return str(current_platform.device_type)


class EngineSetup:
    """A vLLM engine that is about to be started, by its config."""

    def __init__(self, options: Mapping[str, Any], kv_budget_tokens: int | None) -> None:
        self.raw = _build(options, kv_budget_tokens)

    @property
    def gambit(self) -> GambitConfig:
        return self.raw.additional_config

    def use_vllm_noise(self) -> None:
        self.raw.additional_config = replace(self.gambit, exact_noise=False)

    @property
    def has_seeded_noise(self) -> bool:
        """Whether vLLM's sampler makes its noise from a request's seed and position: model runner V2 does."""
        return has_model_runner_v2(self.raw)

    @property
    def architecture(self) -> str:
        return str(self.raw.model_config.architecture)

    @property
    def num_layers(self) -> int:
        return num_layers(self.raw)

    @property
    def vocab_size(self) -> int:
        return int(self.raw.model_config.get_vocab_size())

    @property
    def gives_inner_states(self) -> bool:
        """Whether vLLM can have this model return states of inner layers: it does so for EAGLE-3's drafts."""
        return supports_eagle3(get_model_cls(self.raw.model_config))

    def info(self, model: str, versions: Mapping[str, str]) -> EngineInfo:
        """Once the engine has started: only then vLLM knows how many blocks there are."""
        config, block_tokens = self.raw, int(self.raw.cache_config.block_size)
        return EngineInfo(
            name="vllm",
            model=model,
            device=str(config.device_config.device_type),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            hidden_size=int(config.model_config.get_hidden_size()),
            context_tokens=int(config.model_config.max_model_len),
            kv_capacity_tokens=num_blocks(config) * block_tokens,
            block_tokens=block_tokens,
            versions={"vllm": VERSION, **versions},
            most_traces=int(config.scheduler_config.max_num_seqs),
            most_traces_option="max_num_seqs",
        )


def _build(options: Mapping[str, Any], kv_budget_tokens: int | None) -> Any:
    # As vLLM's own offline class: its defaults for other uses are 128 sequences and 2,048 tokens a step.
    config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    if options.get("async_scheduling"):
        config.scheduler_config.async_scheduling = True  # vLLM switches it off on a CPU
    if kv_budget_tokens is not None:
        # vLLM refuses to start with a cache below one whole context; the scheduler holds back what is over the budget.
        tokens = max(kv_budget_tokens, config.model_config.max_model_len)
        config.cache_config.num_gpu_blocks_override = -(-tokens // config.cache_config.block_size) + 1
    return config


def num_blocks(config: Any) -> int:
    """Those that traces may use: the first block is a placeholder, and a smaller budget leaves some unused."""
    blocks = int(config.cache_config.num_gpu_blocks) - 1
    budget = config.additional_config.kv_budget_tokens
    return blocks if budget is None else min(blocks, budget // config.cache_config.block_size)


def has_model_runner_v2(config: Any) -> bool:
    return bool(getattr(config, "use_v2_model_runner", False))


def num_layers(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def sampling_params(temperature: float, top_p: float, top_k: int, min_p: float, stop_ids: tuple[int, ...]) -> Any:
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # `stop_ids` has them all
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# -- processes -------------------------------------------------------------------------------------------------------


SWITCH_SECONDS = 0.0002


def ignore_interrupts() -> None:
    """In a process of vLLM's: the front decides what Ctrl-C does."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.cache  # scheduler and worker may share a process
def join_front() -> None:
    """In a process of vLLM's: end when the front ends, and give way to the thread that launches steps."""
    ignore_interrupts()
    if (parent := multiprocessing.parent_process()) is None:
        return
    os.setpgid(0, 0)  # `timeout` signals a whole group, and the front would have no engine to end its searches with
    # A thread that unpacks and hashes new traces gives way to the one that launches steps after 5 ms by default, half
    # a step of a GPU, and again each time that one has waited for the device.
    sys.setswitchinterval(SWITCH_SECONDS)
    # Not prctl(PR_SET_PDEATHSIG): that watches the thread which started the process, and a thread may end earlier.
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """Pinned memory of the host as the device sees it: what a kernel writes there needs no copy."""
    return get_accelerator_view_from_cpu_tensor(pinned)

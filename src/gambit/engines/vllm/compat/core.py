"""vLLM's engine core behind its client, in this process or in one of its own."""

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cache, lru_cache
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache
from vllm.lora.request import LoRARequest
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
from gambit.engines.states import LayerChoice
from gambit.engines.vllm.messages import Message, StepReport, TraceTask, packed, unpacked
from gambit.errors import UserError

__all__ = ["HAS_TRITON", "VllmCore", "device_view", "tl", "triton"]  # Triton as vLLM finds it
_POLL_SECONDS = 0.5
_KNOWN_PARAMS = 64  # ways to sample that are used at a time: one or two for each search


class VllmCore:
    """Sends traces to vLLM's engine core and receives a report for each step.

    Not through LLMEngine: its output processor makes several objects per token and request, which is more than the
    whole of Gambit's own work per step.
    """

    # vLLM's process groups belong to the process: a core that is shut down would take them from the others in it, so
    # that only the last may.
    _here: ClassVar[list["VllmCore"]] = []

    def __init__(self, config: Any, *, own_process: bool) -> None:
        self._exact_noise = config.additional_config.exact_noise
        self._seeds_vllm = not self._exact_noise and has_seeded_noise(config)
        self._num_added = 0
        adapters = enumerate(config.additional_config.adapters.items(), 1)
        self._adapters = {name: LoRARequest(name, number, folder) for number, (name, folder) in adapters}
        if own_process:  # vLLM caches the environment once it has started a core in this process
            disable_envs_cache()
        self._client = start_client(config, own_process=own_process)
        if not own_process:
            self._here.append(self)

    def add(self, task: TraceTask, request_id: str, tokens: list[int], max_tokens: int, stop_ids: list[int]) -> None:
        """Sends a trace; the scheduler unpacks its task from the request."""
        given = task.spec.sampling
        # With Gambit's own noise the token is decided before vLLM samples, which then takes the highest logit.
        sampling = GREEDY if self._exact_noise else (given.temperature, given.top_p, given.top_k, given.min_p)
        params = copy(_params(*sampling, tuple(stop_ids)))  # a new one is checked field by field
        params.max_tokens = max_tokens
        if self._seeds_vllm:
            params.seed = task.noise_key >> 1  # signed there
        self._add(request_id, tokens, params, task, None if task.lora is None else self._adapters[task.lora])

    def send(self, message: Message) -> None:
        """Sends a message about no new trace, in a request that the scheduler does not add."""
        self._add(type(message).__name__, [0], copy(_params(*GREEDY, ())), message)

    def _add(self, request_id: str, tokens: list[int], params: Any, message: Message, lora: Any = None) -> None:
        self._num_added += 1
        params.extra_args = packed(message)
        self._client.add_request(new_request(request_id, tokens, self._num_added, sampling_params=params, lora=lora))

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
        while not (self._client.resources.engine_dead and waiting.empty()):
            with suppress(queue.Empty):
                first = waiting.get(timeout=_POLL_SECONDS)
                if isinstance(first, Exception):
                    raise first
                return first
        raise RuntimeError("its engine process has died")

    def close(self) -> None:
        if self not in self._here or len(self._here) == 1:
            self._client.shutdown()
        else:
            self._client.engine_core.model_executor.shutdown()
            if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
                finalizer.detach()
        if self in self._here:
            self._here.remove(self)


GREEDY = (0.0, 1.0, 0, 0.0)  # temperature, top_p, top_k, min_p


@lru_cache(_KNOWN_PARAMS)
def _params(temperature: float, top_p: float, top_k: int, min_p: float, stop_ids: tuple[int, ...]) -> Any:
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


def start_client(config: Any, *, own_process: bool) -> Any:
    """Starts an engine core and returns vLLM's client of it."""
    return EngineCoreClient.make_client(
        multiprocess_mode=own_process, asyncio_mode=False, vllm_config=config,
        executor_class=Executor.get_class(config), log_stats=False,
    )  # fmt: skip


def new_request(
    request_id: str,
    tokens: list[int],
    number: int,
    *,
    sampling_params: Any = None,
    pooling_params: Any = None,
    lora: Any = None,
) -> EngineCoreRequest:
    """Returns a request with these tokens. `number`: in the order of arrival."""
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=tokens, mm_features=None, sampling_params=sampling_params,
        pooling_params=pooling_params, arrival_time=float(number), lora_request=lora, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip


# -- configuration ---------------------------------------------------------------------------------------------------


VERSION: str = vllm.__version__.partition("+")[0]


def device_type() -> str:
    """Returns the kind of device that this vLLM is built for: "cpu" or "cuda"."""
    return str(current_platform.device_type)


_RETENTION = "prefix_cache_retention_interval"


def make_config(options: Mapping[str, Any]) -> Any:
    """Returns the config of an engine that is about to be started; raises for options that vLLM refuses."""
    # As vLLM's own offline class: its defaults for other uses are 128 sequences and 2,048 tokens a step.
    config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    if options.get("async_scheduling"):
        config.scheduler_config.async_scheduling = True  # vLLM switches it off on a CPU
    # Newer versions keep blocks of sliding windows and states at ends of prompts alone. Branches are anywhere.
    if hasattr(config.cache_config, "prefix_cache_retention_interval") and _RETENTION not in options:
        config.cache_config.prefix_cache_retention_interval = None
    budget, model = config.additional_config.kv_budget_tokens, config.model_config
    if budget is not None and not model.is_hybrid and model.get_sliding_window() is None:
        # vLLM refuses to start with a cache below one whole context; the scheduler holds back what is over the budget.
        # With layers of several kinds that is a multiple which only vLLM knows, and the cache is as large as without.
        tokens = max(budget, model.max_model_len)
        config.cache_config.num_gpu_blocks_override = -(-tokens // config.cache_config.block_size) + 1
    return config


def use_vllm_noise(config: Any) -> None:
    config.additional_config = replace(config.additional_config, exact_noise=False)


def has_seeded_noise(config: Any) -> bool:
    """Returns True for model runner V2, whose sampler makes its noise from a request's seed and position."""
    return bool(getattr(config, "use_v2_model_runner", False))


def check_layers(config: Any, layers: Sequence[int]) -> None:
    """Raises if a scorer reads layers whose states vLLM does not return. It returns inner ones for EAGLE-3's drafts."""
    model = config.model_config
    if LayerChoice.of(layers, num_layers(config)).inner and not supports_eagle3(get_model_cls(model)):
        raise UserError(f"the scorer reads layers {list(layers)}: vLLM returns those of {model.architecture} in the "
                        "last one (-1) only; use --engine local, or a scorer of the last layer")  # fmt: skip


def num_layers(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def vocab_size(config: Any) -> int:
    return int(config.model_config.get_vocab_size())


def engine_info(config: Any, model: str, versions: Mapping[str, str]) -> EngineInfo:
    """Describes an engine that has started: only then vLLM knows how many blocks there are."""
    block_tokens = int(config.cache_config.block_size)
    return EngineInfo(
        name="vllm", model=model, device=str(config.device_config.device_type),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        hidden_size=int(config.model_config.get_hidden_size()), context_tokens=int(config.model_config.max_model_len),
        kv_capacity_tokens=num_blocks(config) * block_tokens, block_tokens=block_tokens,
        versions={"vllm": VERSION, **versions}, most_traces=int(config.scheduler_config.max_num_seqs),
        most_traces_option="max_num_seqs",
    )  # fmt: skip


def num_blocks(config: Any) -> int:
    """Counts the blocks that traces may use. The first is a placeholder, and a smaller budget leaves some unused."""
    blocks = int(config.cache_config.num_gpu_blocks) - 1
    budget = config.additional_config.kv_budget_tokens
    return blocks if budget is None else min(blocks, budget // config.cache_config.block_size)


# -- processes -------------------------------------------------------------------------------------------------------


SWITCH_SECONDS = 0.0002


def ignore_interrupts() -> None:
    """Ignores Ctrl-C in a process of vLLM's: the front decides what it does."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache  # scheduler and worker may share a process
def join_front() -> None:
    """Has a process of vLLM's end when the front ends, and give way to the thread that launches steps."""
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
    """Returns pinned memory of the host as the device sees it: what a kernel writes there needs no copy."""
    return get_accelerator_view_from_cpu_tensor(pinned)

"""Everything that depends on vLLM's version, in one place: what is called, what is overridden, what is read."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
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
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from gambit.core.errors import EngineError
from gambit.core.types import EndReason
from gambit.engines.vllm.inside.histories import ThoughtOrders
from gambit.engines.vllm.messages import RowValues

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

__all__ = ["AsyncModelRunnerOutput", "AsyncScheduler", "EngineArgs", "Scheduler", "Worker"]

VERSION: str = vllm.__version__.partition("+")[0]
_ROWS = "gambit_rows"  # attribute of ModelRunnerOutput; a plain attribute survives the way between processes
_THOUGHTS = "gambit_thoughts"  # of SchedulerOutput, likewise
_COPIES = "gambit_copies"  # likewise
RUNNING = RequestStatus.RUNNING
_POLL_SECONDS = 0.5
SWITCH_SECONDS = 0.0002


# -- the engine core, in this process or in its own -----------------------------------------------------------------


class Core:
    """vLLM's engine core behind its client.

    Not LLMEngine: its output processor makes several objects per token and request, which is more than the whole
    of Gambit's own work per step.
    """

    # vLLM's process groups belong to the process: a core that is shut down would take them from the others in it,
    # so that only the last may.
    _here: ClassVar[list[Core]] = []

    def __init__(self, config: Any, *, own_process: bool) -> None:
        if own_process:  # with its first core in this process vLLM has learnt the environment by heart
            disable_envs_cache()
        self._client = EngineCoreClient.make_client(
            multiprocess_mode=own_process,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
        )
        if not own_process:
            self._here.append(self)

    def add(self, request_id: str, tokens: list[int], params: SamplingParams, arrival: float) -> None:
        self._client.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=tokens,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=arrival,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def abort(self, request_ids: list[str]) -> None:
        self._client.abort_requests(request_ids)

    def step(self) -> dict[str, Any] | None:
        """What the scheduler has to say about the next engine step; None when it has nothing to say yet."""
        outputs = self._next_outputs().outputs
        return outputs[0].kv_transfer_params if outputs else None

    def _next_outputs(self) -> EngineCoreOutputs:
        waiting: queue.Queue[Any] | None = getattr(self._client, "outputs_queue", None)
        if waiting is None:
            return self._client.get_output()
        # A core that is killed says nothing any more, and get_output() would wait for it forever.
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

    def shutdown(self) -> None:
        if self not in self._here or len(self._here) == 1:
            self._client.shutdown()
        else:
            self._client.engine_core.model_executor.shutdown()
            if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
                finalizer.detach()
        if self in self._here:
            self._here.remove(self)


def ignore_interrupts() -> None:
    """In a process of vLLM's: Ctrl-C is the front's to decide on."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.cache  # scheduler and worker may share a process
def follow_parent() -> None:
    """In a process of vLLM's: without the front there is nothing to do, and nothing goes before the next step."""
    ignore_interrupts()
    if multiprocessing.parent_process() is not None:
        # A thread that unpacks and hashes new traces gives way to the one that launches steps after 5 ms by default,
        # half a step of a GPU, and again each time that one has waited for the device.
        sys.setswitchinterval(SWITCH_SECONDS)
    # Not prctl(PR_SET_PDEATHSIG): that follows the thread which started the process, and a thread may end earlier.
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def build_config(options: Mapping[str, Any], kv_budget_tokens: int | None) -> Any:
    """vLLM's own config object, with everything it works out from the model and the machine."""
    # As vLLM's own offline class: unasked by anybody, vLLM lets 128 sequences run and reads 2,048 tokens a step.
    config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    if options.get("async_scheduling"):
        config.scheduler_config.async_scheduling = True  # on a CPU vLLM switches it off, unasked
    if kv_budget_tokens is not None:
        # vLLM refuses to start without room for one whole context; the scheduler holds back what is over the budget.
        tokens = max(kv_budget_tokens, config.model_config.max_model_len)
        config.cache_config.num_gpu_blocks_override = -(-tokens // config.cache_config.block_size) + 1
    return config


def has_seeded_noise(config: Any) -> bool:
    """Whether vLLM's sampler makes its noise from a request's seed and position at no cost: model runner V2 does."""
    return bool(getattr(config, "use_v2_model_runner", False))


def num_blocks(config: Any) -> int:
    """Those that traces may use: the first block is a placeholder, and a smaller budget leaves some unused."""
    blocks = int(config.cache_config.num_gpu_blocks) - 1
    budget = config.additional_config.kv_budget_tokens
    return blocks if budget is None else min(blocks, budget // config.cache_config.block_size)


def sampling_params(temperature: float, top_p: float, top_k: int, min_p: float, stop_ids: tuple[int, ...]) -> Any:
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,  # stop ids are all given
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


# -- the scheduler --------------------------------------------------------------------------------------------------


def usable_blocks(scheduler: Any) -> int:
    return num_blocks(scheduler.vllm_config)


def hold_back_blocks(scheduler: Any) -> None:
    """Take what is over the budget out of circulation, for good."""
    surplus = free_blocks(scheduler) - usable_blocks(scheduler)
    if surplus > 0:
        scheduler.kv_cache_manager.block_pool.get_new_blocks(surplus)


def free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def used_blocks(scheduler: Any) -> int:
    return usable_blocks(scheduler) - free_blocks(scheduler)


def blocks_from(scheduler: Any, request_id: str, start: int) -> list[int]:
    """A request's blocks without the first `start`."""
    groups = scheduler.kv_cache_manager.coordinator.get_blocks(request_id)
    return [block.block_id for block in (groups[0] if len(groups) == 1 else [*chain(*groups)])[start:]]


def blocks_only_grow(scheduler: Any) -> bool:
    """Whether a running request keeps its blocks, and new ones come at the end; a sliding window gives some back."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def newly_scheduled(scheduler_output: Any) -> list[str]:
    """New requests, and those that vLLM queued before (model runner V1 lists these apart)."""
    new = [data.req_id for data in scheduler_output.scheduled_new_reqs]
    return [*new, *scheduler_output.scheduled_cached_reqs.resumed_req_ids]


def attach_thoughts(scheduler_output: Any, orders: ThoughtOrders) -> None:
    setattr(scheduler_output, _THOUGHTS, orders)


def thoughts_of(scheduler_output: Any) -> ThoughtOrders | None:
    return getattr(scheduler_output, _THOUGHTS, None)


def attach_copies(scheduler_output: Any, copies: list[tuple[int, int]]) -> None:
    setattr(scheduler_output, _COPIES, copies)


def copies_of(scheduler_output: Any) -> list[tuple[int, int]]:
    """Blocks whose content goes into others before the step, from and to."""
    return getattr(scheduler_output, _COPIES, [])


def end_request(scheduler: Any, request: Any) -> None:
    """End a request that vLLM has just taken out of the running ones; workers learn it with the same step."""
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler._free_request(request)


def stop_requests(scheduler: Any, request_ids: list[str]) -> None:
    """End requests between two steps, as an abort would."""
    if request_ids:
        scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)


def request_outputs(outputs: Mapping[int, EngineCoreOutputs]) -> list[EngineCoreOutput]:
    return outputs[0].outputs if 0 in outputs else []


def outputs_of(params: dict[str, Any]) -> dict[int, EngineCoreOutputs]:
    """One output that carries everything, instead of one per request."""
    return {0: EngineCoreOutputs(outputs=[EngineCoreOutput("gambit", [], kv_transfer_params=params)])}


def new_tokens(outputs: Mapping[int, EngineCoreOutputs]) -> dict[str, int]:
    return {output.request_id: output.new_token_ids[0] for output in request_outputs(outputs) if output.new_token_ids}


def finished(outputs: Mapping[int, EngineCoreOutputs]) -> list[tuple[str, str]]:
    """Requests that vLLM ended in a step, and why."""
    ended = [output for output in request_outputs(outputs) if output.finish_reason is not None]
    reasons = {FinishReason.STOP: EndReason.STOP.value, FinishReason.LENGTH: EndReason.LENGTH.value}
    return [(o.request_id, reasons.get(o.finish_reason, f"vllm: {o.finish_reason}")) for o in ended]


@contextmanager
def failing_once(manager: Any, request_id: str) -> Iterator[None]:
    """Let one allocation of a request fail."""
    real, has_failed = manager.allocate_slots, False

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        if request.request_id == request_id and not has_failed:
            has_failed = True
            return None
        return real(request, *args, **kwargs)

    manager.allocate_slots = allocate
    try:
        yield
    finally:
        manager.allocate_slots = real


# -- the worker -----------------------------------------------------------------------------------------------------


def sampled_states(runner: Any) -> torch.Tensor | None:
    """Post-norm states of the rows about to be sampled; rows follow ModelRunnerOutput.req_ids."""
    state = getattr(runner, "execute_model_state", None)
    if state is None:
        return None
    if state.hidden_states is None:  # V2 on a pipeline stage that is not the last
        return None
    if _is_v1(state) and state.aux_hidden_states is None:
        return state.sample_hidden_states
    return state.hidden_states[_last_tokens(runner, state)]


def _is_v1(state: Any) -> bool:
    return hasattr(state, "sample_hidden_states")


def _last_tokens(runner: Any, state: Any) -> torch.Tensor:
    """Where each row's last token stands among those of the step."""
    if _is_v1(state):  # which forgets what it has picked the states by
        return runner.query_start_loc.gpu[1 : len(state.sample_hidden_states) + 1] - 1
    return state.input_batch.logits_indices


def num_layers(config: Any) -> int:
    return int(config.model_config.hf_text_config.num_hidden_layers)


def gives_inner_states(config: Any) -> bool:
    """Whether vLLM can have this model give states of inner layers: it does so for EAGLE-3's drafts."""
    return supports_eagle3(get_model_cls(config.model_config))


def ask_for_layers(runner: Any, layers: tuple[int, ...]) -> None:
    """Have the model give the states of inner layers too. Before vLLM compiles it, which changes what it returns."""
    runner.use_aux_hidden_state_outputs = True
    runner.get_model().set_aux_hidden_state_layers(layers)


def inner_states(runner: Any) -> list[torch.Tensor]:
    """Of the layers asked for, lowest first, the states of the rows about to be sampled."""
    state = runner.execute_model_state
    if state.aux_hidden_states is None:
        return []
    rows = _last_tokens(runner, state)
    return [states[rows] for states in state.aux_hidden_states]


def row_ids(runner: Any) -> list[str]:
    """Requests in row order, between the forward pass and the sampling of a step."""
    state = runner.execute_model_state
    batch = state.input_batch if hasattr(state, "input_batch") else runner.input_batch
    return [request for request in batch.req_ids if request is not None]


def compute_logits(runner: Any, states: torch.Tensor) -> torch.Tensor | None:
    """A second pass through the output layer; None on a rank that vLLM gives no logits."""
    return runner.model.compute_logits(states)


def blocks_by_layer(runner: Any) -> list[torch.Tensor]:
    """Views of all keys and values whose first dimension counts the scheduler's blocks."""
    num_blocks = runner.kv_cache_config.num_blocks
    return [_by_block(cache, num_blocks) for cache in runner.kv_caches]


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    # Keys and values are apart outside the blocks or inside them, by attention backend; a block of the scheduler may
    # be several of the backend's.
    outer = next((i for i, size in enumerate(cache.shape[:2]) if size >= num_blocks and size % num_blocks == 0), None)
    if outer is None:
        raise RuntimeError(f"keys and values of shape {tuple(cache.shape)} are not in {num_blocks} blocks")
    if cache.dtype.itemsize == 1:  # not every kind of 8 bits can be indexed
        cache = cache.view(torch.uint8)
    return cache.unflatten(outer, (num_blocks, -1)).movedim(outer, 0)


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """Pinned memory of the host as the device sees it: what a kernel writes there needs no copy."""
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor  # not in every version

    return get_accelerator_view_from_cpu_tensor(pinned)


class SamplerTap:
    """Stands before a model runner's sampler and sees the logits first; everything else goes through to it."""

    def __init__(self, sampler: Any, see: Callable[[torch.Tensor], None]) -> None:
        self._sampler = sampler
        self._see = see

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._see(logits)
        return self._sampler(logits, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def tap_sampler(runner: Any, see: Callable[[torch.Tensor], None]) -> None:
    """The one attribute of a runner we set: V2 runners of 0.25 have no other place where logits can be seen."""
    runner.sampler = SamplerTap(runner.sampler, see)


def attach_rows(output: ModelRunnerOutput, values: RowValues) -> ModelRunnerOutput:
    for array in (values.scores, values.confidences, values.greedy, values.embeddings):
        if array is not None and len(array) != len(output.req_ids):
            raise RuntimeError(f"{len(array)} states for {len(output.req_ids)} requests: is speculative decoding on?")
    setattr(output, _ROWS, values)
    return output


def row_values(output: ModelRunnerOutput) -> RowValues | None:
    return getattr(output, _ROWS, None)

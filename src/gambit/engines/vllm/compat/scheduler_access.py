"""Reads vLLM's scheduler and what goes in and out of it, and makes the few calls into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from gambit.engines.vllm.compat.core import num_blocks
from gambit.engines.vllm.messages import RowValues, Sharing, attached
from gambit.types import EndReason

RUNNING = RequestStatus.RUNNING
REASONS = {FinishReason.STOP: EndReason.STOP, FinishReason.LENGTH: EndReason.LENGTH}


# -- blocks ---------------------------------------------------------------------------------------------------------


def usable_blocks(scheduler: Any) -> int:
    return num_blocks(scheduler.vllm_config)


def free_blocks(scheduler: Any) -> int:
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def used_blocks(scheduler: Any) -> int:
    return usable_blocks(scheduler) - free_blocks(scheduler)


def hold_back_blocks(scheduler: Any) -> None:
    """Takes what is over the budget out of circulation, for good."""
    surplus = free_blocks(scheduler) - usable_blocks(scheduler)
    if surplus > 0:
        scheduler.kv_cache_manager.block_pool.get_new_blocks(surplus)


def blocks_from(scheduler: Any, request_id: str, start: int) -> list[int]:
    """Returns a request's blocks without the first `start`."""
    groups = scheduler.kv_cache_manager.coordinator.get_blocks(request_id)
    return [block.block_id for block in (groups[0] if len(groups) == 1 else [*chain(*groups)])[start:]]


def blocks_only_grow(scheduler: Any) -> bool:
    """Returns True if running requests keep their blocks and append new ones; a sliding window gives some back."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def sharing(scheduler: Any, block_tokens: int) -> Sharing:
    """Counts what the running requests share; a block that is being filled counts as a whole."""
    lengths = [request.num_computed_tokens for request in scheduler.running]
    return Sharing(len(lengths), sum(lengths), used_blocks(scheduler) * block_tokens, max(lengths, default=0))


def missing_blocks(scheduler: Any, block_tokens: int, *, only_decodes: bool) -> int:
    """Counts the blocks that the running requests need in the next step beyond the free ones; at most 0: enough."""
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    free = free_blocks(scheduler)
    # No step can need more than one block per trace and those that its share of prompt tokens fills.
    prefill = 0 if only_decodes else scheduler.max_num_scheduled_tokens // block_tokens
    if free > groups * (len(scheduler.running) + prefill):
        return 0
    needed = 0
    for request in scheduler.running:
        end = request.num_tokens + request.num_output_placeholders
        needed += -(-end // block_tokens) - -(-request.num_computed_tokens // block_tokens)
    return groups * needed - free


@contextmanager
def failing_once(scheduler: Any, request_id: str) -> Iterator[None]:
    """Lets one allocation of a request fail although blocks are free: the self-check then sees who is the victim."""
    manager = scheduler.kv_cache_manager
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


# -- requests -------------------------------------------------------------------------------------------------------


def end_request(scheduler: Any, request: Any) -> None:
    """Ends a request that vLLM has just taken out of the running ones; workers learn it with the same step."""
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler._free_request(request)


def stop_requests(scheduler: Any, request_ids: list[str]) -> None:
    """Ends requests between two steps, as an abort would."""
    if request_ids:
        scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)


# -- what a step schedules ------------------------------------------------------------------------------------------


def newly_scheduled(scheduler_output: Any) -> list[str]:
    """Returns new requests, and those that vLLM queued before (model runner V1 lists these apart)."""
    new = [data.req_id for data in scheduler_output.scheduled_new_reqs]
    return [*new, *scheduler_output.scheduled_cached_reqs.resumed_req_ids]


# -- what a step gives ----------------------------------------------------------------------------------------------


def outputs_of(params: dict[str, Any]) -> dict[int, EngineCoreOutputs]:
    """Returns one output that carries everything, instead of one per request."""
    return {0: EngineCoreOutputs(outputs=[EngineCoreOutput("gambit", [], kv_transfer_params=params)])}


def new_tokens(outputs: Mapping[int, EngineCoreOutputs]) -> dict[str, int]:
    return {output.request_id: output.new_token_ids[0] for output in _outputs(outputs) if output.new_token_ids}


def row_values(output: Any, requests: list[str]) -> RowValues | None:
    """Returns the worker's values for these requests; None where it has sent none."""
    values = attached(output, RowValues)
    if values is None or requests == output.req_ids:
        return values
    return values.of_rows([output.req_id_to_index[request] for request in requests])


def finished(outputs: Mapping[int, EngineCoreOutputs]) -> tuple[dict[str, EndReason], str | None]:
    """Returns the requests that vLLM ended in a step, and a sentence where it gave one up."""
    ended = {
        output.request_id: output.finish_reason for output in _outputs(outputs) if output.finish_reason is not None
    }
    given_up = [f"vLLM gave up request {name} ({reason})" for name, reason in ended.items() if reason not in REASONS]
    return {name: REASONS[reason] for name, reason in ended.items() if reason in REASONS}, next(iter(given_up), None)


def _outputs(outputs: Mapping[int, EngineCoreOutputs]) -> list[EngineCoreOutput]:
    return outputs[0].outputs if 0 in outputs else []

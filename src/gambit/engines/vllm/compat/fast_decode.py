"""The usual token of a decoding request, planned and booked here in a fraction of vLLM's time; the rest is vLLM's.

Depends on vLLM's version as the adapter does, and with it the hand-over: both are used with tried versions alone.
Nothing here has to be complete: a request that is not surely usual takes vLLM's own way, and vLLM hashes and caches by
counts, so that it catches up with whatever is not done in one step in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from gambit.engines.vllm.compat import adapter
from gambit.engines.vllm.compat.adapter import RUNNING

NO_TOKEN = -1
# Since 0.27 vLLM counts what is under way, and after a preemption what of that is stale.
_COUNTS_FLIGHT = "num_in_flight_tokens" in Request.__init__.__code__.co_names
_STALE = "num_stale_output_tokens" if _COUNTS_FLIGHT else "async_tokens_to_discard"
# Of a step; since 0.32 vLLM tells those that may run from those that may be admitted.
_LIMITS = ("max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens")


class _Decoding(NamedTuple):
    request: Any
    said: list[int]
    everything: list[int]  # the prompt, and what it said
    stops: frozenset[int]
    limit: int  # this many tokens end it


def are_possible(scheduler: Any, block_tokens: int) -> bool:
    """Whether one token of one plain request is all that a step can bring, and its blocks only grow."""
    has_more = any(
        getattr(scheduler, name, None)
        for name in ("connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts",
                     "num_lookahead_tokens", "num_spec_tokens", "lora_config", "defer_block_free", "use_pp")
    )  # fmt: skip
    return not has_more and adapter.blocks_only_grow(scheduler) and scheduler.block_size == block_tokens


def _touches_blocks(computed: int, length: int, block_tokens: int) -> bool:
    """Whether the next token needs a new block, or a block is full of known tokens and is to be cached."""
    return not (computed % block_tokens and min(computed + 1, length) % block_tokens)


class ShortCuts:
    """Put into one scheduler, for its lifetime."""

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._in_flight = 1 if isinstance(scheduler, AsyncScheduler) else 0  # placeholders of a token under way
        self._max_model_len = scheduler.max_model_len
        self._decoding: dict[str, _Decoding] = {}
        self._scheduler = scheduler
        (self._blocks_of,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._aside: list[_Decoding] = []  # in the step that is being scheduled
        self._blocks: dict[str, Any] = {}  # what they have got in it
        self._order: list[Any] = []  # of all that run in it
        self._spare_allocations(scheduler.kv_cache_manager)
        self._put_back_what_is_aside(scheduler)

    def begin(self, request: Any) -> None:
        params = request.sampling_params
        if params.min_tokens or params.repetition_detection is not None or request.use_structured_output:
            return
        stops = frozenset({*(params.stop_token_ids or ()), params.eos_token_id})
        limit = min(self._max_model_len, request.num_prompt_tokens + request.max_tokens)
        self._decoding[request.request_id] = _Decoding(
            request, request._output_token_ids, request._all_token_ids, stops, limit
        )

    def end(self, request_id: str) -> None:
        self._decoding.pop(request_id, None)

    @contextmanager
    def setting_aside(self) -> Iterator[None]:
        """In a step in which no running request can lose its blocks: vLLM looks at those alone that are not usual.

        What it makes of them is completed as if it had looked at all.
        """
        scheduler, running = self._scheduler, self._scheduler.running
        self._aside, growing = self._usual(running)
        self._blocks = self._grow(growing) if growing else {}
        count = len(self._aside)
        aside = {known.request.request_id for known in self._aside}
        scheduler.running = [request for request in running if request.request_id not in aside]
        self._shift_limits(-count)
        self._order = running
        try:
            yield
        finally:
            self._shift_limits(count)
            scheduler.running = [*running, *scheduler.running[len(running) - count :]]  # and those it has admitted
            self._aside = []

    def _shift_limits(self, by: int) -> None:
        for name in _LIMITS:
            if hasattr(self._scheduler, name):
                setattr(self._scheduler, name, getattr(self._scheduler, name) + by)

    def _usual(self, running: list[Any]) -> tuple[list[_Decoding], list[_Decoding]]:
        """Requests that surely decode one token, and those of them for which the block manager has something to do."""
        found: list[_Decoding] = []
        growing: list[_Decoding] = []
        decoding, block_tokens, scheduler = self._decoding, self._block_tokens, self._scheduler
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        is_first = True  # blocks are given in the order of running: to none after one that is left to vLLM
        for request in running:
            if request.is_prefill_chunk:
                return [], []  # it takes what those before it leave of a step's tokens
            known = decoding.get(request.request_id)
            computed = request.num_computed_tokens
            if (
                known is not None and computed + 2 < known.limit
                and (length := len(known.everything)) + request.num_output_placeholders - computed == 1
                and (before is None or request.request_id in before)
            ):  # fmt: skip
                is_growing = _touches_blocks(computed, length, block_tokens)
                if is_first or not is_growing:
                    found.append(known)
                    if is_growing:
                        growing.append(known)
                    continue
            is_first = False
        return found, growing

    def _grow(self, growing: list[_Decoding]) -> dict[str, tuple[list[int]]]:
        """Cache what has been filled, and give a block to whom the next token needs one."""
        manager, cache = self._blocks_of, self._scheduler.kv_cache_manager.cache_blocks
        full = [known.request for known in growing if not known.request.num_computed_tokens % self._block_tokens]
        new = manager.block_pool.get_new_blocks(len(full))
        if getattr(manager, "_record_new_block_ids", True):
            manager.new_block_ids += [block.block_id for block in new]
        for request, block in zip(full, new, strict=True):
            manager.req_to_blocks[request.request_id].append(block)
        for known in growing:
            cache(known.request, min(known.request.num_computed_tokens + 1, len(known.everything)))
        return {request.request_id: ([block.block_id],) for request, block in zip(full, new, strict=True)}

    def _put_back_what_is_aside(self, scheduler: Any) -> None:
        make_data, update = scheduler._make_cached_request_data, scheduler._update_after_schedule

        def make_all_data(*args: Any, **kwargs: Any) -> Any:
            data = make_data(*args, **kwargs)
            names = [known.request.request_id for known in self._aside]
            data.req_ids += names
            data.new_block_ids += [self._blocks.get(name) for name in names]
            data.num_computed_tokens += [known.request.num_computed_tokens for known in self._aside]
            data.num_output_tokens += [
                len(known.said) + known.request.num_output_placeholders for known in self._aside
            ]  # fmt: skip
            return data

        def update_all(output: Any) -> None:
            update(output)
            if self._aside:
                self._complete(output)

        scheduler._make_cached_request_data, scheduler._update_after_schedule = make_all_data, update_all

    def _complete(self, output: Any) -> None:
        """As if vLLM had planned those that are aside too."""
        scheduler, in_flight, aside = self._scheduler, self._in_flight, {}
        for known in self._aside:
            request = known.request
            request.num_computed_tokens += 1
            request.num_output_placeholders += in_flight
            if _COUNTS_FLIGHT:
                request.num_in_flight_tokens += 1
            aside[request.request_id] = 1
        given = aside | output.num_scheduled_tokens
        # In vLLM's order: those that ran, then those that are new.
        ordered = {request.request_id: given[request.request_id] for request in self._order
                   if request.request_id in given}  # fmt: skip
        output.num_scheduled_tokens = ordered | given
        output.total_num_scheduled_tokens += len(aside)
        if output.num_common_prefix_blocks:  # newer versions do not count them
            manager, first = scheduler.kv_cache_manager, self._order[0].request_id
            output.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(first)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(aside)

    def take(self, scheduled: Any, output: Any) -> tuple[dict[str, int], Any]:
        """Book the usual tokens of a step.

        Gives the token of each scheduled request, NO_TOKEN for those left to vLLM, and what is scheduled of these.
        """
        tokens: dict[str, int] = {}
        rest: dict[str, int] = {}
        sampled, row_of = output.sampled_token_ids, output.req_id_to_index
        block_tokens, in_flight, decoding = self._block_tokens, self._in_flight, self._decoding
        cache = self._scheduler.kv_cache_manager.cache_blocks
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if count == 1 and (known := decoding.get(request_id)) is not None:
                request, said, everything, stops, limit = known
                new = sampled[row_of[request_id]] if sampled else ()
                length = len(everything) + 1
                if (  # a first token ends a prefill
                    len(new) == 1 and said and length < limit and new[0] not in stops
                    and request.status is RUNNING and not getattr(request, _STALE)
                ):  # fmt: skip
                    (token,) = new
                    said.append(token)
                    everything.append(token)
                    request.num_output_placeholders -= in_flight
                    if _COUNTS_FLIGHT:
                        request.num_in_flight_tokens -= 1
                    tokens[request_id] = token
                    # A block is hashed with its last token, and cached with the next, or before that is scheduled.
                    if length % block_tokens == 0:
                        request.update_block_hashes()
                    elif in_flight and length % block_tokens == 1:
                        cache(request, request.num_computed_tokens - request.num_output_placeholders)
                    continue
            tokens[request_id] = NO_TOKEN
            rest[request_id] = count
        unusual = copy(scheduled)
        unusual.num_scheduled_tokens = rest
        return tokens, unusual

    def _spare_allocations(self, manager: Any) -> None:
        """Most tokens need no block manager."""
        real, nothing, block_tokens = manager.allocate_slots, manager.empty_kv_cache_blocks, self._block_tokens

        def allocate(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            is_usual = num_new_tokens == 1 and request.status is RUNNING
            if is_usual and not _touches_blocks(request.num_computed_tokens, request.num_tokens, block_tokens):
                return nothing
            if self._aside and "has_scheduled_reqs" in kwargs:
                kwargs["has_scheduled_reqs"] = True
            return real(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate

"""Fast path for plain decode steps: one more token of a running request, planned and booked in a fraction of the time.

A step that is not surely a plain decode is left to vLLM. Both leave the same state behind: test_vllm_fast_decode.py
compares it field by field. vLLM hashes and caches blocks by counts, so that it catches up in the next step with what is
not done in one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from gambit.engines.vllm.compat.blocks import blocks_from, only_grow
from gambit.engines.vllm.messages import unpacked

RUNNING = RequestStatus.RUNNING
MOST_BLOCKS = 2  # copied for a branch: the one being filled, and one that was filled too late to be in the cache
# Features with which a step does more than add one token to a request.
_MORE_THAN_DECODING = (
    "connector", "ec_connector", "aux_output_connector", "enable_return_routed_experts", "num_lookahead_tokens",
    "num_spec_tokens", "lora_config", "defer_block_free", "use_pp",
)  # fmt: skip


class _Decoding(NamedTuple):
    """A request that may take the fast path, with what is read of it in every step."""

    request: Any
    output: list[int]
    tokens: list[int]  # the prompt and the output
    stop_ids: frozenset[int]
    limit: int  # this many tokens end it


def why_not(scheduler: Any, block_tokens: int) -> str | None:
    """Returns None if a step adds at most one token to a plain request, and its blocks only grow; else the reason."""
    if (name := next((name for name in _MORE_THAN_DECODING if getattr(scheduler, name, None)), None)) is not None:
        return "the engine serves adapters" if name == "lora_config" else f"vLLM uses {name}"
    if not only_grow(scheduler):
        return "the model has layers with a sliding window or a recurrent state"
    return None if scheduler.block_size == block_tokens else "the scheduler counts in blocks of another size"


def _touches_blocks(computed: int, length: int, block_tokens: int) -> bool:
    """Returns True if the next token needs a new block, or a block is full of known tokens and is to be cached."""
    return not (computed % block_tokens and min(computed + 1, length) % block_tokens)


class FastDecode:
    """Plans and books plain decodes by hooks in one scheduler, for its lifetime."""

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._is_async = isinstance(scheduler, AsyncScheduler)
        self._max_model_len = scheduler.max_model_len
        self._decoding: dict[str, _Decoding] = {}
        # Since 0.27 vLLM counts tokens in flight, and under another name those that a preemption has made stale.
        self._counts_in_flight = True
        self._stale = "num_stale_output_tokens"
        self._scheduler = scheduler
        (self._block_manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._planned: list[_Decoding] = []  # in the step that is being scheduled
        self._new_blocks: dict[str, Any] = {}  # that they have got in it
        self._order: list[Any] = []  # of all requests that run in it
        self._hook_allocation(scheduler.kv_cache_manager)
        self._hook_planning(scheduler)

    def begin(self, request: Any) -> None:
        """Takes in a request that comes, if each of its steps may be a plain decode."""
        params = request.sampling_params
        if params.min_tokens or params.repetition_detection is not None or request.use_structured_output:
            return
        self._counts_in_flight = hasattr(request, "num_in_flight_tokens")
        self._stale = "num_stale_output_tokens" if self._counts_in_flight else "async_tokens_to_discard"
        stop_ids = frozenset({*(params.stop_token_ids or ()), params.eos_token_id})
        limit = min(self._max_model_len, request.num_prompt_tokens + request.max_tokens)
        self._decoding[request.request_id] = _Decoding(
            request, request._output_token_ids, request._all_token_ids, stop_ids, limit
        )

    def end(self, request_id: str) -> None:
        self._decoding.pop(request_id, None)

    # -- planning a step ---------------------------------------------------------------------------------------

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Plans the plain decodes of a step, around `schedule`, if no running request can lose its blocks in it.

        They are taken out of vLLM's list of running requests. The hooks then add them to vLLM's plan, which ends up as
        if vLLM had planned all of them.
        """
        scheduler, running = self._scheduler, self._scheduler.running
        self._planned, growing = self._plain_decodes(running)
        self._new_blocks = self._add_blocks(growing) if growing else {}
        count = len(self._planned)
        planned = {known.request.request_id for known in self._planned}
        scheduler.running = [request for request in running if request.request_id not in planned]
        self._shift_limits(-count)
        self._order = running
        try:
            yield
        finally:
            self._shift_limits(count)
            scheduler.running = [*running, *scheduler.running[len(running) - count :]]  # and those it has admitted
            self._planned = []

    def _shift_limits(self, by: int) -> None:
        """Changes the limits of a step, of which the decodes that are planned here take their share."""
        self._scheduler.max_num_running_reqs += by
        self._scheduler.max_num_scheduled_tokens += by
        if hasattr(self._scheduler, "max_num_active_reqs"):
            self._scheduler.max_num_active_reqs += by

    def _plain_decodes(self, running: list[Any]) -> tuple[list[_Decoding], list[_Decoding]]:
        """Returns requests that surely decode one token, and those of them whose blocks change."""
        found: list[_Decoding] = []
        growing: list[_Decoding] = []
        decoding, block_tokens, scheduler = self._decoding, self._block_tokens, self._scheduler
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        is_first = True  # blocks go to requests in the order of running: to none after one that is left to vLLM
        for request in running:
            if request.is_prefill_chunk:
                return [], []  # it takes what those before it leave of a step's tokens
            known = decoding.get(request.request_id)
            computed = request.num_computed_tokens
            if (
                known is not None and computed + 2 < known.limit
                and (length := len(known.tokens)) + request.num_output_placeholders - computed == 1
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

    def _add_blocks(self, growing: list[_Decoding]) -> dict[str, tuple[list[int]]]:
        """Caches the blocks that are full; takes and returns a new one for each request whose next token needs it."""
        manager, cache = self._block_manager, self._scheduler.kv_cache_manager.cache_blocks
        full = [known.request for known in growing if not known.request.num_computed_tokens % self._block_tokens]
        new = manager.block_pool.get_new_blocks(len(full))
        if getattr(manager, "_record_new_block_ids", True):
            manager.new_block_ids += [block.block_id for block in new]
        for request, block in zip(full, new, strict=True):
            manager.req_to_blocks[request.request_id].append(block)
        for known in growing:
            cache(known.request, min(known.request.num_computed_tokens + 1, len(known.tokens)))
        return {request.request_id: ([block.block_id],) for request, block in zip(full, new, strict=True)}

    def _hook_planning(self, scheduler: Any) -> None:
        make_data, update = scheduler._make_cached_request_data, scheduler._update_after_schedule

        def make_all_data(*args: Any, **kwargs: Any) -> Any:
            data = make_data(*args, **kwargs)
            names = [known.request.request_id for known in self._planned]
            data.req_ids += names
            data.new_block_ids += [self._new_blocks.get(name) for name in names]
            data.num_computed_tokens += [known.request.num_computed_tokens for known in self._planned]
            data.num_output_tokens += [
                len(known.output) + known.request.num_output_placeholders for known in self._planned
            ]  # fmt: skip
            return data

        def update_all(output: Any) -> None:
            update(output)
            if self._planned:
                self._complete(output)

        scheduler._make_cached_request_data, scheduler._update_after_schedule = make_all_data, update_all

    def _complete(self, output: Any) -> None:
        """Adds the requests planned here to vLLM's plan, and notes of each what vLLM notes of those it schedules."""
        scheduler = self._scheduler
        # Without pipeline stages a request may decode in the very next step.
        next_step = scheduler.current_step + 1
        sets_next_step = self._is_async and scheduler.use_v2_model_runner
        for known in self._planned:
            request = known.request
            request.num_computed_tokens += 1
            request.num_output_placeholders += self._is_async  # a token under way
            if self._counts_in_flight:
                request.num_in_flight_tokens += 1
            if sets_next_step:
                request.next_decode_eligible_step = next_step
        planned = {known.request.request_id: 1 for known in self._planned}
        given = planned | output.num_scheduled_tokens
        # In vLLM's order: those that ran, then those that are new.
        ordered = {request.request_id: given[request.request_id] for request in self._order
                   if request.request_id in given}  # fmt: skip
        output.num_scheduled_tokens = ordered | given
        output.total_num_scheduled_tokens += len(planned)
        if output.num_common_prefix_blocks:  # newer versions do not count them
            manager, first = scheduler.kv_cache_manager, self._order[0].request_id
            output.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(first)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(planned)

    # -- booking a step's tokens -------------------------------------------------------------------------------

    def book(self, scheduled: Any, output: Any) -> tuple[dict[str, int | None], Any]:
        """Appends the tokens of plain decodes to their requests.

        Returns the token of each scheduled request, None for those left to vLLM, and the part of `scheduled` that is
        left to it.
        """
        tokens: dict[str, int | None] = {}
        rest: dict[str, int] = {}
        sampled, row_of = output.sampled_token_ids, output.req_id_to_index
        block_tokens, is_async, decoding = self._block_tokens, self._is_async, self._decoding
        counts_in_flight, stale = self._counts_in_flight, self._stale
        cache = self._scheduler.kv_cache_manager.cache_blocks
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if count == 1 and (known := decoding.get(request_id)) is not None:
                request, generated, everything, stop_ids, limit = known
                new = sampled[row_of[request_id]] if sampled else ()
                length = len(everything) + 1
                if (  # a first token ends a prefill
                    len(new) == 1 and generated and length < limit and new[0] not in stop_ids
                    and request.status is RUNNING and not getattr(request, stale)
                ):  # fmt: skip
                    (token,) = new
                    generated.append(token)
                    everything.append(token)
                    request.num_output_placeholders -= is_async
                    if counts_in_flight:
                        request.num_in_flight_tokens -= 1
                    tokens[request_id] = token
                    # A block is hashed with its last token, and cached with the next, or before that is scheduled.
                    if length % block_tokens == 0:
                        request.update_block_hashes()
                    elif is_async and length % block_tokens == 1:
                        cache(request, request.num_computed_tokens - request.num_output_placeholders)
                    continue
            tokens[request_id] = None
            rest[request_id] = count
        left = copy(scheduled)
        left.num_scheduled_tokens = rest
        return tokens, left

    def _hook_allocation(self, manager: Any) -> None:
        """Skips the block manager for tokens that need nothing of it."""
        real, nothing, block_tokens = manager.allocate_slots, manager.empty_kv_cache_blocks, self._block_tokens

        def allocate(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            is_plain = num_new_tokens == 1 and request.status is RUNNING
            if is_plain and not _touches_blocks(request.num_computed_tokens, request.num_tokens, block_tokens):
                return nothing
            if self._planned and "has_scheduled_reqs" in kwargs:
                kwargs["has_scheduled_reqs"] = True
            return real(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate

    # -- copies of prefixes ------------------------------------------------------------------------------------

    def copy_prefixes(self, output: Any) -> list[tuple[int, int]]:
        """Shortens what is planned for branches to their last token; returns the blocks to copy before, from and to.

        vLLM shares full blocks only: a branch would compute up to a block of tokens once more. A step in which some
        request computes several tokens is slower for all: vLLM's CUDA graph of a whole step is for one token each.
        By vLLM's own records a branch has computed its prefix in this step, as it would have. Only the tokens in flight
        are fewer: one that is evicted waits for their return.
        """
        if getattr(output, "new_block_ids_to_zero", None):  # vLLM wipes these after the copies
            return []
        scheduler, block_tokens = self._scheduler, self._block_tokens
        copies: list[tuple[int, int]] = []
        planned = dict(output.num_scheduled_tokens) if output.scheduled_new_reqs else {}
        for new in output.scheduled_new_reqs:
            child, count = scheduler.requests[new.req_id], planned[new.req_id]
            task = unpacked(child.sampling_params.extra_args)
            parent = (
                None if task.spec.given else scheduler.requests.get(task.parent)
            )  # given tokens are not the parent's
            # Nothing of it is left for later steps, and it has generated nothing: every token is its parent's too.
            is_complete = child.num_computed_tokens == child.num_tokens == child.num_prompt_tokens
            if not 1 < count <= MOST_BLOCKS * block_tokens or not is_complete or parent is None:
                continue
            last = child.num_tokens - 1
            # Tokens of the parent that are still under way are computed before the blocks are copied.
            num_computed = parent.num_computed_tokens - planned.get(parent.request_id, 0)
            if num_computed < last or parent.status is not RUNNING:
                continue
            first = new.num_computed_tokens // block_tokens
            own = new.block_ids[0][first : last // block_tokens + 1]
            # The parent may lack the last one, where it holds nothing but the token that is computed now.
            copies += zip(blocks_from(scheduler, parent.request_id, first), own, strict=False)
            new.num_computed_tokens = last
            output.num_scheduled_tokens[new.req_id] = 1
            output.total_num_scheduled_tokens -= count - 1
            if self._counts_in_flight:
                child.num_in_flight_tokens -= count - 1
        return copies

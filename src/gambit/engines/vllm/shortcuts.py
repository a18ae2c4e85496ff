"""The usual token of a decoding request, booked here in a fraction of vLLM's time; anything else is left to vLLM.

With the adapter, the only module that depends on vLLM's version: it is used with tried versions alone. Nothing here
has to be complete: a request that is not surely usual takes vLLM's own way, and vLLM hashes and caches by counts, so
that it catches up with whatever is not done in one step in the next.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from gambit.engines.vllm import adapter

NO_TOKEN = -1
RUNNING = RequestStatus.RUNNING
# Since 0.27 vLLM counts what is under way, and after a preemption what of that is stale.
_COUNTS_FLIGHT = "num_in_flight_tokens" in Request.__init__.__code__.co_names
_STALE = "num_stale_output_tokens" if _COUNTS_FLIGHT else "async_tokens_to_discard"


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
                     "num_lookahead_tokens", "num_spec_tokens", "lora_config")
    )  # fmt: skip
    return not has_more and adapter.blocks_only_grow(scheduler) and scheduler.block_size == block_tokens


class ShortCuts:
    """Put into one scheduler, for its lifetime."""

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._in_flight = 1 if isinstance(scheduler, AsyncScheduler) else 0  # placeholders of a token under way
        self._max_model_len = scheduler.max_model_len
        self._decoding: dict[str, _Decoding] = {}
        self._spare_allocations(scheduler.kv_cache_manager)

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

    def take(self, scheduled: Any, output: Any) -> tuple[dict[str, int], Any]:
        """Book the usual tokens of a step.

        Gives the token of each scheduled request, NO_TOKEN for those left to vLLM, and what is scheduled of these.
        """
        tokens: dict[str, int] = {}
        rest: dict[str, int] = {}
        sampled, row_of = output.sampled_token_ids, output.req_id_to_index
        block_tokens, in_flight, decoding = self._block_tokens, self._in_flight, self._decoding
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if count == 1 and (known := decoding.get(request_id)) is not None:
                request, said, everything, stops, limit = known
                new = sampled[row_of[request_id]] if sampled else ()
                length = len(everything) + 1
                # A block is hashed when its last token comes, and cached with the next. A first token ends a prefill.
                if (
                    len(new) == 1 and said and length % block_tokens > 1 and length < limit and new[0] not in stops
                    and request.status is RUNNING and not getattr(request, _STALE)
                ):  # fmt: skip
                    (token,) = new
                    said.append(token)
                    everything.append(token)
                    request.num_output_placeholders -= in_flight
                    if _COUNTS_FLIGHT:
                        request.num_in_flight_tokens -= 1
                    tokens[request_id] = token
                    continue
            tokens[request_id] = NO_TOKEN
            rest[request_id] = count
        unusual = copy(scheduled)
        unusual.num_scheduled_tokens = rest
        return tokens, unusual

    def _spare_allocations(self, manager: Any) -> None:
        """A token that goes into a block its request has, neither its first nor its last, needs no block manager."""
        real, nothing, last = manager.allocate_slots, manager.empty_kv_cache_blocks, self._block_tokens - 1

        def allocate(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            is_usual = num_new_tokens == 1 and request.status is RUNNING
            if is_usual and 0 < request.num_computed_tokens % self._block_tokens < last:
                return nothing
            return real(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate

"""The KV blocks of running requests, as vLLM's scheduler has them."""

from itertools import chain
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


def blocks_from(scheduler: Any, request_id: str, start: int) -> list[int]:
    """Returns a request's blocks without the first `start`."""
    groups = scheduler.kv_cache_manager.coordinator.get_blocks(request_id)
    return [block.block_id for block in (groups[0] if len(groups) == 1 else [*chain(*groups)])[start:]]


def only_grow(scheduler: Any) -> bool:
    """Returns True if running requests keep their blocks and append new ones.

    A sliding window frees some, and a recurrent layer exchanges the one with its state.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)

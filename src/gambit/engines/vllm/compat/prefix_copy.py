"""Copies of a parent's last KV blocks for its branches, so that a branch computes one token of its prefix, not a block.

vLLM shares full blocks only: a branch would compute up to a block of tokens once more. A step in which some request
computes several tokens is slower for all, since vLLM's CUDA graph of a whole step is for one token each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gambit.engines.vllm.compat.scheduler_access import RUNNING, blocks_from

MOST_BLOCKS = 2  # of a branch: the one being filled, and one that was filled too late to be in the cache


def copy_prefixes(
    scheduler: Any, output: Any, parent_of: Callable[[str], str | None], block_tokens: int
) -> list[tuple[int, int]]:
    """Shortens what is planned for branches to their last token; returns the blocks to copy before, from and to.

    vLLM's own records need no change: by them a branch has computed its prefix in this step, as it would have.
    """
    if getattr(output, "new_block_ids_to_zero", None):  # vLLM wipes these after the copies
        return []
    copies: list[tuple[int, int]] = []
    planned = dict(output.num_scheduled_tokens) if output.scheduled_new_reqs else {}
    for new in output.scheduled_new_reqs:
        child, count = scheduler.requests[new.req_id], planned[new.req_id]
        parent = scheduler.requests.get(parent_of(new.req_id))
        if not 1 < count <= MOST_BLOCKS * block_tokens or not _is_complete(child) or parent is None:
            continue
        last = child.num_tokens - 1
        if not _has_computed(parent, last, planned):
            continue
        first = new.num_computed_tokens // block_tokens
        own = new.block_ids[0][first : last // block_tokens + 1]
        # The parent may lack the last one, where it holds nothing but the token that is computed now.
        copies += zip(blocks_from(scheduler, parent.request_id, first), own, strict=False)
        new.num_computed_tokens = last
        output.num_scheduled_tokens[new.req_id] = 1
        output.total_num_scheduled_tokens -= count - 1
    return copies


def _is_complete(child: Any) -> bool:
    """Nothing of it is left for later steps, and it has generated nothing: every token is its parent's too."""
    return bool(child.num_computed_tokens == child.num_tokens == child.num_prompt_tokens)


def _has_computed(parent: Any, count: int, planned: dict[str, int]) -> bool:
    """Its first tokens, in steps before this one; those still under way are computed before the blocks are copied."""
    before = int(parent.num_computed_tokens) - planned.get(parent.request_id, 0)
    return before >= count and parent.status is RUNNING

"""Plans which keys a decode step reads for which traces, so that a block shared by several traces is read once.

The block tables of the traces form a forest. Every path-compressed node of it becomes a *virtual sequence*: its keys
are the node's blocks, its queries those of the traces below it. A variable-length attention kernel takes all virtual
sequences in one call, and the partial results of a trace are merged afterwards.

The plan is made on the device once a step, for all layers. Its shapes depend on the number of traces alone, so that
the host need not wait for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from gambit.engines.vllm.messages import Sharing

TILE_ROWS = 64  # of FlashAttention 3's smallest tile: query heads of one KV head, times queries
MEAN_DEPTH = 12  # nodes from root to leaf for which there is room, on average over the traces
FINEST_TOKENS = 64  # a node begins and ends at a multiple of it: shorter nodes cost more than they save
COARSER = 3  # bits: where the forest has more nodes than there is room for, multiples of 8 times that, 64 times, …
NUM_STEPS = 8  # of these; the coarsest is longer than any trace
_FAR = 1 << 30  # blocks that a trace shares with itself


@dataclass(frozen=True, slots=True)
class ForestPlan:
    """One attention call over virtual sequences and the merge after it. Unused places are at the end of each tensor."""

    query_rows: torch.Tensor  # [parts] the trace whose query stands here
    query_starts: torch.Tensor  # [sequences + 1] where each virtual sequence's queries begin
    num_keys: torch.Tensor  # [sequences] longest first
    block_table: torch.Tensor  # [sequences, blocks]
    parts: torch.Tensor  # [parts] places in `query_rows`, ordered by trace
    part_starts: torch.Tensor  # [traces + 1] where each trace's places begin in `parts`
    owner: torch.Tensor  # [sequences] a trace whose block table is read
    start: torch.Tensor  # [sequences] first block
    is_tail: torch.Tensor  # [sequences] the end of a trace, which grows
    most_queries: int  # of a virtual sequence
    most_keys: int

    @property
    def num_traces(self) -> int:
        return len(self.part_starts) - 1


def plan_holder(
    most_traces: int, most_blocks: int, group: int, device: torch.device
) -> Callable[[ForestPlan], ForestPlan]:
    """Returns a function that puts every plan of as many traces at the same addresses: CUDA graphs need that."""
    parts, sequences = most_parts(most_traces), most_sequences(most_traces, group)
    zeros = partial(torch.zeros, dtype=torch.int32, device=device)
    table_memory = zeros(sequences, most_blocks)
    memories = {
        "query_rows": torch.zeros(parts, dtype=torch.int64, device=device), "query_starts": zeros(sequences + 1),
        "num_keys": zeros(sequences), "parts": zeros(parts), "part_starts": zeros(most_traces + 1),
    }  # fmt: skip

    def hold(plan: ForestPlan) -> ForestPlan:
        table = table_memory[: len(plan.block_table)]
        table[:, : plan.block_table.shape[1]] = plan.block_table  # cells after the last block may be anything
        held: dict[str, Any] = {"block_table": table}
        for name, memory in memories.items():
            values = getattr(plan, name)
            is_there = values.data_ptr() == memory.data_ptr()  # in the plan of an earlier step that was refreshed
            held[name] = values if is_there else memory[: len(values)].copy_(values)
        return replace(plan, **held)

    return hold


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of the forest, longest first; unused places have no members."""

    owner: torch.Tensor  # a member, whose block table is read
    start: torch.Tensor  # first block
    num_keys: torch.Tensor
    num_members: torch.Tensor
    is_tail: torch.Tensor  # a trace's own end


def queries_per_group(heads_per_kv_head: int) -> int:
    """Returns how many queries fill a tile. More would take a larger one, which computes more than it loads."""
    return max(TILE_ROWS // heads_per_kv_head, 1)


def most_parts(num_traces: int) -> int:
    return MEAN_DEPTH * num_traces


def most_sequences(num_traces: int, group: int) -> int:
    """Returns the room for sequences.

    A forest has fewer than two nodes a trace; cutting them into groups adds one for each group that is full.
    """
    return 2 * num_traces + -(-most_parts(num_traces) // group)


def make_plan(
    block_table: torch.Tensor, num_tokens: torch.Tensor, shared: torch.Tensor, *, block_tokens: int, group: int,
    most_tokens: int, finest_tokens: int = FINEST_TOKENS,
) -> ForestPlan:  # fmt: skip
    """Makes the plan of a step.

    `num_tokens`: of each trace, the one being computed included; 0 in padding. `shared`: blocks that each pair of
    traces has in common.
    """
    count = len(num_tokens)
    own = torch.eye(count, dtype=torch.bool, device=shared.device)
    common, order = shared.masked_fill(own, _FAR).sort(dim=1, descending=True, stable=True)
    step = _step_blocks(common, max(finest_tokens // block_tokens, 1), most_parts(count))
    nodes = _nodes(common // step * step, order, num_tokens, block_tokens)
    members_end = nodes.num_members.cumsum(0)
    node, query_starts, num_keys = _sequences(nodes, members_end, group, most_sequences(count, group))
    query_rows = _members(nodes, members_end, order, most_parts(count))
    owner, start = nodes.owner[node], nodes.start[node]
    by_row, parts = query_rows.sort(stable=True)
    return ForestPlan(
        query_rows=query_rows.clamp(max=count - 1),
        query_starts=query_starts,
        num_keys=num_keys,
        block_table=_tables(block_table, owner, start, -(-most_tokens // block_tokens)),
        parts=parts.int(),
        part_starts=torch.searchsorted(by_row, torch.arange(count + 1, device=by_row.device)).int(),
        owner=owner,
        start=start,
        is_tail=nodes.is_tail[node],
        most_queries=min(group, count),
        most_keys=most_tokens,
    )


def refreshed(
    plan: ForestPlan, block_table: torch.Tensor, num_tokens: torch.Tensor, *, block_tokens: int, most_tokens: int
) -> ForestPlan:
    """Returns the plan of a later step of the same traces in the same rows: nothing but their ends has changed."""
    tails = num_tokens[plan.owner] - plan.start * block_tokens
    return replace(
        plan,
        num_keys=tails.int().where(plan.is_tail, plan.num_keys),
        block_table=_tables(block_table, plan.owner, plan.start, -(-most_tokens // block_tokens)),
        most_keys=most_tokens,
    )


def _step_blocks(common: torch.Tensor, finest: int, room: int) -> torch.Tensor:
    """Returns the finest step to which cuts can be rounded down so that there is room.

    The coarsest leaves nothing shared.
    """
    steps = finest << (COARSER * torch.arange(NUM_STEPS, device=common.device))
    cuts = common[None, :, 1:] // steps[:, None, None]
    depths = (cuts > pad(cuts[..., 1:], (0, 1))).sum((1, 2)) + len(common)
    return finest << (COARSER * (depths > room).sum())  # indexing would have the host wait


def _nodes(cuts: torch.Tensor, order: torch.Tensor, num_tokens: torch.Tensor, block_tokens: int) -> _Nodes:
    """Finds the nodes. `cuts[i]`: the blocks that trace i shares with those in `order[i]`, itself first, descending.

    Where a cut is larger than the next one, a node ends: the traces so far are below it. The one with the lowest
    number has it in its own row too and owns it. The first cut is the trace's own tail.
    """
    count = len(cuts)
    below = pad(cuts[:, 1:], (0, 1))
    first = order.cummin(dim=1).values
    rows = torch.arange(count, device=cuts.device)[:, None]
    is_node = (cuts > below) & (first == rows) & (num_tokens[:, None] > 0)
    ends = (cuts * block_tokens).minimum(num_tokens[:, None])
    num_keys = (ends - below * block_tokens).where(is_node, 0)
    places = _first_places(is_node.flatten(), 2 * count)
    lengths, longest = num_keys.flatten()[places.clamp(min=0)].where(places >= 0, 0).sort(descending=True, stable=True)
    places = places[longest]
    at = places.clamp(min=0)
    column = places % count
    num_members = (column + 1).where(places >= 0, 0)
    return _Nodes(at // count, below.flatten()[at], lengths, num_members, (column == 0) & (places >= 0))


def _first_places(flags: torch.Tensor, size: int) -> torch.Tensor:
    """Returns where the flags are set, then -1. The host would have to wait for the size of `nonzero`."""
    target = (flags.cumsum(0) - 1).where(flags, size)
    found = torch.full((size + 1,), -1, dtype=torch.int64, device=flags.device)
    return found.scatter_(0, target, torch.arange(len(flags), device=flags.device))[:size]


def _sequences(
    nodes: _Nodes, members_end: torch.Tensor, group: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cuts nodes into groups of members.

    Returns each sequence's node, where its queries begin, and its number of keys.
    """
    groups = (nodes.num_members + group - 1) // group
    groups_end = groups.cumsum(0)
    number = torch.arange(most, device=groups.device)
    node = torch.searchsorted(groups_end, number, right=True).clamp(max=len(groups) - 1)
    place = number - groups_end[node] + groups[node]
    members = nodes.num_members[node]
    ends = members_end[node] - members + ((place + 1) * group).minimum(members)
    num_keys = nodes.num_keys[node].where(number < groups_end[-1], 0)
    return node, pad(ends, (1, 0)).int(), num_keys.int()


def _members(nodes: _Nodes, members_end: torch.Tensor, order: torch.Tensor, most: int) -> torch.Tensor:
    """Returns the traces below each node, one node after the other; then a number that no trace has."""
    number = torch.arange(most, device=order.device)
    node = torch.searchsorted(members_end, number, right=True).clamp(max=len(members_end) - 1)
    place = (number - members_end[node] + nodes.num_members[node]).clamp(max=len(order) - 1)
    return order[nodes.owner[node], place].where(number < members_end[-1], len(order))


def _tables(block_table: torch.Tensor, owner: torch.Tensor, start: torch.Tensor, width: int) -> torch.Tensor:
    """Returns for each sequence its owner's table from its first block on."""
    columns = start[:, None] + torch.arange(width, device=start.device)
    return block_table[owner[:, None], columns.clamp(max=block_table.shape[1] - 1)]


# -- common prefixes -------------------------------------------------------------------------------------------------


_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd numbers of 64 random bits


def prefix_hashes(block_table: torch.Tensor, most_blocks: int) -> torch.Tensor:
    """Returns [traces, most_blocks + 1]: hashes of each trace's first 0, 1, 2, … blocks.

    Cells after a trace's last block do not matter.

    A block may be in two tables behind different blocks of equal content, and comparing the blocks themselves would
    then not be monotone: hashes of whole prefixes are, up to chance in 64 bits.
    """
    blocks = block_table[:, :most_blocks].long()
    mixed = blocks * _MIX[0] + torch.arange(blocks.shape[1], device=blocks.device) * _MIX[1]
    mixed = (mixed ^ (mixed >> 31)) * _MIX[2]
    return pad((mixed ^ (mixed >> 29)).cumsum(1), (1, 0))


def common_blocks(hashes: torch.Tensor, full_blocks: torch.Tensor) -> torch.Tensor:
    """Counts the blocks that each pair of traces has in common: [traces, traces], by binary search.

    `full_blocks`: of each trace, how many may be shared.
    """
    high = full_blocks.minimum(full_blocks[:, None]).long()
    low = torch.zeros_like(high)
    for _ in range((hashes.shape[1] - 1).bit_length()):
        middle = (low + high + 1) // 2
        found = hashes.gather(1, middle)  # `middle` is symmetric: the other trace's hash is across the diagonal
        is_equal = found == found.T
        low, high = middle.where(is_equal, low), high.where(is_equal, middle - 1)
    return low


def full_blocks(num_tokens: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """Counts the blocks of computed tokens; the token being computed is not among them."""
    return ((num_tokens - 1) // block_tokens).clamp(min=0)


# -- where forest attention pays -------------------------------------------------------------------------------------
#
# Fitted to benchmarks/results/forest_speed_*.json, and on the careful side of them: where a figure varied, the one that
# speaks for stock attention is taken. `benchmarks/forest_speed.py --parts start,gate` checks them on whole steps. On a
# GPU with less bandwidth (H100) attention takes longer and the rest does not: there it would pay earlier than this.


READ_RATE = 4.3e9  # bytes a millisecond: keys and values from the GPU's memory
# What it costs to read a block for one more trace, with 1 for the first: part of it is still in the L2 cache. 0.47 with
# 8 traces, 0.6 with 64, 0.7 to 1 with 112 and more.
READ_AGAIN = 0.45
# A stretch without a branch is read by one multiprocessor for each KV head; 47 and 56 GB/s were measured where one such
# stretch was all there was to wait for. Stock attention splits the keys of a trace among several.
STRETCH_RATE = 5e7  # bytes a millisecond, of one KV head
LAYER_MS = 0.01  # of a layer: gathering queries and merging parts
TRACE_MS = 3e-4  # of a layer and trace: its parts, and tiles of its nodes that are not full
STEP_MS = 0.4  # of a step: bringing the plan up to date, and now and then a new one, which takes 3
LAUNCH_MS = 0.15  # of a layer without a CUDA graph of the whole step: the host launches its kernels one by one
FEWEST_TRACES = 16  # no graphs are captured for fewer, and none was measured to gain


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Attention layers of one shape, on one GPU."""

    num_layers: int
    token_bytes: int  # keys and values of a token in one layer
    num_kv_heads: int


def saved_ms(sharing: Sharing, kinds: Iterable[LayerKind], *, has_graphs: bool) -> float:
    """Returns the milliseconds by which forest attention makes a decode step shorter; below 0: longer."""
    own_ms = LAYER_MS + TRACE_MS * sharing.num_traces + (0 if has_graphs else LAUNCH_MS)
    saved = -STEP_MS
    for kind in kinds:
        read_ms = sharing.unique_tokens * kind.token_bytes / READ_RATE
        again_ms = READ_AGAIN * sharing.duplicated_tokens * kind.token_bytes / READ_RATE
        # How long the longest stretch is, only the plan on the GPU knows; at most as long as the longest trace.
        stretch_ms = sharing.longest_tokens * kind.token_bytes / kind.num_kv_heads / STRETCH_RATE
        saved += kind.num_layers * (read_ms + again_ms - max(read_ms, stretch_ms) - own_ms)
    return saved


def pays(sharing: Sharing, kinds: Iterable[LayerKind], *, has_graphs: bool) -> bool:
    return sharing.num_traces >= FEWEST_TRACES and saved_ms(sharing, kinds, has_graphs=has_graphs) > 0

"""Random forests of block tables as a prefix cache makes them, and attention over them in plain torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from gambit.engines.vllm.forest import ForestPlan, common_blocks, full_blocks, make_plan, prefix_hashes


@dataclass(frozen=True)
class Forest:
    table: torch.Tensor  # [rows, blocks], with stale cells after a row's last block
    num_tokens: torch.Tensor  # 0 in padding
    contents: dict[int, tuple[int, ...]]  # by block: it and all before it, as the prefix cache's hash chain has them
    block_tokens: int


def grow(
    rows: int, rounds: int, *, seed: int = 0, roots: int = 1, turnover: float = 0.3, twins: float = 0.0,
    padding: int = 0, block_tokens: int = 16,
) -> Forest:  # fmt: skip
    """A search: traces grow; some are replaced by branches of others, which share full blocks or hold equal copies."""
    rng = random.Random(seed)
    contents: dict[int, tuple[int, ...]] = {}

    def block(before: tuple[int, ...], said: int) -> int:
        contents[len(contents) + 1] = (*before, said)
        return len(contents)

    shared = [[block((), root)] for root in range(roots)]
    traces = [list(rng.choice(shared)) for _ in range(rows)]
    for number in range(rounds):
        for place in range(rows):
            if rng.random() < turnover:
                parent = rng.choice(traces)
                kept = parent[: rng.randint(1, len(parent))]
                twin = [block(contents[b][:-1], contents[b][-1]) if rng.random() < twins else b for b in kept]
                traces[place] = twin
        for place, trace in enumerate(traces):
            for _ in range(rng.randint(1, 3)):
                trace.append(block(contents[trace[-1]], 1000 + 100 * number + place))
    rng.shuffle(traces)
    width = max(map(len, traces)) + 2
    table = torch.tensor([[*trace, *(rng.randint(0, 99) for _ in range(width - len(trace)))] for trace in traces])
    # The last block is being filled, and the next may be there already.
    tokens = [(len(trace) - rng.randint(1, 2)) * block_tokens + rng.randint(1, block_tokens) for trace in traces]
    table = torch.cat([table, table.new_zeros(padding, width)]).int()
    return Forest(table, torch.tensor([*(max(t, 1) for t in tokens), *[0] * padding]).int(), contents, block_tokens)


def planned(forest: Forest, *, group: int = 4, finest_tokens: int = 1) -> ForestPlan:
    most = int(forest.num_tokens.max())
    hashes = prefix_hashes(forest.table, -(-most // forest.block_tokens))
    shared = common_blocks(hashes, full_blocks(forest.num_tokens, forest.block_tokens))
    return make_plan(
        forest.table, forest.num_tokens, shared, block_tokens=forest.block_tokens, group=group, most_tokens=most,
        finest_tokens=finest_tokens,
    )  # fmt: skip


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention and its log-sum-exp. [queries, heads, width], [keys, KV heads, width]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def keys_of(cache: torch.Tensor, blocks: torch.Tensor, count: int) -> torch.Tensor:
    """`cache`: [blocks, block tokens, KV heads, width]."""
    return cache[blocks.long()].flatten(0, 1)[:count]


def attend_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: ForestPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a variable-length attention kernel gives for a plan: partial results and their log-sum-exp."""
    partial = torch.full((len(plan.query_rows), *q.shape[1:]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], len(plan.query_rows)), torch.nan, dtype=q.dtype)
    starts, lengths = plan.query_starts.tolist(), plan.num_keys.tolist()
    for number, (start, end, count) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        if start < end:
            blocks = plan.block_table[number]
            used = blocks[: -(-count // k.shape[1])]
            found = attend(q[plan.query_rows[start:end]], keys_of(k, used, count), keys_of(v, used, count))
            partial[start:end], lse[:, start:end] = found
    return partial, lse


def merge(partial: torch.Tensor, lse: torch.Tensor, plan: ForestPlan) -> torch.Tensor:
    """[traces, heads, width] in float32 or better. `partial`: [parts, heads, width], `lse`: [heads, parts].

    The same in torch as the kernel does.
    """
    counts = plan.part_starts.diff()
    count, used = len(counts), int(plan.part_starts[-1])
    rows = torch.repeat_interleave(torch.arange(count, device=counts.device), counts.long())
    parts = plan.parts[:used].long()
    weights = lse.T[parts].to(torch.promote_types(lse.dtype, torch.float32))
    top = weights.new_full((count, weights.shape[1]), -torch.inf)
    top.scatter_reduce_(0, rows[:, None].expand_as(weights), weights, "amax")
    weights = (weights - top[rows]).exp()
    total = weights.new_zeros(top.shape).index_add_(0, rows, weights)
    summed = weights.new_zeros((count, *partial.shape[1:]))
    summed.index_add_(0, rows, partial[parts].to(weights.dtype) * weights[..., None])
    return summed / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]

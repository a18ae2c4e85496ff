"""Merges the partial attention results of every trace, weighted by their log-sum-exp."""

from __future__ import annotations

import torch

from gambit.engines.vllm.forest.plan import ForestPlan


def merge(partial: torch.Tensor, lse: torch.Tensor, plan: ForestPlan) -> torch.Tensor:
    """[traces, heads, width] in float32 or better. `partial`: [parts, heads, width], `lse`: [heads, parts].

    The same in torch as `kernels.merge`, for a CPU and for checks.
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

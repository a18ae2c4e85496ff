"""Forest attention inside vLLM's CPU build: registered in place of its CPU backend, with torch instead of kernels."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import ClassVar
from unittest import mock

import torch
import vllm.v1.attention.backends.fa_utils as fa_utils
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from gambit.engines.vllm import kernels
from gambit.engines.vllm.compat import forest
from support.forests import attend, keys_of, merge


def varlen_attention(
    *, q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, out=None, return_softmax_lse=False, **_
):
    """FlashAttention's function for virtual sequences, or for one query each."""
    partial = torch.zeros_like(q) if out is None else out
    lse = torch.zeros(q.shape[1], len(q))
    starts = cu_seqlens_q.tolist()
    assert not causal or int(cu_seqlens_q.diff().max()) == 1
    assert softmax_scale == q.shape[-1] ** -0.5
    for start, end, count, blocks in zip(starts[:-1], starts[1:], seqused_k.tolist(), block_table, strict=True):
        if start < end:
            used = blocks[: -(-count // k.shape[1])]
            found = attend(q[start:end], keys_of(k, used, count), keys_of(v, used, count))
            partial[start:end], lse[:, start:end] = found
    return (partial, lse) if return_softmax_lse else partial


def merge_into(partial, lse, plan, merged):
    merged[: len(plan.part_starts) - 1] = merge(partial, lse, plan)


class CpuForestBuilder(forest.ForestPlanning, CPUAttentionMetadataBuilder):
    finest_tokens = 1
    plans: ClassVar[list[tuple[int, int]]] = []  # of all steps: keys of all traces, and those that were read

    @property
    def num_heads_q(self):
        return self.num_heads

    @property
    def num_heads_kv(self):
        return self.num_kv_heads

    @property
    def headdim(self):
        return self.head_dim

    def plan(self, common):
        plan = super().plan(common)
        self.plans.append((int(common.seq_lens[: common.num_reqs].sum()), int(plan.num_keys.sum())))
        return plan


class CpuForestImpl(CPUAttentionBackendImpl):
    """Keys and values lie in the cache as the model makes them: vLLM's kernels have an order of their own."""

    is_covered = True

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        size = kv_cache.shape[2]
        keys, values = forest.split_cache(kv_cache, self.head_size)
        slots = slot_mapping[slot_mapping >= 0]
        keys[slots // size, slots % size] = key[: len(slots)]
        values[slots // size, slots % size] = value[: len(slots)]

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if attn_metadata is None:
            return output
        keys, values = forest.split_cache(kv_cache, self.head_size)
        plan = forest.plan_of(attn_metadata)
        if plan is not None:
            forest.attend(query, keys, values, plan, self.scale, output)
            return output
        starts = attn_metadata.query_start_loc.tolist()
        for row, count in enumerate(attn_metadata.seq_lens.tolist()):
            blocks = attn_metadata.block_table[row, : -(-count // keys.shape[1])]
            for at in range(starts[row], starts[row + 1]):
                seen = count - (starts[row + 1] - 1 - at)
                own = [keys_of(cache, blocks, seen) for cache in (keys, values)]
                output[at] = attend(query[at : at + 1], *own)[0][0]
        return output


class CpuForestBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return CpuForestImpl

    @staticmethod
    def get_builder_cls():
        return CpuForestBuilder


@contextmanager
def forest_on_cpu(*, interprets: bool = False):
    """`interprets`: Triton's interpreter is there, so that the kernels themselves run."""

    def options():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.CpuForestBackend")
        _cached_get_attn_backend.cache_clear()
        return {}

    with ExitStack() as stack:
        stack.callback(_cached_get_attn_backend.cache_clear)
        stack.callback(AttentionBackendEnum.CPU_ATTN.clear_override)
        stack.callback(CpuForestBuilder.plans.clear)
        for module, name, fake in (
            (forest, "why_not", lambda: None), (forest, "attention_options", options),
            (fa_utils, "flash_attn_varlen_func", varlen_attention),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, fake, create=True))
        if interprets:
            stack.enter_context(mock.patch.object(forest, "common_blocks", kernels.common_blocks_on_gpu))
        else:
            stack.enter_context(mock.patch.object(kernels, "merge", merge_into))
        yield CpuForestBuilder.plans

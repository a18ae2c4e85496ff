"""vLLM's FlashAttention backend that can read shared prefixes once: a plan with each step, used where there is one."""

from __future__ import annotations

from typing import Any

import torch
import vllm.v1.attention.backends.fa_utils as fa_utils  # its functions are not there in a build for CPUs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gambit.engines.vllm.forest import common_prefix, kernels
from gambit.engines.vllm.forest.plan import ForestPlan, PlanMemory, make_plan, queries_per_group, refreshed

HOPPER = 90
FLASH_ATTENTION = 3  # the version whose tiles the plan is made for
HEAD_SIZES = (32, 64, 128, 256)
BACKEND = f"{__name__}.ForestBackend"
_PLAN = "gambit_forest"  # the attribute that Gambit adds to a step's attention metadata


def why_not() -> str | None:
    """Why forest attention cannot be used on this machine; None if it can."""
    if not current_platform.is_cuda():
        return f"it needs a GPU of NVIDIA's, and this vLLM is built for {current_platform.device_type!r}"
    if not current_platform.is_device_capability_family(HOPPER):
        return "it needs a GPU of the Hopper generation (H100, H200)"
    if get_flash_attn_version() != FLASH_ATTENTION:
        return f"it needs FlashAttention {FLASH_ATTENTION}, vLLM would use {get_flash_attn_version()}"
    return None


def register() -> None:
    """In every process that loads the model or reads vLLM's config."""
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def attention_options() -> dict[str, Any]:
    """vLLM's options that choose the backend."""
    register()
    return {"attention_backend": AttentionBackendEnum.CUSTOM.name}


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForestPlan, scale: float, output: torch.Tensor
) -> None:
    """One token of every trace. Queries [traces, heads, width], keys and values [blocks, tokens, KV heads, width]."""
    partial, lse = fa_utils.flash_attn_varlen_func(
        q=query.index_select(0, plan.query_rows),
        k=key,
        v=value,
        max_seqlen_q=plan.most_queries,
        cu_seqlens_q=plan.query_starts,
        max_seqlen_k=plan.most_keys,
        seqused_k=plan.num_keys,
        softmax_scale=scale,
        causal=False,  # the queries of a node are of different traces, and all of its keys are before them
        block_table=plan.block_table,
        return_softmax_lse=True,
        num_splits=1,  # nodes are enough work for all of the GPU
        fa_version=FLASH_ATTENTION,
    )
    kernels.merge(partial, lse, plan, output)


class ForestPlanning:
    """Mixed into a builder of attention metadata: makes the plan of a step, once for all layers."""

    # The builder's own.
    vllm_config: Any
    kv_cache_spec: Any
    device: Any
    num_heads_q: int
    num_heads_kv: int

    supports_update_block_table = False  # the plan is made from the table
    uses_forest = False  # set before each step
    last_plan: ForestPlan | None = None  # of the traces that are in the batch now, in the same rows
    _memory: PlanMemory | None = None
    finest_tokens: int | None = None  # a test's

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)  # type: ignore[misc]
        if self.uses_forest and common_attn_metadata.max_query_len == 1:
            self.last_plan = self.plan_memory().hold(self.plan(common_attn_metadata))
            setattr(metadata, _PLAN, self.last_plan)
        return metadata

    def plan(self, common: Any) -> ForestPlan:
        count, block_tokens = common.num_reqs, self.kv_cache_spec.block_size
        table, num_tokens, most = common.block_table_tensor[:count], common.seq_lens[:count], common.max_seq_len
        if self.last_plan is not None and self.last_plan.num_traces == count:
            return refreshed(self.last_plan, table, num_tokens, block_tokens=block_tokens, most_tokens=most)
        more = {} if self.finest_tokens is None else {"finest_tokens": self.finest_tokens}
        return plan_step(table, num_tokens, block_tokens, self.group_size(), most, **more)

    def plan_memory(self) -> PlanMemory:
        if self._memory is None:
            config = self.vllm_config
            blocks = -(-config.model_config.max_model_len // self.kv_cache_spec.block_size)
            self._memory = PlanMemory(config.scheduler_config.max_num_seqs, blocks, self.group_size(), self.device)
        return self._memory

    def group_size(self) -> int:
        return queries_per_group(self.num_heads_q // self.num_heads_kv)


def plan_step(
    table: torch.Tensor, num_tokens: torch.Tensor, block_tokens: int, group: int, most_tokens: int, **more: int
) -> ForestPlan:
    hashes = common_prefix.prefix_hashes(table, -(-most_tokens // block_tokens))
    full = common_prefix.full_blocks(num_tokens, block_tokens)
    find = kernels.common_blocks if table.is_cuda else common_prefix.common_blocks
    return make_plan(
        table, num_tokens, find(hashes, full), block_tokens=block_tokens, group=group, most_tokens=most_tokens, **more
    )


def plan_of(metadata: Any) -> ForestPlan | None:
    return getattr(metadata, _PLAN, None)


class ForestBuilder(ForestPlanning, FlashAttentionMetadataBuilder):
    """FlashAttention's, with a plan."""


class ForestImpl(FlashAttentionImpl):
    """FlashAttention where there is no plan, and for layers that a plan does not cover."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_covered = (
            self.sliding_window == (-1, -1)
            and self.alibi_slopes is None
            and not self.logits_soft_cap
            and self.sinks is None
            and self.head_size in HEAD_SIZES
            and self.attn_type == AttentionType.DECODER
            and not is_quantized_kv_cache(self.kv_cache_dtype)
            and self.vllm_flash_attn_version == FLASH_ATTENTION
        )

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        plan = plan_of(attn_metadata)
        if plan is None or not self.is_covered:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        keys, values = split_cache(kv_cache, self.head_size)
        attend(query, keys, values, plan, self.scale, output)
        return output


def split_cache(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [blocks, tokens, KV heads, width]: apart in older versions of vLLM, side by side since."""
    if cache.dim() == 5:
        keys, values = cache.unbind(1)
    else:
        keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values


class ForestBackend(FlashAttentionBackend):
    """What vLLM asks for the classes above."""

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> Any:
        return ForestImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return ForestBuilder

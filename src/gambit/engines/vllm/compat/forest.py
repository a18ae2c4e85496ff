"""vLLM's FlashAttention backend that can read shared prefixes once: a plan with each step, used where there is one."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import vllm.v1.attention.backends.fa_utils as fa_utils  # its functions are not there in a build for CPUs
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gambit.engines.vllm import kernels
from gambit.engines.vllm.forest import (
    FEWEST_TRACES,
    FINEST_TOKENS,
    ForestPlan,
    LayerKind,
    common_blocks,
    full_blocks,
    make_plan,
    pays,
    plan_holder,
    prefix_hashes,
    queries_per_group,
    refreshed,
)
from gambit.engines.vllm.messages import DecodeAttention, Sharing
from gambit.errors import EngineError

HOPPER = 90
FLASH_ATTENTION = 3  # the version whose tiles the plan is made for
HEAD_SIZES = (32, 64, 128, 256)
MEASURED_HEAD_SIZES = (128,)  # in whole decode steps on an H200: `auto` trusts its cost model for no other
UNQUANTISED = ("auto", "bfloat16", "float16")  # types of the KV cache
BACKEND = f"{__name__}.ForestBackend"
_PLAN = "gambit_forest"  # the attribute that Gambit adds to a step's attention metadata


def why_not() -> str | None:
    """Returns why forest attention cannot be used on this machine; None if it can."""
    if not current_platform.is_cuda():
        return f"it needs a GPU of NVIDIA's, and this vLLM is built for {current_platform.device_type!r}"
    if not current_platform.is_device_capability_family(HOPPER):
        return "it needs a GPU of the Hopper generation (H100, H200)"
    if get_flash_attn_version() != FLASH_ATTENTION:
        return f"it needs FlashAttention {FLASH_ATTENTION}, vLLM would use {get_flash_attn_version()}"
    return None


def register() -> None:
    """Registers the backend, which every process must that loads the model or reads vLLM's config."""
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def attention_options() -> dict[str, Any]:
    """Returns vLLM's options that choose the backend."""
    register()
    return {"attention_backend": AttentionBackendEnum.CUSTOM.name}


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: ForestPlan, scale: float, output: torch.Tensor
) -> None:
    """Computes attention for one token of every trace.

    Queries are [traces, heads, width], keys and values [blocks, tokens, KV heads, width].
    """
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
    """Makes the plan of a step, once for all layers; mixed into a builder of attention metadata."""

    supports_update_block_table = False  # the plan is made from the table
    uses_forest = False  # set before each step
    last_plan: ForestPlan | None = None  # of the traces that are in the batch now, in the same rows
    _hold: Callable[[ForestPlan], ForestPlan] | None = None
    finest_tokens = FINEST_TOKENS

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)  # type: ignore[misc]
        if self.uses_forest and common_attn_metadata.max_query_len == 1:
            if self._hold is None:
                config = self.vllm_config
                blocks = -(-config.model_config.max_model_len // self.kv_cache_spec.block_size)
                most_traces = config.scheduler_config.max_num_seqs
                self._hold = plan_holder(most_traces, blocks, self.group_size(), self.device)
            self.last_plan = self._hold(self.plan(common_attn_metadata))
            setattr(metadata, _PLAN, self.last_plan)
        return metadata

    def plan(self, common: Any) -> ForestPlan:
        count, block_tokens = common.num_reqs, self.kv_cache_spec.block_size
        table, num_tokens, most = common.block_table_tensor[:count], common.seq_lens[:count], common.max_seq_len
        if self.last_plan is not None and self.last_plan.num_traces == count:
            return refreshed(self.last_plan, table, num_tokens, block_tokens=block_tokens, most_tokens=most)
        return plan_step(table, num_tokens, block_tokens, self.group_size(), most, self.finest_tokens)

    def group_size(self) -> int:
        return queries_per_group(self.num_heads_q // self.num_heads_kv)


def plan_step(
    table: torch.Tensor, num_tokens: torch.Tensor, block_tokens: int, group: int, most_tokens: int,
    finest_tokens: int = FINEST_TOKENS,
) -> ForestPlan:  # fmt: skip
    hashes = prefix_hashes(table, -(-most_tokens // block_tokens))
    find = kernels.common_blocks_on_gpu if table.is_cuda else common_blocks
    shared = find(hashes, full_blocks(num_tokens, block_tokens))
    return make_plan(
        table, num_tokens, shared, block_tokens=block_tokens, group=group, most_tokens=most_tokens,
        finest_tokens=finest_tokens,
    )  # fmt: skip


def plan_of(metadata: Any) -> ForestPlan | None:
    return getattr(metadata, _PLAN, None)


class ForestBuilder(ForestPlanning, FlashAttentionMetadataBuilder):
    """FlashAttention's builder, with a plan."""


class ForestImpl(FlashAttentionImpl):
    """Runs FlashAttention where there is no plan, and for layers that a plan does not cover."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_covered = (
            self.sliding_window == (-1, -1)
            and self.alibi_slopes is None
            and not self.logits_soft_cap
            and self.sinks is None
            and self.head_size in HEAD_SIZES
            and self.attn_type == AttentionType.DECODER
            and self.kv_cache_dtype in UNQUANTISED
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
    """Returns keys and values, [blocks, tokens, KV heads, width]: apart in older vLLM, side by side since."""
    if cache.dim() == 5:
        return cache.unbind(1)
    return cache.transpose(1, 2).split(head_size, dim=-1)


class ForestBackend(FlashAttentionBackend):
    """Names the classes above for vLLM."""

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> Any:
        return ForestImpl

    @staticmethod
    def get_builder_cls() -> Any:
        return ForestBuilder


# -- on and off, step by step ----------------------------------------------------------------------------------------


CHECKED_TRACES, CHECKED_BLOCKS = 24, 96
_LOG = logging.getLogger(__name__)
MOST_ERROR = 0.02  # of the result's norm: a rounding to bfloat16 is 0.002


class ForestSwitch:
    """Turns forest attention on and off: in a model runner's builders of metadata and its choice of CUDA graphs.

    vLLM has stock attention in its CUDA graphs of whole steps. For steps with forest attention graphs of the same
    sizes are captured once more. Model runner V1 keeps its graphs elsewhere: there such steps use the graphs of the
    pieces between attention layers, as vLLM itself does for steps that read prompts.
    """

    def __init__(self, runner: Any, wish: DecodeAttention) -> None:
        self.wish = wish
        self.num_steps = 0  # with forest attention
        self._builders = _builders(runner)
        specs = [builder.kv_cache_spec for builder in self._builders]
        self.layer_kinds = [
            LayerKind(len(builder.layer_names), spec.page_size_bytes // spec.block_size, builder.num_heads_kv)
            for builder, spec in zip(self._builders, specs, strict=True)
        ]
        sizes = {builder.headdim for builder in self._builders}
        self._is_measured = sizes <= {*MEASURED_HEAD_SIZES} and len(self._builders) == sum(map(len, runner.attn_groups))
        self.is_on = False
        self._rows: list[str] = []
        self._manager = getattr(runner, "cudagraph_manager", None)
        self._stock_graphs: dict[Any, Any] = {}
        self.graphs: dict[Any, Any] = {}  # with forest attention
        _wrap_dispatch(runner, self)

    def choose(self, sharing: Sharing | None, rows: list[str]) -> None:
        """Chooses the attention of the next step.

        `rows`: its requests; while they stay the same the plan does, but for the ends of traces.
        """
        if rows != self._rows:
            self._rows = rows
            self._forget_plans()
        is_wanted = self.wish is DecodeAttention.FOREST
        if self.wish is DecodeAttention.AUTO and sharing is not None and self._is_measured:
            is_wanted = pays(sharing, self.layer_kinds, has_graphs=bool(self.graphs))
        self.is_on = is_wanted and bool(self._builders)
        self.num_steps += self.is_on
        self._turn(self.is_on)

    def _forget_plans(self) -> None:
        for builder in self._builders:
            builder.last_plan = None

    def _turn(self, is_on: bool) -> None:
        for builder in self._builders:
            builder.uses_forest = is_on
        if self.graphs:
            self._manager.graphs = self.graphs if is_on else self._stock_graphs

    def capture(self, runner: Any) -> None:
        """Captures graphs of whole decode steps, after vLLM has captured its own."""
        is_useless = self.wish is DecodeAttention.AUTO and not self._is_measured
        if self._manager is None or not self._builders or not self._manager.graphs or is_useless:
            return
        wanted = self._manager._capture_descs
        self._stock_graphs, self._manager.graphs = self._manager.graphs, {}
        self._manager._capture_descs = {CUDAGraphMode.FULL: [
            desc for desc in wanted[CUDAGraphMode.FULL]
            if desc.uniform_token_count == 1 and desc.num_reqs >= FEWEST_TRACES
        ]}  # fmt: skip
        try:
            self._turn(True)
            runner.capture_model()
            self.graphs = self._manager.graphs
        finally:
            self._manager._capture_descs, self._manager.graphs = wanted, self._stock_graphs
            self._turn(False)
            self._forget_plans()

    def check(self) -> None:
        """Compares forest with stock attention on random data in the model's shape; compiles the kernels on the way."""
        for builder in self._builders:
            if (error := forest_error(builder)) > MOST_ERROR:
                raise EngineError(
                    f"forest attention differs from vLLM's by {error:.3f} of the result on random data (at most "
                    f"{MOST_ERROR}): use the engine option attention=stock, and report the versions"
                )


def _builders(runner: Any) -> list[Any]:
    """Returns the builders that have a plan and whose layers can all use it."""
    found = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
    layers = runner.vllm_config.compilation_config.static_forward_context
    covered = [
        builder for builder in found
        if isinstance(builder, ForestPlanning) and all(layers[name].impl.is_covered for name in builder.layer_names)
    ]  # fmt: skip
    if len(covered) < len(found):
        _LOG.warning("forest attention covers %d of %d kinds of attention layers; the others use vLLM's own (sliding "
                     "windows, sinks, ALiBi, soft caps and other head sizes)", len(covered), len(found))  # fmt: skip
    return covered


def _wrap_dispatch(runner: Any, switch: ForestSwitch) -> None:
    """Has vLLM use no graph of a whole step but those with forest attention, while the switch is on."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:  # model runner V2
        dispatch = manager.dispatch

        def dispatch_v2(num_reqs: int, num_tokens: int, uniform: int | None, *args: Any, **kwargs: Any) -> Any:
            found = dispatch(num_reqs, num_tokens, uniform, *args, **kwargs)
            if switch.is_on and found not in switch.graphs:
                return dispatch(num_reqs, num_tokens, None, *args, **kwargs)
            return found

        manager.dispatch = dispatch_v2
    elif (dispatcher := getattr(runner, "cudagraph_dispatcher", None)) is not None:
        dispatch = dispatcher.dispatch

        def dispatch_v1(*args: Any, **kwargs: Any) -> Any:
            if switch.is_on:
                kwargs["invalid_modes"] = {CUDAGraphMode.FULL, *(kwargs.get("invalid_modes") or ())}
            return dispatch(*args, **kwargs)

        dispatcher.dispatch = dispatch_v1


@torch.inference_mode()
def forest_error(builder: Any) -> float:
    """Returns the error, as a share of the result's norm, on a random forest in the shape of a builder's layers."""
    device, size = builder.device, builder.kv_cache_spec.block_size
    generator = torch.Generator(device).manual_seed(0)
    heads = (builder.num_heads_q, builder.num_heads_kv, builder.headdim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(builder.kv_cache_spec.dtype)

    table, num_tokens = _dummy_forest(size, device)
    query = random(CHECKED_TRACES, heads[0], heads[2])
    key, value = (random(int(table.max()) + 1, size, heads[1], heads[2]) for _ in range(2))
    most, scale = int(num_tokens.max()), heads[2] ** -0.5
    found, expected = torch.empty_like(query), torch.empty_like(query)
    attend(query, key, value, plan_step(table, num_tokens, size, builder.group_size(), most), scale, found)
    fa_utils.flash_attn_varlen_func(
        q=query, k=key, v=value, out=expected, max_seqlen_q=1, max_seqlen_k=most, seqused_k=num_tokens,
        cu_seqlens_q=torch.arange(CHECKED_TRACES + 1, dtype=torch.int32, device=device), softmax_scale=scale,
        causal=True, block_table=table, fa_version=FLASH_ATTENTION,
    )  # fmt: skip
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _dummy_forest(block_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tables and lengths of traces that part at different depths: pairs late, fours earlier, and so on."""
    rows, columns = torch.arange(CHECKED_TRACES)[:, None], torch.arange(CHECKED_BLOCKS)[None, :]
    family = rows // (1 << (5 - columns * 6 // CHECKED_BLOCKS))  # whose block it is: all share the first ones
    blocks = 1 + columns * CHECKED_TRACES + family
    num_tokens = CHECKED_BLOCKS * block_tokens - rows[:, 0] % block_tokens
    return blocks.int().to(device), num_tokens.int().to(device)

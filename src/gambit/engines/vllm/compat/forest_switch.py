"""Turns forest attention on and off from step to step, in the worker, and checks it against stock attention once."""

from __future__ import annotations

import logging
from typing import Any

import torch
import vllm.v1.attention.backends.fa_utils as fa_utils
from vllm.config.compilation import CUDAGraphMode

from gambit.engines.vllm.compat.forest_backend import FLASH_ATTENTION, ForestPlanning, attend, plan_step
from gambit.engines.vllm.forest.gate import FEWEST_TRACES, LayerKind, pays
from gambit.engines.vllm.messages import DecodeAttention, Sharing
from gambit.errors import EngineError

CHECKED_TRACES, CHECKED_BLOCKS = 24, 96
_LOG = logging.getLogger(__name__)
MOST_ERROR = 0.02  # of the result's norm: a rounding to bfloat16 is 0.002


class ForestSwitch:
    """Over the attention metadata builders of a model runner, and its choice of CUDA graphs.

    vLLM has stock attention in its CUDA graphs of whole steps. For steps with forest attention graphs of the same
    sizes are captured once more. Model runner V1 keeps its graphs elsewhere: there such steps use the graphs of the
    pieces between attention layers, as vLLM itself does for steps that read prompts.
    """

    def __init__(self, runner: Any, wish: DecodeAttention) -> None:
        self.wish = wish
        self.num_steps = 0  # with forest attention
        self._builders = _builders(runner)
        self.layer_kinds = [_layer_kind(builder) for builder in self._builders]
        self.is_on = False
        self._rows: list[str] = []
        self._manager = getattr(runner, "cudagraph_manager", None)
        self._stock_graphs: dict[Any, Any] = {}
        self.graphs: dict[Any, Any] = {}  # with forest attention
        _wrap_dispatch(runner, self)

    def choose(self, sharing: Sharing | None, rows: list[str]) -> None:
        """Before a step. `rows`: its requests; while they stay the same the plan does, but for the ends of traces."""
        if rows != self._rows:
            self._rows = rows
            self._forget_plans()
        is_wanted = self.wish is DecodeAttention.FOREST or (self.wish is DecodeAttention.AUTO and self._pays(sharing))
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
        """Graphs of whole decode steps, after vLLM has captured its own."""
        if self._manager is None or not self._builders or not self._manager.graphs:
            return
        wanted = self._manager._capture_descs
        self._stock_graphs, self._manager.graphs = self._manager.graphs, {}
        self._manager._capture_descs = {
            CUDAGraphMode.FULL: [desc for desc in wanted[CUDAGraphMode.FULL] if _is_decode(desc)]
        }
        try:
            self._turn(True)
            runner.capture_model()
            self.graphs = self._manager.graphs
        finally:
            self._manager._capture_descs, self._manager.graphs = wanted, self._stock_graphs
            self._turn(False)
            self._forget_plans()

    def _pays(self, sharing: Sharing | None) -> bool:
        return sharing is not None and pays(sharing, self.layer_kinds, has_graphs=bool(self.graphs))

    def check(self) -> None:
        """Forest against stock attention on random data, in the model's shape; compiles the kernels on the way."""
        for builder in self._builders:
            if (error := forest_error(builder)) > MOST_ERROR:
                raise EngineError(
                    f"forest attention differs from vLLM's by {error:.3f} of the result on random data (at most "
                    f"{MOST_ERROR}): use the engine option attention=stock, and tell us the versions"
                )


def _is_decode(desc: Any) -> bool:
    return desc.uniform_token_count == 1 and desc.num_reqs >= FEWEST_TRACES


def _layer_kind(builder: Any) -> LayerKind:
    spec = builder.kv_cache_spec
    return LayerKind(len(builder.layer_names), spec.page_size_bytes // spec.block_size, builder.num_heads_kv)


def _builders(runner: Any) -> list[Any]:
    """Those with a plan, whose layers can all use it."""
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
    """While the switch is on, no graph of a whole step but those with forest attention."""
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
    """Of the result's norm, on a random forest in the shape of a builder's layers."""
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
    """Traces that part at different depths: pairs late, fours earlier, and so on."""
    rows, columns = torch.arange(CHECKED_TRACES)[:, None], torch.arange(CHECKED_BLOCKS)[None, :]
    family = rows // (1 << (5 - columns * 6 // CHECKED_BLOCKS))  # whose block it is: all share the first ones
    blocks = 1 + columns * CHECKED_TRACES + family
    num_tokens = CHECKED_BLOCKS * block_tokens - rows[:, 0] % block_tokens
    return blocks.int().to(device), num_tokens.int().to(device)

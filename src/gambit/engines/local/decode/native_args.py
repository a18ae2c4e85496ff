"""Hands a model's layers to the compiled decode step (`decode.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from gambit.engines.local.decode.native import LayerArgs, NativeDecode, PoolArgs, StepArgs

if TYPE_CHECKING:
    from gambit.engines.local.attention import DecodePlan, LayerCall, LayerStore
    from gambit.engines.local.decode.torch_decode import Layer, Output, Rotation, TorchStack

BLOCK, FEW, TOGETHER = 32, 4, 32  # as in decode.c
MOST_BYTES = 2 << 30  # of weights: they are in memory twice, as transformers' modules need them and as read here
CACHED_BYTES = 32 << 20  # of weights that even one thread alone goes through faster than torch does with all of them


class CompiledStack:
    """All layers and the output layer; holds the weights a second time, in the order in which they are read."""

    def __init__(self, stack: TorchStack, decode: NativeDecode) -> None:
        self._decode, self._torch = decode, stack
        self._is_cached = stack.nbytes <= CACHED_BYTES
        self._kept: list[torch.Tensor] = []  # what the structures below point into
        layer = stack.layers[0]
        self._kv_heads, self._heads, self._dim = layer.kv_heads, layer.heads, layer.head_dim
        self._hidden = layer.qkv.weight.shape[0]
        self._inner = -(-layer.down.weight.shape[0] // decode.lanes) * decode.lanes
        self._vocabulary = len(stack.head_weight)
        layers = [self._layer(*each) for each in zip(stack.layers, stack.calls, strict=True)]
        self._layers = (LayerArgs * len(layers))(*layers)
        self._norm, self._eps = self._keep(stack.norm.weight), stack.norm.eps
        self._head = self._panels(stack.head_weight.t())
        self._head_bias = self._bias(stack.head_bias)
        self._scratch = torch.zeros(0)

    def _layer(self, layer: Layer, call: LayerCall) -> LayerArgs:
        missing = self._inner - layer.down.weight.shape[0]
        return LayerArgs(
            attention_norm=self._keep(layer.before_attention.weight), attention_eps=layer.before_attention.eps,
            qkv=self._panels(layer.qkv.weight), qkv_bias=self._bias(layer.qkv.bias),
            head_norms=None if layer.head_norms is None else self._keep(layer.head_norms.weight),
            head_eps=0.0 if layer.head_norms is None else layer.head_norms.eps,
            output=self._panels(layer.output.weight), output_bias=self._bias(layer.output.bias),
            mlp_norm=self._keep(layer.before_mlp.weight), mlp_eps=layer.before_mlp.eps,
            gates_ups=self._gates(layer.gate_up.weight),
            gates_ups_bias=None if layer.gate_up.bias is None else self._gates(layer.gate_up.bias[None]),
            down=self._panels(nn.functional.pad(layer.down.weight, (0, 0, 0, missing))),
            down_bias=self._bias(layer.down.bias), scaling=call.scaling,
        )  # fmt: skip

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _panels(self, matrix: torch.Tensor) -> int:
        return self._keep(panels(matrix, 2 * self._decode.lanes))

    def _gates(self, matrix: torch.Tensor) -> int:
        return self._keep(gate_panels(matrix, self._decode.lanes))

    def _bias(self, bias: torch.Tensor | None) -> int | None:
        return None if bias is None else self._panels(bias[None])

    def run(self, x: torch.Tensor, rotation: Rotation, plan: DecodePlan, inner: Sequence[int]) -> Output:
        threads = torch.get_num_threads()
        # Threads share rows, torch's share columns: with few rows and large weights most of these would only wait.
        if not self._is_cached and 2 * -(-len(x) // FEW) < threads:
            return self._torch.run(x, rotation, plan, inner)
        self._find_pools(plan, like=x.new_empty(1, self._kv_heads, self._dim))
        states, logits, kept = torch.empty_like(x), x.new_empty(len(x), self._vocabulary), []
        step = self._step(x, rotation, plan, threads)
        for step.first, step.last in pairwise([0, *inner, len(self._layers)]):
            if step.last == len(self._layers):
                step.states, step.logits = states.data_ptr(), logits.data_ptr()
            self._decode(step)
            if step.last < len(self._layers):
                kept.append(x.clone())
        return states, logits, kept

    def _step(self, x: torch.Tensor, rotation: Rotation, plan: DecodePlan, threads: int) -> StepArgs:
        scratch, of_thread = self._scratch_for(threads, plan)
        return StepArgs(
            rows=len(x), hidden=self._hidden, inner=self._inner, vocabulary=self._vocabulary, kv_heads=self._kv_heads,
            group=self._heads // self._kv_heads, dim=self._dim, threads=threads,
            layers=ctypes.addressof(self._layers), norm=self._norm, head=self._head, head_bias=self._head_bias,
            cosines=rotation[0].data_ptr(), signed_sines=rotation[1].data_ptr(), own_at=plan.own.data_ptr(),
            slots=plan.row_slots.data_ptr(), prompt_lengths=plan.prompt_lengths.data_ptr(), x=x.data_ptr(),
            scratch=scratch.data_ptr(), scratch_floats=of_thread, eps=self._eps,
        )  # fmt: skip

    def _find_pools(self, plan: DecodePlan, like: torch.Tensor) -> None:
        """They move when they grow."""
        for index, layer in enumerate(self._layers):
            layer.own, layer.prompt = _pools(plan.store.layer(index, like, like))

    def _scratch_for(self, threads: int, plan: DecodePlan) -> tuple[torch.Tensor, int]:
        """What all threads need, and one of them; zeros in the beginning, since rows that do not exist are read too."""
        pairs = (self._heads // self._kv_heads + 1) // 2 * 2
        of_row = self._hidden + (2 * self._heads + 2 * self._kv_heads) * self._dim + self._inner
        attention = self._dim * (1 + 2 * pairs) + 2 * (plan.prompt_length + plan.own_length)
        floats = TOGETHER * of_row + attention
        if len(self._scratch) < threads * floats:
            self._scratch = torch.zeros(threads * floats * 3 // 2)
        return self._scratch, floats


def can_compile(stack: TorchStack) -> bool:
    """Whether `decode.c` computes what these layers ask for, and there is memory for it."""
    are_alike = len({_shape(layer) for layer in stack.layers}) == 1
    return are_alike and all(map(_is_served, stack.layers, stack.calls)) and stack.nbytes <= MOST_BYTES


def _shape(layer: Layer) -> tuple[object, ...]:
    return layer.qkv.weight.shape, layer.down.weight.shape, layer.heads, layer.kv_heads


def _is_served(layer: Layer, call: LayerCall) -> bool:
    gates, weight = torch.linspace(-9, 9, 19), layer.qkv.weight
    return (
        (weight.device.type, weight.dtype) == ("cpu", torch.float32)
        and layer.head_dim % BLOCK == 0
        and (call.sliding_window, call.softcap, call.sinks) == (None, None, None)
        and torch.equal(layer.activation(gates), nn.functional.silu(gates))  # it has several classes
    )


def panels(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """[depth, columns] as [panel, depth, width], filled up with zeros."""
    depth, columns = matrix.shape
    padded = nn.functional.pad(matrix, (0, -columns % width))
    return padded.view(depth, -1, width).transpose(0, 1).contiguous()


def gate_panels(matrix: torch.Tensor, lanes: int) -> torch.Tensor:
    """The same of [depth, gates then ups]; each panel has `lanes` columns from the gates, then those of their ups."""
    depth, columns = matrix.shape
    both = nn.functional.pad(matrix.view(depth, 2, columns // 2), (0, -(columns // 2) % lanes))
    return panels(both.view(depth, 2, -1, lanes).transpose(1, 2).reshape(depth, -1), 2 * lanes)


def _pools(store: LayerStore) -> tuple[PoolArgs, PoolArgs]:
    own = PoolArgs(store.row_keys.data_ptr(), store.row_values.data_ptr(), store.row_keys.shape[3])
    return own, PoolArgs(store.prompt_keys.data_ptr(), store.prompt_values.data_ptr(), store.prompt_keys.shape[3])

"""The decode step of Llama-like models in few large operations, proven against the model before it is used.

Most causal LMs have one structure: RMSNorm, rotary positions, grouped queries (with or without norms and biases), a
gated MLP. Their decode step is written out here: joined projections, residuals added by the product itself, no module
calls. Weights stay in memory once: transformers' modules, which compute the prompts, become slices of them. Models that
`native.py` serves run a step that GCC has compiled instead, for which their weights are kept once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from gambit.engines.local.attention import DecodePlan, ForwardOutput, LayerCall
from gambit.engines.local.caches import ModelRunner, Proof, is_alike
from gambit.engines.local.native import CompiledStep, can_compile, native_library

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines, and sines with the sign of the first half in them

_ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
_MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
_NORMS = ["input_layernorm", "post_attention_layernorm"]
_HEAD_NORMS = ["self_attn.q_norm", "self_attn.k_norm"]


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Linear layers of the same input, joined into one product."""

    weight: torch.Tensor  # [in, out]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        residual.addmm_(x, self.weight)
        if self.bias is not None:
            residual.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm over the last dimension; a weight of two dimensions is one per head."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 1:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x, self.weight.shape[-1:], None, self.eps).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer."""

    call: LayerCall  # as seen in a pass of the model's modules
    before_attention: Norm
    qkv: FusedLinear
    head_norms: Norm | None  # of queries and keys side by side
    output: FusedLinear
    before_mlp: Norm
    gate_up: FusedLinear
    activation: Callable[[torch.Tensor], torch.Tensor]
    down: FusedLinear
    heads: int
    kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.qkv.weight.shape[1] // (self.heads + 2 * self.kv_heads)

    @property
    def nbytes(self) -> int:
        return sum(linear.weight.nbytes for linear in (self.qkv, self.output, self.gate_up, self.down))

    def forward(self, index: int, x: torch.Tensor, rotation: Rotation, plan: DecodePlan) -> None:
        """Adds the layer's outputs to the residual stream x [n, hidden], in place."""
        n = len(x)
        qkv = self.qkv(self.before_attention(x)).view(n, self.heads + 2 * self.kv_heads, -1)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        if self.head_norms is not None:
            qk = self.head_norms(qk)
        cosines, signed_sines = rotation
        qk = torch.addcmul(qk * cosines, qk.roll(qk.shape[-1] // 2, -1), signed_sines)
        q = qk[:, : self.heads].view(n, self.kv_heads, -1, qk.shape[-1])
        self.output.add_to(x, plan.attend_rows(index, q, qk[:, self.heads :], v, self.call).view(n, -1))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        self.down.add_to(x, self.activation(gate).mul_(up))


class FusedDecoder:
    """The decode step of a whole model: in torch's operations, or compiled where that is faster."""

    def __init__(self, model: PreTrainedModel, calls: Sequence[LayerCall]) -> None:
        trunk: Any = model.base_model
        head: Any = model.get_output_embeddings()
        self.layers = [_fuse(layer, call) for layer, call in zip(trunk.layers, calls, strict=True)]
        self.norm, self.head = _norm(trunk.norm), FusedLinear(head.weight.t(), head.bias)
        self.compiled: CompiledStep | None = None
        self._embed, self._rotary = trunk.embed_tokens, trunk.rotary_emb
        self._table = _rotary_table(model, trunk.rotary_emb)

    @property
    def nbytes(self) -> int:
        """The bytes of the matrices that a step reads."""
        return self.head.weight.nbytes + sum(layer.nbytes for layer in self.layers)

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: DecodePlan, inner: Sequence[int] = ()
    ) -> ForwardOutput:
        """Computes one token a row; tokens and positions are [n, 1]. `inner`: layers whose states are returned too."""
        x = self._embed(tokens)
        if self._table is None:
            rotation = _signed(*self._rotary(x, positions))
        else:
            rotation = self._table[0][positions], self._table[1][positions]  # [n, 1, dim], which serve all heads
        run = self._run if self.compiled is None or self.compiled.is_slow(len(x)) else self.compiled.run
        return run(x[:, 0], rotation, plan, inner)

    def _run(self, x: torch.Tensor, rotation: Rotation, plan: DecodePlan, inner: Sequence[int]) -> ForwardOutput:
        """Runs all layers in torch; x [n, hidden] is overwritten."""
        kept = []
        for index, layer in enumerate(self.layers):
            if index in inner:
                kept.append(x.clone())
            layer.forward(index, x, rotation, plan)
        states = self.norm(x)
        return ForwardOutput(states, self.head(states), kept)


def _rotary_table(model: PreTrainedModel, rotary: Any) -> Rotation | None:
    """Returns the rotations of all positions; None if they depend on more, or on a GPU, whose memory is scarce."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if model.device.type != "cpu" or getattr(rotary, "rope_type", None) != "default" or not positions:
        return None
    cosines, signed_sines = _signed(*rotary(torch.zeros(1, dtype=model.dtype), torch.arange(positions)[None]))
    return cosines[0], signed_sines[0]


def _signed(cosines: torch.Tensor, sines: torch.Tensor) -> Rotation:
    first, second = sines.chunk(2, dim=-1)
    return cosines.contiguous(), torch.cat((-first, second), dim=-1)


def fused_if_alike(runner: ModelRunner, last_position: int) -> FusedDecoder | None:
    """Returns a fused decoder if the model has the structure and a short pass agrees with its modules, else None.

    One row is at the end of the context, so that errors in rotations show too.
    """
    model = runner.model
    if not can_fuse(model):
        return None
    proof = Proof(runner, model, last_position)
    fused = FusedDecoder(model, [*proof.prefill.calls.values()])
    if not is_alike(fused.forward(*proof.step), proof.output):
        return None
    if can_compile(fused) and not isinstance(library := native_library(), str):
        fused.compiled = CompiledStep(fused, library)
        if not is_alike(fused.forward(*proof.step), proof.output):
            fused.compiled = None
    return fused


def can_fuse(model: PreTrainedModel) -> bool:
    """Compares the model's modules. Equal ones may still compute differently: `fused_if_alike` finds out."""
    modules = dict(model.base_model.named_children())
    return (
        set(modules) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and isinstance(modules["embed_tokens"], nn.Embedding)
        and type(model.get_output_embeddings()) is nn.Linear
        and _is_norm(modules["norm"])
        and all(map(_is_layer, modules["layers"].children()))
    )


def _is_layer(layer: nn.Module) -> bool:
    inner = {name: module for name, module in layer.named_modules() if name}
    leaves = {name: module for name, module in inner.items() if not [*module.children()]}
    heads = [name for name in _HEAD_NORMS if name in leaves]
    return (
        set(leaves) == {*_ATTENTION, *_MLP, *_NORMS, *heads, "mlp.act_fn"}
        and len(heads) in (0, 2)
        and all(type(leaves[name]) is nn.Linear for name in (*_ATTENTION, *_MLP))  # none quantised or adapted
        and all(len({leaves[name].bias is None for name in joined}) == 1 for joined in (_ATTENTION[:3], _MLP[:2]))
        and all(_is_norm(leaves[name]) for name in (*_NORMS, *heads))
        and hasattr(inner["self_attn"], "head_dim")
        and not [p for each in (layer, inner["self_attn"], inner["mlp"]) for p in each.parameters(recurse=False)]
    )


def _is_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and isinstance(getattr(module, "variance_epsilon", None), float)


def _fuse(layer: Any, call: LayerCall) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    dim = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // dim, attention.k_proj.out_features // dim
    return Layer(
        call=call,
        before_attention=_norm(layer.input_layernorm),
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=_head_norms(attention, heads, kv_heads) if hasattr(attention, "q_norm") else None,
        output=_join(attention.o_proj),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        activation=mlp.act_fn,
        down=_join(mlp.down_proj),
        heads=heads,
        kv_heads=kv_heads,
    )


def _join(*linears: nn.Linear) -> FusedLinear:
    """Puts the weights side by side and makes the modules slices of them: a model is never in memory twice."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if weight.device.type == "cpu":
        weight = weight.t().contiguous().t()  # a CPU multiplies a few rows a fifth faster this way round
    for linear, own in zip(linears, torch.split(weight, [each.out_features for each in linears]), strict=True):
        linear.weight = nn.Parameter(own, requires_grad=False)
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
    return FusedLinear(weight.t(), bias)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


def _head_norms(attention: Any, heads: int, kv_heads: int) -> Norm:
    """Joins the norms of queries and keys. Norms over more than single heads fail the proof."""
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat((q.weight.detach().expand(heads, -1), k.weight.detach().expand(kv_heads, -1)))
    return Norm(weight, q.variance_epsilon)

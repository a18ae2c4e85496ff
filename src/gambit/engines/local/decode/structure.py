"""Finds out whether a model has the structure that the fused decode step is written for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}


def can_fuse(model: PreTrainedModel) -> bool:
    """By structure alone. Two models of one may still compute differently: `fused_if_alike` finds that out."""
    parts = dict(model.base_model.named_children())
    return (
        set(parts) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and isinstance(parts["embed_tokens"], nn.Embedding)
        and type(model.get_output_embeddings()) is nn.Linear
        and _is_norm(parts["norm"])
        and all(map(_is_layer, parts["layers"].children()))
    )


def _is_layer(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    if set(children) != {"self_attn", "mlp", *_LAYER_NORMS}:
        return False
    attention, mlp = dict(children["self_attn"].named_children()), dict(children["mlp"].named_children())
    return (
        set(attention) in (_ATTENTION, _ATTENTION | _HEAD_NORMS)
        and set(mlp) == {*_MLP, "act_fn"}
        and _can_join(attention["q_proj"], attention["k_proj"], attention["v_proj"])
        and _can_join(mlp["gate_proj"], mlp["up_proj"])
        and _can_join(attention["o_proj"])
        and _can_join(mlp["down_proj"])
        and all(_is_norm(children[name]) for name in _LAYER_NORMS)
        and all(_is_norm(attention[name]) for name in _HEAD_NORMS & set(attention))
        and hasattr(children["self_attn"], "head_dim")
        and not [*layer.parameters(recurse=False), *children["self_attn"].parameters(recurse=False)]
    )


def _can_join(*modules: nn.Module) -> bool:
    """Plain linear layers, none quantised or adapted."""
    return all(type(m) is nn.Linear for m in modules) and len({m.bias is None for m in modules}) == 1


def _is_norm(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and isinstance(getattr(module, "variance_epsilon", None), float)

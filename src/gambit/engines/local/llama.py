"""Llama, Qwen2 and Qwen3 read straight from a folder: importing transformers' models takes longer than a search.

The modules have the names of transformers' own and compute the same numbers (tests compare them bit by bit). A folder
whose config.json requests more than is written out here is left to transformers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Self

import torch
from pydantic import AliasChoices, BaseModel, Field
from safetensors.torch import load_file
from torch import nn

from gambit.engines.local.attention import AttentionPlan, LayerCall
from gambit.models.files import weight_files

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [n, length, head dim]


class LlamaShape(BaseModel, frozen=True):
    """The fields of a config.json that describe the modules, and those that must be plain or absent."""

    model_type: Literal["llama", "qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    dtype: Literal["float32", "float16", "bfloat16"] = Field(validation_alias=AliasChoices("dtype", "torch_dtype"))
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_sliding_window: Literal[False] = False
    layer_types: Sequence[Literal["full_attention"]] | None = None
    rope_scaling: None = None
    quantization_config: None = None
    auto_map: None = None

    def get_text_config(self) -> Self:
        """Returns itself: this is a config of text alone. transformers' configs have the method too."""
        return self


def _read_shape(folder: Path) -> LlamaShape | None:
    """Reads a folder's config.json; None if it requests more than is written out here."""
    try:
        raw = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw.get("rope_theta")}
        if set(rope) != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
            return None
        dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        return LlamaShape.model_validate(raw | {"rope_theta": rope["rope_theta"], "head_dim": dim})
    except (OSError, KeyError, TypeError, ValueError):
        return None


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled.to(x.dtype)


class RotaryEmbedding(nn.Module):
    rope_type = "default"

    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        self._dim, self._theta = config.head_dim, config.rope_theta

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Rotation:
        exponents = torch.arange(0, self._dim, 2, dtype=torch.float) / self._dim
        angles = positions[..., None].float() * (1.0 / self._theta**exponents).to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaShape, index: int) -> None:
        super().__init__()
        self.head_dim, self._index = config.head_dim, index
        queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        has_biases = config.model_type == "qwen2"
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=has_biases)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=has_biases)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=has_biases)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self._call = LayerCall(config.head_dim**-0.5)
        if config.model_type == "qwen3":
            self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation, pool: AttentionPlan) -> torch.Tensor:
        heads = *x.shape[:-1], -1, self.head_dim
        q, k, v = (project(x).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = _rotated(q.transpose(1, 2), rotation), _rotated(k.transpose(1, 2), rotation), v.transpose(1, 2)
        out: torch.Tensor = self.o_proj(pool.attend(self._index, q, k, v, self._call).reshape(*x.shape[:-1], -1))
        return out


def _rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cosines, sines = (numbers.unsqueeze(1) for numbers in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


class Mlp(nn.Module):
    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaShape, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = Mlp(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation, pool: AttentionPlan) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, pool)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        # A weight is passed, since drawing one at random on the meta device imports torch's compiler.
        empty = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=empty)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)


class LlamaModel(nn.Module):
    """A causal LM whose attention is the pool's."""

    def __init__(self, config: LlamaShape) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def base_model(self) -> Trunk:
        return self.model

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        pool: AttentionPlan,
        output_hidden_states: bool = False,
        **_: object,
    ) -> SimpleNamespace:
        """Returns, under transformers' names, the last position's logits and the inputs of each layer.

        transformers' other options are ignored: this model always runs without a cache.
        """
        x = self.model.embed_tokens(input_ids)
        rotation = self.model.rotary_emb(x, position_ids)
        entered = []
        for layer in self.model.layers:
            if output_hidden_states:
                entered.append(x)
            x = layer(x, rotation, pool)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)[:, -1:]), hidden_states=entered)


def read_llama(folder: Path, dtype: torch.dtype | str) -> LlamaModel | None:
    """Loads a folder's model on the CPU; None if transformers has to read it. `dtype` "auto": the model's own."""
    config, files = _read_shape(folder), weight_files(str(folder))
    if config is None or not files:
        return None
    own_dtype = dtype if isinstance(dtype, torch.dtype) else getattr(torch, config.dtype)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    # Some old checkpoints carry the rotary frequencies, which are computed here.
    weights = {name: tensor.to(own_dtype) for name, tensor in found.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = LlamaModel(config)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != expected:
        return None
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False).eval()

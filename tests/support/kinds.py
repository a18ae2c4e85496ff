"""Tiny random models of every kind of layer that is in use, made from transformers' own configs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf

from support.tiny import livened, tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 0}
SMALL = {
    **IDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
HEADS = {**SMALL, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
STATE = {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
LATENT = {
    **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of model, with the names under which people know it."""

    models: str
    layers: str
    make: Callable[[], torch.nn.Module]
    is_core: bool = False  # tested with every change, not every week alone
    has_inner_states: bool = True  # a token has one state in every layer

    def build(self) -> torch.nn.Module:
        torch.manual_seed(1)
        return livened(self.make())


KINDS = {
    "qwen3_next": Kind(
        "Qwen3-Next", "gated DeltaNet, attention, experts",
        lambda: hf.Qwen3NextForCausalLM(
            hf.Qwen3NextConfig(**HEADS, **DELTA, **EXPERTS, shared_expert_intermediate_size=16)
        ),
        is_core=True,
    ),
    "qwen3_5": Kind(
        "Qwen3.5, 3.6, 3.8", "gated DeltaNet, attention",
        lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**HEADS, **DELTA)),
    ),
    "qwen3_5_moe": Kind(
        "Qwen3.5 with experts", "gated DeltaNet, attention, experts",
        lambda: hf.Qwen3_5MoeForCausalLM(
            hf.Qwen3_5MoeTextConfig(**HEADS, **DELTA, **EXPERTS, shared_expert_intermediate_size=16)
        ),
    ),
    "olmo_hybrid": Kind(
        "OLMo hybrid", "gated DeltaNet, attention",
        lambda: hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**HEADS, **DELTA))
    ),
    "nemotron_h": Kind(
        "Nemotron-H, Nemotron 3", "Mamba-2, attention",
        lambda: hf.NemotronHForCausalLM(hf.NemotronHConfig(
            **{name: value for name, value in HEADS.items() if name != "num_hidden_layers"}, mamba_num_heads=4,
            mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=8,
            layers_block_type=["mamba", "attention", "mamba", "mlp"],
        )),
        is_core=True,
    ),
    "mamba2": Kind(
        "Mamba-2", "Mamba-2 alone",
        lambda: hf.Mamba2ForCausalLM(hf.Mamba2Config(**STATE, num_heads=8, head_dim=8, n_groups=2, chunk_size=8)),
        is_core=True,
    ),
    "mamba": Kind("Mamba", "Mamba alone", lambda: hf.MambaForCausalLM(hf.MambaConfig(**STATE))),
    "falcon_mamba": Kind(
        "Falcon Mamba", "Mamba alone", lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**STATE))
    ),
    "falcon_h1": Kind(
        "Falcon-H1", "Mamba-2 and attention in each layer",
        lambda: hf.FalconH1ForCausalLM(hf.FalconH1Config(**HEADS, **{**MAMBA, "mamba_d_head": 8}, mamba_d_ssm=32)),
    ),
    "bamba": Kind(
        "Bamba", "Mamba-2, attention",
        lambda: hf.BambaForCausalLM(hf.BambaConfig(**SMALL, **MAMBA, attn_layer_indices=[1]))
    ),
    "jamba": Kind(
        "Jamba", "Mamba, attention, experts",
        lambda: hf.JambaForCausalLM(hf.JambaConfig(
            **SMALL, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            num_experts=2, mamba_d_state=8, mamba_dt_rank=4,
        )),
    ),
    "granitemoehybrid": Kind(
        "Granite 4", "Mamba-2, attention, experts",
        lambda: hf.GraniteMoeHybridForCausalLM(hf.GraniteMoeHybridConfig(
            **SMALL, **MAMBA, **LOCAL_EXPERTS, layer_types=["mamba", "attention"] * 2, shared_intermediate_size=16
        )),
    ),
    "zamba2": Kind(
        "Zamba2", "Mamba-2, shared attention",
        lambda: hf.Zamba2ForCausalLM(hf.Zamba2Config(
            **SMALL, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=4, mamba_ngroups=1,
            chunk_size=8, use_mem_rope=True,
        )),
    ),
    "lfm2": Kind(
        "LFM2", "short convolutions, attention",
        lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SMALL, full_attn_idxs=[1, 3]))
    ),
    "minimax": Kind(
        "MiniMax-01, M1", "lightning attention, attention, experts",
        lambda: hf.MiniMaxForCausalLM(hf.MiniMaxConfig(**HEADS, **LOCAL_EXPERTS, block_size=8)),
    ),
    "recurrent_gemma": Kind(
        "RecurrentGemma", "linear recurrences, windows",
        lambda: hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**HEADS, lru_width=32, attention_window_size=16)),
    ),
    "rwkv": Kind(
        "RWKV-4", "linear recurrences",
        lambda: hf.RwkvForCausalLM(hf.RwkvConfig(
            **IDS, context_length=512, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
        )),
    ),
    "gemma3": Kind(
        "Gemma 3", "sliding windows, attention",
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**HEADS, sliding_window=12, sliding_window_pattern=2)),
        is_core=True,
    ),
    "gemma3n": Kind(
        "Gemma 3n", "sliding windows, shared keys",
        lambda: hf.Gemma3nForCausalLM(hf.Gemma3nTextConfig(
            **HEADS, sliding_window=12, num_kv_shared_layers=2, vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=[0.0] * 4,
        )),
        has_inner_states=False,
    ),
    "gemma4": Kind(
        "Gemma 4", "sliding windows, attention",
        lambda: hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(
            **HEADS, sliding_window=12, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8,
            num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2,
        )),
    ),
    "gpt_oss": Kind(
        "gpt-oss", "sliding windows, sinks, experts",
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**HEADS, **LOCAL_EXPERTS, sliding_window=10)),
        is_core=True,
    ),
    "qwen3_moe": Kind(
        "Qwen3 with experts", "attention, experts",
        lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**HEADS, **EXPERTS)),
        is_core=True,
    ),
    "glm4_moe": Kind(
        "GLM-4.5 to 4.7", "attention, experts",
        lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(
            **HEADS, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=1, n_shared_experts=1,
        )),
    ),
    "deepseek_v3": Kind(
        "DeepSeek-V3, R1", "latent attention, experts", lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT))
    ),
    "kimi_linear": Kind(
        "Kimi Linear", "Kimi delta attention, latent attention, experts",
        lambda: hf.KimiLinearForCausalLM(hf.KimiLinearConfig(
            **LATENT | {"q_lora_rank": None, "n_routed_experts": None}, num_local_experts=4, linear_num_heads=4,
            linear_head_dim=8, layer_types=["linear_attention", "full_attention"] * 2,
        )),
    ),
    "llama4": Kind(
        "Llama 4", "chunked attention, attention, experts",
        lambda: hf.Llama4ForCausalLM(hf.Llama4TextConfig(
            **HEADS, intermediate_size_mlp=64, attention_chunk_size=16, num_local_experts=4, interleave_moe_layer_step=1
        )),
        is_core=True,
    ),
    "bloom": Kind("BLOOM", "attention with ALiBi", lambda: hf.BloomForCausalLM(hf.BloomConfig(
        **IDS, hidden_size=32, n_layer=2, n_head=4
    ))),
    "openai-gpt": Kind(
        "GPT", "attention, no cache",
        lambda: hf.OpenAIGPTLMHeadModel(hf.OpenAIGPTConfig(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512
        )),
    ),
}  # fmt: skip

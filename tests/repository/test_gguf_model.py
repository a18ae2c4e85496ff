"""Names of a GGUF's tensors, as transformers calls them."""

import pytest
from benchmarks.gguf_model import name_of

from support.tables import table


@table(("theirs", "ours"), [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output.weight", "lm_head.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("blk.27.attn_q.bias", "model.layers.27.self_attn.q_proj.bias"),
    ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
    ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
])  # fmt: skip
def test_tensors_have_the_names_of_transformers(theirs: str, ours: str) -> None:
    assert name_of(theirs) == ours


@table("theirs", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight"])
def test_a_tensor_that_these_models_do_not_have_is_not_guessed(theirs: str) -> None:
    with pytest.raises(KeyError):
        name_of(theirs)

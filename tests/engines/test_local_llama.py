"""Models read without transformers compute what transformers' own modules compute, bit by bit."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gambit.engines.local.attention import KvPool, PrefillPlan
from gambit.engines.local.llama import read_llama
from gambit.engines.local.model import PoolModel, load_model, read_with_transformers
from gambit.models.files import locate
from support.tiny import save_tiny

SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
KINDS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
}


def saved(folder: Path, kind: str, **changes: object) -> Path:
    model_class, config_class, options = KINDS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **options, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # norms and biases too: a 1 or a 0 would hide a formula that leaves them out
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def output_of(model: PoolModel):
    prompts = KvPool()
    prompts.reserve(1, 40)
    tokens = torch.arange(40)[None] % 48
    found = model.forward(tokens, torch.arange(40)[None], PrefillPlan(prompts, 0), inner=(0, 2))
    return [found.states, found.logits, *found.inner, prompts.keys[1], prompts.values[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_transformers_computes(tmp_path, kind, dtype):
    folder = saved(tmp_path, kind)
    own = read_llama(folder, dtype)
    assert own is not None
    ours, theirs = (PoolModel(model, kind) for model in (own, read_with_transformers(str(folder), dtype)))
    assert (ours.fused is None) == (theirs.fused is None)
    assert (ours.hidden_size, ours.num_layers, ours.context_tokens, ours.cache_sizes, ours.dtype) == (
        theirs.hidden_size, theirs.num_layers, theirs.context_tokens, theirs.cache_sizes, theirs.dtype,
    )  # fmt: skip
    for got, expected in zip(output_of(ours), output_of(theirs), strict=True):
        assert torch.equal(got, expected)


def test_the_bundled_model_is_read_this_way_in_its_own_dtype():
    own = read_llama(Path(locate("pawn")), "auto")
    assert own is not None and own.dtype is torch.bfloat16
    assert type(load_model(locate("pawn"), "cpu")[0]._runner.model).__name__ == "LlamaModel"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention"] * 3},
        {"quantization_config": {"quant_method": "gptq"}},
        {"auto_map": {"AutoModelForCausalLM": "theirs.Model"}},
        {"attention_bias": True},
        {"num_key_value_heads": None},
        {"dtype": "float8_e4m3fn"},
        {"intermediate_size": 65},
        {"num_hidden_layers": 2},
    ],
)
def test_anything_else_is_left_to_transformers(tmp_path, changes):
    folder = saved(tmp_path, "qwen3")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert read_llama(folder, torch.float32) is None


@pytest.mark.parametrize("content", ["{", "[]", "7", '"qwen3"'])
def test_a_config_that_cannot_be_read_is_left_to_transformers(tmp_path, content):
    (saved(tmp_path, "llama") / "config.json").write_text(content)
    assert read_llama(tmp_path, torch.float32) is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_is_left_to_transformers(tmp_path, name):
    (saved(tmp_path, "llama") / name).unlink()
    assert read_llama(tmp_path, torch.float32) is None


def test_a_library_call_draws_no_bars(tmp_path, capfd):
    folder = save_tiny(tmp_path)
    capfd.readouterr()
    read_with_transformers(str(folder), torch.float32)
    load_model(str(folder), "cpu")
    assert capfd.readouterr() == ("", "")


def test_loading_leaves_the_number_of_threads_as_it_was(monkeypatch):
    seen = []
    real = PoolModel.__init__

    def init(self, *args):
        seen.append(torch.get_num_threads())
        real(self, *args)

    monkeypatch.setattr(PoolModel, "__init__", init)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    given = torch.get_num_threads()  # one where vLLM has run in this process before, which binds its threads
    try:
        load_model(locate("pawn"), "cpu")
        assert seen == [1] and torch.get_num_threads() == given
    finally:
        torch.set_num_threads(before)

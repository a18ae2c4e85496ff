"""The compiled operations of a decode step: they say what torch says, and nobody misses them where there is no GCC."""

import subprocess

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine_setups import PROMPT, open_search, run, spec, start_local
from gambit.engines.local import fused, native
from gambit.engines.local.attention import DecodePlan, LayerCall, PoolStore
from gambit.types import TraceKey
from tiny import livened, tiny_config, tiny_model

needs_compiler = pytest.mark.skipif(native.native_ops() is None, reason="no GCC, or not on Linux and x86")
SMALL = {name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")} | {
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "head norms": tiny_model,
    "one query": lambda: tiny_model(num_attention_heads=2),
    "three queries": lambda: tiny_model(num_attention_heads=6),
    "biases": lambda: livened(Qwen2ForCausalLM(Qwen2Config(**SMALL))),
}


def start(name, monkeypatch, is_native):
    """An engine and what each of its decode steps gives."""
    torch.manual_seed(3)
    with monkeypatch.context() as patched:
        if not is_native:
            patched.setattr(fused, "native_ops", lambda: None)
        engine = start_local(model=MODELS[name]())
    kinds = {type(layer) for layer in engine._model._fused._layers}
    assert kinds == {fused.NativeLayer if is_native else fused.Layer}
    outputs, forward = [], engine._model._fused.forward

    def recorded(*step):
        outputs.append(forward(*step))
        return outputs[-1]

    engine._model._fused.forward = recorded
    return engine, outputs


def story(engine):
    """Prompts of several lengths (one of a single token), branches, rows of all lengths, a store that grows."""
    for number, prompt in enumerate((PROMPT, PROMPT[3:], PROMPT[:1]), 1):
        open_search(engine, number, prompt, stops=())
        engine.submit([spec(i, search=number, tokens=60 + 5 * i) for i in range(3)])
    run(engine, 7)
    engine.submit([spec(3, inherited=5, tokens=50, parent=TraceKey(1, 0)), spec(4, inherited=7, parent=TraceKey(1, 1))])
    run(engine, 20)
    engine.close_search(2)
    engine.submit([spec(5 + i, search=3, tokens=40) for i in range(20)])
    run(engine, 45)


@needs_compiler
@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_say_what_torch_says(name, monkeypatch):
    (compiled, got), (plain, expected) = (start(name, monkeypatch, is_native) for is_native in (True, False))
    story(compiled)
    story(plain)
    assert len(got) == len(expected) > 60
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):  # states, logits
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


@needs_compiler
def test_the_number_of_threads_changes_no_bit():
    def attended(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return attend(torch.Generator().manual_seed(0))
        finally:
            torch.set_num_threads(before)

    assert all(torch.equal(attended(1), attended(threads)) for threads in (2, 3, 16))


def attend(generator):
    store, own = PoolStore(), torch.tensor([0, 3, 6, 2, 1])
    store.reserve("row", 5, 7)
    store.reserve("prompt", 2, 4)
    plan = DecodePlan(
        store=store, own=own, positions=own + 4, own_length=7, prompt_lengths=torch.tensor([4, 2]), prompt_length=4,
        row_slots=torch.tensor([0, 1, 0, 1, 1]), members=None, places=None, level=None, has_even_prompts=False,
    )  # fmt: skip
    qkv, *rotation = (torch.randn(5, heads, 32, generator=generator) for heads in (8, 1, 1))
    call = LayerCall(0.2, sliding_window=None, softcap=None, sinks=None)
    return native.native_ops().attend(0, qkv, None, tuple(rotation), plan, call, kv_heads=2)


@pytest.mark.parametrize("kind", ["sliding window", "wide heads"])
def test_layers_that_ask_for_more_stay_with_torch(kind):
    sliding = livened(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=9)))
    engine = start_local(model=sliding if kind == "sliding window" else tiny_model(head_dim=64))
    assert engine._model.is_fused and {type(layer) for layer in engine._model._fused._layers} == {fused.Layer}


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As if nothing had been built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.native_ops.cache_clear()
    yield tmp_path
    native.native_ops.cache_clear()


@needs_compiler
def test_it_is_built_once_a_machine(fresh, monkeypatch):
    assert native.native_ops() is not None
    (library,) = (fresh / "gambit").iterdir()
    native.native_ops.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    assert native.native_ops() is not None and list((fresh / "gambit").iterdir()) == [library]


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/nowhere/gcc"])
def test_without_a_working_compiler_torch_does_it(fresh, monkeypatch, compiler):
    monkeypatch.setattr(native.shutil, "which", lambda name: compiler)
    assert native.native_ops() is None
    assert start_local()._model.is_fused
    assert not list(fresh.glob("gambit/*"))

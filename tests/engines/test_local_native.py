"""The compiled decode step: it says what torch says, and nobody misses it where there is no GCC."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gambit.engines.local import fused, native
from gambit.engines.local.attention import DecodePlan, KvPool
from gambit.engines.local.model import PoolModel
from gambit.scorers.base import ScorerInfo
from gambit.types import TraceKey
from support.engine_setups import PROMPT, open_search, run, spec, start_local
from support.tiny import livened, tiny_config, tiny_model


def is_built():
    return not isinstance(native.native_library(), str)


needs_compiler = pytest.mark.skipif(not is_built(), reason="no GCC, or not on Linux and x86")
SMALL = {name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")} | {
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "head norms": tiny_model,
    "one query": lambda: tiny_model(num_attention_heads=2),
    "three queries": lambda: tiny_model(num_attention_heads=6),
    "biases": lambda: livened(Qwen2ForCausalLM(Qwen2Config(**SMALL))),
    "biases everywhere": lambda: with_biases(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "wide heads": lambda: tiny_model(head_dim=96),
    "odd sizes": lambda: tiny_model(intermediate_size=57, hidden_size=44),
}


def with_biases(config):
    model = livened(LlamaForCausalLM(config))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def start(name, monkeypatch, is_native):
    """An engine and what each of its decode steps gives."""
    torch.manual_seed(3)
    with monkeypatch.context() as patched:
        if not is_native:
            patched.setattr(fused, "native_library", lambda: "left out")
        engine = start_local(FirstState(), model=MODELS[name]())
    assert engine._model.fused is not None and engine._model.is_compiled == is_native
    outputs, forward = [], engine._model.fused.forward

    def recorded(*step):
        outputs.append(forward(*step))
        return outputs[-1]

    engine._model.fused.forward = recorded
    return engine, outputs


class FirstState:
    """Reads inner layers too, so that steps have to give them; what it makes of them is not looked at."""

    info = ScorerInfo("first", is_probability=False, layers=(-1, 0, 1))

    def to(self, device):
        return self

    def score(self, thoughts):
        return thoughts.states[:, 0]


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
        for a, b in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]), strict=True):  # states, logits, inner layers
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
        assert len(ours[2]) == 2


@needs_compiler
def test_neither_threads_nor_neighbours_change_a_bit():
    model = pool_model()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = decoded(model, 71)
        for threads, rows in ((2, 71), (3, 71), (16, 71), (2, 1), (1, 5), (2, 33), (2, 38)):
            torch.set_num_threads(threads)
            parts = decoded(model, rows)
            assert all(torch.equal(part, all_rows[:rows]) for part, all_rows in zip(parts, whole, strict=True))
    finally:
        torch.set_num_threads(before)


def pool_model():
    found = PoolModel(tiny_model(), "tiny")
    assert found.is_compiled
    return found


def decoded(model, rows):
    """One step of rows of all lengths over made-up keys and values."""
    generator = torch.Generator().manual_seed(0)
    row_kv, prompt_kv, lengths = KvPool(), KvPool(), np.arange(71) % 7
    row_kv.reserve(71, 7)
    prompt_kv.reserve(2, 4)
    for index in range(2):
        for pool in (row_kv, prompt_kv):
            for part in pool.layer(index, *[torch.zeros(1, 2, 32)] * 2):
                part.copy_(torch.randn(part.shape, generator=generator))
    plan = DecodePlan(row_kv, prompt_kv, np.arange(rows) % 2, [4, 2], torch.device("cpu"))
    plan.move_to(lengths[:rows])
    tokens = torch.arange(rows)[:, None] % 30
    output = model.forward(tokens, plan.positions[:, None], plan)
    return output.states, output.logits


def test_layers_that_ask_for_more_stay_with_torch():
    sliding = livened(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=9)))
    narrow = tiny_model(head_dim=16)
    for model in (sliding, narrow):
        engine = start_local(model=model)
        assert engine._model.fused is not None and not engine._model.is_compiled


@needs_compiler
def test_large_models_and_few_rows_of_many_threads_stay_with_torch(monkeypatch):
    monkeypatch.setattr(native, "CACHED_BYTES", 0)
    model = pool_model()
    used = []
    real = fused.FusedDecoder._run
    monkeypatch.setattr(fused.FusedDecoder, "_run", lambda *args: used.append(len(args[1])) or real(*args))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for rows in (3, 8, 12, 13, 70):
        decoded(model, rows)
    assert used == [3, 8, 12], "a thread takes four rows: half of them would have none"
    monkeypatch.setattr(native, "MOST_BYTES", 1000)
    assert not start_local()._model.is_compiled


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As if nothing had been built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.native_library.cache_clear()
    yield tmp_path
    native.native_library.cache_clear()


@needs_compiler
def test_it_is_built_once_a_machine(fresh, monkeypatch):
    assert is_built()
    (library,) = (fresh / "gambit" / "native").iterdir()
    native.native_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    assert is_built() and list((fresh / "gambit" / "native").iterdir()) == [library]


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/nowhere/gcc"])
def test_without_a_working_compiler_torch_does_it(fresh, monkeypatch, compiler):
    monkeypatch.setattr(native.shutil, "which", lambda name: compiler)
    assert not is_built() and native.native_library()
    assert start_local()._model.fused is not None
    assert not list(fresh.glob("gambit/native/*"))


@needs_compiler
def test_what_the_compiler_complains_of_is_told(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "decode.c"
    broken.write_text("int decode(")
    monkeypatch.setattr(native, "_SOURCE", broken)
    assert "error" in native.native_library()


@needs_compiler
def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.SWITCH in native.native_library()


@needs_compiler
@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_others_could_have_written_is_not_loaded(fresh, monkeypatch, which):
    assert is_built()
    folder = fresh / "gambit" / "native"
    (library,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder if which == "folder" else library).chmod(0o777)
    native.native_library.cache_clear()
    assert "others may write" in native.native_library()


@needs_compiler
def test_a_link_in_its_place_is_not_followed(fresh, tmp_path):
    assert is_built()
    (library,) = (fresh / "gambit" / "native").iterdir()
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    native.native_library.cache_clear()
    assert not is_built()


@needs_compiler
def test_without_a_home_directory_torch_decodes(fresh, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert "set XDG_CACHE_HOME" in str(native.native_library())

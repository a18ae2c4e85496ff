"""What only the local engine promises: any architecture, sampling by the book, one pass for everything."""

import warnings

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gambit.engines.local import model as model_module
from gambit.engines.local.engine import LocalEngine
from gambit.engines.local.fused import can_fuse
from gambit.engines.local.model import PoolModel, load_model, pick_device, pick_dtype
from gambit.engines.local.pool import KvBlocks
from gambit.errors import GambitWarning, UserError
from gambit.models.files import locate
from gambit.types import TraceKey
from support.engine_setups import (
    GREEDY,
    PROMPT,
    ProjectionScorer,
    finish,
    open_search,
    projection,
    run,
    spec,
    start_local,
    tokens_of,
)
from support.kinds import KINDS
from support.tiny import copied, livened, tiny_model, tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 1,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=9)),
    "gemma2-softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, sliding_window=12)),
    "gpt-oss-sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**SMALL, head_dim=8, sliding_window=10, num_local_experts=4, num_experts_per_tok=2)
    ),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(**SMALL, residual_multiplier=0.5, logits_scaling=2.0, embedding_multiplier=3.0)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=0)
    ),
}


def build(name):
    torch.manual_seed(1)
    model = livened(ARCHITECTURES[name]())
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_says_what_transformers_says(name):
    """Two prompts at once, a child, and a prefix computed again; each against a full forward pass by transformers."""
    reference = build(name)
    engine = start_local(model=build(name))
    open_search(engine, stops=())
    open_search(engine, 2, PROMPT[3:], stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40), spec(0, search=2, sampling=GREEDY, tokens=40)])
    run(engine, 15)
    engine.submit([spec(1, sampling=GREEDY, tokens=40, inherited=15, parent=TraceKey(1, 0))])
    first, second = {}, {}
    while engine.progress(1) or engine.progress(2):
        searches = engine.step().searches
        first |= tokens_of([searches[1]])
        second |= tokens_of([searches[2]])
    assert first[0] == first[1]
    again = start_local(model=build(name))
    open_search(again, stops=())
    again.submit([spec(2, sampling=GREEDY, tokens=40, inherited=25, prefix=first[0][:25])])
    assert tokens_of(finish(again))[2] == first[0]
    for prompt, tokens in ((PROMPT, first[0]), (PROMPT[3:], second[0])):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 1e-4  # rounding may settle a tie either way
        assert clear.sum() > 35
        assert (logits.argmax(-1) == torch.tensor(tokens))[clear].all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_architecture_gives_the_states_of_its_inner_layers(name):
    layers = (1, -1, 0)
    engine = start_local(ProjectionScorer(layers=layers), model=build(name))
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=40) for i in range(4)])
    steps = finish(engine)
    said, reference = tokens_of(steps), build(name)
    thoughts = [thought for step in steps for thought in step.scored]
    assert len(thoughts) > 4
    for thought in thoughts:
        ids = torch.tensor([[*PROMPT, *said[thought.trace][: thought.num_tokens]]])
        with torch.inference_mode():
            hidden = reference(input_ids=ids, output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0, -1] for layer in layers])
        expected = float(states @ projection(32 * len(layers)))
        assert thought.score == pytest.approx(expected, abs=1e-3 * float(states.abs().max() + 1))


def pool_model(model):
    return PoolModel(copied(model), "tiny")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_are_fused_where_structure_and_numbers_agree(name):
    is_fused = pool_model(build(name)).fused is not None
    assert is_fused == (name in ("llama", "qwen2", "mistral-sliding"))
    assert pool_model(tiny_model()).fused is not None


def test_a_model_of_the_same_structure_that_computes_otherwise_keeps_its_modules():
    """Granite is built of the parts of Llama, but scales what they give."""
    assert can_fuse(build("granite")) and can_fuse(build("llama"))
    assert pool_model(build("granite")).fused is None
    llama = copied(build("llama"))
    real = llama.model.layers[1].mlp.forward
    llama.model.layers[1].mlp.forward = lambda x: real(x) * 1.01
    assert PoolModel(llama, "tampered").fused is None


def test_fused_weights_are_in_memory_once_and_are_those_of_the_modules():
    model = copied(build("qwen2"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pool = PoolModel(model, "qwen2")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in after.values()}
    joined = [w for layer in pool.fused.layers for w in (layer.qkv.weight, layer.gate_up.weight, layer.down.weight)]
    assert {w.untyped_storage().data_ptr() for w in joined} <= storages.keys()
    assert sum(storages.values()) == sum(p.nbytes for p in before.values())


def test_one_forward_pass_serves_every_trace_of_every_search():
    engine = start_local()
    shapes = []
    engine._model._runner.model.model.embed_tokens.register_forward_hook(
        lambda m, args, out: shapes.append(tuple(out.shape))
    )
    for number in (1, 2, 3):
        open_search(engine, number, stops=())
        engine.submit([spec(i, search=number) for i in range(4)])
    engine.step()
    prefill = (1, len(PROMPT) - 1, 32)
    assert shapes == [prefill] * 3 + [(12, 1, 32)]  # each prompt once, then everything at once
    shapes.clear()
    engine.submit([spec(9, inherited=1, parent=TraceKey(1, 0))])
    engine.step()
    assert shapes == [(13, 1, 32)]  # a branch costs no pass of its own


def test_rows_are_reused_and_stay_dense():
    engine = start_local()
    open_search(engine, stops=())
    for generation in range(6):
        first = generation * 5
        engine.submit([spec(first + i, tokens=3 + i) for i in range(5)])
        finish(engine)
    rows = {keys.shape[0] for keys in engine._pool.kv_rows.keys.values()}
    assert rows == {16}  # room for sixteen was the first allocation, and 30 traces later it still is


def test_blocks_are_counted_once_however_often_they_are_shared():
    blocks = KvBlocks(capacity_tokens=100, block_tokens=16)
    assert (blocks.num_blocks, blocks.capacity_tokens) == (6, 96)
    mine = blocks.allocate(4, search=1)
    assert blocks.allocate(3, search=2) is None and blocks.num_free == 2
    blocks.share(mine)
    blocks.release(mine)
    assert blocks.used_tokens == 64 and blocks.used_by[1] == 4
    blocks.release(mine)
    assert blocks.used_tokens == 0 and blocks.used_by[1] == 0


def test_waiting_children_that_lock_each_other_out_let_go():
    """All room is held by prefixes that wait: the last child gives its up and is computed again later."""
    engine = start_local(kv_budget_tokens=64, block_tokens=4)
    open_search(engine, prompt=(5,) * 4, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=40), spec(1, tokens=40)])
    run(engine, 24)
    for child, parent in ((2, 0), (3, 1), (4, 0)):
        engine.submit([spec(child, sampling=GREEDY, tokens=40, inherited=24, parent=TraceKey(1, parent))])
    engine.stop([TraceKey(1, 0), TraceKey(1, 1)])
    steps = finish(engine)
    admitted = {a.trace: (a.reused, a.recomputed) for step in steps for a in step.admitted}
    assert admitted[2] == (24, 0) and len(admitted) == 3
    assert all(reused + recomputed == 24 for reused, recomputed in admitted.values())


@pytest.mark.parametrize(("name", "problem"), [("no/such-model", "cannot load model"), ("README.md", "cannot load")])
def test_a_model_that_cannot_be_loaded_is_the_users_mistake(name, problem):
    with pytest.raises(UserError, match=problem):
        load_model(name, "cpu")


def test_a_model_that_is_no_causal_one_is_refused():
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(UserError, match="no causal language model"):
        PoolModel(BartForConditionalGeneration(config), "bart")


def test_a_model_that_cannot_use_its_own_cache_runs_without_it():
    model = KINDS["bloom"].build()
    real = model.forward

    def forward(**arguments):
        if arguments.get("past_key_values") is not None:
            raise ValueError("the cache is of another length")
        return real(**arguments)

    model.forward = forward
    with pytest.warns(GambitWarning, match="without a cache"):
        engine = LocalEngine(PoolModel(model, "tiny"), tiny_tokenizer(), ProjectionScorer())
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=20)])
    tokens = tokens_of(finish(engine))[0]
    with torch.inference_mode():
        logits = real(input_ids=torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(tokens)


@pytest.mark.parametrize("kind", ["nemotron_h", "gpt_oss", "qwen3_next"])
def test_half_precision_keeps_traces_together(kind):
    """Logits of Nemotron-H are float32 also in a model of half precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GambitWarning)  # of a model that runs one trace at a time
        model = PoolModel(KINDS[kind].build().to(torch.bfloat16), "tiny")
    engine = LocalEngine(model, tiny_tokenizer(), ProjectionScorer())
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=20), spec(1, tokens=20)])
    run(engine, 9)
    engine.submit([spec(2, sampling=GREEDY, tokens=20, inherited=9, parent=TraceKey(1, 0))])
    tokens = tokens_of(finish(engine))
    assert tokens[2] == tokens[0] != tokens[1]


def test_inner_layers_with_several_states_of_a_token_have_no_scorer():
    engine = start_local(ProjectionScorer(layers=(1, -1)), model=KINDS["gemma3n"].build())
    open_search(engine)
    engine.submit([spec(0)])
    with pytest.raises(UserError, match="several states of a token: use a scorer of the last layer"):
        engine.step()


@pytest.mark.parametrize(("kind", "how"), [("llama4", "with a cache of its own"), ("openai-gpt", "without a cache")])
def test_what_runs_one_trace_at_a_time_is_told(kind, how):
    with pytest.warns(GambitWarning, match=f"tiny runs {how}, one trace at a time"):
        PoolModel(KINDS[kind].build(), "tiny")


def test_devices_and_dtypes():
    assert pick_device("cpu").type == "cpu"
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == "auto"
    for bad in ("abacus", "cuda:7", "mps", "meta"):
        with pytest.raises(UserError):
            pick_device(bad)
    with pytest.raises(UserError, match="int8"):
        pick_dtype("int8", torch.device("cpu"))


@pytest.mark.parametrize(("units", "dtype", "is_told"), [
    ({"avx512_bf16": True}, "auto", True), ({"avx512_bf16": False}, "auto", False),
    ({"amx_bf16": True}, "bfloat16", False),
])  # fmt: skip
def test_where_half_precision_pays_it_is_said(monkeypatch, units, dtype, is_told):
    monkeypatch.setattr(model_module, "LARGE_MODEL_BYTES", 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_model(locate("pawn"), "cpu", dtype)
    assert any("--dtype bfloat16" in str(each.message) for each in told) == is_told


def test_half_precision_runs_and_scores_in_float32():
    engine = start_local(ProjectionScorer(), model=copied(tiny_model()).to(torch.float16))
    open_search(engine, stops=())
    engine.submit([spec(i) for i in range(4)])
    steps = finish(engine)
    assert engine.info.dtype == "float16"
    scores = [t.score for step in steps for t in step.scored]
    assert scores and all(np.isfinite(scores))


def test_children_that_hold_prefixes_do_not_lock_each_other_out():
    """Two parents end while their children wait, and the prefixes that these hold are all the memory there is."""
    engine = start_local(kv_budget_tokens=16 * 8)
    open_search(engine, stops=())
    engine.submit([spec(0), spec(1)])
    length = 3 * 16 - len(PROMPT) % 16  # the next token of each needs a block
    run(engine, length)
    engine.submit([
        spec(2, parent=TraceKey(1, 0), inherited=length),
        spec(3, parent=TraceKey(1, 1), inherited=length),
    ])  # fmt: skip
    engine.stop([TraceKey(1, 0), TraceKey(1, 1)])
    blocks = engine._pool.blocks
    hoard = blocks.allocate(blocks.num_free, 1)
    (step,) = run(engine, 1)
    assert [(won.trace, won.reused) for won in step.admitted] == [(2, length)]
    blocks.release(hoard)
    engine.stop([TraceKey(1, 2)])
    (step,) = run(engine, 1)
    assert [(won.trace, won.recomputed) for won in step.admitted] == [(3, length)], "its prefix was given up"
    engine.close()

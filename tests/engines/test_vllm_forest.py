"""Forest attention inside vLLM, on its CPU build: real block tables of branches, the gate, the self-check."""

from collections import namedtuple
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from gambit.errors import EngineError, UserError
from gambit.types import TraceKey
from support.engine_setups import (
    GREEDY,
    HAS_VLLM,
    PROMPT,
    finish,
    open_search,
    run,
    spec,
    start_own_vllm,
    start_vllm,
    tokens_of,
    worker_of,
)

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build")


def grown(engine, search):
    """A scripted tree: branches, branches of branches, prunes; greedy, so that its tokens can be compared."""
    open_search(engine, search, prompt=PROMPT * 5, stops=())
    engine.submit([spec(i, search=search, sampling=GREEDY, tokens=150, prefix=(5 + i,), inherited=1) for i in range(3)])
    run(engine, 50, search)
    child = {"search": search, "sampling": GREEDY, "tokens": 150}
    engine.submit([spec(3 + i, inherited=35 + i, parent=TraceKey(search, i % 3), **child) for i in range(6)])
    run(engine, 40, search)
    engine.stop([TraceKey(search, 1)])
    engine.submit([spec(9 + i, inherited=70 + i, parent=TraceKey(search, 3 + i), **child) for i in range(3)])
    steps = finish(engine, search)
    engine.close_search(search)
    return tokens_of(steps)


def test_a_tree_of_branches_says_what_it_says_with_stock_attention():
    from gambit.engines.vllm.messages import DecodeAttention
    from support.forest_on_cpu import forest_on_cpu

    with forest_on_cpu() as plans:
        engine = start_own_vllm(attention="auto")
        switch, seen = worker_of(engine)._forest, []
        with mock.patch.object(switch, "choose", partial(note, seen, switch.choose)):
            without = grown(engine, 1)
        assert not plans and not switch.num_steps, "so little does not pay"
        switch.wish = DecodeAttention.FOREST
        shared = grown(engine, 2)
        assert max(total / read for total, read in plans) > 2 and switch.num_steps > 100
        engine.close()
    stock = start_vllm()
    expected = grown(stock, 1)
    stock.close()
    assert len(expected) == 11 and shared == expected == without
    most = max(seen, key=lambda each: each.duplicated_tokens)
    assert most.total_tokens > 1.5 * most.unique_tokens > 0
    assert most.total_tokens / most.num_traces <= most.longest_tokens < most.unique_tokens
    assert all(each.unique_tokens - each.total_tokens < 12 * 32 for each in seen), "at most one open block each"


def note(seen, choose, sharing, rows):
    seen.append(sharing)
    choose(sharing, rows)


def fake_runner(*, is_covered=True, head_size=128):
    """A model runner with one kind of attention layers: 2 KV heads of 32 numbers in float32."""
    from gambit.engines.vllm.compat.forest import ForestPlanning

    builder = ForestPlanning()
    builder.layer_names, builder.num_heads_kv, builder.headdim = ["layer"], 2, head_size
    builder.kv_cache_spec = SimpleNamespace(block_size=16, page_size_bytes=16 * 2 * 2 * 32 * 4)
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(is_covered=is_covered))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    group = SimpleNamespace(get_metadata_builder=lambda number: builder)
    return SimpleNamespace(attn_groups=[[group]], vllm_config=config, builder=builder)


def test_it_is_used_where_it_pays():
    from gambit.engines.vllm.compat.forest import ForestSwitch
    from gambit.engines.vllm.forest import FEWEST_TRACES, LayerKind
    from gambit.engines.vllm.messages import DecodeAttention, Sharing

    runner = fake_runner()
    switch = ForestSwitch(runner, DecodeAttention.AUTO)
    assert switch.layer_kinds == [LayerKind(num_layers=1, token_bytes=2 * 2 * 32 * 4, num_kv_heads=2)]
    pays = Sharing(64, 4 * 10**7, 10**6, 10**5)
    few = replace(pays, num_traces=FEWEST_TRACES - 1)
    unshared = replace(pays, total_tokens=10**6)
    cases = ((None, False), (unshared, False), (pays, True), (few, False), (pays, True))
    for sharing, is_on in cases:
        switch.choose(sharing, [])
        assert switch.is_on == is_on == runner.builder.uses_forest
    switch.wish = DecodeAttention.STOCK
    switch.choose(pays, [])
    assert not switch.is_on
    switch.wish = DecodeAttention.FOREST
    switch.choose(None, [])
    assert switch.is_on and switch.num_steps == 3


@pytest.mark.parametrize("runner", [{"head_size": 64}, {"is_covered": False}], ids=["head size", "kind of layers"])
def test_auto_keeps_to_what_was_measured(runner):
    from gambit.engines.vllm.compat.forest import ForestSwitch
    from gambit.engines.vllm.messages import DecodeAttention, Sharing

    runner = fake_runner(**runner)
    window = SimpleNamespace(get_metadata_builder=lambda number: SimpleNamespace(layer_names=["layer"]))
    runner.attn_groups.append([window])
    switch = ForestSwitch(runner, DecodeAttention.AUTO)
    switch.choose(Sharing(64, 4 * 10**7, 10**6, 10**5), [])
    assert not switch.is_on
    runner.cudagraph_manager = switch._manager = SimpleNamespace(graphs={1: None})
    switch.capture(runner)
    assert switch._manager.graphs == {1: None}, "nothing is captured that is never used"


def test_a_plan_is_kept_while_the_same_traces_are_in_the_same_rows():
    from gambit.engines.vllm.compat.forest import ForestSwitch
    from gambit.engines.vllm.messages import DecodeAttention

    runner = fake_runner()
    switch, kept = ForestSwitch(runner, DecodeAttention.FOREST), []
    for rows in (["a", "b"], ["a", "b"], ["b", "a"], ["b", "a"], ["b"]):
        switch.choose(None, rows)
        kept.append(runner.builder.last_plan is not None)
        runner.builder.last_plan = object()
    assert kept == [False, True, False, True, False]


def test_layers_that_no_plan_covers_keep_stock_attention_with_one_word(caplog):
    from gambit.engines.vllm.compat.forest import ForestSwitch
    from gambit.engines.vllm.messages import DecodeAttention

    runner = fake_runner(is_covered=False)
    switch = ForestSwitch(runner, DecodeAttention.FOREST)
    switch.choose(None, [])
    assert not switch.is_on and not runner.builder.uses_forest
    assert [record.message for record in caplog.records if "covers 0 of 1" in record.message]


def test_attention_that_differs_from_stock_is_refused_at_the_start(monkeypatch):
    from gambit.engines.vllm import kernels
    from support.forest_on_cpu import forest_on_cpu

    with forest_on_cpu():
        monkeypatch.setattr(kernels, "merge", lambda partial, lse, plan, merged: merged.copy_(partial[: len(merged)]))
        with pytest.raises(EngineError, match=r"forest attention differs from vLLM's by .* attention=stock"):
            start_own_vllm(attention="forest")


def test_wishes_that_cannot_be_met():
    with pytest.raises(UserError, match=r"attention='tree': choose one of stock, auto, forest"):
        start_own_vllm(attention="tree")
    with pytest.raises(UserError, match=r"attention=forest cannot be used: it needs a GPU of NVIDIA's.*'cpu'"):
        start_own_vllm(attention="forest")
    with pytest.raises(UserError, match=r"attention_backend='FLASHINFER' is given"):
        start_own_vllm(attention="forest", attention_backend="FLASHINFER")
    engine = start_own_vllm(attention="auto")
    assert worker_of(engine)._forest is None
    engine.close()


def test_a_step_with_forest_attention_uses_no_graph_of_a_whole_step_but_those_with_it():
    from vllm.config.compilation import CUDAGraphMode

    from gambit.engines.vllm.compat.forest import _wrap_dispatch

    def second(num_reqs, num_tokens, uniform_token_count, num_active_loras=0):
        return (num_tokens, uniform_token_count)

    def first(num_tokens, uniform_decode=False, invalid_modes=None):
        return invalid_modes

    switch = SimpleNamespace(is_on=False, graphs={(16, 1): "graph"})
    v2 = SimpleNamespace(cudagraph_manager=SimpleNamespace(dispatch=second))
    v1 = SimpleNamespace(cudagraph_dispatcher=SimpleNamespace(dispatch=first))
    for runner in (v1, v2):
        _wrap_dispatch(runner, switch)
    assert v2.cudagraph_manager.dispatch(8, 8, 1, num_active_loras=0) == (8, 1)
    assert v1.cudagraph_dispatcher.dispatch(num_tokens=8, uniform_decode=True) is None
    switch.is_on = True
    assert v2.cudagraph_manager.dispatch(8, 8, 1, num_active_loras=0) == (8, None)
    assert v2.cudagraph_manager.dispatch(16, 16, 1, num_active_loras=0) == (16, 1)
    assert v1.cudagraph_dispatcher.dispatch(num_tokens=8, invalid_modes=None) == {CUDAGraphMode.FULL}


def test_graphs_are_captured_a_second_time_and_chosen_with_the_switch():
    from vllm.config.compilation import CUDAGraphMode

    from gambit.engines.vllm.compat.forest import ForestSwitch
    from gambit.engines.vllm.messages import DecodeAttention

    Size = namedtuple("Size", "num_reqs uniform_token_count")
    sizes = {CUDAGraphMode.FULL: [Size(64, 1), Size(8, 1)], CUDAGraphMode.PIECEWISE: [Size(None, None)]}
    runner = fake_runner()
    manager = SimpleNamespace(graphs=dict.fromkeys(sizes[CUDAGraphMode.FULL], "stock"), _capture_descs=sizes)
    manager.dispatch = lambda num_reqs, num_tokens, uniform: Size(num_tokens, uniform)

    def capture():
        runner.builder.last_plan = "of dummies"
        wanted = manager._capture_descs
        assert list(wanted) == [CUDAGraphMode.FULL] and runner.builder.uses_forest and not manager.graphs
        manager.graphs |= dict.fromkeys(wanted[CUDAGraphMode.FULL], "forest")

    runner.cudagraph_manager, runner.capture_model = manager, capture
    switch = ForestSwitch(runner, DecodeAttention.FOREST)
    switch.capture(runner)
    assert manager._capture_descs is sizes and not runner.builder.uses_forest and runner.builder.last_plan is None
    assert manager.graphs[manager.dispatch(64, 64, 1)] == "stock" and len(manager.graphs) == 2
    switch.choose(None, ["a"])
    assert manager.graphs[manager.dispatch(64, 64, 1)] == "forest" and len(manager.graphs) == 1
    assert manager.dispatch(8, 8, 1).uniform_token_count is None, "there is none of 8 traces"
    switch.wish = DecodeAttention.STOCK
    switch.choose(None, ["a"])
    assert manager.graphs[manager.dispatch(8, 8, 1)] == "stock"


def test_keys_and_values_of_both_layouts():
    from gambit.engines.vllm.compat.forest import split_cache

    apart = torch.randn(3, 2, 16, 4, 8)
    assert all(map(torch.equal, split_cache(apart, 8), (apart[:, 0], apart[:, 1])))
    beside = torch.cat([apart[:, 0], apart[:, 1]], -1).transpose(1, 2)
    assert all(map(torch.equal, split_cache(beside, 8), (apart[:, 0], apart[:, 1])))

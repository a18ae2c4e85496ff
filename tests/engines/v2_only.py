"""What only vLLM's second model runner can do; `test_vllm_model_runner_v2.py` runs it, with `v2_on_cpu`."""

import warnings
from dataclasses import replace

import pytest
import torch

from gambit.errors import GambitWarning
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.scorers.mlp import BlendScorer
from gambit.types import TraceKey
from support.engine_setups import (
    GREEDY,
    PROMPT,
    SAMPLED,
    finish,
    open_search,
    random_mlp,
    spec,
    start_own_vllm,
    tokens_of,
    worker_of,
)
from support.forests import attend, attend_plan, grow, keys_of, planned


@pytest.mark.parametrize(("hidden", "width", "most"), [(32, 16, 5), (100, 33, 70), (128, 64, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies the bits of bfloat16
def test_the_fused_scorer_is_the_scorer_whatever_the_shape(hidden, width, most, dtype):
    from gambit.engines.vllm.kernels import FusedScorer

    scorer = random_mlp(hidden, width)
    fused = FusedScorer(scorer.two_layers, most, dtype)
    asked = []
    for rows in (most, 1, most // 2, most):
        states = torch.randn(rows, hidden).to(dtype)
        asked.append((fused.score(states), scorer.score(ThoughtBatch(states, torch.zeros(rows)))))
    for read, expected in reversed(asked):  # several are under way at a time, each in memory of its own
        torch.testing.assert_close(torch.from_numpy(read()[0]), expected, rtol=1e-4, atol=1e-5)


def test_a_fused_scorer_that_is_wrong_is_not_used():
    from gambit.engines.vllm.kernels import fused

    scorer, like = random_mlp(), torch.zeros(1, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused(scorer.two_layers, 9, like, lambda states: scorer.logits(states).sigmoid()) is not None
    with pytest.warns(GambitWarning, match="wrong by"):
        assert fused(scorer.two_layers, 9, like, lambda states: scorer.logits(states).sigmoid() + 0.1) is None


@pytest.mark.parametrize("kind", ["mlp", "blend"])
def test_an_engine_with_a_fused_scorer_gives_the_same_scores(kind):
    scorer = random_mlp()
    if kind == "blend":
        info = ScorerInfo("mlp+confidence", hidden_size=32, needs_confidence=True)
        scorer = BlendScorer(info, scorer, 0.05)
    engine, found = start_own_vllm(scorer, fused_scorer=True), []
    worker = worker_of(engine)
    for fused in (worker._scoring.fused, None):
        worker._scoring.fused = fused
        open_search(engine, stops=())
        engine.submit([spec(i, tokens=24) for i in range(10)])
        found.append({(t.trace, t.num_tokens): t.score for step in finish(engine) for t in step.scored})
        engine.close_search(1)
        assert (fused is None) == (len(found) == 2)
    engine.close()
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    assert max(abs(found[0][thought] - found[1][thought]) for thought in found[0]) < 1e-4


def test_vllms_own_noise_comes_from_seed_trace_and_position():
    engine = start_own_vllm(exact_noise=False)

    def said(search, seed, traces):
        open_search(engine, search, stops=())
        sampling = replace(SAMPLED, seed=seed)
        engine.submit([spec(trace, search=search, sampling=sampling, tokens=10) for trace in traces])
        engine.step()
        child = spec(99, search=search, sampling=sampling, tokens=10, inherited=1, parent=TraceKey(search, traces[0]))
        engine.submit([child])
        found = tokens_of(finish(engine, search))
        engine.close_search(search)
        return found

    once, again, other = said(1, 5, [0, 1, 2]), said(2, 5, [2, 1, 0]), said(3, 6, [0, 1, 2])
    traces = [once[trace] for trace in (0, 1, 2)]
    assert traces == [again[trace] for trace in (0, 1, 2)], "neighbours change nothing"
    assert len({*traces, *(other[trace] for trace in (0, 1, 2))}) == 6
    assert once[99] != once[0] and once[99][0] == once[0][0]
    engine.close()


@pytest.mark.parametrize(("seed", "rows", "padding"), [(0, 1, 0), (1, 20, 3), (2, 70, 0)])
def test_the_kernel_finds_the_blocks_that_traces_have_in_common(seed, rows, padding):
    from gambit.engines.vllm.forest import common_blocks, full_blocks, prefix_hashes
    from gambit.engines.vllm.kernels import common_blocks_on_gpu

    forest = grow(rows, 8, seed=seed, roots=2, twins=0.1, padding=padding)
    full = full_blocks(forest.num_tokens, forest.block_tokens)
    hashes = prefix_hashes(forest.table, forest.table.shape[1])
    assert torch.equal(common_blocks_on_gpu(hashes, full), common_blocks(hashes, full))


def test_a_tree_with_forest_attention_by_the_kernels_says_what_it_says_without():
    """As `test_vllm_forest.py` shows of the first model runner."""
    from gambit.engines.vllm.messages import DecodeAttention
    from support.forest_on_cpu import forest_on_cpu

    with forest_on_cpu(interprets=True) as plans:
        engine, said = start_own_vllm(attention="forest"), []
        for search, wish in enumerate((DecodeAttention.STOCK, DecodeAttention.FOREST)):
            worker_of(engine)._forest.wish = wish
            open_search(engine, search, prompt=PROMPT * 5, stops=())
            engine.submit(
                [spec(i, search=search, sampling=GREEDY, tokens=8, prefix=(5 + i,), inherited=1) for i in range(4)]
            )
            said.append(tokens_of(finish(engine, search)))
            engine.close_search(search)
        engine.close()
        assert len(plans) >= 6 and max(total / read for total, read in plans) > 2
    assert said[0] == said[1] and len(said[0]) == 4


@pytest.mark.parametrize(("heads", "width"), [(4, 16), (12, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_merges_as_dense_attention_in_float64_would(heads, width, dtype):
    from gambit.engines.vllm import kernels

    forest = grow(20, 8, seed=heads, padding=2)
    plan = planned(forest)
    shape = (len(forest.contents) + 1, forest.block_tokens, 2, width)
    k, v = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    q = 3 * torch.randn(22, heads, width, dtype=torch.float64)
    partial, lse = attend_plan(q, k, v, plan)
    merged = torch.full((22, heads, width), torch.nan, dtype=dtype)
    kernels.merge(partial.to(dtype), lse.float(), plan, merged)
    for row, count in enumerate(forest.num_tokens.tolist()):
        blocks = forest.table[row, : -(-count // forest.block_tokens)]
        expected = attend(q[row : row + 1], keys_of(k, blocks, count), keys_of(v, blocks, count))[0][0]
        expected = expected if count else torch.zeros(heads, width)
        torch.testing.assert_close(merged[row].double(), expected.double(), rtol=0, atol=20 * torch.finfo(dtype).eps)

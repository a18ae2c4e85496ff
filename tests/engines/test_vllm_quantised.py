"""Quantised weights on vLLM: checkpoints in the formats of GPTQ, AWQ and FP8, searched like any other."""

from dataclasses import replace

import pytest
import torch

from gambit.errors import EngineError
from gambit.types import TraceKey
from support.engine_setups import (
    GREEDY,
    HAS_VLLM,
    PROMPT,
    ProjectionScorer,
    finish,
    open_search,
    projection,
    run,
    spec,
    start_own_vllm,
    tokens_of,
)
from support.quantised import HIDDEN, save_quantised

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
TOLERANCE = 0.01  # of the largest logit, in half precision


class WideScorer(ProjectionScorer):
    def to(self, device):
        return replace(self, vector=projection(HIDDEN).to(device))


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_traces_are_those_of_the_weights_that_a_checkpoint_stands_for(name, tmp_path):
    model = save_quantised(name, tmp_path)
    engine = start_own_vllm(WideScorer(), model=tmp_path, dtype="float16", self_check=True)
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY)])
    run(engine, 41)
    engine.submit([spec(1, sampling=GREEDY, inherited=41, parent=TraceKey(1, 0))])
    steps = finish(engine)
    engine.close()
    tokens = tokens_of(steps)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *tokens[0]]])).logits[0][len(PROMPT) - 1 : -1]
    chosen = logits[torch.arange(len(tokens[0])), list(tokens[0])]
    assert (logits.max(-1).values - chosen).max() <= TOLERANCE * logits.abs().max()
    assert tokens[1] == tokens[0] and [won.recomputed for step in steps for won in step.admitted] == [1]


def test_vllms_build_for_cpus_has_no_fp8_and_says_so(tmp_path):
    """On a GPU benchmarks/quantised_check.py runs it."""
    save_quantised("fp8", tmp_path)
    with pytest.raises(EngineError, match=r"vLLM does not start: .*fp8"):
        start_own_vllm(WideScorer(), model=tmp_path, dtype="float16")

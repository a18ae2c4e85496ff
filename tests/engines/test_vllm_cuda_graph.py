"""Scorers as CUDA graphs: neither padding nor reused memory changes a score. A replay is simulated by a second run."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gambit.engines.vllm.scoring import recorded, sizes_up_to, tensor_cores
from gambit.scorers.base import ThoughtBatch
from support.engine_setups import HAS_VLLM, open_search, random_mlp, spec, start_own_vllm, worker_of


class Again:
    """A recording as CUDA's are: fixed memory in, fixed memory out."""

    def __init__(self, work):
        self._work, self.result = work, work()

    def replay(self):
        self.result.copy_(self._work())


def scores_of(scorer):
    return lambda states: scorer.score(ThoughtBatch(states, torch.zeros(len(states))))


def again(work):
    recording = Again(work)
    return recording.replay, recording.result


@given(st.integers(1, 3000))
def test_every_batch_finds_a_size_and_little_of_it_is_padding(most):
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for before, size in itertools.pairwise(sizes):
        assert size <= 2 * before


def test_scores_are_those_of_the_scorer_whatever_came_before():
    scorer = random_mlp()
    replayed = recorded(scores_of(scorer), torch.zeros(1, 32), 100, again)
    for rows in (100, 1, 7, 8, 9, 64, 3, 97):
        states = torch.randn(rows, 32)
        expected = scorer.score(ThoughtBatch(states, torch.zeros(rows)))
        torch.testing.assert_close(replayed(states), expected)


def test_precision_is_lent_only():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ValueError, match="halfway"), tensor_cores():
        raise ValueError("halfway")
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.system
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: scripts/install.sh brings its CPU build")
def test_a_worker_with_a_recording_says_the_same():
    engine = start_own_vllm(random_mlp())
    worker = worker_of(engine)
    said = []
    for replayed in (None, recorded(scores_of(worker._scoring.scorer), torch.zeros(1, 32), 64, again)):
        worker._scoring.recorded = replayed
        open_search(engine, stops=())
        engine.submit([spec(i, tokens=50 + i) for i in range(12)])
        scored = []
        while engine.progress(1):
            scored += [(t.trace, t.num_tokens, t.score) for t in engine.step().searches[1].scored]
        engine.close_search(1)
        said.append(scored)
    engine.close()
    assert len(said[0]) > 20
    assert [each[:2] for each in said[0]] == [each[:2] for each in said[1]]
    torch.testing.assert_close(*(torch.tensor([each[2] for each in scored]) for scored in said))

"""Searches simulated over real traces (benchmarks/simulated_search.py) keep to the tournament's rules."""

import numpy as np
import pytest
from benchmarks.simulated_search import Settings, Simulation, Text, half_way_auc, is_voted_right, simulated

LENGTHS = (200, 320, 260, 410)


def text(answer, *, is_right, length, logit):
    ends = np.arange(40, length, 40)
    return Text(answer, is_right, length, ends, np.full(len(ends), float(logit)), float(logit))


@pytest.fixture
def texts():
    """One right answer in three, and a judge that says nothing."""
    return [text(i % 3, is_right=i % 3 == 0, length=LENGTHS[i % 4], logit=0.0) for i in range(12)]


def searched(texts, settings, better=0.0, seed=0):
    return Simulation(texts, better, np.random.default_rng(seed)).completed(settings)


@pytest.mark.parametrize("islands", [1, 2, 4, 8])
def test_a_search_completes_its_traces_island_by_island(texts, islands):
    runs = searched(texts, Settings(islands, 1, 60, 0.0), better=1.0)
    counts = np.bincount([run.island for run in runs], minlength=islands)
    assert (counts >= 16 // islands).all(), "an island is over when its share is complete"
    assert all(run.position == run.text.num_tokens for run in runs)


def test_branches_stay_on_their_island_and_keep_an_answer_that_is_decided(texts):
    runs = [run for seed in range(20) for run in searched(texts, Settings(4, 1, 60, 0.0), 2.0, seed) if run.past]
    assert runs, "a judge that knows branches"
    for run in runs:
        _, left, before, decided = run.past[-1]
        assert run.starts == left and run.text.num_tokens > left
        if left / before.num_tokens >= decided and any(
            t.answer == before.answer and t.num_tokens > left for t in texts
        ):
            assert run.text.answer == before.answer


def test_no_lead_is_clear_enough_for_a_large_margin(texts):
    assert not any(run.past for run in searched(texts, Settings(4, 1, 60, 50.0), better=1.0))
    assert not any(run.past for run in searched(texts, Settings(16, 0, 0, 0.0), better=1.0)), "plain sampling"


def test_a_better_judge_has_a_higher_auc_and_gains_more(texts):
    rng = np.random.default_rng(0)
    assert half_way_auc([texts], 0.0, rng) == 0.5
    assert 0.6 < half_way_auc([texts], 1.0, rng) < 0.95
    useless, good = (simulated([texts], Settings(4, 2, 60, 0.0), better, 60, 0) for better in (0.0, 2.0))
    assert good["one_trace"][0] > useless["one_trace"][0] + 0.1 and good["score"][0] > useless["score"][0]


def test_votes_are_weighed(texts):
    runs = searched(texts, Settings(16, 0, 0, 0.0))
    assert is_voted_right(runs, [float(run.text.is_right) for run in runs])
    assert not is_voted_right(runs, [float(not run.text.is_right) for run in runs])
    assert not is_voted_right([], [])

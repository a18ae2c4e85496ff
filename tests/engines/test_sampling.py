"""Sampling: the noise, the filters, and their independence of the neighbours."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.engines.sampling import Filters, noise_keys, sample, token_confidence, uniforms


def filters(rows):
    temperature, top_p, top_k, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Filters(temperature.float(), top_p.float(), top_k.long(), min_p.float(),
                   has_greedy=bool((temperature == 0).any()),
                   has_filters=bool(((top_p < 1) | (top_k > 0) | (min_p > 0)).any()))  # fmt: skip


def support(logits, row):
    """Every token that a fine grid of noise can draw."""
    grid = torch.linspace(0, 1, 4001)[:-1]
    many = logits.expand(len(grid), -1)
    return sorted(set(sample(many, filters([row] * len(grid)), grid).tolist()))


LOGITS = torch.log(torch.tensor([[0.05, 0.4, 0.1, 0.3, 0.15]]))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1.0, 1.0, 0, 0.0), [0, 1, 2, 3, 4]),
        ((0.0, 1.0, 0, 0.0), [1]),
        ((1.0, 1.0, 2, 0.0), [1, 3]),
        ((1.0, 1.0, 99, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 0.4, 0, 0.0), [1]),  # the first alone reaches 0.4
        ((1.0, 0.41, 0, 0.0), [1, 3]),
        ((1.0, 0.84, 0, 0.0), [1, 3, 4]),
        ((1.0, 0.5, 2, 0.0), [1]),  # of the two that top_k leaves, 4/7 is the first's
        ((1.0, 0.6, 2, 0.0), [1, 3]),
        ((1.0, 1.0, 0, 0.3), [1, 3, 4]),  # at least 0.3 × 0.4
        ((1.0, 0.9, 4, 0.5), [1, 3]),
    ],
)
def test_filters_leave_exactly_these_tokens(row, expected):
    assert support(LOGITS, row) == expected


def test_drawn_frequencies_are_the_probabilities():
    keys = noise_keys([3] * 20_000, range(20_000))
    noise = torch.from_numpy(uniforms(keys, np.zeros(len(keys), np.int64))).float()
    drawn = sample(LOGITS.expand(len(noise), -1), filters([(1.0, 1.0, 0, 0.0)] * len(noise)), noise)
    frequencies = torch.bincount(drawn, minlength=5) / len(drawn)
    assert torch.allclose(frequencies, LOGITS.exp()[0], atol=0.012)


def test_noise_is_uniform_and_depends_on_seed_trace_and_position():
    keys = noise_keys(*zip(*product(range(40), repeat=2), strict=True))
    assert len(set(keys.tolist())) == 1600
    values = np.concatenate([uniforms(keys, np.full(len(keys), position)) for position in range(50)])
    assert len(set(values.tolist())) == len(values)
    assert abs(values.mean() - 0.5) < 0.005 and abs(values.var() - 1 / 12) < 0.002
    along = np.stack([uniforms(keys, np.full(len(keys), position)) for position in range(2)])
    assert abs(np.corrcoef(along)[0, 1]) < 0.1
    assert uniforms(keys[:3], np.arange(3)).tolist() == uniforms(keys[:3], np.arange(3)).tolist()
    assert noise_keys([-1], [0]) != noise_keys([1], [0])


row_values = st.tuples(
    st.sampled_from([0.0, 0.6, 1.0, 1.7]), st.sampled_from([0.3, 0.95, 1.0]), st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.0, 0.1]),
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(row_values, min_size=2, max_size=5), st.integers(0, 1000), st.sampled_from([7, 40, 3000]))
def test_a_row_draws_the_same_token_whatever_its_neighbours_filter(rows, seed, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), vocabulary, generator=generator) * 3
    noise = torch.rand(len(rows), generator=generator)
    together = sample(logits, filters(rows), noise).tolist()
    alone = [int(sample(logits[i : i + 1], filters([row]), noise[i : i + 1])) for i, row in enumerate(rows)]
    assert together == alone


def test_a_nucleus_wider_than_the_candidates_is_still_exact():
    """A flat distribution over many tokens: top_p needs the full sort."""
    logits = torch.zeros(1, 5000)
    logits[0, ::2] = 0.01
    picked = support(logits, (1.0, 0.45, 0, 0.0))
    assert picked and all(token % 2 == 0 for token in picked)


def test_the_last_token_is_never_drawn_by_rounding():
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2] = 0.0
    assert sample(logits, filters([(1.0, 1.0, 0, 0.0)]), torch.tensor([1.0])).tolist() == [2]


def test_confidence_is_minus_the_mean_log_probability_of_the_top_twenty():
    logits = torch.randn(3, 100)
    expected = -torch.log_softmax(logits, -1).topk(20).values.mean(-1)
    assert torch.allclose(token_confidence(logits), expected, atol=1e-5)
    assert torch.allclose(token_confidence(logits[:, :5]), -torch.log_softmax(logits[:, :5], -1).mean(-1), atol=1e-5)

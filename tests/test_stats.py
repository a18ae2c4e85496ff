"""The statistics of a comparison, against brute force, closed forms and cases worked out by hand."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gambit import stats as st
from gambit.bench.summary import union_seconds


def by_enumeration(differences: list[Fraction]) -> float:
    """Every choice of signs, counted."""
    observed = abs(sum(differences))
    sums = [
        abs(sum(d * s for d, s in zip(differences, signs, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(total >= observed for total in sums) / len(sums)


@given(some.lists(some.fractions(-1, 1, max_denominator=4), min_size=1, max_size=9))
def test_the_sign_flip_test_counts_every_choice_of_signs(differences: list[Fraction]) -> None:
    assert st.sign_flip_p(differences) == pytest.approx(by_enumeration(differences))


@pytest.mark.parametrize(("wins", "losses", "ties"), [(3, 0, 5), (9, 1, 40), (0, 0, 4), (5, 5, 0), (20, 6, 100)])
def test_with_one_seed_it_is_mcnemars_exact_test(wins: int, losses: int, ties: int) -> None:
    n, fewer = wins + losses, min(wins, losses)
    binomial = min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
    differences = [Fraction(1)] * wins + [Fraction(-1)] * losses + [Fraction(0)] * ties
    assert st.sign_flip_p(differences) == pytest.approx(binomial)


def test_holm_multiplies_the_smallest_by_all_and_never_falls() -> None:
    assert st.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert st.holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert st.holm([]) == []


def test_an_interval_is_the_middle_of_the_resampled_means() -> None:
    values = np.array([0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 1.0])
    draws = st.resamples(len(values))
    means = sorted(sum(n * value for n, value in zip(draw, values, strict=True)) / len(draw) for draw in draws)
    found = st.mean_interval(values, draws)
    assert found.value == pytest.approx(4.5 / 7)
    assert found.low == pytest.approx(means[249], abs=0.08) and found.high == pytest.approx(means[9749], abs=0.08)
    assert found.low < found.value < found.high


def test_a_constant_ratio_has_no_width_and_an_empty_one_is_none() -> None:
    below = np.array([100.0, 50.0, 900.0, 10.0])
    found = st.ratio_interval(0.5 * below, below, st.resamples(4))
    assert found is not None and (found.low, found.value, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert st.ratio_interval(below, np.zeros(4), st.resamples(4)) is None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_right_is_not_certainty(share: float) -> None:
    """Eight of eight: by the binomial, anything above 63.1 % would give that in one run of forty."""
    found = st.share_interval(np.full(8, share), st.resamples(8))
    assert found.value == share
    bound = found.low if share else 1 - found.high
    assert bound == pytest.approx(0.025 ** (1 / 8))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    draws = st.resamples(60)
    hits = 0
    for _ in range(100):
        found = st.mean_interval((rng.random(60) < 0.6).astype(float), draws)
        hits += found.low <= 0.6 <= found.high
    assert 88 <= hits <= 100


def test_each_benchmark_counts_alike_in_the_overall_mean() -> None:
    large, small = np.full(100, 1.0), np.zeros(2)
    found = st.stratified_mean_interval([(large, st.resamples(100)), (small, st.resamples(2))])
    assert found == st.Interval(0.5, 0.5, 0.5)


def test_each_problem_counts_alike_in_the_pooled_mean() -> None:
    large, small = np.full(98, 1.0), np.zeros(2)
    found = st.pooled_mean_interval([(large, st.resamples(98)), (small, st.resamples(2))])
    assert (found.value, found.low, found.high) == pytest.approx((0.98, 0.98, 0.98))
    values = np.arange(40) % 2 * 1.0
    pooled = st.pooled_mean_interval([(values, st.resamples(40)), (1 - values, st.resamples(40))])
    assert pooled.value == 0.5 and pooled.low < 0.5 < pooled.high


def test_the_wall_clock_counts_overlaps_once() -> None:
    assert union_seconds([(0.0, 2.0), (1.0, 3.0), (10.0, 11.0), (10.2, 10.4)]) == pytest.approx(4.0)
    assert union_seconds([]) == 0


def test_chances_and_log_odds_lead_to_each_other_and_stay_finite() -> None:
    for chance in (0.0, 1e-9, 0.02, 0.5, 0.999, 1.0):
        kept = min(max(chance, st.LEAST_CHANCE), 1 - st.LEAST_CHANCE)
        assert st.sigmoid(st.log_odds(chance)) == pytest.approx(kept)
        assert st.all_log_odds(np.array([chance]))[0] == pytest.approx(st.log_odds(chance))
    assert st.sigmoid(-1e9) > 0 and st.all_sigmoids(np.array([-1e9, 1e9])).tolist() == [st.sigmoid(-1e9), 1.0]

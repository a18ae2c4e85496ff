"""pass@k and majority@k against every subset that there is."""

import itertools
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.bench.subsets import majority_at, pass_at, sizes_up_to


@given(st.integers(0, 4), st.lists(st.integers(1, 3), max_size=3), st.integers(0, 2), st.data())
def test_the_chances_are_those_of_all_subsets(right, wrong, silent, data):
    answers = ["right"] * right + [f"w{i}" for i, count in enumerate(wrong) for _ in range(count)] + [None] * silent
    if not answers:
        return
    k = data.draw(st.integers(1, len(answers)))
    passes, wins = [], []
    for chosen in itertools.combinations(answers, k):
        votes = Counter(answer for answer in chosen if answer is not None)
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        passes.append("right" in chosen)
        wins.append(("right" in best) / max(len(best), 1))
    assert pass_at(k, len(answers), right) == pytest.approx(fmean(passes), abs=1e-12)
    assert majority_at(k, len(answers), right, wrong) == pytest.approx(fmean(wins), abs=1e-12)


def test_large_pools_neither_overflow_nor_lose_their_sum():
    assert majority_at(256, 256, 100, [99, 57]) == pytest.approx(1)
    assert majority_at(128, 256, 100, [100]) + majority_at(128, 256, 100, [100]) == pytest.approx(1, abs=1e-6)
    assert majority_at(255, 512, 200, [150, 100, 62]) > 0.99
    assert sizes_up_to(6) == [1, 2, 4, 6] and sizes_up_to(8) == [1, 2, 4, 8] and sizes_up_to(0) == []

"""Token confidence: windows by hand, tracks against a recomputation from scratch, the stop rule at the very token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.engines.confidence import ConfidenceTracks, summarise
from gambit.types import StopRule, TraceConfidence


def values(*numbers):
    return np.array(numbers, np.float32)


def test_windows_by_hand():
    # windows of 2: (5+1)/2, (1+3)/2, (3+7)/2, (7+2)/2
    assert summarise(values(5, 1, 3, 7, 2), 2) == TraceConfidence(5, 3.6, 4.5, 2.0, 2.0)


def test_a_trace_shorter_than_a_window_is_one_window():
    assert summarise(values(4, 2), 2048) == TraceConfidence(2, 3.0, 3.0, 3.0, 3.0)
    assert summarise(values(), 8) == TraceConfidence(0, 0.0, 0.0, 0.0, 0.0)


def test_the_bottom_is_the_mean_of_the_lowest_tenth_of_all_windows():
    # 20 windows of one token: the lowest two are 1 and 2
    found = summarise(values(*range(20, 0, -1)), 1)
    assert (found.bottom, found.lowest, found.tail) == (1.5, 1.0, 1.0)
    assert summarise(values(*range(19, 0, -1)), 1).bottom == 1.0  # a tenth of 19, rounded down


def test_a_stop_rule_ends_a_trace_at_the_first_full_window_below_it():
    tracks = ConfidenceTracks()
    tracks.add("a", 3, StopRule(3, 4.0))
    tracks.add("b", 3, None)
    said = [1.0, 1.0, 20.0, 1.0, 1.0, 9.9, 1.0]  # full windows: 7.33, 7.33, 7.33, 3.97
    ended = [tracks.fold(["a", "b"], values(x, x)) for x in said]
    assert ended == [[], [], [], [], [], ["a"], ["a"]]
    assert tracks.end("a").num_tokens == 7 and tracks.end("a") is None


def test_exactly_at_the_threshold_a_trace_goes_on():
    tracks = ConfidenceTracks()
    tracks.add("a", 2, StopRule(2, 3.0))
    assert [tracks.fold(["a"], values(x)) for x in (2, 4, 2, 4)] == [[], [], [], []]
    assert tracks.fold(["a"], values(1.9)) == ["a"]


def test_a_child_takes_over_its_parents_tokens_up_to_the_branch_wherever_that_is():
    tracks = ConfidenceTracks()
    tracks.add("parent", 2, None)
    for x in (5, 1, 3):
        tracks.fold(["parent"], values(x))
    tracks.add("now", 2, StopRule(2, 2.5), inherited=3, parent="parent")
    tracks.add("before", 2, None, inherited=2, parent="parent")
    assert tracks.fold(["parent", "now", "before"], values(9, 1.5, 4)) == ["now"]  # (3 + 1.5) / 2 < 2.5
    assert tracks.end("now") == summarise(values(5, 1, 3, 1.5), 2)
    assert tracks.end("before") == summarise(values(5, 1, 4), 2)
    assert tracks.end("parent") == summarise(values(5, 1, 3, 9), 2)


def test_tokens_of_a_parent_that_is_gone_are_not_counted():
    tracks = ConfidenceTracks()
    tracks.add("orphan", 4, None, inherited=7, parent="gone")
    tracks.fold(["orphan"], values(2))
    tracks.add("grandchild", 4, None, inherited=8, parent="orphan")
    tracks.add("early", 4, None, inherited=5, parent="orphan")
    tracks.fold(["grandchild", "early"], values(4, 4))
    assert (tracks.end("grandchild").num_tokens, tracks.end("early").num_tokens) == (2, 1)


def test_a_freed_place_starts_empty_and_tables_grow():
    tracks = ConfidenceTracks()
    for turn in range(3):
        for trace in range(100):
            tracks.add(trace, 3, None)
        for _ in range(300):
            tracks.fold(range(100), np.full(100, turn, np.float32))
        assert {tracks.end(trace).mean for trace in range(100)} == {float(turn)} and len(tracks) == 0


numbers = st.lists(st.floats(0, 20, width=32), min_size=1, max_size=40)


@settings(max_examples=200)
@given(numbers, st.integers(1, 12), st.floats(0, 20))
def test_running_windows_are_those_computed_from_scratch(said, window, threshold):
    tracks = ConfidenceTracks()
    tracks.add(0, window, StopRule(window, threshold))
    for count in range(1, len(said) + 1):
        ended = tracks.fold([0], values(said[count - 1]))
        mean = np.mean(np.array(said[:count][-window:], np.float64))
        if abs(mean - threshold) > 1e-9:
            assert bool(ended) == (count >= window and mean < threshold)
    means = [np.mean(said[i : i + window]) for i in range(max(len(said) - window, 0) + 1)]
    found = tracks.end(0)
    assert found.lowest == pytest.approx(min(means), abs=1e-4) and found.tail == pytest.approx(means[-1], abs=1e-4)
    assert found.bottom >= found.lowest - 1e-9

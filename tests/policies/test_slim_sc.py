"""Slim-SC by hand: which pair, which of the two, when, and how thoughts are found in text."""

import re
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.policies import slim_sc
from gambit.policies.base import PoolView, Prune, Start, ThoughtNeed, ThoughtSplit, ThoughtView, TraceView, Wake
from gambit.policies.slim_sc import (
    MARKERS,
    SlimSc,
    SlimScOptions,
    SlimScState,
    ThoughtReader,
    marker_lengths,
    nearest,
    redundancy,
)
from gambit.search.choice import check_search
from gambit.solver import Solver
from gambit.tree import TraceState
from gambit.types import OnPressure, PressureAction, ThoughtScore


def at(degrees):
    """A unit vector in the plane: cosines are those of angles."""
    return (float(np.cos(np.radians(degrees))), float(np.sin(np.radians(degrees))))


def bank(**angles):
    return {int(trace[1:]): np.array([at(a) for a in of]) for trace, of in angles.items()}


def running(trace, is_thinking=True, state=TraceState.RUNNING):
    return TraceView(trace, state, None, 0, 600, 600, 0, is_thinking)


def view(*thoughts, traces=(0, 1, 2), silent=(), num_tokens=600):
    found = tuple(ThoughtView(trace, num_tokens, at(angle)) for trace, angle in thoughts)
    pool = tuple(running(trace, is_thinking=trace not in silent) for trace in traces)
    return PoolView(600, pool, len(traces), (), found)


def make(**options):
    return SlimSc(3, 3, 0, SlimScOptions(**{"threshold": 0.95, **options}))


def pruned(policy, state, seen):
    return [d.trace for d in policy.decide(state, seen)[1] if isinstance(d, Prune)]


def test_the_nearest_thought_of_another_trace():
    thoughts = bank(t0=[0], t1=[40, 90], t2=[50])
    assert nearest(thoughts, 0, np.array(at(45)))[0] == 1  # as near as trace 2's: the lower id
    assert nearest(thoughts, 1, np.array(at(45))) == (2, pytest.approx(np.cos(np.radians(5)), abs=1e-6))
    assert nearest(bank(t0=[0]), 0, np.array(at(0))) is None


def test_redundancy_is_the_mean_pairwise_cosine_by_the_number_of_thoughts():
    [own] = bank(t0=[0, 60, 90]).values()
    cosines = [0.5, 0.0, np.cos(np.radians(30))]
    assert redundancy(own) == pytest.approx(np.mean(cosines) / 3, abs=1e-6)
    assert redundancy(own[:1]) == 0.0  # no pair: as theirs


def test_of_a_like_pair_the_more_redundant_goes():
    state = SlimScState(bank(t0=[0, 90], t1=[10, 20]), threshold=0.95)
    policy = make()
    # Trace 0 thinks what trace 1 thinks; trace 1's own thoughts are nearly one.
    assert pruned(policy, state, view((0, 12))) == [1]
    state = SlimScState(bank(t0=[0, 2], t1=[10, 100]), threshold=0.95)
    assert pruned(policy, state, view((0, 11))) == [0]


def test_on_a_tie_the_one_with_fewer_thoughts_goes_then_the_one_whose_thought_is_new():
    policy, square = make(), np.eye(3)  # orthogonal thoughts: redundancy 0, however many
    assert policy.victim({0: square, 1: square[:2]}, 0, 1) == 1
    assert policy.victim({0: square[:2], 1: square}, 0, 1) == 0
    assert policy.victim({0: square, 1: square}, 0, 1) == 0
    assert policy.victim({0: square, 1: square}, 1, 0) == 1


def test_a_cosine_must_exceed_the_threshold_by_however_little():
    state = SlimScState({0: np.array([[1.0, 0.0]])}, threshold=0.5)
    for cosine, goes in ((0.5, []), (0.5000001, [1]), (0.4999999, [])):
        thought = ThoughtView(1, 600, (cosine, (1 - cosine**2) ** 0.5))
        seen = PoolView(600, (running(0), running(1)), 2, (), (thought,))
        assert pruned(make(), state, seen) == goes, cosine


def test_a_thought_is_compared_with_those_that_come_in_the_same_round_after_it():
    state = SlimScState(bank(t0=[90, 180], t1=[270, 250]), threshold=0.95)
    # Trace 0 is judged first, and its like is trace 1's, which is already there: trace 1 is the more redundant.
    assert pruned(make(), state, view((0, 0), (1, 1))) == [1]
    # With equal redundancy the one that is judged first goes.
    state = SlimScState(bank(t0=[90], t1=[90]), threshold=0.95)
    assert pruned(make(), state, view((0, 0), (1, 0))) == [0]


def test_redundancy_counts_all_thoughts_of_the_round():
    # By its first new thought alone trace 0 would be the more redundant, by both it is the less.
    state = SlimScState(bank(t0=[0], t1=[10, 60]), threshold=0.95)
    assert pruned(make(), state, view((0, 10), traces=(0, 1))) == [0]
    assert pruned(make(), state, view((0, 10), (0, 180), traces=(0, 1))) == [1]


def test_a_pair_with_a_trace_that_is_to_go_prunes_nobody_else():
    # 1 goes for being like 0. Trace 2 is like 1 alone, so that it stays until the next round.
    state = SlimScState(bank(t0=[0, 90], t1=[2, 4], t2=[180]), threshold=0.99)
    assert pruned(make(), state, view((0, 3), (2, 10))) == [1]


def test_below_the_threshold_nothing_happens_and_the_thought_is_remembered():
    state, decisions = make().decide(SlimScState(bank(t0=[0]), threshold=0.95), view((1, 30)))
    assert decisions == [] and set(state.thoughts) == {0, 1}


def test_before_its_delay_a_trace_is_not_tested():
    policy, state = make(delay_tokens=500), SlimScState(bank(t0=[0]), threshold=0.95)
    assert pruned(policy, state, view((1, 0), num_tokens=499)) == []
    assert pruned(policy, state, view((1, 0), num_tokens=500)) == [1]


def test_only_traces_that_still_reason_are_compared():
    state = SlimScState(bank(t0=[0], t1=[0]), threshold=0.95)
    assert pruned(make(), state, view((2, 0), silent=(0, 1))) == []
    assert pruned(make(), state, view((2, 0), silent=(2,))) == []
    assert pruned(make(), state, view((2, 0), traces=(1, 2))) == [2]


def test_every_new_thought_of_a_round_is_tested():
    state = SlimScState(bank(t0=[0, 100], t1=[200], t2=[300]), threshold=0.95)
    assert pruned(make(), state, view((1, 1), (1, 150), (2, 30))) == [0]
    assert pruned(make(), state, view((2, 30), (1, 150), (1, 1))) == [0]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 359)), max_size=30))
def test_one_trace_is_always_left_and_none_goes_twice(thoughts):
    policy, state = SlimSc(5, 5, 0, SlimScOptions(threshold=0.5)), SlimScState(threshold=0.5)
    live = set(range(5))
    for start in range(0, len(thoughts), 6):
        seen = [each for each in thoughts[start : start + 6] if each[0] in live]
        state, decisions = policy.decide(state, view(*seen, traces=sorted(live)))
        gone = [d.trace for d in decisions if isinstance(d, Prune)]
        assert len(gone) == len(set(gone)) and live - set(gone)
        live -= set(gone)
        assert set(state.thoughts) <= live


def test_a_pruned_trace_says_nothing_more_in_its_round():
    state = SlimScState(bank(t0=[0, 90], t1=[10]), threshold=0.95)
    new, decisions = make().decide(state, view((1, 0), (1, 1)))
    assert [d.trace for d in decisions] == [1] and set(new.thoughts) == {0}


def test_the_coin_is_fair_and_depends_on_the_seed_alone():
    def coin(seed, other):
        policy = SlimSc(3, 3, seed, SlimScOptions(variant="random", threshold=0.95))
        return policy.victim(bank(t0=[0], t1=[0], t2=[0]), 0, other)

    flips = [coin(seed, 1) for seed in range(200)]
    assert flips == [coin(seed, 1) for seed in range(200)]
    assert 60 < sum(flips) < 140


def test_for_states_the_threshold_is_a_percentile_of_what_the_delay_showed():
    policy = SlimSc(40, 40, 0, SlimScOptions(threshold_percentile=50, delay_tokens=100))
    state = policy.initial_state()
    assert state.threshold is None
    angles = [0, *range(10, 31)]  # the first is 10° from its nearest, the others 1°
    early = view(*enumerate(angles), traces=range(40), num_tokens=50)
    state, decisions = policy.decide(state, early)
    assert decisions == [] and state.threshold is None and len(state.cosines) == 22
    state, decisions = policy.decide(state, view((30, 200), (31, 30.5), traces=range(40), num_tokens=100))
    assert state.threshold == pytest.approx(np.median(state.cosines), abs=2e-6)
    assert [d.trace for d in decisions] == [31]  # half a degree from trace 21's; 200° is far from everything


def test_a_thought_that_reaches_the_learnt_percentile_is_too_like():
    policy = SlimSc(40, 40, 0, SlimScOptions(threshold_percentile=99, delay_tokens=100))
    same = view(*((trace, 0) for trace in range(21)), traces=range(40), num_tokens=50)
    state, _ = policy.decide(policy.initial_state(), same)
    assert state.cosines == (1.0,) * 21
    assert pruned(policy, state, view((30, 0), traces=range(40), num_tokens=100)) == [30]
    assert pruned(policy, state, view((30, 1), traces=range(40), num_tokens=100)) == []


def test_it_starts_like_self_consistency_and_wakes_where_thoughts_end():
    _, decisions = make().decide(SlimScState(), PoolView(0, (), 0))
    assert decisions == [Start(3, OnPressure(PressureAction.QUEUE))]
    assert make().wake == Wake(on_boundary=True, on_completion=True)
    assert make(split="markers").wake == Wake(every_steps=25, on_completion=True)


def test_the_papers_threshold_belongs_to_a_sentence_model():
    policy = SlimSc(3, 3, 0, SlimScOptions(embedder="all-mpnet-base-v2"))
    assert policy.initial_state().threshold == 0.95
    assert policy.requirements.thoughts == ThoughtNeed(ThoughtSplit.MARKERS, 25, "all-mpnet-base-v2")
    assert policy.requirements.embedding_size == 0
    assert SlimSc(3, 3).requirements.thoughts == ThoughtNeed(ThoughtSplit.BLANK_LINES, 1, None)


def test_a_sentence_model_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(slim_sc, "find_spec", lambda name: None)
    config = SearchConfig(policy="slim-sc", policy_options={"embedder": "all-mpnet-base-v2"})
    with pytest.raises(UserError, match="embedder = 'all-mpnet-base-v2': sentence_transformers is not installed"):
        check_search(config)
    slim_sc.load_embedder.cache_clear()
    with pytest.raises(UserError, match="pip install sentence-transformers, or use embedder=states"):
        slim_sc.load_embedder("all-mpnet-base-v2")


# -- thoughts in text ----------------------------------------------------------------------------------------------


def decode(words):
    return "".join(words)


def words(text):
    """A token per word, its space before it, as most tokenizers cut."""
    first, *rest = text.split(" ")
    return [first, *(" " + word for word in rest)]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_thought_ends_before_a_marker(marker):
    text = words("so x is 3 . " + marker + " of that")
    assert marker_lengths(text, decode) == [5]


def test_a_marker_inside_a_word_is_none():
    assert marker_lengths(words("one two threeWait four 7Wait éWait"), decode) == []
    assert marker_lengths(["one", " two", ".", "Wait", " four"], decode) == [3]
    assert marker_lengths(words("one two wait another time"), decode) == []  # these begin with a capital
    assert marker_lengths([], decode) == []


def test_the_marker_that_begins_a_thought_does_not_end_it():
    assert marker_lengths([" Wait", " no", " But", " wait", " so"], decode) == [2]


@given(st.lists(st.sampled_from(["Wait", " Wait", "a", " b", "\n", "But", " wait", "7", "_"]), max_size=40))
def test_markers_are_found_where_a_search_over_every_cut_finds_them(tokens):
    starts = [m.start() for m in re.finditer(r"(?<=[^0-9A-Za-z])(?:Wait|But wait)", decode(tokens))]
    token_of = [i for i, token in enumerate(tokens) for _ in token]
    ends = sorted({token_of[start] for start in starts} - {0})
    assert np.cumsum(marker_lengths(tokens, decode)).tolist() == ends


def reader(split, texts, min_tokens=1, embed=None):
    need = ThoughtNeed(split, min_tokens, "model" if embed else None)
    return ThoughtReader(need, lambda trace, start: texts[trace][start:], decode, embed)


def test_blank_line_thoughts_come_with_their_states_once():
    found = reader(ThoughtSplit.BLANK_LINES, {})
    found.note([ThoughtScore(0, 0.5, 4, at(0)), ThoughtScore(1, 0.5, 6, at(90)), ThoughtScore(9, 0.5, 6, at(1))])
    assert [(t.trace, t.num_tokens) for t in found.collect([0, 1])] == [(0, 4), (1, 6)]
    assert found.collect([0, 1]) == ()


def test_pieces_under_the_smallest_size_are_dropped_with_their_states():
    found = reader(ThoughtSplit.BLANK_LINES, {}, min_tokens=5)
    found.note([ThoughtScore(0, 0.5, 3, at(0)), ThoughtScore(0, 0.5, 9, at(60)), ThoughtScore(0, 0.5, 13, at(70))])
    [thought] = found.collect([0])
    assert thought.num_tokens == 9 and thought.vector == pytest.approx(at(60))

    texts = {0: words("a b Wait c d e But wait f Wait")}
    calls = []
    found = reader(ThoughtSplit.MARKERS, texts, 3, lambda given: calls.append(list(given)) or [at(0) for _ in given])
    assert [thought.num_tokens for thought in found.collect([0])] == [6, 9]
    assert calls == [["Wait c d e", "But wait f"]]


def test_marker_thoughts_with_states_are_the_mean_of_the_boundaries_in_them():
    texts = {0: words("a b c d Wait e f g Wait h")}
    found = reader(ThoughtSplit.MARKERS, texts)
    found.note([ThoughtScore(0, 0.5, 2, at(0)), ThoughtScore(0, 0.5, 4, at(90)), ThoughtScore(0, 0.5, 6, at(10))])
    first, second = found.collect([0])
    assert (first.num_tokens, second.num_tokens) == (4, 8)
    assert first.vector == pytest.approx(at(45)) and second.vector == pytest.approx(at(10))


def test_text_thoughts_are_embedded_in_one_call_and_go_on_where_they_ended():
    calls = []

    def embed(texts):
        calls.append(list(texts))
        return [at(len(text)) for text in texts]

    texts = {0: words("a b Wait c"), 1: words("x y z")}
    found = reader(ThoughtSplit.MARKERS, texts, embed=embed)
    assert [t.num_tokens for t in found.collect([0, 1])] == [2]
    texts[0] += [" d", " But", " wait", " e"]
    texts[1] += [" Another", " u"]
    assert [(t.trace, t.num_tokens) for t in found.collect([0, 1])] == [(0, 5), (1, 3)]
    assert calls == [["a b"], ["Wait c d", "x y z"]]


class FakeSentenceTransformer:
    """Embeds a text by its length; knows one model."""

    def __init__(self, name):
        if name != "known":
            raise OSError(f"no such model: {name}\nand much advice")

    def encode(self, texts, *, normalize_embeddings, show_progress_bar):
        assert normalize_embeddings and not show_progress_bar and all(isinstance(text, str) for text in texts)
        return np.array([at(10 * len(text)) for text in texts])


@pytest.fixture
def sentence_models(monkeypatch):
    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = FakeSentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(slim_sc, "find_spec", lambda name: object())
    slim_sc.load_embedder.cache_clear()
    yield
    slim_sc.load_embedder.cache_clear()


def test_a_search_with_a_sentence_model_reads_thoughts_as_text(sentence_models, tiny_folder):
    def solve(**options):
        seen = []
        config = SearchConfig(
            policy="slim-sc",
            policy_options={"split": "blank_lines", "delay_tokens": 3, **options},
            capacity=8,
            max_new_tokens=40,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        )
        solver.solve("a=1+2", config, on_event=seen.append)
        return [event.reason for event in seen if isinstance(event, ev.Pruned)]

    with Solver(str(tiny_folder), device="cpu", scorer="constant") as solver:
        assert set(solve(embedder="known")) == {"similar"}
        assert solve(embedder="known", delay_tokens=1000) == []
        with pytest.raises(UserError, match=r"cannot load the sentence model 'other': no such model: other$"):
            solve(embedder="other")

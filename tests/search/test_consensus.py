"""The consensus stop: by hand, and the promise that `certain` never changes an answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.config.options import SearchConfig, build
from gambit.errors import UserError
from gambit.results.vote import Ballot, Consensus, VoteKind, check_consensus, count_votes, is_settled
from gambit.search.choice import check_search
from gambit.types import StopReason
from support.scripted import ScriptedEngine
from support.searching import all_options, make, make_settings, run_one, schedules

CERTAIN = Consensus(None, 1)


def settled(consensus, kind, *votes, to_come=0):
    ballots = [Ballot(i, answer, weight, i) for i, (answer, weight) in enumerate(votes)]
    return is_settled(consensus, kind, ballots, count_votes(ballots, kind, lambda a, b: a == b), to_come, unseen=0.0)


def test_certain_means_that_all_that_come_could_agree_against_the_leader():
    votes = [("1", 1.0)] * 5 + [("2", 1.0)] * 2
    assert settled(CERTAIN, VoteKind.MAJORITY, *votes, to_come=2)
    assert not settled(CERTAIN, VoteKind.MAJORITY, *votes, to_come=3)  # a tie would go elsewhere
    assert settled(CERTAIN, VoteKind.MAJORITY, *[("1", 1.0)] * 4, to_come=3)
    assert not settled(CERTAIN, VoteKind.MAJORITY, *[("1", 1.0)] * 4, to_come=4)
    assert not settled(CERTAIN, VoteKind.MAJORITY, (None, 1.0))


def test_certain_bounds_scores_that_are_probabilities_by_one():
    votes = [("1", 0.9), ("1", 0.9), ("1", 0.9), ("2", 0.5)]
    assert settled(CERTAIN, VoteKind.SCORE, *votes, to_come=2)  # 2.7 > 0.5 + 2
    assert not settled(CERTAIN, VoteKind.SCORE, *votes, to_come=3)
    # All weights are zero, so that traces were counted: one real weight will decide alone.
    assert not settled(CERTAIN, VoteKind.SCORE, *[("1", 0.0)] * 5, to_come=1)


def test_a_share_is_of_all_weight():
    votes = [("1", 9.5), ("2", 0.5)]
    assert settled(Consensus(0.95, 1), VoteKind.LOWEST_CONFIDENCE, *votes, to_come=100)
    assert not settled(Consensus(0.96, 1), VoteKind.LOWEST_CONFIDENCE, *votes, to_come=100)


@pytest.mark.parametrize("kind", [k for k in VoteKind if k.needs_confidence or k is VoteKind.BEST])
def test_votes_without_a_bound_cannot_be_certain(kind):
    with pytest.raises(UserError, match=f"with the vote '{kind.value}'"):
        check_consensus(CERTAIN, kind, is_probability=True)
    check_consensus(Consensus(0.95, 1), kind, is_probability=True)


def test_scores_must_be_probabilities():
    check_consensus(CERTAIN, VoteKind.SCORE, is_probability=True)
    with pytest.raises(UserError, match="are no probabilities"):
        check_consensus(CERTAIN, VoteKind.SCORE, is_probability=False)
    check_consensus(CERTAIN, VoteKind.MAJORITY, is_probability=False)


def test_it_is_refused_before_a_model_is_loaded():
    with pytest.raises(UserError, match="lowest-confidence"):
        check_search(SearchConfig(policy="deepconf", consensus_stop="certain"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [("off", None), ("certain", Consensus(None, 16)), ("0.95", Consensus(0.95, 16)), (1, Consensus(1.0, 16))],
)
def test_the_option_takes_words_and_shares(value, expected):
    assert build(SearchConfig, {"consensus_stop": value}).consensus == expected


@pytest.mark.parametrize("value", ["maybe", 0, 1.5, "-1", "nan"])
def test_other_values_are_refused(value):
    with pytest.raises(UserError, match="should be off, certain, or a share above 0 and at most 1"):
        build(SearchConfig, {"consensus_stop": value})


def test_a_share_counts_only_after_the_least_number_of_traces():
    def completed(least):
        engine = ScriptedEngine(seed=4, finish_chance=0.05)
        wanted = make_settings("sc", capacity=12, consensus=Consensus(0.5, least))
        result = run_one(engine, wanted, answer_of=lambda tokens: "1").search.result
        assert result.stop_reason is StopReason.CONSENSUS and result.counts.cancelled > 0
        return result.counts.completed

    assert completed(1) == 1 and 6 <= completed(6) < 12


@pytest.mark.parametrize("answer", ["1", "2"])
def test_certain_ends_a_majority_of_equals_after_more_than_half(answer):
    engine = ScriptedEngine(seed=4, finish_chance=0.03)
    wanted = make_settings("sc", capacity=12, max_new_tokens=500, consensus=CERTAIN)
    result = run_one(engine, wanted, answer_of=lambda tokens: answer, vote="majority").search.result
    assert result.stop_reason is StopReason.CONSENSUS and 7 <= result.counts.completed <= 9


@settings(max_examples=200)
@given(schedules, all_options, st.integers(1, 6), st.sampled_from(["majority", "score", "position", "concise"]))
def test_certain_never_changes_the_answer(schedule, choice, swap, vote):
    """The same schedule to its natural end elects the same winner."""
    choice = {**choice, "budget_tokens": None, "budget_traces": None}

    def answer(consensus):
        wanted = make({**choice, "consensus": consensus}, swap)
        # Mostly 0, so that it is settled early.
        answer_of = lambda tokens: str(max(0, tokens[-1] % 7 - 4))  # noqa: E731
        return run_one(ScriptedEngine(**schedule), wanted, vote=vote, answer_of=answer_of).search.result.answer

    assert answer(CERTAIN) == answer(None)

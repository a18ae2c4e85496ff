import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.vote import Ballot, VoteEntry, VoteKind, VoteResult, count_votes, recount_votes
from gambit.search.choice import vote_of
from gambit.types import Aggregation


def never(first: str, second: str) -> bool:
    return False


def ballots(*votes: tuple[str | None, float]) -> list[Ballot]:
    return [Ballot(trace=i, answer=answer, weight=weight, root=i) for i, (answer, weight) in enumerate(votes)]


def pools_of_entries(result: VoteResult) -> tuple[tuple[str, ...], ...]:
    return tuple(entry.forms for entry in result.entries)


def test_the_heaviest_pool_wins_over_the_larger_one() -> None:
    result = count_votes(ballots(("3", 0.2), ("3", 0.2), ("4", 0.9)), VoteKind.SCORE, never)
    assert result.answer == "4"
    assert result.entries == (VoteEntry("4", 0.9, 1, 1, ("4",)), VoteEntry("3", 0.4, 2, 2, ("3",)))
    assert result.margin == pytest.approx(0.5 / 1.3)
    assert result.num_abstained == 0


def test_equal_forms_pool_without_asking() -> None:
    asked: list[tuple[str, str]] = []

    def spy(first: str, second: str) -> bool:
        asked.append((first, second))
        return False

    votes = ballots(("1/2", 1.0), (r"\frac{1}{2}", 1.0), ("0.5", 1.0), ("7", 1.0), ("½", 1.0), ("7.0", 1.0))
    result = count_votes(votes, VoteKind.SCORE, spy)
    assert [entry.traces for entry in result.entries] == [4, 2]
    assert asked == [("1/2", "7")]


def test_equivalent_answers_pool_with_the_representative() -> None:
    def same_initial(first: str, second: str) -> bool:
        return first[0] == second[0]

    result = count_votes(ballots(("xa", 1.0), ("yb", 1.0), ("xc", 1.0), ("xd", 1.0)), VoteKind.SCORE, same_initial)
    assert [(entry.answer, entry.traces) for entry in result.entries] == [("xa", 3), ("yb", 1)]


def one_lacks_the_unit(first: str, second: str) -> bool:
    """12 is 12 cm and 12 m, which are not each other."""
    return first == second or "12" in (first, second)


@pytest.mark.parametrize("answers", [("12", "12 cm", "12 m", "12 m"), ("12 cm", "12 m", "12", "12 m")])
def test_an_answer_joins_a_pool_to_all_of_which_it_is_equal(answers: tuple[str, ...]) -> None:
    result = count_votes(ballots(*((answer, 1.0) for answer in answers)), VoteKind.SCORE, one_lacks_the_unit)
    assert {frozenset(entry.forms) for entry in result.entries} == {frozenset({"12", "12 cm"}), frozenset({"12 m"})}


def test_entries_say_what_was_held_equal() -> None:
    votes = ballots(("0.5", 1.0), ("7", 1.0), ("1/2", 1.0), ("x", 1.0), ("0.5", 1.0), ("y", 1.0), (None, 1.0))
    result = count_votes(votes, VoteKind.SCORE, lambda first, second: {first, second} == {"x", "y"})
    assert pools_of_entries(result) == (("0.5", "1/2"), ("x", "y"), ("7",))


def test_a_vote_is_repeated_from_its_pools_without_a_grader() -> None:
    votes = ballots(("x", 0.2), ("y", 0.9), ("z", 0.8), (None, 1.0), ("x", 0.1))
    result = count_votes(votes, VoteKind.SCORE, lambda first, second: {first, second} == {"x", "z"})
    assert result.answer == "x"
    found = pools_of_entries(result)
    for pools in (found, found[::-1]):
        assert recount_votes(votes, VoteKind.SCORE, pools) == result
    assert recount_votes(votes, VoteKind.SCORE, (("x",), ("y",), ("z",))).answer == "y"


def test_an_answer_that_the_recorded_vote_does_not_mention_is_an_error() -> None:
    with pytest.raises(UserError, match=r"trace 1 answers '6'.*has been changed"):
        recount_votes(ballots(("5", 1.0), ("6", 1.0)), VoteKind.SCORE, (("5",),))


def test_the_most_frequent_surface_form_stands_for_the_pool() -> None:
    assert count_votes(ballots(("0.5", 1.0), ("1/2", 1.0), ("1/2", 1.0)), VoteKind.SCORE, never).answer == "1/2"
    assert count_votes(ballots(("0.5", 1.0), ("1/2", 1.0)), VoteKind.SCORE, never).answer == "0.5"


@pytest.mark.parametrize("blank", [None, "", "  ", "$$"])
def test_unanswered_traces_abstain_and_never_win(blank: str | None) -> None:
    result = count_votes(ballots((blank, 5.0), (blank, 5.0), ("8", 0.1)), VoteKind.SCORE, never)
    assert (result.answer, result.num_abstained, result.margin) == ("8", 2, 1.0)
    alone = count_votes(ballots((blank, 5.0)), VoteKind.SCORE, never)
    assert (alone.answer, alone.entries, alone.margin, alone.num_abstained) == (None, (), 0.0, 1)


def test_no_ballots_elect_nobody() -> None:
    result = count_votes([], VoteKind.SCORE, never)
    assert (result.answer, result.entries, result.margin, result.num_abstained) == (None, (), 0.0, 0)


def test_ties_go_to_more_traces_then_to_the_first_seen() -> None:
    assert count_votes(ballots(("1", 1.0), ("2", 0.5), ("2", 0.5)), VoteKind.SCORE, never).answer == "2"
    assert count_votes(ballots(("1", 1.0), ("2", 1.0)), VoteKind.SCORE, never).answer == "1"
    assert count_votes(ballots(("1", 1.0), ("2", 1.0)), VoteKind.SCORE, never).margin == 0.0


def test_zero_weights_fall_back_to_counting() -> None:
    result = count_votes(ballots(("1", 0.0), ("2", 0.0), ("2", 0.0), (None, 3.0)), VoteKind.SCORE, never)
    assert result.entries == (VoteEntry("2", 2.0, 2, 2, ("2",)), VoteEntry("1", 1.0, 1, 1, ("1",)))
    assert result.margin == pytest.approx(1 / 3)


def test_roots_count_independent_origins() -> None:
    votes = [Ballot(trace=i, answer="1", weight=1.0, root=root) for i, root in enumerate((0, 0, 4))]
    assert count_votes(votes, VoteKind.SCORE, never).entries == (VoteEntry("1", 3.0, 3, 2, ("1",)),)


def test_islands_count_what_could_not_have_spread() -> None:
    places = ((0, 0), (1, 0), (2, 5), (3, 5), (4, 7))
    votes = [
        Ballot(trace=i, answer="1", weight=1.0, root=root, island=island) for i, (root, island) in enumerate(places)
    ]
    [entry] = count_votes(votes, VoteKind.SCORE, never).entries
    assert (entry.traces, entry.roots, entry.islands) == (5, 5, 3)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.1])
def test_impossible_weights_are_our_own_mistake(weight: float) -> None:
    with pytest.raises(AssertionError, match=r"^vote weights are finite and not negative"):
        count_votes(ballots(("1", weight)), VoteKind.SCORE, never)


votes = st.lists(st.tuples(st.sampled_from(["1", "2", "1/2", "0.5", "x", None]), st.floats(0, 1)), max_size=12)


@given(votes)
def test_every_ballot_is_counted_once_and_the_winner_leads(cast: list[tuple[str | None, float]]) -> None:
    result = count_votes(ballots(*cast), VoteKind.SCORE, never)
    assert sum(entry.traces for entry in result.entries) + result.num_abstained == len(cast)
    assert 0.0 <= result.margin <= 1.0
    weights = [entry.weight for entry in result.entries]
    assert weights == sorted(weights, reverse=True)
    assert result.answer == (result.entries[0].answer if result.entries else None)
    assert recount_votes(ballots(*cast), VoteKind.SCORE, pools_of_entries(result)) == result


def test_gambit_votes_with_later_thoughts_heavier_where_a_traces_score_is_a_mean() -> None:
    assert vote_of(SearchConfig()) is VoteKind.POSITION
    assert vote_of(SearchConfig(), Aggregation.LAST) is VoteKind.SCORE, "the weight is what traces were ranked by"
    assert vote_of(SearchConfig(vote="position"), Aggregation.LAST) is VoteKind.POSITION
    assert vote_of(SearchConfig(policy="sc"), Aggregation.LAST) is VoteKind.MAJORITY

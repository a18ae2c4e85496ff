"""A search that begins with a few traces and takes more only while its vote is not settled."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit import SearchConfig, Solver
from gambit import events as ev
from gambit.config.presets import ModelDefaults, resolve
from gambit.errors import UserError
from gambit.policies.base import SplitBy
from gambit.results.vote import Consensus
from gambit.search.choice import check_search
from gambit.search.parts import split
from gambit.types import StopReason
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one, schedules


def created_in_rounds(run):
    """How many traces were begun together, one number a round."""
    steps = [event.step for event in run.events if isinstance(event, ev.Created)]
    return [steps.count(step) for step in sorted(set(steps))]


def searched(policy="sc", answer_of=lambda tokens: "1", seed=4, share=0.9, **options):
    wanted = make_settings(policy, **{"capacity": 16, "first_traces": 2, "consensus": Consensus(share, 2), **options})
    return run_one(ScriptedEngine(seed=seed, finish_chance=0.05), wanted, answer_of=answer_of, vote="majority")


def different(tokens):
    return str(tokens[-1])


@pytest.mark.parametrize("options", [{"policy": "sc"}, {"policy": "gambit", "islands": 16}])
def test_a_vote_that_is_settled_needs_no_more_traces(options):
    run = searched(**options)
    assert created_in_rounds(run) == [2]
    result = run.search.result
    assert result.stop_reason is StopReason.CONSENSUS and result.counts.completed == 2


@pytest.mark.parametrize("options", [{"policy": "sc"}, {"policy": "gambit", "islands": 16}])
def test_while_it_is_not_there_are_twice_as_many_each_time(options):
    run = searched(answer_of=different, **options)
    assert created_in_rounds(run) == [2, 2, 4, 8]
    assert run.search.result.stop_reason is StopReason.COMPLETED and run.search.result.counts.completed == 16


def test_the_last_round_is_what_is_left():
    assert created_in_rounds(searched(answer_of=different, capacity=13, first_traces=3)) == [3, 3, 6, 1]


def test_a_round_begins_when_nothing_of_the_one_before_runs():
    run = searched(answer_of=different)
    live = 0
    for event in run.events:
        if isinstance(event, ev.Created):
            live += 1
            assert live <= 8, "the last round has eight"
        elif isinstance(event, ev.Finished):
            live -= 1
    assert live == 0


def test_no_more_than_the_pool_holds_run_at_once():
    assert created_in_rounds(searched(answer_of=different, capacity=4, num_traces=16))[:3] == [2, 2, 4]


def test_islands_are_begun_whole():
    run = searched("gambit", answer_of=different, islands=4, warmup_tokens=10**6)
    assert created_in_rounds(run) == [4, 4, 8], "rounded up: two traces are half an island"
    islands = [event.island for event in run.events if isinstance(event, ev.Created)]
    assert islands == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_that_is_said():
    config = SearchConfig(capacity=16, islands=4, first_traces=2, consensus_stop=0.8)
    _, told = resolve(config, ModelDefaults(), 1000, is_probability=True)
    assert told == ["first_traces 2 is less than an island: the search begins with a whole one, 4 traces"]
    for fine in ({"first_traces": 4}, {"policy": "sc"}, {"islands": 16}):
        changed = config.model_copy(update=fine)
        assert resolve(changed, ModelDefaults(), 1000, is_probability=True)[1] == []


@given(schedules, st.sampled_from(["sc", "gambit", "step", "best-of-n"]), st.integers(1, 12), st.integers(1, 12))
def test_rounds_never_lose_or_add_a_trace(schedule, policy, first, islands):
    """With answers that never agree, and memory for all, every search has all its traces in the end."""
    wanted = make_settings(policy, capacity=12, islands=islands if policy == "gambit" else 1, first_traces=first,
                           warmup_tokens=10**6, consensus=Consensus(1.0, 12))  # fmt: skip
    numbers = iter(range(10**9))
    run = run_one(
        ScriptedEngine(**{**schedule, "kv_tokens": 1 << 30}),
        wanted,
        answer_of=lambda tokens: str(next(numbers)),
        vote="majority",
    )
    assert sum(isinstance(event, ev.Created) for event in run.events) == 12
    assert run.search.result.stop_reason in (StopReason.COMPLETED, StopReason.EXHAUSTED)


# -- what is asked of the vote ---------------------------------------------------------------------------------


def test_traces_that_agree_and_are_thought_to_be_wrong_settle_nothing():
    """All weight is the leader's, and little of what a right trace would have."""

    def run(score):
        scores = dict.fromkeys(range(16), score)
        wanted = make_settings("gambit", capacity=16, islands=16, first_traces=4, consensus=Consensus(0.6, 4),
                               is_probability=True)  # fmt: skip
        engine = ScriptedEngine(seed=4, finish_chance=0.05, thought_chance=1.0, scores=scores)
        return run_one(engine, wanted, answer_of=lambda tokens: "1").search.result

    assert run(0.9).counts.completed == 4, "3.6 of 4.1"
    assert run(0.04).counts.completed == 16, "0.64 of 1.14 at the end"
    doubtful = run(0.1)
    assert doubtful.counts.completed == 8 and doubtful.stop_reason is StopReason.CONSENSUS, "0.8 of 1.3"


def test_counted_votes_are_shares_as_they_are():
    assert searched(share=1.0).search.result.counts.completed == 2


# -- options ---------------------------------------------------------------------------------------------------


def test_a_share_counts_from_the_first_round_on():
    assert SearchConfig(first_traces=4, consensus_stop=0.8).consensus == Consensus(0.8, 4)
    assert SearchConfig(first_traces=40, consensus_stop=0.8).consensus == Consensus(0.8, 16)
    assert SearchConfig(first_traces=4, consensus_stop=0.8, consensus_min_traces=6).consensus == Consensus(0.8, 6)


@pytest.mark.contract
def test_without_an_end_that_a_vote_can_bring_it_is_refused():
    with pytest.raises(UserError, match="give consensus_stop too"):
        check_search(SearchConfig(first_traces=4))
    with Solver("pawn") as solver, pytest.raises(UserError, match="give consensus_stop too"):
        solver.solve("a = 5; b = 9; c = a + b; c?", SearchConfig(first_traces=4))


def test_as_many_as_there_are_is_all_at_once():
    config = SearchConfig(capacity=8, first_traces=8, consensus_stop="certain")
    assert resolve(config, ModelDefaults(), 1000, is_probability=True)[0].first_traces is None


def test_a_search_over_several_engines_refuses_it():
    with pytest.raises(UserError, match="begins with all its traces"):
        split(make_settings(first_traces=2, consensus=Consensus(0.8, 2)), SplitBy.ISLANDS, 2)


@pytest.mark.contract
def test_pawn_needs_fewer_traces_for_an_easy_puzzle():
    with Solver("pawn") as solver, warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SearchConfig(capacity=32, islands=8, first_traces=4, consensus_stop=0.6)
        easy = solver.solve("a = 5; b = 9; c = a + b; c?", config)
        assert easy.answer == "14" and easy.counts.completed < 32 and easy.stop_reason is StopReason.CONSENSUS
        again = solver.solve("a = 5; b = 9; c = a + b; c?", config)
        assert (again.votes, again.tokens) == (easy.votes, easy.tokens)

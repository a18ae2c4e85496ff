"""The tournament by hand: ranking, the two cases, warm-up, ghosts, the floor, and the paper's worked example."""

import dataclasses
import math

import pytest

from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.config.trust import THOUGHTS, Doubt
from gambit.policies.base import (
    Branch,
    Evict,
    PoolView,
    Prune,
    ScoreUse,
    SplitBy,
    SplitIslands,
    Start,
    TraceView,
    Wake,
)
from gambit.policies.doubt import Doubting, spread_in
from gambit.policies.doubt import fallback as fallback_pool
from gambit.policies.islands import Gambit, Islands
from gambit.policies.tournament import Tournament
from gambit.tree import TraceState
from gambit.types import EndReason, Eviction, OnPressure, PressureAction, SearchStep, StopReason, ThoughtScore, TraceEnd
from support.scripted import PuppetEngine, admit
from support.searching import fallback, finished_view, make_settings, run_one


def trace(id_, score, *, state=TraceState.RUNNING, generated=100, thoughts=10, thinking=True, boundary=90):
    return TraceView(id_, state, score, thoughts if score is not None else 0, generated, generated, boundary, thinking)


def finished(id_, island=0):
    return finished_view(id_, "1", 0.5, island=island)


def decide(*traces, capacity=None, swap=2, warmup=50, floor=None, completed=0, **options):
    policy = Tournament(capacity or len(traces), swap, 10, warmup, hard_floor=floor, **options)
    done = tuple(finished(100 + i) for i in range(completed))
    return policy.decide(PoolView(10, traces, len(traces) + completed, done))


def pruned(decisions):
    return [d.trace for d in decisions if isinstance(d, Prune)]


def parents(decisions):
    return [d.parent for d in decisions if isinstance(d, Branch)]


def test_the_first_decision_fills_the_pool():
    (start,) = Tournament(5, 2, 10, 50).decide(PoolView(0, (), 0))
    assert isinstance(start, Start) and start.count == 5
    assert start.on_pressure.action is PressureAction.GHOST


def test_at_capacity_the_worst_make_room_for_branches_of_the_best():
    round_ = decide(trace(0, 0.1), trace(1, 0.9), trace(2, 0.5), trace(3, 0.2), trace(4, 0.7))
    assert pruned(round_) == [0, 3]
    assert parents(round_) == [1, 4]
    assert [type(d) for d in round_] == [Prune, Prune, Branch, Branch]


def test_under_capacity_the_best_branch_once_each_and_nothing_is_pruned():
    round_ = decide(trace(0, 0.1), trace(1, 0.9), trace(2, 0.5), capacity=5, completed=2)
    assert pruned(round_) == [] and parents(round_) == [1, 2]
    assert parents(decide(trace(0, 0.4), capacity=5, completed=4)) == [0]


def test_equal_scores_break_by_id():
    assert parents(decide(trace(7, 0.5), trace(3, 0.5), trace(5, 0.5), capacity=4)) == [3]
    round_ = decide(trace(0, 0.9), trace(3, 0.1), trace(5, 0.1), swap=1)
    assert pruned(round_) == [5]


def test_a_pair_that_would_not_gain_is_dropped():
    assert decide(trace(0, 0.5), trace(1, 0.5), trace(2, 0.5)) == []
    round_ = decide(trace(0, 0.9), trace(1, 0.3), trace(2, 0.3), trace(3, 0.2), swap=2, warmup=0)
    assert list(zip(parents(round_), pruned(round_), strict=True)) == [(0, 3)]  # 1 against 2 would gain nothing


@pytest.mark.parametrize(
    ("margin", "swaps"),
    [
        ({}, [(0, 3), (1, 2)]),
        ({"margin": 0.25}, [(0, 3), (1, 2)]),
        ({"margin": 0.35}, [(0, 3)]),
        ({"margin": 0.9}, []),
        ({"margin": 2.5, "in_log_odds": True}, [(0, 3)]),  # log-odds of 2.2, 0.4, -0.8 and -2.9
        ({"margin": 5.2, "in_log_odds": True}, []),
    ],
)
def test_a_pair_needs_a_clear_lead(margin, swaps):
    round_ = decide(trace(0, 0.9), trace(1, 0.6), trace(2, 0.3), trace(3, 0.05), **margin)
    assert list(zip(parents(round_), pruned(round_), strict=True)) == swaps


def test_certainty_is_a_lead_like_any_other():
    def leads(margin, parent, victim, *, in_log_odds=True):
        return Tournament(4, 2, 10, 50, margin, in_log_odds).leads(parent, victim)

    assert leads(13, 1.0, 0.0) and not leads(30, 1.0, 0.0)
    assert not leads(0.5, 0.2, 0.8, in_log_odds=False)


def test_places_are_filled_without_a_margin():
    """Nobody gives way there."""
    assert parents(decide(trace(0, 0.51), trace(1, 0.5), capacity=4, margin=3.0)) == [0, 1]


def test_no_trace_is_parent_and_victim():
    assert decide(trace(0, 0.9), trace(1, 0.2), swap=2) == []  # both are parents, so nobody is left to give way
    round_ = decide(trace(0, 0.9), trace(1, 0.5), trace(2, 0.2), swap=2)
    assert (parents(round_), pruned(round_)) == ([0], [2])
    assert decide(trace(0, 0.9), swap=1) == []


def test_warmup_counts_tokens_since_the_traces_own_creation():
    young = trace(0, 0.99, generated=49)
    assert parents(decide(young, trace(1, 0.6, generated=50), trace(2, 0.1), swap=1)) == [1]


def test_a_trace_that_closed_its_think_block_is_no_parent_but_can_be_pruned():
    assert parents(decide(trace(0, 0.9, thinking=False), trace(1, 0.6), trace(2, 0.1), swap=1)) == [1]
    assert pruned(decide(trace(0, 0.9), trace(1, 0.6), trace(2, 0.1, thinking=False), swap=1)) == [2]


def test_without_a_thought_a_trace_is_left_alone_until_its_warmup_is_over():
    silent = trace(2, None, generated=49)
    assert pruned(decide(trace(0, 0.9), trace(1, 0.3), silent, swap=1)) == [1]
    silent = trace(2, None, generated=50)
    assert pruned(decide(trace(0, 0.9), trace(1, 0.3), silent, swap=1)) == [2]


def test_ghosts_count_and_are_ranked_and_pruned_but_are_no_parents():
    ghost = trace(2, 0.95, state=TraceState.GHOST)
    round_ = decide(trace(0, 0.9), trace(1, 0.1), ghost, capacity=3, swap=1)
    assert (parents(round_), pruned(round_)) == ([0], [1])  # N = C because the ghost counts
    low_ghost = trace(2, 0.05, state=TraceState.GHOST)
    assert pruned(decide(trace(0, 0.9), trace(1, 0.1), low_ghost, swap=1)) == [2]
    assert parents(decide(trace(0, 0.9), trace(1, 0.1), ghost, swap=1, ghost_parents=True)) == [2]


def test_waiting_children_are_ranked_by_what_they_inherited_but_are_no_parents():
    waiting = trace(2, 0.95, state=TraceState.WAITING, generated=0)
    assert parents(decide(trace(0, 0.9), trace(1, 0.1), waiting, swap=1, warmup=0)) == [0]


def test_branch_point():
    assert decide(trace(0, 0.9, generated=100, boundary=90), trace(1, 0.1), swap=1)[1].inherited == 100
    boundary = BranchPoint.LAST_BOUNDARY
    assert decide(trace(0, 0.9, boundary=90), trace(1, 0.1), swap=1, branch_point=boundary)[1].inherited == 90


def test_the_floor_evicts_hopeless_traces_after_eight_thoughts_but_never_the_best_running_one():
    traces = [trace(0, 0.9), trace(1, 0.05, thoughts=8), trace(2, 0.05, thoughts=7), trace(3, 0.11)]
    evictions = [d for d in decide(*traces, swap=1, warmup=1000, floor=0.1) if isinstance(d, Evict)]
    assert evictions == [Evict(1, "floor")]
    hopeless = [trace(i, 0.01 * i, thoughts=20) for i in range(3)]
    assert [d.trace for d in decide(*hopeless, warmup=1000, floor=0.1)] == [1, 0]
    assert decide(*hopeless, warmup=1000, floor=None) == []


def test_the_floor_leaves_what_the_round_pruned():
    traces = [trace(0, 0.9), trace(1, 0.01, thoughts=20)]
    assert decide(*traces, swap=1, floor=0.1)[0] == Prune(1, "tournament")
    assert not [d for d in decide(*traces, swap=1, floor=0.1) if isinstance(d, Evict)]


def thoughts(**scores):
    return tuple(ThoughtScore(int(name[1:]), score, length) for name, (score, length) in scores.items())


def test_the_papers_pipeline_by_hand():
    """C = 5, K = 2: two tournaments, then five completed traces; 29 wins with 1.78 against 1.43."""
    running = 5
    steps = [
        SearchStep(admitted=admit(0, 1, 2, 3, 4), num_generated=running),
        # Round 1 at step 2: ranking 1 (0.9), 4 (0.8), 2 (0.6), 0 (0.3), 3 (0.2).
        SearchStep(
            num_generated=running,
            scored=thoughts(t0=(0.3, 2), t1=(0.9, 2), t2=(0.6, 2), t3=(0.2, 2), t4=(0.8, 2)),
        ),
        # Children 5 (of 1) and 6 (of 4) replaced 3 and 0.
        SearchStep(admitted=admit(5, 6, reused=2), num_generated=running),
        # Round 2 at step 4. Running means: 1: (0.9+0.5)/2 = 0.7, 2: (0.6+0.2)/2 = 0.4, 4: (0.8+0.6)/2 = 0.7,
        # 5: (0.9+0.9)/2 = 0.9, 6: (0.8+0.9)/2 = 0.85. Parents must be 2 tokens old: 5 and 6 are; 5 -> 7, 6 -> 8.
        SearchStep(
            num_generated=running,
            scored=thoughts(t1=(0.5, 4), t2=(0.2, 4), t4=(0.6, 4), t5=(0.9, 4), t6=(0.9, 4)),
        ),
        SearchStep(admitted=admit(7, 8, reused=4), num_generated=running),
        # The end: 5 says 29 with (0.9+0.9+0.87)/3 = 0.89, 7 says 29 with 0.89; 1 says 31 with 0.7, 6 says 31 with 0.73.
        SearchStep(
            num_generated=running,
            scored=thoughts(t5=(0.87, 6), t7=(0.87, 6), t6=(0.49, 6)),
            finished=(
                TraceEnd(1, EndReason.STOP, (0, 0, 0, 0, 0, 31)),
                TraceEnd(5, EndReason.STOP, (0, 0, 0, 0, 0, 29)),
                TraceEnd(6, EndReason.STOP, (0, 0, 0, 0, 0, 31)),
                TraceEnd(7, EndReason.STOP, (0, 0, 0, 0, 0, 29)),
                TraceEnd(8, EndReason.STOP, (0, 0, 0, 0, 0, 0)),
            ),
        ),
    ]
    settings = make_settings(capacity=5, swap_size=2, check_interval=2, warmup_tokens=2)
    engine = PuppetEngine(steps)
    watched = run_one(engine, settings, answer_of=lambda tokens: str(tokens[-1]) if tokens[-1] else None)
    events = watched.events
    rounds = [(e.step, e.trace) for e in events if isinstance(e, ev.Pruned)]
    assert rounds == [(2, 3), (2, 0), (4, 2), (4, 4)]
    branches = [(e.step, e.parent, e.trace, e.inherited) for e in events if isinstance(e, ev.Branched)]
    assert branches == [(2, 1, 5, 2), (2, 4, 6, 2), (4, 5, 7, 4), (4, 6, 8, 4)]
    result = watched.search.result
    assert result.stop_reason is StopReason.COMPLETED
    assert (result.answer, result.num_abstained) == ("29", 1)
    first, second = result.votes
    assert (first.answer, round(first.weight, 2), first.traces, first.roots) == ("29", 1.78, 2, 1)
    assert (second.answer, round(second.weight, 2), second.traces, second.roots) == ("31", 1.43, 2, 2)
    counts = result.counts
    assert (counts.roots, counts.branched, counts.pruned, counts.completed) == (5, 4, 4, 5)


def test_an_evicted_trace_keeps_the_round_balanced():
    """The decoupled views: after an eviction the pool still counts C, so the round swaps instead of filling up."""
    steps = [
        SearchStep(admitted=admit(0, 1, 2), num_generated=3),
        SearchStep(num_generated=3, scored=thoughts(t0=(0.9, 2), t1=(0.5, 2), t2=(0.1, 2))),
        SearchStep(evicted=(Eviction(2, PressureAction.GHOST, 0.1, 2, (0, 0)),), num_generated=2),
        SearchStep(num_generated=2),
        SearchStep(
            admitted=admit(3, reused=4),
            num_generated=3,
            finished=tuple(TraceEnd(i, EndReason.STOP, (0,) * 5) for i in (0, 1, 3)),
        ),
    ]
    settings = make_settings(capacity=3, swap_size=2, check_interval=4, warmup_tokens=2)
    watched = run_one(PuppetEngine(steps), settings)
    decided = [e for e in watched.events if isinstance(e, ev.Pruned | ev.Branched)]
    assert [(type(e).__name__, e.trace) for e in decided] == [("Pruned", 2), ("Branched", 3)]
    assert watched.search.result.counts.evicted == 1


@pytest.mark.parametrize("policy", ["gambit", "sc"])
def test_deciding_changes_nothing(policy):
    """A policy is a pure function: the same view twice gives the same decisions."""
    from gambit.config import registry

    settings = make_settings(policy, capacity=4)
    built = registry.load("gambit.policies", policy).from_settings(settings)
    view = PoolView(5, tuple(trace(i, 0.1 * i) for i in range(4)), 4)
    assert built.decide(built.initial_state(), view) == built.decide(built.initial_state(), view)


# -- islands, by hand --------------------------------------------------------------------------------------------------


def gambit(count, capacity, num_traces, swap=2, interval=10, warmup=50):
    pool = {"islands": count, "swap_size": swap, "check_interval": interval, "warmup_tokens": warmup}
    return Gambit.from_settings(make_settings(capacity=capacity, num_traces=num_traces, **pool))


def on_islands(*traces, step=10, capacity=4, num_traces=4, islands=2, swap=2, warmup=50, completed=()):
    """`traces` and `completed`: with the island of each."""
    policy = gambit(islands, capacity, num_traces, swap, warmup=warmup)
    views = tuple(dataclasses.replace(view, island=island) for view, island in traces)
    done = tuple(finished(100 + i, island) for i, island in enumerate(completed))
    return policy.decide(None, PoolView(step, views, len(views) + len(done), done))[1]


def test_a_pool_of_one_island_and_of_several_differ_in_what_is_spared_and_when_they_wake():
    one, several = (gambit(count, 8, 8, swap=5) for count in (1, 2))
    pressure = [policy.tournament.on_pressure for policy in (one, several)]
    assert [rule.spares_islands for rule in pressure] == [False, True]
    assert {rule.action for rule in pressure} == {PressureAction.GHOST}
    assert one.wake == Wake(every_steps=10) and several.wake == Wake(every_steps=10, on_completion=True)
    assert one.requirements.scores is several.requirements.scores is ScoreUse.ROUNDS
    assert one.requirements.split_by is several.requirements.split_by is SplitBy.ISLANDS
    assert (one.tournament.swap_size, several.tournament.swap_size) == (5, 2)
    assert gambit(8, 8, 8).tournament.swap_size == 1, "at least one"


def test_every_island_begins_with_its_own_places():
    starts = on_islands(capacity=5, num_traces=9, islands=2)
    assert [(start.island, start.count) for start in starts] == [(0, 3), (1, 2)]
    few = on_islands(capacity=8, num_traces=2, islands=2)
    assert [(start.island, start.count) for start in few] == [(0, 1), (1, 1)], "no more than it has to complete"


def test_traces_compete_on_their_own_island():
    pool_ = [(trace(0, 0.9), 0), (trace(1, 0.8), 0), (trace(2, 0.2), 1), (trace(3, 0.1), 1)]
    round_ = on_islands(*pool_, num_traces=8)
    assert pruned(round_) == [1, 3] and parents(round_) == [0, 2]
    assert on_islands(*pool_, num_traces=8, step=11) == [], "between two rounds nobody is ranked"


def test_an_island_runs_no_more_traces_than_it_has_to_complete():
    pool_ = [(trace(0, 0.9), 0), (trace(1, 0.8), 0)]
    assert parents(on_islands(*pool_, capacity=8, num_traces=6, completed=(1, 1, 1))) == [0], "two run, three to go"
    assert parents(on_islands(*pool_, capacity=8, num_traces=8, completed=(1, 1, 1, 1))) == [0, 1]
    assert parents(on_islands(*pool_, capacity=6, num_traces=8, completed=(1, 1, 1, 1))) == [0], "one place"


def test_an_island_that_is_complete_gives_up_what_still_runs():
    pool_ = [(trace(0, 0.9), 0), (trace(1, 0.8, state=TraceState.GHOST), 0), (trace(2, 0.5), 1)]
    done = on_islands(*pool_, completed=(0, 0), step=7)
    assert done == [Prune(0, "island complete")], "at once; a ghost runs no more"


def test_an_island_that_has_lost_its_last_trace_begins_anew():
    pool_ = [(trace(0, 0.9), 0), (trace(1, 0.8), 0)]
    (start,) = on_islands(*pool_, completed=(1,), step=7)
    assert (start.island, start.count) == (1, 1) and start.on_pressure.spares_islands
    ghosts = [*pool_, (trace(2, 0.5, state=TraceState.GHOST), 1), (trace(3, 0.5, state=TraceState.GHOST), 1)]
    assert on_islands(*ghosts, step=7) == [], "no place is free"
    (start,) = on_islands(*ghosts[:3], step=7)
    assert start.count == 1


def test_the_papers_pool_does_not_begin_anew():
    assert on_islands((trace(0, 0.9, state=TraceState.GHOST), 0), islands=1) == []
    assert on_islands(islands=1, completed=(0,)) == []


# -- doubt, by hand ----------------------------------------------------------------------------------------------------

POOLS = (fallback(0.6, 2, 3, 4), fallback(0.0, 4, 5, 6))
DOUBT = Doubt(0.9, (0.5,) * len(THOUGHTS), is_probability=True, pools=POOLS)


def scores_apart(spread, num_thoughts=4):
    """The scores of eight roots, so far apart in log-odds after every thought."""
    return tuple((1 / (1 + math.exp(-side)),) * num_thoughts for side in (spread, -spread) * 4)


def doubting(islands=1, **options):
    return Doubting(gambit(islands, 8, 8), DOUBT, **options)


def test_scores_that_lie_too_far_apart_split_the_islands():
    found = fallback_pool(DOUBT, scores_apart(1.5), 1)  # three times as far: 0.5 + 0.4 / 3
    assert (found.islands, found.swap_size, found.warmup_tokens) == (2, 3, 4)
    assert "was 0.90" in found.why and found.why.endswith("which leaves about 0.63")
    assert fallback_pool(DOUBT, scores_apart(5.0), 1).islands == 4
    assert fallback_pool(DOUBT, scores_apart(0.999), 1) is None, "no further than twice"
    assert fallback_pool(DOUBT, scores_apart(1.5), 2) is None, "they are as small already"
    assert fallback_pool(DOUBT, scores_apart(5.0), 2).islands == 4
    assert fallback_pool(DOUBT, scores_apart(5.0)[:7], 1) is None, "too few to say"


def test_roots_are_compared_after_as_many_thoughts_as_half_of_them_have():
    scores = [*scores_apart(1.5, 3), *scores_apart(9.0, 1)[:7]]
    assert spread_in(DOUBT, scores) == pytest.approx((3, 1.5)), "eight of fifteen have three"
    assert spread_in(DOUBT, [*scores, *scores_apart(9.0, 1)[:2]])[0] == 1, "eight of seventeen are too few"
    assert spread_in(DOUBT, scores_apart(1.5, 5)) == pytest.approx((4, 1.5)), "one of the numbers it was judged by"


def test_a_split_changes_the_policy_in_force():
    policy = doubting()
    view = PoolView(10, (trace(0, 0.9), trace(1, 0.1)), 2, first_scores=scores_apart(1.5))
    after, (split,) = policy.decide(policy.initial_state(), view)
    assert after == gambit(1, 8, 8).with_pool(split.pool)
    tournament = after.tournament
    assert (after.islands, tournament.swap_size, tournament.warmup_tokens) == (Islands(2, 8, 8), 2, 4)
    assert tournament.check_interval == 10 and tournament.on_pressure.spares_islands
    again, decisions = policy.decide(after, view)
    assert again is after and not [d for d in decisions if isinstance(d, SplitIslands)]
    between = dataclasses.replace(view, step=11)
    assert policy.decide(policy.initial_state(), between) == (policy.policy, []), "only in a round"


def test_a_policy_that_may_split_wakes_at_completions():
    assert doubting().wake == Wake(every_steps=10, on_completion=True)
    assert doubting().requirements.first_scores == THOUGHTS[-1]


def test_a_split_that_leaves_an_island_too_full_prunes_its_worst():
    policy = gambit(2, 4, 8, swap=1, warmup=0)
    crowd = [trace(0, 0.5), trace(1, 0.2), trace(2, None), trace(3, 0.2)]
    assert [each.id for each in policy.surplus(0, crowd)] == [3, 1], "the youngest of equals, the unscored last"
    assert policy.surplus(0, crowd[:2]) == [] and [each.id for each in policy.surplus(0, crowd[:3])] == [1]
    decisions = policy.decide(None, PoolView(11, tuple(crowd), 4))[1]
    assert decisions[:2] == [Prune(3, "split"), Prune(1, "split")]
    assert [(start.island, start.count) for start in decisions[2:]] == [(1, 2)], "the other has places"


def test_settings_reach_the_policy():
    settings = make_settings(
        capacity=6, num_traces=9, islands=3, swap_size=4, check_interval=7, warmup_tokens=5, hard_floor=0.25,
        ghost_parents=True, branch_point=BranchPoint.LAST_BOUNDARY, doubt=DOUBT, swap_margin=1.5, is_probability=True,
    )  # fmt: skip
    policy = Gambit.from_settings(settings)
    tournament = Tournament(
        6, 1, 7, 5, 1.5, True, 0.25, True, BranchPoint.LAST_BOUNDARY,
        OnPressure(PressureAction.GHOST, spares_islands=True),
    )  # fmt: skip
    assert policy == Doubting(Gambit(Islands(3, 6, 9), tournament), DOUBT)
    assert Gambit.from_settings(dataclasses.replace(settings, doubt=None)) == policy.policy

"""The authors' rules against what their own code decided, and each of their rules by hand."""

import json
import lzma
from collections import Counter
from dataclasses import dataclass

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.presets import Preset, system_prompt_of
from gambit.policies.authors import AuthorsGambit, Rounds
from gambit.policies.base import Branch, PoolView, Prune, Start, TraceView
from gambit.policies.tournament import ParentChoice
from gambit.results.vote import VoteKind, ballots_of
from gambit.scorers.base import ScorerInfo
from gambit.search.choice import vote_of
from gambit.solver import Solver
from gambit.tree import TraceState, TraceTree
from gambit.types import Aggregation, EndReason, PressureAction, StatePosition
from support import GOLDEN, ROOT
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one
from support.tables import table


@dataclass(frozen=True)
class Flat:
    """Gives every thought one half."""

    aggregation: Aggregation

    @property
    def info(self):
        return ScorerInfo("flat", StatePosition.BOUNDARY, hidden_size=32, aggregation=self.aggregation)

    def to(self, device):
        return self

    def score(self, thoughts):
        return thoughts.states[:, 0] * 0 + 0.5


STATES = {"run": TraceState.RUNNING, "wait": TraceState.WAITING, "ghost": TraceState.GHOST}
SAMPLE = GOLDEN / "authors" / "authors_tournament_sample.jsonl.xz"
WHOLE = [found for folder in ROOT.parents if (found := folder / "shared/golden/authors_tournament.jsonl.xz").is_file()]
POOLS, NUM_POOLS = (WHOLE[0], 2_000) if WHOLE else (SAMPLE, 400)  # all are there beside the repository, some in it
DUE = Rounds(decisions=999, last=799)


def trace(id_, score, *, state=TraceState.RUNNING, generated=100, inherited=0, thoughts=5, thinking=True):
    length = generated + inherited
    return TraceView(id_, state, score, thoughts if score is not None else 0, generated, length, length, thinking)


def view(*traces, step=10):
    return PoolView(step, traces, len(traces))


def decide(*traces, capacity=None, swap=2, floor=None, state=DUE, **options):
    policy = AuthorsGambit(capacity or len(traces), swap, 200, 50, floor, **options)
    return policy.decide(state, view(*traces))


def pruned(decisions):
    return sorted(each.trace for each in decisions if isinstance(each, Prune))


def parents(decisions):
    return sorted(each.parent for each in decisions if isinstance(each, Branch))


def test_every_pool_of_the_authors_own_code_is_decided_alike():
    """Their code was run on random pools in ten regimes: all 2,000 where they are, 40 of each regime elsewhere."""
    with lzma.open(POOLS, "rt") as lines:
        pools = [json.loads(line) for line in lines]
    assert len(pools) == NUM_POOLS and set(Counter(pool["regime"] for pool in pools).values()) == {NUM_POOLS // 10}
    differences, decided = [], Counter()
    for number, pool in enumerate(pools):
        policy = AuthorsGambit(pool["capacity"], pool["swap"], pool["interval"], pool["warmup"], pool["floor"])
        traces = tuple(
            trace(
                id_, score, state=STATES[state], generated=own, inherited=inherited, thoughts=count, thinking=thinking
            )
            for id_, state, score, own, inherited, count, thinking in pool["traces"]
        )
        _, decisions = policy.decide(DUE, PoolView(10**6, traces, len(traces) + pool["completed"]))
        decided += Counter(type(each).__name__ for each in decisions)
        if (pruned(decisions), parents(decisions)) != (sorted(pool["pruned"]), sorted(pool["parents"])):
            differences.append((number, pool["regime"]))
    assert differences == []
    assert decided == Counter(
        Prune=sum(len(pool["pruned"]) for pool in pools), Branch=sum(len(pool["parents"]) for pool in pools)
    )
    assert min(decided.values()) > NUM_POOLS


def test_the_pool_begins_full_and_a_trace_without_a_score_loses_its_memory_first():
    state, (start,) = AuthorsGambit(5, 2, 200, 50).decide(Rounds(), PoolView(0, (), 0))
    assert (state, start.count) == (Rounds(), 5) and isinstance(start, Start)
    assert start.on_pressure.action is PressureAction.GHOST and start.on_pressure.unscored_first


def test_the_interval_counts_steps_in_which_a_thought_was_scored():
    pool = trace(0, 0.9), trace(1, 0.1, generated=10)
    state, decisions = decide(*[trace(i, 0.5, generated=49) for i in range(2)], state=Rounds(7), swap=1)
    assert (state, decisions) == (Rounds(8), [])  # nothing is warm: not even the first tournament
    state, decisions = decide(*pool, state=state, swap=1)
    assert state == Rounds(9, last=9) and parents(decisions) == [0]
    for count in range(10, 209):
        state, decisions = decide(*pool, state=state, swap=1)
        assert (state, decisions) == (Rounds(count, last=9), [])
    state, decisions = decide(*pool, state=state, swap=1)
    assert state == Rounds(209, last=209) and pruned(decisions) == [1]


GOOD, BAD = trace(0, 0.9), trace(1, 0.2)
RULES = {
    "row 17: without a score neither victim nor parent": ([GOOD, trace(2, None), trace(3, None), BAD], {}, [1], [0]),
    "row 19: parent past its thinking": ([trace(0, 0.9, thinking=False), BAD], {}, [1], [0]),
    "row 22: a ghost among the best": (
        [trace(0, 0.9, state=TraceState.GHOST), trace(2, 0.8), trace(3, 0.3), BAD], {"swap": 1}, [1], []),
    "row 23: half of the scored at most": ([GOOD, trace(2, 0.8), BAD], {"swap": 3}, [1], [0]),
    "row 23: victims without parents": ([trace(0, 0.9, generated=10), BAD], {}, [1], []),
    "row 24: no comparison": ([trace(0, 0.5), trace(1, 0.5)], {}, [1], [0]),
    "row 25: a victim is no parent": ([trace(0, 0.9, generated=10), trace(2, 0.8, generated=10), BAD], {}, [1], []),
    "row 27: the floor frees a place for the best": ([GOOD, trace(1, 0.05), trace(2, 0.4)], {"floor": 0.1}, [1], [0]),
    "row 27: not before the warm-up": ([GOOD, trace(1, 0.05, generated=10), trace(2, 0.4)],
                                       {"floor": 0.1, "capacity": 4}, [], [0]),
    "row 27: ghosts too": ([GOOD, trace(1, 0.05, state=TraceState.GHOST)], {"floor": 0.1}, [1], [0]),
}  # fmt: skip


@table("name", RULES)
def test_their_rules_one_by_one(name):
    traces, options, victims, chosen = RULES[name]
    _, decisions = decide(*traces, **options)
    assert (pruned(decisions), parents(decisions)) == (victims, chosen)


def test_the_floor_acts_between_tournaments_too():
    state, decisions = decide(GOOD, trace(1, 0.05), floor=0.1, state=Rounds(20, last=10))
    assert (state, pruned(decisions), parents(decisions)) == (Rounds(21, last=10), [1], [])


def test_random_parents_are_drawn_by_lot_from_all_but_the_victims():
    pool = [trace(i, i / 10) for i in range(10)]
    drawn = Counter()
    for seed in range(300):
        _, decisions = decide(*pool, parents=ParentChoice.RANDOM, seed=seed)
        assert pruned(decisions) == [0, 1] and decisions == decide(*pool, parents=ParentChoice.RANDOM, seed=seed)[1]
        drawn.update(parents(decisions))
    assert set(drawn) == set(range(2, 10)) and min(drawn.values()) > 40  # 75 each


# -- `--compat authors`, besides the tournament ----------------------------------------------------------------


def test_compat_fills_what_is_left_open_and_nothing_else():
    config = SearchConfig(compat="authors")
    assert (config.policy, config.boundary, config.own_limit) == ("gambit-authors", "blank-line-token", True)
    assert vote_of(config) is VoteKind.SCORE_OR_ONE
    assert SearchConfig(**config.model_dump()) == config
    given = SearchConfig(compat="authors", policy="sc", boundary="stride:32", own_limit=False)
    assert (given.policy, given.boundary, given.own_limit) == ("sc", "stride:32", False)
    assert SearchConfig().boundary is None and SearchConfig().policy == "gambit"


def test_the_authors_prompt_has_no_full_stop_and_a_models_own_prompt_stays():
    config, plain = SearchConfig(compat="authors"), SearchConfig()
    theirs = r"Please reason step by step, and put your final answer within \boxed{}"
    assert system_prompt_of(config, Preset()) == theirs and system_prompt_of(plain, Preset()) == theirs + "."
    assert system_prompt_of(config, Preset(system_prompt="Be brief.")) == "Be brief."


def test_a_scorer_that_counts_by_its_last_score_counts_by_the_mean(tiny_folder):
    """Their sequence scorer is averaged over its thoughts; those that are trained here say `last`."""
    scorer = Flat(aggregation=Aggregation.LAST)
    with Solver(str(tiny_folder), scorer=scorer, engine="local", device="cpu") as solver:
        headers = []
        for compat in ("authors", None):
            config = SearchConfig(compat=compat, capacity=2, max_new_tokens=4)
            solver.solve("a?", config, on_event=headers.append)
        found = [each.aggregation for each in headers if isinstance(each, ev.RunStarted)]
    assert found == [Aggregation.MEAN, Aggregation.LAST]


def test_a_trace_without_a_score_votes_with_the_most_there_is():
    tree = TraceTree(2, Aggregation.MEAN)
    for i in range(2):
        tree.apply(ev.Created(0, i))
        tree.apply(ev.Admitted(0, i, 0, 0, 0))
    tree.apply(ev.Scored(0, (0,), (0.25,), (1,)))
    for i in range(2):
        tree.apply(ev.Finished(0, i, EndReason.STOP, str(i), (0,), None))
    for kind, weights in ((VoteKind.SCORE_OR_ONE, [0.25, 1.0]), (VoteKind.SCORE, [0.25, 0.0])):
        assert [ballot.weight for ballot in ballots_of(tree, kind)] == weights


def test_a_child_may_write_as_many_tokens_as_its_parent_up_to_the_context():
    def lengths(**changes):
        engine = ScriptedEngine(seed=5, finish_chance=0.0, thought_chance=0.5)
        settings = make_settings("gambit-authors", capacity=4, max_new_tokens=40, **changes)
        children = [trace for trace in run_one(engine, settings).search.record.tree.traces if trace.parent is not None]
        return [(each.inherited, each.num_tokens) for each in children if each.state is TraceState.FINISHED]

    assert {whole for _, whole in lengths()} == {40}
    grown = lengths(own_limit=True)
    assert grown and all(whole == inherited + 40 for inherited, whole in grown)

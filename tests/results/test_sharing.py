"""The tokens that decode steps read, from the log alone, are those of every step of the engine, counted one by one."""

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.results.record import fold
from gambit.results.result import SearchSharing, sharing_of
from gambit.tree import TraceTree
from gambit.types import Aggregation, EndReason, StepBatch, TraceKey
from support.scripted import ScriptedEngine
from support.searching import make_settings, run_one

PROMPT = 3


@dataclass
class CountingEngine(ScriptedEngine):
    """Looks at the tokens of all traces that decode, in every step; tokens are random: equal ones are shared."""

    total: int = 0
    unique: int = 0

    def step(self) -> StepBatch:
        before = {key: len(tokens) for key, tokens in self.emitted.items()}
        batch = super().step()
        ended = {TraceKey(s, end.trace): end.tokens for s, step in batch.searches.items() for end in step.finished}
        paths = {key: trace.tokens for key, trace in self.running.items()} | ended
        self._count([paths[key][:-1] for key, said in self.emitted.items() if len(said) > before.get(key, 0)])
        return batch

    def _count(self, paths: list) -> None:
        if paths:
            self.total += sum(PROMPT + len(path) for path in paths)
            nodes = {(i, *path[max(0, i - 1) : i + 1]) for path in paths for i in range(len(path))}
            self.unique += PROMPT + len(nodes)


schedules = st.fixed_dictionaries({
    "seed": st.integers(0, 10**6),
    "thought_chance": st.sampled_from([0.1, 0.4, 1.0]),
    "finish_chance": st.sampled_from([0.0, 0.02, 0.2]),
    "kv_tokens": st.sampled_from([40, 60, 120, 300, 1 << 30]),
    "admit_chance": st.sampled_from([1.0, 0.6, 0.1]),
})  # fmt: skip

choices = st.fixed_dictionaries({
    "policy": st.sampled_from(["gambit", "gambit", "gambit", "sc", "step"]),
    "capacity": st.integers(4, 12),
    "swap_size": st.integers(1, 4),
    "check_interval": st.integers(1, 9),
    "warmup_tokens": st.integers(0, 12),
    "max_new_tokens": st.integers(1, 50),
    "hard_floor": st.sampled_from([None, 0.4]),
    "branch_point": st.sampled_from(list(BranchPoint)),
    "ghost_parents": st.booleans(),
    "budget_tokens": st.sampled_from([None, 200]),
    "islands": st.sampled_from([1, 1, 2, 4]),
})  # fmt: skip


@settings(max_examples=200)
@given(schedules, choices)
def test_it_is_what_every_step_of_the_engine_reads(schedule: dict, choice: dict) -> None:
    islands = choice["islands"] if choice["policy"] == "gambit" else 1
    engine = CountingEngine(**schedule)
    watched = run_one(engine, make_settings(**{**choice, "islands": islands}))
    sharing = sharing_of(watched.search.record.tree, PROMPT)
    assert (sharing.total_tokens, sharing.unique_tokens) == (engine.total, engine.unique)
    assert sharing.factor == (engine.total / engine.unique if engine.unique else 1.0)
    header = watched.search.record.started
    assert watched.search.result.sharing == sharing_of(watched.search.record.tree, len(header.prompt_tokens))
    assert fold(watched.events).result(watched.search.record.vote(str.__eq__)).sharing == watched.search.result.sharing


def test_the_random_searches_branch_wait_and_end_as_ghosts() -> None:
    """What makes the count hard is there: otherwise the property says little."""
    seen = set()
    for seed in range(20):
        engine = CountingEngine(seed=seed, kv_tokens=120, admit_chance=0.6, finish_chance=0.02)
        watched = run_one(engine, make_settings(islands=4, branch_point=BranchPoint.LAST_BOUNDARY, warmup_tokens=1))
        tree = watched.search.record.tree
        seen |= {type(event) for event in watched.events}
        children = [trace for trace in tree.traces if trace.parent is not None]
        seen |= {"twins" for trace in children if trace.inherited == tree.traces[trace.parent].inherited}
        seen |= {"again" for trace in tree.traces if trace.num_admissions > 1 and trace.num_own_tokens}
    assert seen >= {"twins", "again", ev.Queued, ev.Evicted, ev.Branched, ev.Pruned}


def grown(*events: ev.Event) -> TraceTree:
    tree = TraceTree(8, Aggregation.MEAN)
    for event in events:
        tree.apply(event)
    return tree


def finished(step: int, trace: int, num_tokens: int) -> ev.Finished:
    return ev.Finished(step, trace, EndReason.STOP, None, tuple(range(num_tokens)))


def test_two_roots_share_the_prompt() -> None:
    tree = grown(
        ev.Created(0, 0), ev.Created(0, 1), ev.Admitted(1, 0, 0, 0, 0), ev.Admitted(1, 1, 0, 0, 0),
        finished(2, 0, 2), finished(3, 1, 3),
    )  # fmt: skip
    assert sharing_of(tree, 10) == SearchSharing((20 + 22 + 12), (10 + 12 + 12), 54 / 34)


def test_a_prefix_is_read_after_its_trace_has_ended() -> None:
    """Root 0 says 4 tokens; its child takes over 3 and says 2 of its own, in steps 6 and 7."""
    tree = grown(
        ev.Created(0, 0), ev.Admitted(1, 0, 0, 0, 0), ev.Branched(3, 1, 0, 3, 1.0), finished(4, 0, 4),
        ev.Admitted(6, 1, 3, 0, 2), finished(7, 1, 2),
    )  # fmt: skip
    assert sharing_of(tree, 0) == SearchSharing((0 + 1 + 2 + 3) + (3 + 4), (0 + 1 + 2 + 3) + (3 + 4), 1.0)


def test_a_child_may_leave_before_its_parent_began() -> None:
    """Trace 2 is a child of 1, which has 4 tokens of root 0, and takes over only 2 of these; 3, beside it, has 3."""
    tree = grown(
        ev.Created(0, 0), ev.Admitted(1, 0, 0, 0, 0), ev.Branched(4, 1, 0, 4, 1.0), ev.Admitted(5, 1, 4, 0, 0),
        ev.Branched(5, 2, 1, 2, 1.0), ev.Branched(5, 3, 0, 3, 1.0), finished(5, 0, 5), finished(5, 1, 1),
        ev.Admitted(6, 2, 2, 0, 0), ev.Admitted(6, 3, 3, 0, 0), finished(7, 2, 2), finished(7, 3, 2),
    )  # fmt: skip
    total = (0 + 1 + 2 + 3 + 4) + 4 + (2 + 3) + (3 + 4)
    unique = (0 + 1 + 2 + 3 + 4) + 3 + (3 + 1 + 1)  # in steps 6 and 7 what trace 3 inherited, and what both said
    assert sharing_of(tree, 0) == SearchSharing(total, unique, total / unique)


def test_a_search_without_a_step_shares_nothing() -> None:
    assert sharing_of(grown(), 5) == SearchSharing(0, 0, 1.0)


def test_a_trace_whose_tokens_were_lost_with_the_engine_reads_what_is_known() -> None:
    tree = grown(
        ev.Created(0, 0), ev.Admitted(1, 0, 0, 0, 0), ev.Queued(3, 0, 2), ev.Admitted(5, 0, 0, 2, 2),
        ev.Cancelled(9, 0, ()),
    )  # fmt: skip
    assert dataclasses.astuple(sharing_of(tree, 1)) == (1 + 2, 1 + 2, pytest.approx(1.0))

"""How the work of a search grows: counted in calls and operations, never in seconds."""

import pytest

from gambit import events as ev
from gambit.engines.base import EngineInfo
from gambit.tree import TraceTree
from gambit.types import Admission, Aggregation, Progress, SearchStep, StepBatch, StepSeconds, ThoughtScore
from support.searching import absorb, counted, make_search, make_settings


class QuietEngine:
    """Runs everything and says nothing, but for one thought of every trace in the first step."""

    info = EngineInfo("quiet", "none", "none", "none", 1, 1 << 20, 1 << 20, 1)

    def __init__(self):
        self.specs, self.length, self.num_progress = [], 0, 0

    def open(self, spec): ...

    def close_search(self, search): ...

    def submit(self, specs):
        self.specs += specs

    def stop(self, keys):
        return dict.fromkeys(keys, (7,) * self.length)

    def progress(self, search):
        self.num_progress += 1
        return {spec.key.trace: Progress(self.length, True) for spec in self.specs}

    def step(self):
        first, ids = self.length == 0, [spec.key.trace for spec in self.specs]
        self.length += 1
        admitted = tuple(Admission(i, 0, 0, 0) for i in ids) if first else ()
        scored = tuple(ThoughtScore(i, i / len(ids), 1) for i in ids) if first else ()
        return StepBatch({1: SearchStep((), admitted, len(ids), scored)}, 0, 1 << 20, StepSeconds())


def begun(capacity, **options):
    engine = QuietEngine()
    settings = make_settings(
        capacity=capacity, swap_size=capacity // 4, check_interval=100, max_new_tokens=10_000, **options
    )
    search = make_search(engine, settings).search
    search.begin()
    return engine, search


def stepped(engine, search):
    batch = engine.step()
    with counted() as counts:
        absorb(search, batch)
    return counts


@pytest.mark.parametrize("options", [{}, {"budget_tokens": 1 << 30, "budget_seconds": 1e9}])
def test_a_step_in_which_nothing_ends_costs_the_same_whatever_the_pool(options):
    work = {}
    for capacity in (4, 64, 1024):
        engine, search = begun(capacity, **options)
        stepped(engine, search)
        asked = engine.num_progress
        work[capacity] = [stepped(engine, search) for _ in range(5)]
        assert engine.num_progress == asked
    assert work[4] == work[64] == work[1024]
    assert work[4][0]["line"] < 100


def test_a_round_is_linear_in_the_pool():
    lines = {}
    for capacity in (64, 256, 1024):
        engine, search = begun(capacity)
        for _ in range(99):
            batch = engine.step()
            absorb(search, batch)
        lines[capacity] = stepped(engine, search)["line"]
        assert len(search.record.tree.traces) == capacity + capacity // 4
    assert lines[256] < 4.2 * lines[64] and lines[1024] < 4.2 * lines[256]


def test_only_traces_that_end_a_thought_are_touched():
    def cost(capacity, ended):
        engine, search = begun(capacity)
        stepped(engine, search)
        step = SearchStep((), (), capacity, tuple(ThoughtScore(i, 0.5, 50) for i in range(ended)))
        batch = StepBatch({1: step}, 0, 1, StepSeconds())
        with counted() as counts:
            absorb(search, batch)
        return counts

    assert cost(8, 3) == cost(512, 3)
    assert cost(512, 5)["line"] > cost(512, 3)["line"]


def test_the_tokens_of_a_deep_lineage_are_put_together_in_one_pass():
    depth, step = 200, 5
    tree = TraceTree(depth + 1, Aggregation.MEAN)
    tree.apply(ev.Created(0, 0))
    tree.apply(ev.Admitted(0, 0, 0, 0, 0))
    for child in range(1, depth):
        tree.apply(ev.Branched(child, child, child - 1, step * child, 1.0))
        tree.apply(ev.Admitted(child, child, step * child, 0, 0))
    for trace in range(depth):
        # Everybody goes on for seven tokens after its child has left.
        own = range(1000 * trace, 1000 * trace + step + 7)
        tree.apply(ev.Pruned(depth, trace, "test", None, tuple(own)))
    expected = [1000 * i + k for i in range(depth - 1) for k in range(step)]
    expected += range(1000 * (depth - 1), 1000 * (depth - 1) + step + 7)
    with counted() as counts:
        assert tree.tokens_of(depth - 1) == tuple(expected)
    assert counts["line"] < 8 * depth


def test_a_child_of_the_inherited_part_of_its_parent_keeps_only_that():
    """Branch points may lie before the parent's own first token (a boundary it inherited)."""
    tree = TraceTree(8, Aggregation.MEAN)
    tree.apply(ev.Created(0, 0))
    tree.apply(ev.Admitted(0, 0, 0, 0, 0))
    tree.apply(ev.Branched(9, 1, 0, 6, 1.0))
    tree.apply(ev.Admitted(9, 1, 6, 0, 0))
    tree.apply(ev.Branched(9, 2, 1, 4, 1.0))
    tree.apply(ev.Admitted(9, 2, 4, 0, 0))
    for trace, tokens in ((0, range(10)), (1, range(20, 25)), (2, range(30, 33))):
        tree.apply(ev.Pruned(9, trace, "test", None, tuple(tokens)))
    assert tree.tokens_of(1) == (0, 1, 2, 3, 4, 5, 20, 21, 22, 23, 24)
    assert tree.tokens_of(2) == (0, 1, 2, 3, 30, 31, 32)

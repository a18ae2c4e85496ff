"""Rows in tree order: traces with the same beginning are neighbours, whatever the tree; and nothing else changes."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_setups import HAS_VLLM, finish, open_search, run, spec, start_own_vllm, tokens_of, worker_of
from gambit.engines.vllm.row_order import RowOrder, child_path, root_path
from gambit.types import TraceKey


def grow(seed, count, searches):
    """A random search: every trace as its tokens (who made each), and its path."""
    rng = random.Random(seed)
    traces = {}
    for trace in range(count):
        search = rng.randrange(searches)
        parents = [key for key in traces if key[0] == search]
        if parents and rng.random() < 0.8:
            parent = rng.choice(parents)
            said, path = traces[parent]
            inherited = rng.randint(1, len(said) - 1)
            said, path = said[:inherited], child_path(path, inherited, trace)
        else:
            said, path = (), root_path(search, trace)
        traces[search, trace] = ((*said, *([(search, trace)] * rng.randint(2, 9))), path)
    return traces


@given(st.integers(0, 10**6), st.integers(1, 24), st.integers(1, 3), st.floats(0, 0.9))
def test_traces_with_the_same_beginning_are_neighbours(seed, count, searches, pruned):
    traces = grow(seed, count, searches)
    rng = random.Random(seed)
    rows = [f"{key}" for key in traces if rng.random() >= pruned]
    rng.shuffle(rows)
    order = RowOrder()
    order.update([], [(f"{key}", path) for key, (_, path) in traces.items()])
    found = order.ordered(dict.fromkeys(rows, 1))
    assert sorted(found) == sorted(rows)
    said = {f"{key}": tokens for key, (tokens, _) in traces.items()}
    for length in range(1, max(map(len, said.values())) + 1):
        beginnings = [said[row][:length] for row in found if len(said[row]) >= length]
        changes = sum(one != other for one, other in pairwise(beginnings))
        assert changes == len(set(beginnings)) - 1 or not beginnings, length


def test_a_step_keeps_its_counts_and_requests_that_nobody_knows():
    order = RowOrder()
    order.update([], [("a", root_path(1, 5)), ("b", root_path(1, 2)), ("c", child_path(root_path(1, 5), 3, 9))])
    assert list(order.ordered({"b": 1, "c": 7, "warm-up": 2, "a": 1}).items()) == [
        ("warm-up", 2), ("b", 1), ("a", 1), ("c", 7),
    ]  # fmt: skip
    order.update(["a"], [("d", root_path(1, 1))])
    assert list(order.ordered({"b": 1, "c": 1, "d": 1})) == ["d", "b", "c"]
    assert list(order.ordered({"b": 4, "c": 5, "d": 6}).items()) == [("d", 6), ("b", 4), ("c", 5)], "other counts"
    assert list(order.ordered({"c": 5, "d": 6, "b": 4})) == ["d", "b", "c"], "another order of running"


def test_paths_are_as_long_as_the_tree_is_deep_not_as_often_as_it_branched():
    path = root_path(1, 0)
    for trace in range(1, 100):
        path = child_path(path, 10, trace)
    assert path == (1, 0, -10, 99)


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_schedulers_own_plan_is_left_as_it_is():
    from gambit.engines.vllm.compat.worker import in_order

    order = RowOrder()
    order.update([], [("a", (1, 2)), ("b", (1, 1))])
    plan = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1}, gambit_thoughts="kept")
    seen = in_order(plan, order)
    assert list(seen.num_scheduled_tokens) == ["b", "a"] and seen.gambit_thoughts == "kept"
    assert list(plan.num_scheduled_tokens) == ["a", "b"]


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_paths_reach_the_worker_and_model_runner_v1_keeps_its_rows():
    engine, seen = start_own_vllm(tree_order=True), []
    worker = worker_of(engine)
    assert worker._row_order is None, "V1: a request stays in the row in which it began"
    worker._row_order = SimpleNamespace(
        update=lambda finished, new: seen.extend(new), ordered=lambda counts: dict(reversed(counts.items()))
    )
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=40) for i in range(3)])
    run(engine, 20)
    engine.submit([spec(7, tokens=40, inherited=15, parent=TraceKey(1, 1))])
    run(engine, 3)
    engine.submit([spec(8, tokens=40, inherited=12, parent=TraceKey(1, 7))])
    said = tokens_of(finish(engine))
    engine.close()
    assert [path for _, path in seen] == [(1, 0), (1, 1), (1, 2), (1, 1, -15, 7), (1, 1, -12, 8)]
    assert said[8][:12] == said[7][:12] == said[1][:12]

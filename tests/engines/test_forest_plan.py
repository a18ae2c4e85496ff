"""Forest attention's plan: every key of every trace once, blocks of equal content, whatever the forest."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gambit.engines.vllm.forest import (
    MEAN_DEPTH,
    common_blocks,
    full_blocks,
    plan_holder,
    prefix_hashes,
    queries_per_group,
    refreshed,
)
from support.forests import Forest, attend, attend_plan, grow, keys_of, merge, planned

FORESTS = st.builds(
    grow, st.integers(1, 24), st.integers(1, 12), seed=st.integers(0, 10**6), roots=st.integers(1, 3),
    turnover=st.sampled_from([0.0, 0.1, 0.5, 0.9]), twins=st.sampled_from([0.0, 0.2]), padding=st.integers(0, 3),
    block_tokens=st.sampled_from([4, 16]),
)  # fmt: skip


def covered(forest, plan):
    """By row: the blocks of its keys in order of position, as the plan has them; fails where a position comes twice."""
    size = forest.block_tokens
    starts, lengths = plan.query_starts.tolist(), plan.num_keys.tolist()
    found = {}
    for number, (start, end, count) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        assert (start < end) == (count > 0)
        blocks = plan.block_table[number, : -(-count // size)].tolist()
        for row in plan.query_rows[start:end].tolist():
            at = found.setdefault(row, {})
            first = len(forest.contents[blocks[0]]) - 1
            for place, block in enumerate(blocks, first):
                assert place not in at, (row, place)
                at[place] = (block, min(count - (place - first) * size, size))
    return found


def common_by_hand(forest, i, j):
    size = forest.block_tokens
    most = min((int(forest.num_tokens[row]) - 1) // size for row in (i, j))
    same = [bool(a == b) for a, b in zip(forest.table[i, :most], forest.table[j, :most], strict=True)]
    return next((place for place, equal in enumerate(same) if not equal), most)


@settings(max_examples=60, deadline=None)
@given(FORESTS)
def test_blocks_in_common_are_those_before_the_first_difference(forest):
    most = -(-int(forest.num_tokens.max()) // forest.block_tokens)
    full = full_blocks(forest.num_tokens, forest.block_tokens)
    found = common_blocks(prefix_hashes(forest.table, most), full)
    rows = [row for row in range(len(full)) if forest.num_tokens[row]]
    for i in rows:
        assert found[i].tolist() == [common_by_hand(forest, i, j) if j in rows else 0 for j in range(len(full))]


@settings(max_examples=150, deadline=None)
@given(FORESTS, st.sampled_from([1, 4, 16]), st.sampled_from([1, 16, 64]))
def test_every_key_of_every_trace_is_read_once_from_a_block_of_equal_content(forest, group, finest):
    plan = planned(forest, group=group, finest_tokens=finest)
    found = covered(forest, plan)
    size = forest.block_tokens
    assert sorted(found) == [row for row, count in enumerate(forest.num_tokens.tolist()) if count]
    for row, at in found.items():
        count = int(forest.num_tokens[row])
        assert sorted(at) == list(range(-(-count // size)))
        for place, (block, used) in at.items():
            own = int(forest.table[row, place])
            assert forest.contents[block] == forest.contents[own]
            assert used == min(count - place * size, size)
            assert block == own or (place + 1) * size < count, "only full blocks of computed tokens are shared"


@settings(max_examples=60, deadline=None)
@given(FORESTS, st.sampled_from([1, 4, 16]))
def test_the_shape_of_a_plan_is_what_kernel_and_merge_expect(forest, group):
    plan = planned(forest, group=group)
    rows = len(forest.num_tokens)
    assert plan.query_starts.diff().max() <= plan.most_queries <= group
    assert plan.num_keys.tolist() == sorted(plan.num_keys.tolist(), reverse=True), "longest first"
    used, starts = int(plan.query_starts[-1]), plan.part_starts.tolist()
    assert starts[0] == 0 and starts[-1] == used and len(starts) == rows + 1
    for row in range(rows):
        parts = plan.parts[starts[row] : starts[row + 1]].long()
        assert (plan.query_rows[parts] == row).all()
    assert sorted(plan.parts[:used].tolist()) == list(range(used)), "each partial result is merged once"
    sizes = {name: getattr(plan, name).shape for name in plan.__slots__ if not name.startswith("most")}
    empty = Forest(forest.table, torch.ones_like(forest.num_tokens), forest.contents, forest.block_tokens)
    other = planned(empty, group=group)
    assert all(sizes[name][0] == getattr(other, name).shape[0] for name in sizes), "no size depends on the forest"


@settings(max_examples=60, deadline=None)
@given(FORESTS, st.lists(st.integers(0, 30), min_size=24, max_size=24), st.sampled_from([1, 4, 16]))
def test_a_refreshed_plan_has_the_tokens_that_came_since(forest, grown, group):
    size, plan = forest.block_tokens, planned(forest, group=group)
    counts = [count + grown[row % 24] if count else 0 for row, count in enumerate(forest.num_tokens.tolist())]
    table = torch.nn.functional.pad(forest.table, (0, 8))
    contents = dict(forest.contents)
    for row, count in enumerate(counts):
        for place in range(-(-int(forest.num_tokens[row]) // size), -(-count // size)):
            table[row, place] = new = len(contents) + 1
            contents[new] = (*contents[int(table[row, place - 1])], -row)
    later = Forest(table, torch.tensor(counts).int(), contents, size)
    again = refreshed(plan, table, later.num_tokens, block_tokens=size, most_tokens=max(counts))
    found = covered(later, again)
    for row, at in found.items():
        assert sorted(at) == list(range(-(-counts[row] // size)))
        for place, (block, used) in at.items():
            assert contents[block] == contents[int(table[row, place])]
            assert used == min(counts[row] - place * size, size)


def test_plans_of_as_many_traces_are_at_the_same_addresses():
    hold = plan_holder(30, 100, 4, torch.device("cpu"))
    places, tensors = set(), ("query_rows", "query_starts", "num_keys", "block_table", "parts", "part_starts")
    for seed in range(3):
        forest = grow(20, 10, seed=seed)
        plan = planned(forest)
        held = hold(plan)
        assert all(torch.equal(getattr(held, name), getattr(plan, name)) for name in tensors if name != "block_table")
        found = covered(forest, held)
        assert all(len(at) == -(-int(forest.num_tokens[row]) // 16) for row, at in found.items())
        places.add(tuple((getattr(held, name).data_ptr(), getattr(held, name).stride()) for name in tensors))
        again = hold(refreshed(held, forest.table, forest.num_tokens, block_tokens=16, most_tokens=999))
        assert torch.equal(again.num_keys, plan.num_keys) and again.num_keys.data_ptr() == held.num_keys.data_ptr()
    assert len(places) == 1


def test_a_forest_without_twins_reads_no_block_twice():
    forest = grow(24, 10, seed=3, turnover=0.5)
    plan = planned(forest, group=64)
    lengths = ((plan.num_keys - 1) // 16).tolist()  # a trace's last block may be another's in these forests
    blocks = [b for n, row in zip(lengths, plan.block_table.tolist(), strict=True) for b in row[: max(n, 0)]]
    assert len(blocks) == len(set(blocks))
    total = int(forest.num_tokens.sum())
    assert plan.num_keys.sum() < 0.7 * total, "there was something to share"


def comb(rows, block_tokens=16, tooth=4):
    """Each trace parts from the spine one tooth later than the one before: half the square of the rows in parts."""
    spine = list(range(1, rows * tooth + 1))
    own = len(spine) + 1
    contents = {block: tuple(range(1, block + 1)) for block in spine}
    table = torch.zeros(rows, len(spine) + 2, dtype=torch.int32)
    for row in range(rows):
        kept = spine[: (row + 1) * tooth]
        table[row, : len(kept)] = torch.tensor(kept)
        table[row, len(kept)] = own + row
        contents[own + row] = (*contents[kept[-1]], -row)
    counts = (torch.arange(rows) + 1) * tooth * block_tokens + 5
    return Forest(table, counts.int(), contents, block_tokens)


def test_a_forest_with_more_nodes_than_there_is_room_for_is_cut_more_coarsely():
    forest = comb(40)
    plan = planned(forest, group=16, finest_tokens=64)
    depths = plan.part_starts.diff()
    assert 40 < int(depths.sum()) <= MEAN_DEPTH * 40 < 40 * 41 // 2
    found = covered(forest, plan)
    assert all(len(at) == -(-int(forest.num_tokens[row]) // 16) for row, at in found.items())


def test_nodes_shorter_than_the_finest_step_are_not_shared():
    plan = planned(comb(40, tooth=1), finest_tokens=10**6)
    assert plan.part_starts.diff().tolist() == [1] * 40


@pytest.mark.parametrize(("heads", "group"), [(1, 64), (4, 16), (5, 12), (6, 10), (8, 8), (128, 1)])
def test_a_group_fills_one_tile(heads, group):
    assert queries_per_group(heads) == group


@settings(max_examples=40, deadline=None)
@given(FORESTS, st.sampled_from([1, 4, 16]))
def test_attention_by_the_plan_is_attention(forest, group):
    generator = torch.Generator().manual_seed(len(forest.contents))
    of_content = {content: number for number, content in enumerate(set(forest.contents.values()), 1)}
    same = torch.tensor([0, *(of_content[forest.contents[block]] for block in range(1, len(forest.contents) + 1))])
    shape = (len(of_content) + 1, forest.block_tokens, 2, 8)
    k, v = (torch.randn(shape, generator=generator, dtype=torch.float64)[same] for _ in range(2))
    q = 3 * torch.randn(len(forest.num_tokens), 4, 8, generator=generator, dtype=torch.float64)
    found = merge(*attend_plan(q, k, v, planned(forest, group=group)), planned(forest, group=group))
    for row, count in enumerate(forest.num_tokens.tolist()):
        blocks = forest.table[row, : -(-count // forest.block_tokens)]
        own = [keys_of(cache, blocks, count) for cache in (k, v)]
        expected = attend(q[row : row + 1], *own)[0][0] if count else torch.zeros(4, 8)
        torch.testing.assert_close(found[row], expected.double(), rtol=0, atol=1e-12)

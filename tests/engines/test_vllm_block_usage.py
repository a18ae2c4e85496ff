"""The count of KV blocks by search against counting everything anew."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from gambit.engines.vllm.scheduling import BlockUsage

NUM_SEARCHES = 3
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 20), st.integers(1, 3)),
        st.tuples(st.just("root"), st.integers(0, NUM_SEARCHES - 1), st.just(0)),
        st.tuples(st.just("branch"), st.integers(0, 20), st.integers(0, 6)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("queue"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("look"), st.just(0), st.integers(0, 5)),
    ),
    max_size=60,
)


class World:
    """Traces of some searches with their blocks, and a count that is told only what a scheduler would tell it."""

    def __init__(self) -> None:
        self.usage = BlockUsage()
        self.search_of: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self._num_blocks = 1
        self._num_requests = 0

    def add(self, search: int, shared: list[int]) -> None:
        self._num_requests += 1
        request = f"r{self._num_requests}"
        self.search_of[request], self.blocks[request] = search, [*shared, *self._new(1)]

    def move(self, kind: str, which: int, amount: int) -> None:
        names = list(self.blocks)
        if kind == "root":
            self.add(which, [0])  # all searches have the same prompt
        elif kind == "look":
            self.look(amount)
        elif names:
            self._touch(kind, names[which % len(names)], amount)

    def _touch(self, kind: str, request: str, amount: int) -> None:
        if kind == "grow":
            self.blocks[request] += self._new(amount)
        elif kind == "branch":
            self.add(self.search_of[request], self.blocks[request][: amount + 1])
        elif kind == "end":
            del self.blocks[request], self.search_of[request]
        else:  # it is queued and comes back with other blocks
            self.usage.forget(request)
            self.blocks[request] = [0, *self._new(2)]

    def look(self, num_victims: int) -> None:
        running = {request: self.search_of[request] for request in self.blocks}
        self.usage.update(running, lambda request, start: self.blocks[request][start:])
        left = dict(self.blocks)
        assert self._held() == self._used(left)
        for victim in list(left)[:num_victims]:  # the next update finds them again
            before = _distinct(left.values())
            del left[victim]
            assert self.usage.forget(victim) == before - _distinct(left.values())
            assert self._held() == self._used(left)

    def _held(self) -> dict[int, int]:
        held = {search: self.usage.num_held(search) for search in range(NUM_SEARCHES)}
        return {search: blocks for search, blocks in held.items() if blocks}

    def _used(self, blocks: dict[str, list[int]]) -> dict[int, int]:
        held = defaultdict(list)
        for request, mine in blocks.items():
            held[self.search_of[request]].append(mine)
        return {search: _distinct(lists) for search, lists in held.items()}

    def _new(self, count: int) -> list[int]:
        self._num_blocks += count
        return list(range(self._num_blocks - count, self._num_blocks))


def _distinct(lists) -> int:
    return len({block for blocks in lists for block in blocks})


@given(MOVES)
def test_it_counts_what_each_search_holds_and_what_each_eviction_frees(moves):
    world = World()
    for move in moves:
        world.move(*move)
    world.look(3)


def test_only_new_blocks_are_asked_for():
    usage, asked = BlockUsage(), []
    blocks = {"a": [0, 1, 2]}

    def blocks_from(request: str, start: int) -> list[int]:
        asked.append(start)
        return blocks[request][start:]

    for _ in range(3):
        usage.update({"a": 7}, blocks_from)
        blocks["a"].append(len(blocks["a"]))
    assert asked == [0, 3, 4]

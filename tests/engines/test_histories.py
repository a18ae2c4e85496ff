"""Slots of remembered thoughts: whose they are, that none is lost or given twice, and when the front lets go."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gambit.engines.vllm.messages import TraceTask
from gambit.engines.vllm.scheduling import RequestHistories
from gambit.errors import EngineError
from gambit.scorers.base import ThoughtBatch
from gambit.scorers.memory import Histories, ThoughtMemory
from gambit.types import RunningScore, TraceKey
from support.engine_setups import make_sequence, spec

MAX_PAST = 5


class HistoryMachine(RuleBasedStateMachine):
    """Random lives of traces against plain lists."""

    def __init__(self):
        super().__init__()
        self.histories = Histories()
        self.model: dict[int, list[int]] = {}
        self.proposed: list[tuple[list[int], np.ndarray]] = []
        self.num_born = 0

    def pick(self, data, least=0):
        return (
            data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=least)) if self.model else []
        )

    @rule(data=st.data())
    def begin(self, data):
        parents = self.pick(data)[:1]
        source = parents[0] if parents else None
        count = data.draw(st.integers(0, len(self.model[source]))) if parents else 0
        self.histories.begin(self.num_born, source, count)
        self.model[self.num_born] = self.model[source][:count] if parents else []
        self.num_born += 1

    @rule(data=st.data())
    def propose(self, data):
        keys = self.pick(data)
        past = self.histories.propose(keys, MAX_PAST)
        for row, key in enumerate(keys):
            known = self.model[key]
            assert past.slots[row, : past.lengths[row]].tolist() == known[-MAX_PAST:]
            assert past.positions[row] == len(known)
        assert past.slots.shape == (len(keys), max((min(len(self.model[k]), MAX_PAST) for k in keys), default=0))
        assert not set(past.own.tolist()) & self.in_use(), "a slot in use was handed out"
        self.proposed.append((keys, past.own))

    @rule(data=st.data())
    def settle(self, data):
        if not self.proposed:
            return
        keys, own = self.proposed.pop(0)
        kept = [row for row, key in enumerate(keys) if key in self.model and data.draw(st.booleans())]
        self.histories.append([keys[row] for row in kept], own[kept])
        self.histories.give_back(np.delete(own, kept))
        for row in kept:
            self.model[keys[row]].append(int(own[row]))

    @rule(data=st.data())
    def extend(self, data):
        keys = self.pick(data)
        past = self.histories.extend(keys, MAX_PAST)
        for key, slot in zip(keys, past.own.tolist(), strict=True):
            self.model[key].append(slot)

    @rule(data=st.data())
    def end(self, data):
        for key in self.pick(data)[:2]:
            self.histories.end(key)
            self.histories.end(key)  # twice is once
            del self.model[key]

    def in_use(self):
        waiting = {slot for _, own in self.proposed for slot in own.tolist()}
        return waiting.union(*self.model.values())

    @invariant()
    def every_slot_is_accounted_for(self):
        assert self.histories.num_used == len(self.in_use())

    def teardown(self):
        for _, own in self.proposed:
            self.histories.give_back(own)
        self.histories.end_where(lambda key: True)
        assert self.histories.num_used == 0


HistoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_histories_are_plain_lists = HistoryMachine.TestCase


def test_memory_grows_and_keeps_what_it_has():
    scorer = make_sequence()
    memory, histories, states = ThoughtMemory(scorer, 2), Histories(), torch.randn(3, 40, 6)
    for trace in range(3):
        histories.begin(trace, None, 0)
    for step in range(40):
        batch = ThoughtBatch(states[:, step], torch.zeros(3))
        scores = memory.score(batch, histories.extend(range(3), memory.max_past))
    assert memory.num_slots >= 120
    assert torch.allclose(scores, scorer.network(states)[:, -1].sigmoid(), atol=1e-5)


def test_long_histories_are_gathered_in_parts(monkeypatch):
    scorer, states = make_sequence(), torch.randn(5, 7, 6)
    monkeypatch.setattr("gambit.scorers.sequence._GATHERED", 16 * 7 * 2)  # two rows of the longest
    histories, memory = Histories(), ThoughtMemory(scorer)
    for trace in range(5):
        histories.begin(trace, None, 0)
    for step in range(7):
        batch = ThoughtBatch(states[:, step], torch.zeros(5))
        scores = memory.score(batch, histories.extend(range(5), memory.max_past))
    assert torch.allclose(scores, scorer.network(states)[:, -1].sigmoid(), atol=1e-5)


def test_thoughts_that_nobody_knows_are_not_made_up():
    histories = Histories()
    histories.begin("a", None, 0)
    histories.extend(["a"], MAX_PAST)
    for source, count in ((None, 1), ("b", 1), ("a", 2)):
        with pytest.raises(EngineError, match=f"continues after {count} scored thoughts"):
            histories.begin("c", source, count)
    assert "c" not in histories and histories.num_used == 1


# -- in vLLM's scheduler -----------------------------------------------------------------------------------------


def task(*, history_of=None, count=0, search=1, **more):
    trace = replace(spec(0), key=TraceKey(search, 0), score=RunningScore(count))
    return TraceTask(trace, prompt_tokens=1, flags=1, is_pending=False, noise_key=0, history_of=history_of, **more)


def think(histories, *requests):
    """One thought for each, in a step of their own."""
    histories.settle(histories.propose(requests), set(requests))


@pytest.fixture
def histories():
    return RequestHistories(MAX_PAST)


def test_a_child_may_come_after_its_parents_end_until_the_front_lets_go(histories):
    histories.begin("1", task())
    think(histories, "1")
    think(histories, "1")
    histories.forget_released()  # the parent has ended, and nobody has told the front: nothing happens
    histories.release(["1"])  # the abort overtakes a branch that was sent before it
    histories.begin("2", task(history_of="1", count=1))
    histories.forget_released()
    assert histories.num_used == 1
    histories.release(["2", "1", "7"])  # vLLM hears of an abort twice, and may not know the request
    histories.forget_released()
    assert histories.num_used == 0


def test_a_search_that_keeps_histories_lets_go_of_all_when_it_is_closed(histories):
    histories.keep(1)
    histories.begin("1", task())
    histories.begin("2", task(search=2))
    think(histories, "1", "2")
    histories.release(["1", "2"])
    histories.forget_released()
    assert histories.num_used == 1
    histories.begin("3", task(history_of="1", count=1))
    think(histories, "3")
    histories.close(2)
    histories.close(1)
    histories.forget_released()
    assert histories.num_used == 0


def test_slots_of_steps_in_flight_are_settled_one_by_one(histories):
    """Asynchronous scheduling: a step is scheduled before the one ahead of it has told what ended."""
    histories.begin("1", task())
    histories.begin("2", task())
    first, second = histories.propose(["1", "2"]), histories.propose(["1", "2"])
    assert len({*first.past.own.tolist(), *second.past.own.tolist()}) == 4
    histories.settle(first, {"1"})
    histories.release(["2"])
    histories.forget_released()
    histories.settle(second, set())
    assert histories.num_used == 1
    third = histories.propose(["1"])
    assert third.past.slots.tolist() == [[first.past.own[0]]] and third.past.positions.tolist() == [1]
    with pytest.raises(RuntimeError, match="without a slot"):
        histories.settle(third, {"2"})


def test_a_trace_of_the_self_check_has_no_history(histories):
    histories.begin("1", task(count=1, is_check=True))
    assert histories.num_used == 0

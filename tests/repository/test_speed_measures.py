"""What the speed benchmarks compute from what they see: idle time, ratios, drawn lengths, rooms, differences."""

import os
import statistics
import sys
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from gambit.types import (
    Admission,
    OnPressure,
    PressureAction,
    Sampling,
    SearchStep,
    StepBatch,
    StepSeconds,
    TraceKey,
    TraceSpec,
)
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"
with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]):  # they set some
    import forest_check
    import forest_speed
    import gpu_speed
    import speed_parts
    import step_profile


def kernel(name: str, begin: float, length: float, stream: int = 7) -> dict:
    return {"name": name, "ts": begin, "dur": length, "args": {"stream": stream}}


def steps(count: int, *, pause: float = 0.0, held_up: int = -1) -> list[dict]:
    """Steps of 100 us: 60 us of two kernels that overlap by 10, 40 us of nothing; one may be held up."""
    found, now = [], 1000.0
    for number in range(count):
        found += [kernel("first", now, 30), kernel("second", now + 20, 40, stream=8)]
        now += 100 + (pause if number == held_up else 0)
    return found


def test_work_side_by_side_counts_once():
    assert step_profile.busy(steps(3)) == pytest.approx(180)
    assert step_profile.busy(reversed(steps(3))) == pytest.approx(180)
    assert step_profile.busy([kernel("long", 0, 100), kernel("inside", 10, 20), kernel("after", 90, 30)]) == 120


def test_idle_time_is_named_by_what_ran_around_it():
    assert step_profile.gaps(steps(3, pause=500, held_up=1)) == {"second > first": pytest.approx(40 + 540)}


def test_one_step_that_is_held_up_is_not_the_usual_one():
    usual = step_profile.median_step(steps(9, pause=5000, held_up=4), 9)
    assert usual == {"ms": pytest.approx(0.1), "idle_ms": pytest.approx(0.04)}
    assert step_profile.median_step(steps(3), 4) == {}  # nothing runs once a step


def test_ratios_are_of_neighbours_and_the_interval_holds_the_median():
    speeds = [(100.0, 99.0), (50.0, 50.0), (200.0, 202.0)]  # the machine's speed changes from turn to turn
    rounds = [{"stock": {"tokens_per_second": a}, "scoring": {"tokens_per_second": b}} for a, b in speeds]
    found = gpu_speed.summarise(rounds)["scoring"]["ratio"]
    assert found["each"] == pytest.approx([0.99, 1.0, 1.01]) and found["median"] == pytest.approx(1.0)
    low, high = found["interval"]
    assert low == pytest.approx(0.99) and high == pytest.approx(1.01)


def test_completed_traces_per_second_are_of_all_turns_together():
    runs = [
        {"policy": "step", "completed": 10, "seconds": 10.0}, {"policy": "step", "completed": 30, "seconds": 10.0},
        {"policy": "gambit", "completed": 80, "seconds": 20.0}, {"policy": "sc", "completed": 10, "seconds": 4.0},
    ]  # fmt: skip
    found = gpu_speed.compare(runs)
    assert found["completed_per_second"] == {"step": 2.0, "gambit": 4.0, "sc": 2.5}
    assert found["ratios"] == {"gambit / step": 2.0, "gambit / sc": 1.6}
    assert gpu_speed.compare(runs[:2])["ratios"] == {}


def test_a_childs_length_is_of_the_same_distribution_given_that_it_exceeds_its_prefix():
    lengths = speed_parts.Lengths(median=1000, seed=3)
    rooted = lengths.rooted(2000)
    assert rooted == speed_parts.Lengths(median=1000, seed=3).rooted(2000)
    assert statistics.median(rooted) == pytest.approx(1000, rel=0.05)
    longer = sorted(length for length in rooted if length > 1500)
    children = sorted(lengths.of(trace, inherited=1500) for trace in range(2000, 4000))
    assert children[0] > 1500
    assert statistics.median(children) == pytest.approx(statistics.median(longer), rel=0.05)
    assert lengths.of(1, inherited=4000) == 4001  # nothing is longer than the longest


def test_the_room_is_one_in_which_the_wanted_share_completes():
    room, capacity, block = 20_000, 64, 16
    median = speed_parts.saturating_median(room, capacity, block, 0.5, range(2))
    shares = [
        speed_parts.share_completing(speed_parts.Lengths(median, seed), order, room, capacity, block)
        for seed in range(2)
        for order in range(8)
    ]
    assert statistics.mean(shares) == pytest.approx(0.5, abs=0.02)
    short = speed_parts.Lengths(median / 8, 0)
    assert speed_parts.share_completing(short, 0, room, capacity, block) == 1.0


def gated(stock_ms: float, forest_ms: float, chosen: str, predicted: float) -> dict:
    faster = "forest" if forest_ms < stock_ms else "stock"
    return {"stock_ms": stock_ms, "forest_ms": forest_ms, "saved_ms": stock_ms - forest_ms, "chosen": chosen,
            "faster": faster, "predicted_saved_ms": predicted}  # fmt: skip


def test_the_gate_is_judged_by_what_was_faster():
    trees = [gated(20, 10, "forest", 7.0), gated(8, 10, "forest", 1.0), gated(11, 10, "stock", -1.0)]
    assert forest_speed.summary_of(trees) == {
        "right": 1, "of": 3, "slower_than_stock": 1, "most_slower_than_the_faster": 0.25, "promised_too_much": 1,
        "slower_beyond_noise": 1, "share_of_best_gain": 0.727,  # (10 - 2) ms of 10 + 1
    }  # fmt: skip
    trees[1]["noise_ms"] = 3.0
    assert forest_speed.summary_of(trees)["slower_beyond_noise"] == 0
    assert forest_speed.summary_of([])["of"] == 0


def test_the_verdict_compares_searches_that_differ_in_attention_alone():
    rates = {"stock": {"tokens_per_second": 200.0}, "auto": {"tokens_per_second": 250.0}}
    runs = {name: {"seconds": seconds, "completed": 64} for name, seconds in (
        ("gambit, 1 islands, auto", 50.0), ("gambit, 1 islands, stock", 60.0), ("sc, 1 islands, stock", 70.0),
    )}  # fmt: skip
    gate = {"slower_beyond_noise": 1, "share_of_best_gain": 0.93}
    found = forest_speed.verdict({"gate": gate, "plain": rates, "search": {"runs": runs}, "start": {}})
    assert found["one tree at most is slower with auto"] and found["at least 90 % of the best gain"]
    assert found["plain sampling, auto / stock"] == 1.25
    assert found["searches, stock / auto in seconds"] == {"gambit, 1 islands": 1.2}
    nothing = forest_speed.verdict({})
    assert not nothing["one tree at most is slower with auto"] and not nothing["at least 90 % of the best gain"]


def test_a_heads_width_is_given_or_computed():
    sizes = {"hidden_size": 1536, "num_attention_heads": 12}
    assert forest_speed.sizes_of(sizes)["head_dim"] == 128
    assert forest_speed.sizes_of(sizes | {"head_dim": 64})["head_dim"] == 64


class Told:
    """An engine that keeps what it was given and admits all of it."""

    def submit(self, specs):
        self.specs = specs

    def step(self):
        admitted = tuple(Admission(spec.key.trace, spec.inherited - 3, 3, 0) for spec in self.specs)
        return StepBatch({7: SearchStep(admitted=admitted, num_generated=1)}, 5, 9, StepSeconds())


def test_roots_that_have_begun_look_to_the_search_as_if_they_had_said_it_there():
    engine, said = Told(), np.arange(20).reshape(2, 10)
    watched = speed_parts.Begun(engine, speed_parts.Lengths(12, seed=0, spread=0.1), said=said)
    root = TraceSpec(TraceKey(7, 1), Sampling(), 99, OnPressure(PressureAction.QUEUE))
    child = replace(root, key=TraceKey(7, 2), inherited=11, parent=TraceKey(7, 1))
    watched.submit([root, child])
    assert engine.specs[0].prefix == tuple(range(10, 20)) and engine.specs[0].inherited == 10
    assert engine.specs[1] == replace(child, max_new_tokens=engine.specs[1].max_new_tokens)
    assert engine.specs[0].max_new_tokens > 10 and engine.specs[1].max_new_tokens > 11
    assert watched.step().searches[7].admitted == (Admission(1, 0, 0, 0), Admission(2, 8, 3, 0))
    assert watched.seconds_before > 0 and watched.peak_kv == 5


def test_log_probabilities_are_compared_where_both_had_said_the_same():
    logs = {(0, at): torch.tensor([-0.1, -3.0]) for at in range(3)}
    one = forest_check.Said({0: (7, 8, 9)}, logs)
    other = forest_check.Said({0: (7, 1, 9)}, {**logs, (0, 0): torch.tensor([-0.3, -2.0]), (0, 2): torch.zeros(2)})
    found = forest_check.compared(one, other)
    assert found["same tokens"] == pytest.approx(2 / 3, abs=1e-3) and found["compared"] == 2
    assert found["median |log p|"] == pytest.approx(0.1) and found["same to the bit"] == 0.5
    assert forest_check.distance(Counter("aabb"), Counter("abcc")) == 0.5


def test_accuracies_are_paired():
    found = forest_check.accuracies(
        {"stock": [True, True, False, False] * 20, "forest": [True, False, True, False] * 20}
    )
    assert (found["puzzles"], found["stock"], found["forest"], found["forest - stock"]) == (80, 0.5, 0.5, 0.0)
    low, high = found["95 %"]
    assert -0.2 < low < 0 < high < 0.2 and found["right with one alone"] == {"stock": 20, "forest": 20}

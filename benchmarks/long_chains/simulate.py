"""Plays searches over recorded traces of long chains through Gambit's own loop, to compare settings without a GPU.

    python -m benchmarks.long_chains.simulate --traces FOLDER/chains-judge --scores FOLDER/chains-scores.npz \
        --model DIR --out simulated.json

A problem's roots are drawn from its recorded traces. A child that leaves its parent after n right steps goes on as
another trace of the problem that had the same n steps right, with that trace's scores and answer: what was right so far
is the same in both. A child of a prefix that is already wrong goes on as its parent did. `--traces` names a collection
of `generate.py` and `--scores` the scores that `judge.py` gave its lines; only problems with right and wrong traces
count. What is left out: a child does not keep its parent's way of writing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from benchmarks.long_chains.answers import answer_in
from benchmarks.long_chains.collection import Cutter
from benchmarks.long_chains.first_error import first_wrong_step, right_steps

from gambit import events as ev
from gambit.config import registry
from gambit.config.options import BranchPoint
from gambit.config.presets import SearchSettings
from gambit.engines.base import EngineInfo, SearchSpec
from gambit.search.loop import Search, SearchBatch
from gambit.search.pool import Callbacks
from gambit.stats import mean_interval, resamples
from gambit.text.boundary import BoundaryRule
from gambit.tree import TraceState
from gambit.types import (
    Admission,
    Aggregation,
    EndReason,
    PoolSettings,
    Progress,
    Sampling,
    SearchStep,
    StepBatch,
    StepSeconds,
    ThoughtScore,
    TraceEnd,
    TraceKey,
    TraceSpec,
)

# name: islands, swaps of a tournament, steps between tournaments, warm-up, margin; None is plain sampling
SETTINGS: dict[str, tuple[int, int, int, int, float] | None] = {
    "plain sampling": None,
    "as Gambit sets itself": (16, 32, 7, 392, 0.0),
    "1 island": (1, 4, 7, 392, 0.0),
    "4 islands": (4, 16, 7, 392, 0.0),
    "32 islands": (32, 32, 7, 392, 0.0),
    "half the warm-up": (16, 32, 7, 196, 0.0),
    "every 60 tokens": (16, 32, 60, 392, 0.0),
    "margin 1": (16, 32, 7, 392, 1.0),
    "margin 2": (16, 32, 7, 392, 2.0),
}
CAPACITY = 64
COUNTED = ("majority", "vote by score", "pass@1", "tokens")


@dataclass(frozen=True)
class Recorded:
    """A trace: where its thoughts end, how they score, where each right step stands and where it went wrong."""

    length: int
    scores: Mapping[int, float]  # by the thought's last token, counted from 1
    right: Sequence[int]  # tokens after which one more step was right, up to the first error
    error: float  # the token of the first wrong step; infinite in a right trace
    answer: str
    is_right: bool


@dataclass
class Running:
    """A live trace: what it was recorded from, and how far it is in that."""

    recorded: Recorded
    at: int
    num_tokens: int


@dataclass
class RecordedEngine:
    """An engine of one search whose traces go on as recorded ones."""

    traces: Sequence[Recorded]
    rng: random.Random
    running: dict[TraceKey, Running] = field(default_factory=dict)
    new: list[tuple[int, int]] = field(default_factory=list)
    info: ClassVar = EngineInfo("recorded", "recorded", "none", "none", 1, 1 << 20, 1 << 30, 1)

    def open(self, spec: SearchSpec) -> None:
        pass

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        for spec in specs:
            if spec.parent is None:
                self.running[spec.key] = Running(self.rng.choice(self.traces), 0, 0)
            else:
                self.running[spec.key] = self._child(self.running[spec.parent], spec.inherited)
            self.new.append((spec.key.trace, spec.inherited))

    def _child(self, parent: Running, inherited: int) -> Running:
        recorded, at = parent.recorded, max(0, parent.at - (parent.num_tokens - inherited))
        if recorded.error <= at:
            return Running(recorded, at, inherited)
        num_right = bisect_right(recorded.right, at)
        other = self.rng.choice([each for each in self.traces if len(each.right) >= num_right] or [recorded])
        since = at - (recorded.right[num_right - 1] if num_right else 0)
        start = other.right[num_right - 1] if num_right else 0
        following = other.right[num_right] if len(other.right) > num_right else min(other.error, other.length)
        return Running(other, int(min(start + since, max(following - 1, 0), other.length - 1)), inherited)

    def step(self) -> StepBatch:
        admitted = tuple(Admission(trace, inherited, 0, 0) for trace, inherited in self.new)
        self.new, scored, finished, count = [], [], [], len(self.running)
        for key, live in list(self.running.items()):
            live.at, live.num_tokens = live.at + 1, live.num_tokens + 1
            if (score := live.recorded.scores.get(live.at)) is not None:
                scored.append(ThoughtScore(key.trace, score, live.num_tokens, None))
            if live.at >= live.recorded.length:
                tokens = (*range(live.num_tokens - 1), -1 - self.traces.index(live.recorded))
                finished.append(TraceEnd(key.trace, EndReason.STOP, tokens, None))
                del self.running[key]
        done = SearchStep((), admitted, count, tuple(scored), tuple(finished))
        return StepBatch({1: done} if count else {}, 1, 1 << 30, StepSeconds())

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        return {key: tuple(range(self.running.pop(key).num_tokens)) for key in keys}

    def progress(self, search: int) -> Mapping[int, Progress]:
        return {key.trace: Progress(live.num_tokens, True) for key, live in self.running.items()}

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return range(start, self.running[key].num_tokens)

    def close_search(self, search: int) -> None:
        self.running.clear()

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None: ...

    def regroup(self, islands: Mapping[TraceKey, int]) -> None: ...

    def close(self) -> None: ...


def play(traces: Sequence[Recorded], wanted: tuple[int, int, int, int, float] | None, seed: int) -> list[float]:
    """Returns for one search: majority right, vote by score right, pass@1, tokens."""
    engine: Any = RecordedEngine(traces, random.Random(seed))
    policy: Any = registry.load("gambit.policies", "sc" if wanted is None else "gambit")
    islands, swaps, interval, warmup, margin = wanted or (1, 4, 7, 392, 0.0)
    settings = SearchSettings(
        policy="sc" if wanted is None else "gambit", capacity=CAPACITY, num_traces=CAPACITY,
        pool=PoolSettings(islands, swaps, interval, warmup, "", margin), hard_floor=None, child_temperature=1.0,
        branch_point=BranchPoint.LAST_TOKEN, ghost_parents=False, max_new_tokens=4096, budget_tokens=None,
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0), budget_seconds=None, budget_traces=None,
        is_probability=True,
    )  # fmt: skip
    started = ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="recorded", question="", policy=settings.policy, vote="majority",
        aggregation="mean", seed=seed, capacity=CAPACITY, num_traces=CAPACITY, prompt_tokens=(), settings={},
        environment={},
    )  # fmt: skip
    callbacks = Callbacks(
        lambda tokens: traces[-1 - tokens[-1]].answer, lambda deadline: str.__eq__, lambda event: None
    )
    rule = BoundaryRule(10, frozenset([0]), frozenset(), frozenset(), None)
    search = Search(
        engine, policy.from_settings(settings), settings, SearchSpec(1, (1, 2), rule, frozenset()), started, callbacks
    )
    batch = SearchBatch(engine)
    stopped = batch.add(search)
    while not stopped:
        stopped = batch.step()
    search.conclude()
    if search.failure is not None:
        raise search.failure
    return [*votes(search, traces), search.meter.num_generated]


def votes(search: Search, traces: Sequence[Recorded]) -> list[float]:
    gold = next(each.answer for each in traces if each.is_right)
    done = [trace for trace in search.record.tree.traces if trace.state is TraceState.FINISHED]
    counted: dict[str, float] = defaultdict(float)
    weighed: dict[str, float] = defaultdict(float)
    for trace in done:
        if trace.answer:
            counted[trace.answer] += 1
            weighed[trace.answer] += trace.score.value(Aggregation.MEAN) or 0.5
    right = sum(trace.answer == gold for trace in done) / len(done)
    return [*(float(max(tally, key=tally.__getitem__) == gold) for tally in (counted, weighed)), right]


# -- recorded traces -------------------------------------------------------------------------------------------------


def read_steps(work: tuple[dict[str, Any], str, list[int]]) -> tuple[float, list[int], str]:
    """Returns the token of the first error, those of the right steps before it, and the answer."""
    problem, text, ends = work
    found = first_wrong_step(problem, text)
    error = bisect_right(ends, found.offset) if found.offset is not None and found.certain else float("inf")
    offsets = right_steps(problem, text, len(text) if found.offset is None else found.offset)
    return error, [bisect_right(ends, offset) for offset in offsets], answer_in(text, problem["family"]) or ""


def read_traces(path: Path, scores: np.ndarray, model: str) -> dict[int, list[Recorded]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    problems = [json.loads(line) for line in path.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    with np.load(path.with_suffix(".npz")) as found:
        numbers, tokens = found["problem"], np.split(found["tokens"], np.cumsum(found["length"])[:-1])
    lengths = {int(token): len(tokenizer.decode([token])) for token in np.unique(np.concatenate(tokens))}
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    work = [
        (problems[number], text, np.cumsum([lengths[int(each)] for each in own]).tolist())
        for number, text, own in zip(numbers, texts, tokens, strict=True)
    ]
    with ProcessPoolExecutor() as pool:
        steps = list(pool.map(read_steps, work, chunksize=64))
    cutter, first = Cutter(tokenizer), 0
    by_problem: dict[int, list[Recorded]] = defaultdict(list)
    for number, own, (error, right, answer) in zip(numbers, tokens, steps, strict=True):
        places = np.flatnonzero(cutter.kinds(own)["line"]) + 1
        values = scores[first : first + len(places)]
        first += len(places)
        is_right = answer == problems[number]["answer"]
        if not is_right and error == float("inf"):  # somewhere after the last step that is known to be right
            error = right[-1] + 1 if right else 1
        marks = dict(zip(places.tolist(), values.tolist(), strict=True))
        by_problem[int(number)].append(
            Recorded(len(own), marks, right, float("inf") if is_right else error, answer, is_right)
        )
    assert first == len(scores), "the scores are those of other traces"
    return by_problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--scorer", default="mlp/line/14/outcome", help="whose scores: a name in the file of --scores")
    parser.add_argument("--model", required=True, help="a folder with the tokenizer")
    parser.add_argument("--every", type=int, default=1, help="take each so many-th problem")
    parser.add_argument("--repeats", type=int, default=3, help="searches of a problem")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with np.load(options.scores) as found:
        scores = found[options.scorer].astype(float)
    recorded = read_traces(options.traces, scores, options.model)
    mixed = [own for own in recorded.values() if 0 < sum(each.is_right for each in own) < len(own)]
    taken = mixed[:: options.every]
    rows: dict[str, Any] = {"problems": len(taken), "repeats": options.repeats, "capacity": CAPACITY, "settings": {}}
    draws, plain = resamples(len(taken)), np.zeros(len(taken))
    for name, wanted in SETTINGS.items():
        began = time.monotonic()
        seeds = range(options.repeats)
        played = np.array([[play(own, wanted, 1000 * seed + i) for seed in seeds] for i, own in enumerate(taken)])
        by_problem = played.mean(axis=1)
        if wanted is None:
            plain = by_problem[:, 0]
        gain = mean_interval(by_problem[:, 0] - plain, draws)
        rows["settings"][name] = {
            **dict(zip(COUNTED, np.round(by_problem.mean(axis=0), 4).tolist(), strict=True)),
            "majority against plain sampling": [round(each, 4) for each in (gain.value, gain.low, gain.high)],
        }
        print(f"{name}: {rows['settings'][name]} ({time.monotonic() - began:.0f} s)", flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

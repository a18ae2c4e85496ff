"""What the search itself costs, without any model, as the pool and its traces grow: seconds a step, a round, memory.

    python benchmarks/search_scale.py --out benchmarks/results/search_scale.json        # one core: about a minute

The engine here is a calendar of who ends a thought or a trace in which step, so that it costs nothing while nothing
happens. Everything else is real: loop, policy, tree, event log on disk. Time inside the engine is taken out, and so is
time in which other processes ran. Each figure is the median of a run; an exponent is the slope of a line through the
logarithms: 0 constant, 1 linear.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType

from gambit import events as ev
from gambit.config.options import BranchPoint
from gambit.config.presets import SearchSettings
from gambit.engines.base import EngineInfo, SearchSpec
from gambit.policies.tournament import Tournament
from gambit.search.loop import Callbacks, Search
from gambit.storage.run_folder import EventSink
from gambit.text.boundary import BoundaryRule
from gambit.types import (
    Admission,
    Aggregation,
    EndReason,
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

THOUGHT_TOKENS = 100  # on average
CHECK_INTERVAL = 200
POOLS = (16, 32, 64, 128, 256, 512, 1024)
LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
COMMON_POOL, COMMON_LENGTH = 64, 4_000


@dataclass(slots=True)
class _Trace:
    born: int  # the step in which it would have said its first token, inherited ones included
    ends: int  # the step of its last token


@dataclass
class CalendarEngine:
    """One token per trace and step; who is at which length is known from the step alone."""

    length: int
    seed: int = 0
    seconds: float = 0.0  # spent in here
    _step: int = 0
    _running: dict[int, _Trace] = field(default_factory=dict)
    _admitted: list[Admission] = field(default_factory=list)
    _calendar: list[tuple[int, int, bool]] = field(default_factory=list)  # step, trace, whether it ends there

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("calendar", "none", "none", "none", 1, 1 << 30, 1 << 30, 1)

    @property
    def tokenizer(self) -> None:
        return None

    def open(self, spec: SearchSpec) -> None: ...

    def close_search(self, search: int) -> None: ...

    def close(self) -> None: ...

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        with _Clock(self):
            for spec in specs:
                trace = spec.key.trace
                length = max(int(self._rng.uniform(0.5, 1.5) * self.length), spec.inherited + 1)
                born = self._step - spec.inherited
                self._running[trace] = _Trace(born, born + length)
                self._admitted.append(Admission(trace, spec.inherited, 0, 0))
                heapq.heappush(self._calendar, (born + length, trace, True))
                self._expect_thought(trace)

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        with _Clock(self):
            return {key: (7,) * (self._step - self._running.pop(key.trace).born) for key in keys}

    def progress(self, search: int) -> Mapping[int, Progress]:
        with _Clock(self):
            return {trace: Progress(self._step - t.born, True) for trace, t in self._running.items()}

    def step(self) -> StepBatch:
        with _Clock(self):
            self._step += 1
            admitted, self._admitted = tuple(self._admitted), []
            count, scored, finished = len(self._running), [], []
            while self._calendar and self._calendar[0][0] <= self._step:
                _, trace, is_end = heapq.heappop(self._calendar)
                if trace not in self._running:
                    continue
                length = self._step - self._running[trace].born
                if is_end:
                    del self._running[trace]
                    finished.append(TraceEnd(trace, EndReason.STOP, (7,) * length))
                else:
                    scored.append(ThoughtScore(trace, self._rng.random(), length))
                    self._expect_thought(trace)
            step = SearchStep((), admitted, count, tuple(scored), tuple(finished))
            return StepBatch({1: step}, 0, 1 << 30, StepSeconds())

    def _expect_thought(self, trace: int) -> None:
        at = self._step + self._rng.randint(THOUGHT_TOKENS // 2, THOUGHT_TOKENS * 3 // 2)
        if at < self._running[trace].ends:
            heapq.heappush(self._calendar, (at, trace, False))


class _Clock:
    def __init__(self, engine: CalendarEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._engine.seconds += time.thread_time() - self._began


@dataclass(frozen=True)
class Cost:
    """Of the search alone, in microseconds and bytes."""

    capacity: int
    length: int
    steps: int
    rounds: int
    traces: int
    quiet_step_us: float  # nobody ended a thought, nobody was asked
    thought_us: float  # a step with thoughts, per thought
    ranking_us: float  # a round that changes nothing
    swapping_us: float  # a round with swaps, the log of what was pruned included
    finish_us: float  # per trace that ended
    us_per_step: float  # everything, divided by the steps
    bytes_per_trace: float
    bytes_per_token: float  # of what the tree keeps, per generated token


def run(capacity: int, length: int, seed: int = 0) -> Cost:
    engine = CalendarEngine(length, seed)
    with tempfile.TemporaryDirectory() as folder:
        sink = EventSink("scale", Path(folder) / "run", None)
        search = make_search(engine, capacity, length, sink.write)
        kinds: defaultdict[str, list[float]] = defaultdict(list)
        total, steps = 0.0, 0
        search.begin()
        while not search.is_stopped:
            batch = engine.step()
            step = batch.searches[1]
            before, inside, began = len(search.record.tree.traces), engine.seconds, time.thread_time()
            search.absorb(step, batch)
            spent = time.thread_time() - began - (engine.seconds - inside)
            steps += 1
            total += spent
            kind, per = kind_of(step, steps, has_swapped=len(search.record.tree.traces) > before)
            kinds[kind].append(spent / per)
        sink.close()
    traces = search.record.tree.traces
    size = deep_size(search.record.tree)
    return Cost(
        capacity=capacity,
        length=length,
        steps=steps,
        rounds=len(kinds["ranking"]) + len(kinds["swapping"]),
        traces=len(traces),
        quiet_step_us=median_us(kinds["quiet"]),
        thought_us=median_us(kinds["thought"]),
        ranking_us=median_us(kinds["ranking"]),
        swapping_us=median_us(kinds["swapping"]),
        finish_us=median_us(kinds["finish"]),
        us_per_step=round(total / steps * 1e6, 2),
        bytes_per_trace=round(size / len(traces)),
        bytes_per_token=round(size / search.num_generated, 3),
    )


def kind_of(step: SearchStep, number: int, *, has_swapped: bool) -> tuple[str, int]:
    """What a step is counted as, and by what its cost is divided."""
    if number % CHECK_INTERVAL == 0:
        return "swapping" if has_swapped else "ranking", 1
    if step.finished:
        return "finish", len(step.finished)
    if step.admitted:
        return "admission", len(step.admitted)
    return ("thought", len(step.scored)) if step.scored else ("quiet", 1)


def median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2) if seconds else math.nan


def make_search(engine: CalendarEngine, capacity: int, length: int, on_event: Callable[[ev.Event], None]) -> Search:
    settings = SearchSettings(
        policy="gambit", capacity=capacity, num_traces=capacity, swap_size=max(capacity // 16, 1),
        check_interval=CHECK_INTERVAL, warmup_tokens=length // 2, hard_floor=None, child_temperature=1.0,
        branch_point=BranchPoint.LAST_TOKEN, ghost_parents=False, max_new_tokens=4 * length,
        sampling=Sampling(), budget_tokens=None, budget_seconds=None, budget_traces=None,
    )  # fmt: skip
    header = ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="scale", question="", policy="gambit", vote="score",
        aggregation=Aggregation.MEAN, seed=0, capacity=capacity, num_traces=capacity, prompt_tokens=(1,), settings={},
        environment={},
    )  # fmt: skip
    rule = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)
    callbacks = Callbacks(lambda tokens: str(len(tokens) % 3), lambda deadline: str.__eq__, on_event)
    return Search(
        engine, Tournament.from_settings(settings), settings, SearchSpec(1, (1,), rule, frozenset()), header, callbacks
    )


def deep_size(root: object) -> int:
    """Bytes of everything that is only reachable through `root`, classes and code aside."""
    seen, todo, size = set(), [root], 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | FunctionType | ModuleType):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        todo += gc.get_referents(item)
    return size


def exponent(xs: Iterable[float], ys: Iterable[float]) -> float:
    """The slope of the line of least squares through the logarithms."""
    points = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return round(over / sum((x - mean_x) ** 2 for x, _ in points), 3)


def measure(grid: Sequence[tuple[int, int]], repeats: int) -> list[Cost]:
    """Of each cell the run that was disturbed least."""
    costs = []
    for capacity, length in grid:
        runs = [run(capacity, length, seed) for seed in range(repeats)]
        costs.append(min(runs, key=lambda cost: cost.us_per_step))
        print(costs[-1], flush=True)
    return costs


MEASURES = (
    "quiet_step_us", "thought_us", "ranking_us", "swapping_us", "finish_us", "us_per_step", "bytes_per_trace",
    "bytes_per_token",
)  # fmt: skip


def exponents(costs: list[Cost], along: str) -> dict[str, float]:
    return {name: exponent([getattr(c, along) for c in costs], [getattr(c, name) for c in costs]) for name in MEASURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    run(16, 1_000)  # bytecode is warm
    by_pool = measure([(capacity, COMMON_LENGTH) for capacity in POOLS], args.repeats)
    by_length = measure([(COMMON_POOL, length) for length in LENGTHS], args.repeats)
    report = {
        "exponents_in_capacity": exponents(by_pool, "capacity"),
        "exponents_in_length": exponents(by_length, "length"),
        "by_capacity": [vars(cost) for cost in by_pool],
        "by_length": [vars(cost) for cost in by_length],
        "check_interval": CHECK_INTERVAL,
        "thought_tokens": THOUGHT_TOKENS,
        "seconds": round(time.monotonic() - began),
        "python": platform.python_version(),
    }
    print(json.dumps({name: report[name] for name in ("exponents_in_capacity", "exponents_in_length")}, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

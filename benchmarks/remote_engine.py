"""One search on several engines under Ray: steps fetched from each engine, against a loop in each engine's process.

Four ways to run the same searches on the same scripted engines, whose steps take a given time:

- `parts`: today's way. Each engine's process runs a part of the search with a loop of its own; the driver merges logs.
- `lockstep`: one loop in the driver; each step is a call to every engine.
- `ahead`: one loop in the driver; an engine runs alone up to the next round of the policy, or to the end of a trace,
  and returns its steps together.
- `stream`, `chunks`: as `ahead`, but an engine sends its steps as it goes, each one, or eight at a time.

    python benchmarks/remote_engine.py --out benchmarks/results/remote_engine.json       # about ten minutes, two cores

Result (remote_engine.json, with the loop and the parts of e5590e1): parts cost about 1 % with 2 and 8 engines. Every
loop in the driver costs more than 5 % in some case, since engines wait for the slowest one at the end of each trace, if
not at each step. So today's way stays.

The cost is the time of a search beyond that of its slowest engine's steps. With more engines than cores the processes
wait for each other, which engines on machines of their own would not: there `driver` counts, the processor time that
the driver needs a step, while all engines wait for it or not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])  # of the engines

from gambit.cluster.engines import EnginePool  # noqa: E402
from gambit.cluster.plan import ClusterPlan, EngineNeeds, connected  # noqa: E402
from gambit.cluster.spreading import RemoteEngine as RemoteSolver  # noqa: E402
from gambit.config.presets import SearchSettings  # noqa: E402
from gambit.engines.base import SearchSpec  # noqa: E402
from gambit.policies.base import SplitBy, requirements_of  # noqa: E402
from gambit.search.choice import load_policy  # noqa: E402
from gambit.search.host import SearchHost  # noqa: E402
from gambit.search.loop import run_searches  # noqa: E402
from gambit.search.merging import MergedSearch  # noqa: E402
from gambit.search.parts import PartOrder, RunningPart, split  # noqa: E402
from gambit.types import (  # noqa: E402
    Progress,
    SearchStep,
    StepBatch,
    StepSeconds,
    TraceKey,
    TraceSpec,
)
from support.scripted import ScriptedEngine  # noqa: E402
from support.searching import make_header, make_search, make_settings  # noqa: E402

TRACES_PER_ENGINE = 8
CHUNKS = {"stream": 1, "chunks": 8}  # steps in a message
# Seconds of each engine's steps, and how far steps vary (the deviation of the logarithm).
RUNS = (
    ((0.01, 0.02), 0.05),
    ((0.02, 0.02), 0.05),
    ((0.02,) * 8, 0.05),
    ((0.02,) * 32, 0.05),
)


# -- in the process of an engine -------------------------------------------------------------------------------


class TimedEngine(ScriptedEngine):
    """A scripted engine whose steps take about so many seconds."""

    mean_seconds: float = 0.01
    jitter: float = 0.05
    slept: float = 0.0

    def step(self) -> StepBatch:
        began = time.perf_counter()
        batch = super().step()
        rng = random.Random(f"{self.num_steps} {os.getpid()}")
        wanted = self.mean_seconds * rng.lognormvariate(-(self.jitter**2) / 2, self.jitter)
        time.sleep(max(0.0, began + wanted - time.perf_counter()))
        self.slept += time.perf_counter() - began
        return batch


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps that an engine took alone, with how far its traces were after each."""

    batches: tuple[StepBatch, ...]
    progress: tuple[Mapping[int, Progress], ...]
    is_last: bool


class Stub:
    """An engine in its process, both with a loop of its own (`start_part`) and stepped from outside (`advance`)."""

    def __init__(self, seconds: float, jitter: float) -> None:
        self._seconds = seconds
        self._jitter = jitter
        self.reset()

    def reset(self) -> float:
        """Begins anew; returns how long the steps have taken since the last time."""
        slept = self.engine.slept if hasattr(self, "engine") else 0.0
        self.engine = TimedEngine(seed=1, own_noise=True, finish_chance=0.002, thought_chance=0.05)
        self.engine.mean_seconds, self.engine.jitter = self._seconds, self._jitter
        self._host: SearchHost | None = None
        return slept

    def start_part(self, order: PartOrder, tell: Callable[[Any], None]) -> RunningPart:
        part = RunningPart(tell, order.settings, order.allowed_step)
        self._host = SearchHost(lambda: self.engine)

        def make() -> Any:
            search = make_search(self.engine, order.settings).search
            callbacks = dataclasses.replace(search._callbacks, on_event=part.on_event, after_step=part.after_step)
            search._callbacks = search.pool._callbacks = callbacks
            return search

        part.follow(self._host.submit(make))
        return part

    def call(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
        """Calls methods of the engine one after the other; returns what the last returns."""
        found = None
        for name, arguments in calls:
            found = getattr(self.engine, name)(*arguments)
        return found

    def advance(self, calls: Sequence[tuple[str, tuple[Any, ...]]], most: int, chunk: int) -> Iterator[Steps]:
        """Runs steps, up to `most` and to the first that ends a trace."""
        self.call(calls)
        batches: list[StepBatch] = []
        progress: list[Mapping[int, Progress]] = []
        for number in range(most):
            batch = self.engine.step()
            batches.append(batch)
            progress.append(self.engine.progress(1))
            is_last = number == most - 1 or any(step.finished for step in batch.searches.values())
            if is_last or len(batches) == chunk:
                yield Steps(tuple(batches), tuple(progress), is_last)
                batches, progress = [], []
            if is_last:
                return

    def close(self) -> None:
        """Holds nothing."""


@dataclass(frozen=True)
class StubMaker:
    seconds: float
    jitter: float

    def __call__(self) -> Stub:
        return Stub(self.seconds, self.jitter)


class StubActor:
    def __init__(self, seconds: float, jitter: float) -> None:
        self._stub = Stub(seconds, jitter)

    def reset(self) -> float:
        return self._stub.reset()

    def call(self, calls: Any) -> Any:
        return self._stub.call(calls)

    def advance(self, calls: Any, most: int) -> Steps:
        [steps] = self._stub.advance(calls, most, most)
        return steps

    def stream(self, calls: Any, most: int, chunk: int) -> Iterator[Steps]:
        yield from self._stub.advance(calls, most, chunk)


# -- in the driver ---------------------------------------------------------------------------------------------


@dataclass
class RemoteEngine:
    """An engine in another process: calls that return nothing travel with the next step."""

    actor: Any
    chunk: int | None  # None: all steps in one message
    ray: Any
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    ahead: deque[tuple[StepBatch, Mapping[int, Progress]]] = field(default_factory=deque)
    now: Mapping[int, Progress] = field(default_factory=dict)
    coming: Iterator[Any] | None = None
    num_messages: int = 0

    def request(self, most: int) -> None:
        """Lets it run, unless it does."""
        if self.ahead or self.coming is not None:
            return
        if self.chunk is not None:
            stream = self.actor.stream.options(num_returns="streaming")
            self.coming = iter(stream.remote(self.calls, most, self.chunk))
        else:
            self.coming = iter([self.actor.advance.remote(self.calls, most)])
        self.calls = []

    @property
    def is_running(self) -> bool:
        return bool(self.ahead) or self.coming is not None

    def pop(self) -> StepBatch:
        """Returns its next step; waits for it."""
        if not self.ahead:
            assert self.coming is not None
            steps = self.ray.get(next(self.coming))
            self.num_messages += 1
            self.ahead.extend(zip(steps.batches, steps.progress, strict=True))
            if steps.is_last:
                self.coming = None
        batch, self.now = self.ahead.popleft()
        return batch


class SpreadEngine:
    """Several engines as one: traces go where their island is, steps are joined."""

    def __init__(self, engines: Sequence[RemoteEngine], islands: int, lead: int) -> None:
        self._engines = engines
        self._islands = islands
        self._lead = lead
        self._place: dict[int, RemoteEngine] = {}
        self._at = 0
        self.info = ScriptedEngine().info

    def open(self, spec: SearchSpec) -> None:
        for engine in self._engines:
            engine.calls.append(("open", (spec,)))

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        for spec in specs:
            engine = self._engines[spec.island * len(self._engines) // self._islands]
            self._place[spec.key.trace] = engine
            engine.calls.append(("submit", ([spec],)))
            engine.now = {**engine.now, spec.key.trace: Progress(spec.inherited, True)}

    def stop(self, keys: Sequence[TraceKey]) -> dict[TraceKey, tuple[int, ...]]:
        found: dict[TraceKey, tuple[int, ...]] = {}
        for engine in self._engines:
            mine = [key for key in keys if self._place[key.trace] is engine]
            if not mine:
                continue
            assert not engine.is_running, "stopped between two rounds, other than at an end on the same engine"
            now = engine.now
            tokens = engine.ray.get(engine.actor.call.remote([*engine.calls, ("stop", (mine,))]))
            engine.calls = []
            found |= {key: tokens[key][: now[key.trace].num_tokens] for key in mine}
            engine.now = {trace: each for trace, each in now.items() if TraceKey(1, trace) not in tokens}
        return found

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        raise AssertionError

    regroup = tokens = set_scores

    def progress(self, search: int) -> dict[int, Progress]:
        return {trace: each for engine in self._engines for trace, each in engine.now.items()}

    def step(self) -> StepBatch:
        most = self._lead - self._at % self._lead
        for engine in self._engines:
            if engine.now or engine.calls:
                engine.request(most)
        batches = [engine.pop() for engine in self._engines if engine.is_running]
        self._at += 1
        return joined(batches)

    def close_search(self, search: int) -> None:
        for engine in self._engines:
            engine.calls.append(("close_search", (search,)))

    def close(self) -> None:
        """The engines stay."""


def joined(batches: Sequence[StepBatch]) -> StepBatch:
    steps = [batch.searches[1] for batch in batches if 1 in batch.searches]
    whole = SearchStep()
    for step in steps:
        whole.evicted.extend(step.evicted)
        whole.admitted.extend(step.admitted)
        whole.num_generated += step.num_generated
        whole.scored.extend(step.scored)
        whole.finished.extend(step.finished)
    used, capacity = (sum(getattr(each, name) for each in batches) for name in ("kv_used_tokens", "kv_capacity_tokens"))
    return StepBatch({1: whole}, used, capacity, StepSeconds())


# -- measurements ----------------------------------------------------------------------------------------------


def settings_for(num_engines: int, check_interval: int) -> SearchSettings:
    places = TRACES_PER_ENGINE * num_engines
    return make_settings(
        capacity=places, num_traces=places, swap_size=2 * num_engines, islands=num_engines,
        check_interval=check_interval, warmup_tokens=50, max_new_tokens=500,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """One search."""

    seconds: float
    engine_seconds: float  # of the engine whose steps took longest
    driver_seconds: float  # of its processor
    steps: int
    tokens: int
    messages: int

    @property
    def cost(self) -> float:
        return self.seconds / self.engine_seconds - 1


def run_stepped(way: str, actors: Sequence[Any], wanted: SearchSettings, ray: Any) -> Found:
    engines = [RemoteEngine(actor, CHUNKS.get(way), ray) for actor in actors]
    spread = SpreadEngine(engines, wanted.pool.islands, 1 if way == "lockstep" else wanted.pool.check_interval)
    ray.get([actor.reset.remote() for actor in actors])
    clock, began = time.process_time(), time.perf_counter()
    search = make_search(spread, wanted).search
    list(run_searches(spread, [search]))
    seconds, driver = time.perf_counter() - began, time.process_time() - clock
    slept = ray.get([actor.reset.remote() for actor in actors])
    num_messages = sum(engine.num_messages for engine in engines)
    return Found(seconds, max(slept), driver, search.meter.num_steps, search.meter.num_generated, num_messages)


def run_in_parts(pool: EnginePool[Stub], wanted: SearchSettings) -> Found:
    requirements = requirements_of(load_policy(wanted.policy).from_settings(wanted))
    parts = split(wanted, SplitBy.ISLANDS, len(pool.slots))
    for slot in pool.slots:
        pool.ask(slot, Stub.reset)
    clock, began, num_messages = time.process_time(), time.perf_counter(), 0

    def counted(tell: Callable[[Any], None]) -> Callable[[Any], None]:
        def count(news: Any) -> None:
            nonlocal num_messages
            num_messages += 1
            tell(news)

        return count

    merged = MergedSearch(
        make_header(wanted), wanted, requirements, len(parts), lambda event: None, lambda _: str.__eq__
    )
    starts = [
        lambda tell, allowed, slot=slot, part=part: RemoteSolver(pool, slot).start_part(
            PartOrder(SimpleNamespace(), SimpleNamespace(), part, allowed), counted(tell)
        )
        for slot, part in zip(pool.slots, parts, strict=True)
    ]
    result = merged.run(starts, lambda: False)
    seconds, driver = time.perf_counter() - began, time.process_time() - clock
    slept = [pool.ask(slot, Stub.reset) for slot in pool.slots]
    return Found(seconds, max(slept), driver, merged.step, result.tokens.generated, num_messages)


def measure(step_seconds: Sequence[float], jitter: float, check_interval: int, rounds: int, ray: Any) -> dict[str, Any]:
    """The same search in each way, several times; the first of each warms up."""
    wanted, found = settings_for(len(step_seconds), check_interval), {}
    for way in ("lockstep", "ahead", "stream", "chunks"):
        actors = [ray.remote(StubActor).options(num_cpus=0.01).remote(each, jitter) for each in step_seconds]
        found[way] = [run_stepped(way, actors, wanted, ray) for _ in range(rounds + 1)][1:]
        for actor in actors:
            ray.kill(actor)
    maker = StubMaker(step_seconds[0], jitter)
    with EnginePool(maker, len(step_seconds), EngineNeeds(cpus=0.01), jobs_per_engine=2) as pool:
        pool.wait()
        for slot, seconds in zip(pool.slots, step_seconds, strict=True):
            pool.ask(slot, SetSeconds(seconds))
        found["parts"] = [run_in_parts(pool, wanted) for _ in range(rounds + 1)][1:]
    assert len({(each.steps, each.tokens) for runs in found.values() for each in runs}) == 1, "other searches"
    return {"step_seconds": list(step_seconds), "jitter": jitter, "check_interval": check_interval} | {
        way: summary(runs) for way, runs in found.items()
    }


@dataclass(frozen=True, slots=True)
class SetSeconds:
    seconds: float

    def __call__(self, stub: Stub) -> None:
        stub._seconds = self.seconds


def summary(runs: Sequence[Found]) -> dict[str, Any]:
    return {
        "cost": [round(each.cost, 4) for each in runs],
        "median_cost": round(statistics.median(each.cost for each in runs), 4),
        "seconds": round(statistics.median(each.seconds for each in runs), 3),
        "engine_seconds": round(statistics.median(each.engine_seconds for each in runs), 3),
        "driver_ms_a_step": round(1000 * statistics.median(each.driver_seconds / each.steps for each in runs), 3),
        "messages": runs[0].messages,
        "steps": runs[0].steps,
        "tokens": runs[0].tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check-interval", type=int, default=50)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of engines; default: 2, 8 and 32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"cpus": os.cpu_count(), "runs": []}
    with connected(ClusterPlan(num_engines=2)):
        import ray

        for step_seconds, jitter in RUNS:
            if options.only and len(step_seconds) not in options.only:
                continue
            report["runs"].append(measure(step_seconds, jitter, options.check_interval, options.rounds, ray))
            print(json.dumps(report["runs"][-1]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

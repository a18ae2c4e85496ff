"""Collects on engines under Ray: each samples traces and reads their states, the driver grades and writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gambit import events as ev
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool
from gambit.cluster.work import SolverMaker, Work, run_work
from gambit.config.options import SearchConfig
from gambit.engines.base import EngineInfo
from gambit.errors import EngineError
from gambit.results.result import SearchResult
from gambit.solver import Solver
from gambit.training.collect import CollectPlan, readings_of, state_reader
from gambit.training.sampling import WHOLE, Sampled, SamplingOrder, Task, Watch
from gambit.training.states import NoStates, StateReader

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class CollectEngine:
    """A solver and the model that reads states, in one process."""

    solver: Solver
    reader: StateReader | NoStates
    _reading: threading.Lock = field(default_factory=threading.Lock)  # one pass at a time: memory is planned for one

    def read(self, sampled: Sampled) -> list[dict[str, torch.Tensor]]:
        with self._reading:
            return self.reader.read(readings_of([sampled]))

    def close(self) -> None:
        self.solver.close()


@dataclass(frozen=True, slots=True)
class CollectMaker:
    make_solver: SolverMaker
    plan: CollectPlan

    def __call__(self) -> CollectEngine:
        solver = self.make_solver()  # first: what it leaves of the memory is enough for the other
        try:
            return CollectEngine(solver, state_reader(self.plan))
        except BaseException:
            solver.close()
            raise


@dataclass(frozen=True, slots=True)
class CollectFacts:
    """Facts about an engine that the driver needs."""

    hidden_size: int
    batch_tokens: int
    info: EngineInfo


def facts_of(engine: CollectEngine) -> CollectFacts:
    return CollectFacts(engine.reader.hidden_size, engine.reader.batch_tokens, engine.solver.engine.info)


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The end of one problem; `sampled` if all its traces are there."""

    sampled: Sampled | None
    error: str | None


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Samples the traces of one problem."""

    task: Task
    config: SearchConfig
    concurrency: int

    def __call__(self, engine: CollectEngine, desk: JobDesk) -> SampleEnd:
        watch = Watch()
        result = self._search(engine.solver, desk, watch)
        sampled = watch.take(self.task)
        if result is None or result.stop_reason not in WHOLE or not sampled.traces:
            return SampleEnd(None, None if result is None else result.error)
        sampled.states = engine.read(sampled)
        return SampleEnd(sampled, result.error)

    def _search(self, solver: Solver, desk: JobDesk, watch: Watch) -> SearchResult | None:
        def on_event(problem: str, event: ev.Event) -> None:
            if isinstance(event, ev.Sample):
                desk.send(event)
            watch.on_event(problem, event)

        results = solver.solve_many(
            [self.task.problem], self.config, concurrency=self.concurrency, extractor=watch.keep_text,
            on_event=on_event, should_stop=desk.should_stop,
        )  # fmt: skip
        return next(iter(list(results)), None)


@dataclass(frozen=True, slots=True)
class PoolSampler:
    """Samples on every engine of a pool."""

    pool: EnginePool[CollectEngine]

    def sample(
        self, tasks: Iterable[Task], order: SamplingOrder, refused: list[str], should_stop: Callable[[], bool]
    ) -> Iterator[Sampled]:
        config, most = order.search, order.concurrency
        work = (Work(SampleJob(task, config, most), task.id) for task in tasks)
        for end in run_work(self.pool, work, jobs_per_engine=most, should_stop=should_stop):
            found = end.value if isinstance(end.value, SampleEnd) else SampleEnd(None, end.error)
            if found.error is not None:
                refused.append(f"{end.tag}: {found.error}")
            if found.sampled is not None:
                yield found.sampled


class RayEngines:
    """The engines of a collection under Ray; the pool is its caller's to close."""

    def __init__(self, pool: EnginePool[CollectEngine], should_stop: Callable[[], bool] = lambda: False) -> None:
        self.sampler = PoolSampler(pool)
        facts = pool.ask_one(facts_of, should_stop)
        if facts is None:
            raise EngineError("stopped before an engine was ready: nothing was collected")
        self._facts = facts

    @property
    def hidden_size(self) -> int:
        return self._facts.hidden_size

    @property
    def batch_tokens(self) -> int:
        return self._facts.batch_tokens

    @property
    def engine_info(self) -> EngineInfo:
        return self._facts.info

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        """Returns the states that came with the traces."""
        return [states for problem in problems for states in problem.states or ()]

    def close(self) -> None:
        """Holds nothing."""

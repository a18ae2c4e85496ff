"""Carries out the searches of a bench run on engines under Ray; rows are measured there and written here."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gambit import events as ev
from gambit.bench.meter import About, measure
from gambit.bench.rows import Row
from gambit.bench.stamp import stamp
from gambit.bench.tasks import BenchTask, TaskEnd
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool
from gambit.cluster.work import FinishedSearch, SearchJob, SolverMaker, Work, run_work
from gambit.config.options import SearchConfig
from gambit.events import Json
from gambit.solver import Solver
from gambit.storage.run_folder import LOG_FILE
from gambit.types import StopReason


class BenchEngine:
    """A solver that warms up before its first measured search."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self._warming = threading.Lock()
        self._is_warm = False

    def warm_up(self, job: SearchJob, config: SearchConfig) -> None:
        with self._warming:
            if not self._is_warm:
                with suppress(Exception):  # a problem that cannot be searched will be a row, with the reason
                    list(self.solver.solve_many([job.problem], config))
            self._is_warm = True

    def close(self) -> None:
        self.solver.close()


@dataclass(frozen=True, slots=True)
class BenchMaker:
    make_solver: SolverMaker

    def __call__(self) -> BenchEngine:
        return BenchEngine(self.make_solver())


@dataclass(frozen=True, slots=True)
class StampQuestion:
    """Asks an engine what it runs on."""

    identity: Mapping[str, str]

    def __call__(self, engine: BenchEngine) -> dict[str, Json]:
        return stamp(engine.solver.engine.info, self.identity)


@dataclass(frozen=True, slots=True)
class MeasuredSearch:
    """A finished search and its row; none where it was interrupted."""

    search: FinishedSearch
    row: Row | None


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """Searches a problem and measures the search, so that little is left for the driver."""

    search: SearchJob
    about: About
    warmup: SearchConfig

    def __call__(self, engine: BenchEngine, desk: JobDesk) -> MeasuredSearch:
        engine.warm_up(self.search, self.warmup)
        events: list[ev.Event] = []
        began = time.time()
        found = self.search.searched(engine.solver, desk, events.append)
        if found.result.stop_reason is StopReason.INTERRUPTED:
            return MeasuredSearch(found, None)
        about = dataclasses.replace(self.about, began=began)
        return MeasuredSearch(found, measure(about, found.result, events, engine.solver.equivalent))


class RaySearches:
    """Each engine searches what is next; methods do not share the batch of one."""

    def __init__(
        self, pool: EnginePool[BenchEngine], folder: Path, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._should_stop = should_stop

    def run(self, tasks: Iterable[BenchTask]) -> Iterator[TaskEnd]:
        for end in run_work(self._pool, map(_work, tasks), should_stop=self._should_stop):
            if end.error is not None:
                yield TaskEnd(end.tag, error=end.error)
                continue
            assert isinstance(end.value, MeasuredSearch)
            if end.value.row is not None:
                log = self._write(end.tag, end.value.search)
                yield TaskEnd(end.tag, dataclasses.replace(end.value.row, engine=end.engine, log=log))

    def _write(self, task: BenchTask, found: FinishedSearch) -> str | None:
        """The log before the row: a row that is there has its log."""
        folder = self._folder / task.folder
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed before it wrote the row
        self._pool.told.tell(found.result.warnings)
        found.written(folder)
        return (task.folder / LOG_FILE).as_posix() if (folder / LOG_FILE).is_file() else None


def _work(task: BenchTask) -> Work[BenchTask]:
    group = task.group
    bench = group.plan.recipe.bench
    search = SearchJob(task.problem, group.config, bench.logs, bench.concurrency)
    job = MeasuredJob(search, task.about(0.0, None), group.warmup_config)
    return Work(job, task, (group.benchmark.name, group.variant.label, group.seed))

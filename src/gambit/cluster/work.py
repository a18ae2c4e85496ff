"""Work for engines under Ray: pieces that are handed out as engines become free, and searches that need all of them.

A piece that was under way when its engine died is done again. One that has cost two engines their life is given up.
"""

import dataclasses
import itertools
import os
import queue
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Generic, TypeVar

from gambit import events as ev
from gambit.cluster.actor import Done, Failed, Job, JobDesk, JobEnd, Make
from gambit.cluster.engines import POLL_SECONDS, EnginePool, EngineSlot, RemoteJob
from gambit.cluster.plan import OWN, ClusterPlan, EngineNeeds, check_plan, connected, engine_needs, workers_of
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.config.presets import SearchSettings
from gambit.errors import EngineError, StorageError
from gambit.models import files as models
from gambit.results.result import SearchResult
from gambit.scorers.base import Scorer
from gambit.search.parts import PartHandle, PartNews, Report
from gambit.solver import Solver
from gambit.solver.builder import LengthHistory, SearchPlan, SearchRequest
from gambit.solver.spread import SpreadSolver
from gambit.storage.run_folder import LOG_FILE, warn_incomplete, with_log_error, write_result
from gambit.types import Problem

EXECUTOR = "distributed_executor_backend"
MOST_DEATHS = 2  # of engines, by one piece of work
PARTS_PER_ENGINE = 2  # of spread searches: one that is ending, and the next
Tag = TypeVar("Tag")


# -- work for any engine ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Work(Generic[Tag]):
    """A job on its way to its end, through as many engines as it takes."""

    job: Job[Any, object] = field(repr=False)
    tag: Tag  # the driver's name for it
    batch: object = None  # equal for jobs that may share an engine at the same time
    num_deaths: int = 0  # of engines
    slot: EngineSlot | None = None  # of the engine that runs it, or ran it last
    remote: RemoteJob | None = None
    value: object = None  # of the finished job
    error: str | None = None  # the reason if there is none

    @property
    def engine(self) -> int:
        """The number of the engine that it ended on."""
        assert self.slot is not None
        return self.slot.number

    def fits_beside(self, others: Sequence["Work[Tag]"]) -> bool:
        """Returns whether an engine may run it together with others.

        What ran when an engine died runs alone the next time, which shows which of several killed it.
        """
        return not others or (not self.num_deaths and not others[0].num_deaths and others[0].batch == self.batch)


def run_work(
    pool: EnginePool[Any],
    work: Iterable[Work[Tag]],
    *,
    jobs_per_engine: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Work[Tag]]:
    """Yields each piece of work when it is over, in any order.

    The next piece is taken from `work` when an engine is free for it. Once `should_stop`, no more is begun and
    running jobs are stopped; they still come back, unless their engine dies. `jobs_per_engine`: at most the pool's.
    """
    shift = WorkQueue(pool, work, min(jobs_per_engine or pool.most_jobs, pool.most_jobs))
    is_stopping = False
    try:
        while True:
            if not is_stopping and should_stop():
                is_stopping = True
                shift.stop()
            if not is_stopping:
                pool.check()
                shift.hand_out()
            if not shift.running and (is_stopping or shift.peek() is None):
                return
            yield from shift.ends()
    finally:
        shift.stop()


class WorkQueue(Generic[Tag]):
    """The work of one call of `run_work`, with everything of it that is under way."""

    def __init__(self, pool: EnginePool[Any], work: Iterable[Work[Tag]], most: int) -> None:
        self.running: list[Work[Tag]] = []
        self._pool = pool
        self._coming = iter(work)
        self._next: deque[Work[Tag]] = deque()  # what has to be done again comes first
        self._most = most
        self._inbox: queue.SimpleQueue[tuple[Work[Tag], JobEnd]] = queue.SimpleQueue()

    def peek(self) -> Work[Tag] | None:
        """Returns the work to begin next; None if none is left."""
        if not self._next:
            self._next.extend(itertools.islice(self._coming, 1))
        return self._next[0] if self._next else None

    def hand_out(self) -> None:
        """Begins what can begin, on the least busy engine first: none has two jobs while another has none."""
        while (work := self.peek()) is not None:
            beside = {slot.number: [each for each in self.running if each.slot is slot] for slot in self._pool.slots}
            fit = [
                slot
                for slot in self._pool.slots
                if slot.is_ready and len(beside[slot.number]) < self._most and work.fits_beside(beside[slot.number])
            ]
            if not fit:
                return
            slot = min(fit, key=lambda slot: len(beside[slot.number]))

            def put(end: JobEnd, work: Work[Tag] = work) -> None:
                self._inbox.put((work, end))

            try:
                work.remote, work.slot = self._pool.begin(slot, work.job, lambda item: None, put), slot
            except EngineError:  # it died just now
                continue
            self.running.append(self._next.popleft())

    def stop(self) -> None:
        for work in self.running:
            assert work.remote is not None
            work.remote.stop()

    def ends(self) -> Iterator[Work[Tag]]:
        """Yields what has ended since; waits a moment for the first one."""
        arrived = self._arrived(POLL_SECONDS)
        while arrived is not None:
            work, end = arrived
            self.running.remove(work)
            if self._is_over(work, end):
                yield work
            arrived = self._arrived(0.0)

    def _arrived(self, seconds: float) -> tuple[Work[Tag], JobEnd] | None:
        """Returns the next end; None if there is none so soon."""
        try:
            return self._inbox.get(block=seconds > 0, timeout=seconds or None)
        except queue.Empty:
            return None

    def _is_over(self, work: Work[Tag], end: JobEnd) -> bool:
        """Notes the end of a job; returns False if it has to be done again, because its engine died."""
        if isinstance(end, Done):
            work.value = end.value
        elif end.is_users:
            work.error = end.reason
        else:
            work.num_deaths += 1
            if work.num_deaths < MOST_DEATHS:
                self._next.appendleft(work)
                return False
            work.error = f"its engine died {MOST_DEATHS} times over it, the last time with: {end.reason}"
        return True


# -- in the process of an engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SolverMaker:
    """Makes a solver in an engine's process."""

    options: Mapping[str, Any]  # of `EngineConfig`, without its defaults
    scorer: Scorer | None = None  # instead of the one that the options name
    environment: Mapping[str, str] = field(default_factory=dict)  # read by libraries when they are imported

    def __call__(self) -> Solver:
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        return Solver(**self.options if self.scorer is None else {**self.options, "scorer": self.scorer})


def fitting_options(config: EngineConfig, needs: EngineNeeds) -> dict[str, Any]:
    """Returns the options that a config sets, made to fit into a share of a machine."""
    given = config.model_dump(exclude_unset=True)
    if needs.shares_a_gpu:
        given["memory_ratio"] = config.memory_ratio * needs.gpus
    if workers_of(config) > 1:  # inside Ray vLLM would start its workers as actors, and wait for GPUs that it holds
        given["engine_options"] = {EXECUTOR: "mp", **config.engine_options}
    return given


@dataclass(frozen=True, slots=True)
class FinishedSearch:
    """A finished search on its way to the driver, which alone writes."""

    result: SearchResult
    log: bytes | None  # None for a search that was refused before it began

    def written(self, folder: Path) -> SearchResult:
        """Writes log and result, and returns the result as a search on this machine would have."""
        if self.log is None:
            return self.result
        result = dataclasses.replace(self.result, out_dir=str(folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOG_FILE).write_bytes(self.log)
            write_result(folder, result)
        except (OSError, StorageError) as error:
            return with_log_error(result, warn_incomplete(folder, error))
        return result


@dataclass(frozen=True, slots=True)
class SearchJob:
    """Searches one problem."""

    problem: Problem
    config: SearchConfig
    keeps_log: bool = True
    concurrency: int = 1  # searches that this one may have beside it on its engine, itself included

    def __call__(
        self, solver: Solver, desk: JobDesk, on_event: Callable[[ev.Event], None] = lambda event: None
    ) -> FinishedSearch:
        """Searches as a local run does, with the log in a folder of this machine's until it is whole."""
        has_begun = False

        def follow(_: str, event: ev.Event) -> None:
            nonlocal has_begun
            has_begun = True
            if isinstance(event, ev.Sample):
                desk.send(event)
            on_event(event)

        with tempfile.TemporaryDirectory(prefix="gambit-") as scratch:
            [result] = solver.solve_many(
                [self.problem], self.config, concurrency=self.concurrency, out_dir=scratch if self.keeps_log else None,
                on_event=follow, should_stop=lambda: has_begun and desk.should_stop(),
            )  # fmt: skip
            log = Path(scratch) / self.problem.id / LOG_FILE
            found = log.read_bytes() if log.is_file() else None
        return FinishedSearch(dataclasses.replace(result, out_dir=None, traces=()), found)


def run_part(
    request: SearchRequest, settings: SearchSettings, allowed_step: int | None, solver: Solver, desk: JobDesk
) -> None:
    """Runs a part of a search to its end; called in the process of its engine."""
    is_over = threading.Event()

    def report(news: PartNews) -> None:
        desk.send(news, at_once=True)
        if news.is_over:
            is_over.set()

    part = solver.start_part(request, settings, report, allowed_step)
    desk.listen(part.stop, part.allow)
    is_over.wait()


# -- in the process of the driver ------------------------------------------------------------------------------


class ClusterSolver:
    """Solves many problems on the engines of a pool, with the results and folders of a solver on this machine."""

    def __init__(self, pool: EnginePool[Solver], searches_per_engine: int = 1) -> None:
        self._pool = pool
        self._concurrency = searches_per_engine
        self.num_given_up = 0  # problems that cost their engines

    def solve_many(
        self,
        problems: Iterable[Problem],
        config: SearchConfig,
        *,
        out_dir: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[SearchResult]:
        """Yields results as searches finish; a problem that cannot be searched gives one with `error` set."""
        work = (
            Work(SearchJob(problem, config, out_dir is not None, self._concurrency), problem) for problem in problems
        )
        for end in run_work(self._pool, work, should_stop=should_stop):
            if end.error is not None:
                self.num_given_up += 1
                yield SearchResult.failed(end.tag.id, config.policy_name, config.seed, end.error)
                continue
            assert isinstance(end.value, FinishedSearch)
            self._pool.warnings_given.warn(end.value.result.warnings)
            yield end.value.result if out_dir is None else end.value.written(out_dir / end.tag.id)


# -- one search on all engines ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A solver under Ray, for a spread search."""

    pool: EnginePool[Solver]
    slot: EngineSlot

    def plan(self, request: SearchRequest, history: LengthHistory, num_engines: int) -> SearchPlan:
        self.pool.wait()  # for the other engines too: the clock of the search does not run yet
        plan: SearchPlan = self.pool.call(self.slot, methodcaller("plan", request, history, num_engines))
        return plan

    def start_part(
        self, request: SearchRequest, settings: SearchSettings, report: Report, allowed_step: int | None
    ) -> PartHandle:
        def on_end(end: JobEnd) -> None:
            if isinstance(end, Failed):
                error = f"engine {self.slot.number} died: {end.reason}"
                report(PartNews(-1, (), is_over=True, error=error, is_engines=True))

        job = partial(run_part, request, settings, allowed_step)
        remote = self.pool.begin(self.slot, job, report, on_end)
        return PartHandle(remote.post, remote.stop)

    def text_of(self, tokens: Sequence[int]) -> str:
        text: str = self.pool.call(self.slot, methodcaller("text_of", tokens))
        return text


@contextmanager
def spread_over(
    make: Make[Solver], num_engines: int, needs: EngineNeeds
) -> Iterator[tuple[SpreadSolver, EnginePool[Solver]]]:
    """Yields a solver that spreads each search over new engines, and these; this process must be a driver of Ray."""
    with (
        EnginePool(make, num_engines, needs, jobs_per_engine=PARTS_PER_ENGINE) as pool,
        SpreadSolver([RemoteEngine(pool, slot) for slot in pool.slots]) as solver,
    ):
        yield solver, pool


@contextmanager
def spread_on_ray(
    model: str = models.BUNDLED, *, engines: int, address: str = OWN, **engine_options: object
) -> Iterator[SpreadSolver]:
    """Yields a `SpreadSolver` on engines under Ray: at an address, or on this machine alone.

    `engine_options` are those of `Solver`.
    """
    config = build(EngineConfig, {"model": model, **engine_options})
    plan = build(ClusterPlan, {"ray": address, "engines": engines})
    check_plan(plan, config)
    with connected(plan) as resources:
        needs = engine_needs(plan, config, resources)
        with spread_over(SolverMaker(fitting_options(config, needs)), engines, needs) as (solver, _):
            yield solver

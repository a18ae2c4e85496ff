"""Carries out the searches that a bench run still lacks, on an engine of this process or on many under Ray.

Variants take turns, block of problems by block, so that a machine that warms up or slows down treats all alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

from gambit import events as ev
from gambit.bench.datasets import Benchmark, Item, slug
from gambit.bench.folder import LOGS_FOLDER, BenchPlan, stamp
from gambit.bench.recipe import BenchVariant
from gambit.bench.rows import Row, RowWriter, TaskKey, measure
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool
from gambit.cluster.work import FinishedSearch, SearchJob, Work, run_work
from gambit.config.options import SearchConfig
from gambit.errors import DeadEngineError, EngineError, GambitError, StorageError, UserError, named
from gambit.events import Json
from gambit.results.result import SearchResult
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from gambit.storage.run_folder import LOG_FILE
from gambit.types import Problem, StopReason

WARMUP_TOKENS = 1024
MOST_FAILURES_IN_A_ROW = 3
ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """Searches that may share a batch: one method with one seed on a block of problems."""

    plan: BenchPlan
    benchmark: Benchmark
    variant: BenchVariant
    seed: int
    turn: int  # which block

    @property
    def log_folder(self) -> Path:
        return Path(LOGS_FOLDER) / self.benchmark.name / slug(self.variant.label) / f"seed-{self.seed}"

    @property
    def config(self) -> SearchConfig:
        fixed: dict[str, object] = {} if self.benchmark.answer is None else {"answer": self.benchmark.answer}
        return self.plan.recipe.search_config(self.variant, self.seed, fixed)

    @property
    def warmup_config(self) -> SearchConfig:
        """The options of a short search before any that is measured: the first steps compile and allocate."""
        return self.config.model_copy(update={"budget_tokens": WARMUP_TOKENS})


@dataclass(frozen=True, slots=True)
class BenchTask:
    """One search that has no row yet."""

    group: SearchGroup
    item: Item

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.group.variant.label, self.group.benchmark.name, self.item.id, self.group.seed)

    @property
    def problem(self) -> Problem:
        return Problem(self.item.question, self.item.id)

    @property
    def folder(self) -> Path:
        """The folder of its log, relative to the run's."""
        return self.group.log_folder / self.item.id

    def row(self, began: float, log: str | None = None) -> Row:
        """Returns a row with the facts that the events of the search do not hold."""
        shard = self.group.plan.recipe.bench.shard
        return Row(**self.key._asdict(), answer=None, gold=self.item.answer, correct=False, stop_reason="", began=began,
                   shard=shard, log=log)  # fmt: skip

    def lost(self, error: str, log: str | None = None) -> TaskEnd:
        """Returns the end of a task whose engine failed."""
        result = SearchResult.failed(self.item.id, self.group.variant.policy, self.group.seed, error)
        return measure(self.row(time.time(), log), result, [], lambda first, second: False), False


TaskEnd: TypeAlias = tuple[Row, bool]  # of a finished task; not sure (False) if it failed through its engine's fault


@dataclass(slots=True)
class Runner:
    """One start of a bench run: finds what has no row yet, has it searched, and appends the rows."""

    plan: BenchPlan
    benchmarks: Sequence[Benchmark]
    searches: Searches
    writer: RowWriter
    done: set[TaskKey]
    on_row: Callable[[Row], None] = lambda row: None
    should_stop: ShouldStop = lambda: False
    unsure: list[Row] = field(default_factory=list)  # failures that may be the engine's and not the problem's

    def run(self) -> None:
        """Carries out every search that has no row; a signal ends it after the row that is being written."""
        for row, is_sure in self.searches.run(self._tasks()):
            if is_sure:
                self._keep_unsure()  # the engine works, so what failed before was the problem's fault
                self._write(row)
            else:
                self._note_failure(row)
        if not self.should_stop():
            self._keep_unsure()

    def _tasks(self) -> Iterator[BenchTask]:
        """Yields what has no row, in an order that depends on the plan alone.

        One seed after the other: a run that is cut short has been through all benchmarks before any problem twice.
        The first variant changes with block and shard.
        """
        bench = self.plan.recipe.bench
        number, count = bench.shard_numbers
        for seed, benchmark in itertools.product(bench.seeds, self.benchmarks):
            mine = itertools.islice(benchmark.first(bench.limit, bench.problems), number, None, count)
            for turn, block in enumerate(_blocks(mine, bench.block_size)):
                for variant in _rotated(self.plan.variants, number + turn):
                    group = SearchGroup(self.plan, benchmark, variant, seed, turn)
                    found = (BenchTask(group, item) for item in block)
                    yield from (task for task in found if task.key not in self.done)

    def _write(self, row: Row) -> None:
        self.writer.write(row)
        self.done.add(row.key)
        self.on_row(row)

    def _keep_unsure(self) -> None:
        unsure, self.unsure = self.unsure, []
        for row in unsure:
            self._write(row)

    def _note_failure(self, row: Row) -> None:
        self.unsure.append(row)
        self.done.add(row.key)
        if len(self.unsure) >= MOST_FAILURES_IN_A_ROW:
            raise GambitError(
                f"{len(self.unsure)} searches in a row failed, the last with: {row.error}. The engine seems broken; "
                "these searches are not recorded, and --resume goes on from here"
            )


def _blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while block := list(itertools.islice(items, size)):
        yield block


def _rotated(variants: Sequence[BenchVariant], turn: int) -> list[BenchVariant]:
    shift = turn % len(variants)
    return [*variants[shift:], *variants[:shift]]


@dataclass(frozen=True, slots=True)
class LocalSearches:
    """Searches group by group, so that methods share no batch and the seconds of each can be measured."""

    solver: Solver | SpreadSolver
    folder: Path
    should_stop: ShouldStop = lambda: False

    def run(self, tasks: Iterable[BenchTask]) -> Iterator[TaskEnd]:
        """Carries out tasks and yields each when it ends, but for those that were interrupted."""
        for number, (group, members) in enumerate(itertools.groupby(tasks, key=lambda task: task.group)):
            pending = list(members)
            if number == 0:
                warm_up(self.solver, pending[0].problem, group.warmup_config, self.should_stop)
            yield from self._run_group(group, pending)
            if self.should_stop():
                return

    def _run_group(
        self, group: SearchGroup, pending: Sequence[BenchTask], *, is_retry: bool = False
    ) -> Iterator[TaskEnd]:
        """Yields a group's ends. An engine that fails ends all its searches; these are tried again, one by one."""
        while pending and not self.should_stop():
            begun: dict[str, list[ev.Event]] = defaultdict(list)
            done: set[str] = set()
            try:
                for row, is_sure in self._search(group, pending, begun):
                    done.add(row.problem)
                    yield row, is_sure
                return
            except (UserError, StorageError):
                raise
            except DeadEngineError as error:
                raise EngineError(f"what ran is not recorded, --resume goes on from here: {error}") from error
            except Exception as error:
                pending = [task for task in pending if task.item.id not in done]
                suspects = [task for task in pending if is_retry or task.item.id in begun]
                if not suspects:
                    raise
                for task in suspects:
                    if len(suspects) > 1:
                        yield from self._run_group(group, [task], is_retry=True)
                    else:
                        yield task.lost(named(error), log_of(self.folder, task))
                pending = [task for task in pending if task not in suspects]

    def _search(
        self, group: SearchGroup, tasks: Sequence[BenchTask], begun: dict[str, list[ev.Event]]
    ) -> Iterator[TaskEnd]:
        bench = group.plan.recipe.bench
        by_name = {task.item.id: task for task in tasks}
        times: dict[str, float] = {}

        def on_event(problem: str, event: ev.Event) -> None:
            if isinstance(event, ev.RunStarted):  # also of a search that begins anew, since it lost an engine
                times[problem] = time.time()
                begun[problem].clear()
            begun[problem].append(event)  # measured once the search is over: nothing here may cost it time

        for result in self.solver.solve_many(
            self._problems(tasks), group.config, concurrency=bench.concurrency,
            out_dir=self.folder / group.log_folder if bench.logs else None,
            on_event=on_event, should_stop=self.should_stop,
        ):  # fmt: skip
            if result.stop_reason is StopReason.INTERRUPTED:
                continue  # half a search is no result: a resumed run does it again
            task = by_name[result.problem_id]
            row = task.row(times.get(result.problem_id, time.time()), log_of(self.folder, task))
            events = begun.pop(result.problem_id, [])
            yield measure(row, result, events, self.solver.equivalent), True

    def _problems(self, tasks: Sequence[BenchTask]) -> Iterator[Problem]:
        for task in tasks:
            # What a kill left of an unfinished search is in the way of the new one.
            shutil.rmtree(self.folder / task.folder, ignore_errors=True)
            yield task.problem


def warm_up(
    solver: Solver | SpreadSolver, problem: Problem, config: SearchConfig, should_stop: ShouldStop = lambda: False
) -> None:
    """Searches once, unmeasured. A problem that cannot be searched will be a row of its own, with the reason."""
    with suppress(Exception):
        list(solver.solve_many([problem], config, should_stop=should_stop))


def log_of(folder: Path, task: BenchTask) -> str | None:
    """Returns the path of a task's log relative to the run's folder; None if there is no log."""
    path = task.folder / LOG_FILE
    return path.as_posix() if (folder / path).is_file() else None


class BenchEngine:
    """A solver that warms up before its first measured search."""

    def __init__(self, make_solver: Callable[[], Solver]) -> None:
        """Makes an engine in its own process."""
        self.solver = make_solver()
        self._warming = threading.Lock()
        self._is_warm = False

    def warm_up(self, problem: Problem, config: SearchConfig) -> None:
        """Warms up at the first call; later ones wait for that."""
        with self._warming:
            if not self._is_warm:
                warm_up(self.solver, problem, config)
            self._is_warm = True

    def close(self) -> None:
        self.solver.close()


def stamp_of(engine: BenchEngine, identity: Mapping[str, str]) -> dict[str, Json]:
    """Stamps the environment of an engine, in its process."""
    return stamp(engine.solver.engine.info, identity)


def measured(
    engine: BenchEngine, desk: JobDesk, *, search: SearchJob, row: Row, warmup: SearchConfig
) -> tuple[FinishedSearch, Row | None]:
    """Searches and measures a problem in the engine's process; the row is None if the search was interrupted."""
    engine.warm_up(search.problem, warmup)
    events: list[ev.Event] = []
    row = dataclasses.replace(row, began=time.time())
    found = search(engine.solver, desk, events.append)
    is_whole = found.result.stop_reason is not StopReason.INTERRUPTED
    return found, measure(row, found.result, events, engine.solver.equivalent) if is_whole else None


@dataclass(frozen=True, slots=True)
class RaySearches:
    """Hands the next search to whichever engine is free; methods do not share the batch of one."""

    pool: EnginePool[BenchEngine]
    folder: Path
    should_stop: ShouldStop = lambda: False

    def run(self, tasks: Iterable[BenchTask]) -> Iterator[TaskEnd]:
        """Carries out tasks and yields each when it ends, but for those that were interrupted."""
        for end in run_work(self.pool, map(_work, tasks), should_stop=self.should_stop):
            if end.error is not None:
                yield end.tag.lost(end.error)
                continue
            found, row = cast("tuple[FinishedSearch, Row | None]", end.value)
            if row is not None:
                yield dataclasses.replace(row, engine=end.engine, log=self._write(end.tag, found)), True

    def _write(self, task: BenchTask, found: FinishedSearch) -> str | None:
        """Writes the log before the row, so that each row has its log; returns the log's path."""
        folder = self.folder / task.folder
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed before it wrote the row
        self.pool.warnings_given.warn(found.result.warnings)
        found.written(folder)
        return log_of(self.folder, task)


def _work(task: BenchTask) -> Work[BenchTask]:
    group = task.group
    bench = group.plan.recipe.bench
    search = SearchJob(task.problem, group.config, bench.logs, bench.concurrency)
    job = partial(measured, search=search, row=task.row(began=0.0), warmup=group.warmup_config)
    return Work(job, task, (group.benchmark.name, group.variant.label, group.seed))


Searches: TypeAlias = LocalSearches | RaySearches

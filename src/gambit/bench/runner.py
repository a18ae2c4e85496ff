"""Runs the searches that a bench plan still lacks and appends a row for each.

Variants take turns, block of problems by block, so that a machine that warms up or slows down treats all alike; inside
a block the problems of one variant share a continuous batch. Variants do not share a batch, so that the seconds of each
can be measured.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gambit.bench.datasets import Benchmark, Item, slug
from gambit.bench.folder import LOGS_FOLDER, BenchPlan
from gambit.bench.meter import About, measure
from gambit.bench.recipe import BenchVariant
from gambit.bench.rows import Row, RowWriter, TaskKey
from gambit.config.options import SearchConfig
from gambit.core import events as ev
from gambit.core.errors import GambitError, StorageError, UserError
from gambit.core.problem import Problem
from gambit.core.types import StopReason
from gambit.results.record import SearchResult
from gambit.solver import Solver
from gambit.storage.run_folder import LOG_FILE

WARMUP_TOKENS = 1024
MOST_FAILURES_IN_A_ROW = 3
OnRow = Callable[[Row], None]


@dataclass(frozen=True, slots=True)
class _SearchGroup:
    """Searches that share one batch."""

    benchmark: Benchmark
    variant: BenchVariant
    seed: int

    def key(self, item: Item) -> TaskKey:
        return TaskKey(self.variant.label, self.benchmark.name, item.id, self.seed)

    @property
    def log_folder(self) -> Path:
        return Path(LOGS_FOLDER) / self.benchmark.name / slug(self.variant.label) / f"seed-{self.seed}"


class Runner:
    """One start of a bench run."""

    def __init__(
        self,
        plan: BenchPlan,
        benchmarks: Sequence[Benchmark],
        solver: Solver,
        folder: Path,
        writer: RowWriter,
        done: set[TaskKey],
        *,
        on_row: OnRow = lambda row: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan = plan
        self._bench = plan.recipe.bench
        self._benchmarks = benchmarks
        self._solver = solver
        self._folder = folder
        self._writer = writer
        self._done = done
        self._on_row = on_row
        self._should_stop = should_stop
        self._unsure: list[Row] = []  # failures that may be the engine's and not the problem's

    def run(self) -> None:
        """Every search that has no row yet; a signal ends it after the row that is being written."""
        is_warm = False
        for group, items in self._groups():
            pending = [item for item in items if group.key(item) not in self._done]
            if pending and not is_warm:
                self._warm_up(group, pending[0])
                is_warm = True
            self._run_group(group, pending)
            if self._should_stop():
                return
        self._keep_unsure()

    def _groups(self) -> Iterator[tuple[_SearchGroup, list[Item]]]:
        """In an order that depends on the plan alone; which variant comes first changes with block and shard."""
        number, count = self._bench.part
        for benchmark in self._benchmarks:
            mine = itertools.islice(benchmark.first(self._bench.limit), number, None, count)
            for turn, block in enumerate(_blocks(mine, self._bench.block_size)):
                for seed in self._bench.seeds:
                    for variant in _rotated(self._plan.variants, number + turn):
                        yield _SearchGroup(benchmark, variant, seed), block

    def _warm_up(self, group: _SearchGroup, item: Item) -> None:
        """Search once before anything is measured: the first forward passes compile kernels and allocate memory."""
        config = self._config(group).model_copy(update={"budget_tokens": WARMUP_TOKENS})
        with suppress(Exception):  # a problem that cannot be searched will be a row of its own, with the reason
            for _ in self._solver.solve_many([Problem(item.question, item.id)], config, should_stop=self._should_stop):
                pass

    def _config(self, group: _SearchGroup) -> SearchConfig:
        fixed: dict[str, object] = {} if group.benchmark.answer is None else {"answer": group.benchmark.answer}
        return self._plan.recipe.search_config(group.variant, group.seed, fixed)

    # -- one group ---------------------------------------------------------------------------------------------

    def _run_group(self, group: _SearchGroup, pending: list[Item]) -> None:
        """An engine that fails takes all its searches with it: those are tried again, one by one."""
        while pending and not self._should_stop():
            begun: dict[str, list[ev.Event]] = defaultdict(list)
            try:
                self._search(group, pending, begun, self._bench.concurrency)
                return
            except (UserError, StorageError):
                raise
            except Exception as error:
                suspects = [item for item in pending if item.id in begun and group.key(item) not in self._done]
                if not suspects:
                    raise
                for item in suspects:
                    self._search_alone(group, item, error if len(suspects) == 1 else None)
                pending = [item for item in pending if group.key(item) not in self._done]

    def _search_alone(self, group: _SearchGroup, item: Item, error: Exception | None) -> None:
        """`error` is what its first try, if that was alone too, came to."""
        if error is None:
            try:
                self._search(group, [item], defaultdict(list), 1)
                return
            except (UserError, StorageError):
                raise
            except Exception as second:
                error = second
        self._failed(group, item, error)

    def _search(
        self, group: _SearchGroup, items: list[Item], begun: dict[str, list[ev.Event]], concurrency: int
    ) -> None:
        golds = {item.id: item.answer for item in items}
        times: dict[str, float] = {}

        def on_event(problem: str, event: ev.Event) -> None:
            if isinstance(event, ev.RunStarted):
                times[problem] = time.time()
            begun[problem].append(event)  # measured once the search is over: nothing here may cost it time

        for result in self._solver.solve_many(
            self._problems(group, items), self._config(group), concurrency=concurrency,
            out_dir=self._folder / group.log_folder if self._bench.logs else None,
            on_event=on_event, should_stop=self._should_stop,
        ):  # fmt: skip
            if result.stop_reason is StopReason.INTERRUPTED:
                continue  # half a search is no result: a resumed run does it again
            name = result.problem_id
            key = TaskKey(group.variant.label, group.benchmark.name, name, group.seed)
            about = About(key, golds[name], times.get(name, time.time()), self._bench.shard, self._log(group, name))
            self._keep(measure(about, result, begun.pop(name, []), self._solver.equivalent))

    def _problems(self, group: _SearchGroup, items: list[Item]) -> Iterator[Problem]:
        for item in items:
            # What a kill left of an unfinished search is in the way of the new one.
            shutil.rmtree(self._folder / group.log_folder / item.id, ignore_errors=True)
            yield Problem(item.question, item.id)

    def _log(self, group: _SearchGroup, name: str) -> str | None:
        path = group.log_folder / name / LOG_FILE
        return path.as_posix() if (self._folder / path).is_file() else None

    # -- rows --------------------------------------------------------------------------------------------------

    def _keep(self, row: Row) -> None:
        self._keep_unsure()  # the engine works, so what failed before was the problem's fault
        self._write(row)

    def _keep_unsure(self) -> None:
        unsure, self._unsure = self._unsure, []
        for row in unsure:
            self._write(row)

    def _write(self, row: Row) -> None:
        self._writer.write(row)
        self._done.add(row.key)
        self._on_row(row)

    def _failed(self, group: _SearchGroup, item: Item, error: Exception) -> None:
        result = SearchResult.failed(item.id, group.variant.policy, group.seed, f"{type(error).__name__}: {error}")
        about = About(group.key(item), item.answer, time.time(), self._bench.shard, self._log(group, item.id))
        self._unsure.append(measure(about, result, [], self._solver.equivalent))
        self._done.add(group.key(item))
        if len(self._unsure) >= MOST_FAILURES_IN_A_ROW:
            raise GambitError(
                f"{len(self._unsure)} searches in a row failed, the last with: {error}. The engine seems broken; "
                "these searches are not recorded, and --resume goes on from here"
            ) from error


def _blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while block := list(itertools.islice(items, size)):
        yield block


def _rotated(variants: Sequence[BenchVariant], turn: int) -> list[BenchVariant]:
    shift = turn % len(variants)
    return [*variants[shift:], *variants[:shift]]

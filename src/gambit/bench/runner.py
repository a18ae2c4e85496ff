"""Runs the searches that a bench plan still lacks and appends a row for each.

Variants take turns, block of problems by block, so that a machine that warms up or slows down treats all alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from gambit.bench.datasets import Benchmark, Item
from gambit.bench.folder import BenchPlan
from gambit.bench.meter import measure
from gambit.bench.recipe import BenchVariant
from gambit.bench.rows import Row, RowWriter, TaskKey
from gambit.bench.tasks import BenchTask, Searches, SearchGroup, TaskEnd
from gambit.errors import GambitError
from gambit.results.result import SearchResult

MOST_FAILURES_IN_A_ROW = 3
OnRow = Callable[[Row], None]


class Runner:
    """One start of a bench run."""

    def __init__(
        self,
        plan: BenchPlan,
        benchmarks: Sequence[Benchmark],
        searches: Searches,
        writer: RowWriter,
        done: set[TaskKey],
        *,
        on_row: OnRow = lambda row: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._plan = plan
        self._bench = plan.recipe.bench
        self._benchmarks = benchmarks
        self._searches = searches
        self._writer = writer
        self._done = done
        self._on_row = on_row
        self._should_stop = should_stop
        self._unsure: list[Row] = []  # failures that may be the engine's and not the problem's

    def run(self) -> None:
        """Every search that has no row yet; a signal ends it after the row that is being written."""
        for end in self._searches.run(self._tasks()):
            if end.row is not None:
                self._keep(end.row)
            else:
                self._failed(end)
        if not self._should_stop():
            self._keep_unsure()

    def _tasks(self) -> Iterator[BenchTask]:
        for group, items in self._groups():
            for item in items:
                task = BenchTask(group, item)
                if task.key not in self._done:
                    yield task

    def _groups(self) -> Iterator[tuple[SearchGroup, list[Item]]]:
        """In an order that depends on the plan alone; which variant comes first changes with block and shard.

        One seed after the other: a run that is cut short has been through all benchmarks before any problem twice.
        """
        number, count = self._bench.part
        for seed, benchmark in itertools.product(self._bench.seeds, self._benchmarks):
            mine = itertools.islice(benchmark.first(self._bench.limit), number, None, count)
            for turn, block in enumerate(_blocks(mine, self._bench.block_size)):
                for variant in _rotated(self._plan.variants, number + turn):
                    yield SearchGroup(self._plan, benchmark, variant, seed, turn), block

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

    def _failed(self, end: TaskEnd) -> None:
        task, error = end.task, end.error or "unknown"
        result = SearchResult.failed(task.item.id, task.group.variant.policy, task.group.seed, error)
        self._unsure.append(measure(task.about(time.time(), end.log), result, [], _never_equal))
        self._done.add(task.key)
        if len(self._unsure) >= MOST_FAILURES_IN_A_ROW:
            raise GambitError(
                f"{len(self._unsure)} searches in a row failed, the last with: {error}. The engine seems broken; "
                "these searches are not recorded, and --resume goes on from here"
            )


def _never_equal(first: str, second: str) -> bool:
    """A failed search has no answer to compare."""
    return False


def _blocks(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    while block := list(itertools.islice(items, size)):
        yield block


def _rotated(variants: Sequence[BenchVariant], turn: int) -> list[BenchVariant]:
    shift = turn % len(variants)
    return [*variants[shift:], *variants[:shift]]

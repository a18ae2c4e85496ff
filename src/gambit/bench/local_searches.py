"""Carries out the searches of a bench run one after the other: on an engine of this process, or on all of a cluster."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from gambit import events as ev
from gambit.bench.meter import measure
from gambit.bench.tasks import BenchTask, SearchGroup, TaskEnd
from gambit.errors import StorageError, UserError
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from gambit.storage.run_folder import LOG_FILE
from gambit.types import Problem, StopReason


class LocalSearches:
    """Groups one after the other, so that methods do not share a batch and the seconds of each can be measured."""

    def __init__(
        self, solver: Solver | SpreadSolver, folder: Path, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._solver = solver
        self._folder = folder
        self._should_stop = should_stop

    def run(self, tasks: Iterable[BenchTask]) -> Iterator[TaskEnd]:
        is_warm = False
        for group, members in itertools.groupby(tasks, key=lambda task: task.group):
            pending = list(members)
            if not is_warm:
                self._warm_up(pending[0])
                is_warm = True
            yield from self._run_group(group, pending)
            if self._should_stop():
                return

    def _warm_up(self, task: BenchTask) -> None:
        config = task.group.warmup_config
        with suppress(Exception):  # a problem that cannot be searched will be a row of its own, with the reason
            for _ in self._solver.solve_many([task.problem], config, should_stop=self._should_stop):
                pass

    def _run_group(self, group: SearchGroup, pending: Sequence[BenchTask]) -> Iterator[TaskEnd]:
        """An engine that fails takes all its searches with it: those are tried again, one by one."""
        concurrency = group.plan.recipe.bench.concurrency
        while pending and not self._should_stop():
            begun: dict[str, list[ev.Event]] = defaultdict(list)
            done: set[str] = set()
            try:
                for end in self._search(group, pending, begun, concurrency):
                    done.add(end.task.item.id)
                    yield end
                return
            except (UserError, StorageError):
                raise
            except Exception as error:
                pending = [task for task in pending if task.item.id not in done]
                suspects = [task for task in pending if task.item.id in begun]
                if not suspects:
                    raise
                for task in suspects:
                    yield from self._search_alone(task, error if len(suspects) == 1 else None)
                pending = [task for task in pending if task not in suspects]

    def _search_alone(self, task: BenchTask, error: Exception | None) -> Iterator[TaskEnd]:
        """`error` is what its first try, if that was alone too, came to."""
        if error is None:
            try:
                yield from self._search(task.group, [task], defaultdict(list), 1)
                return
            except (UserError, StorageError):
                raise
            except Exception as second:
                error = second
        yield TaskEnd(task, error=f"{type(error).__name__}: {error}", log=self._log(task))

    def _search(
        self, group: SearchGroup, tasks: Sequence[BenchTask], begun: dict[str, list[ev.Event]], concurrency: int
    ) -> Iterator[TaskEnd]:
        by_name = {task.item.id: task for task in tasks}
        times: dict[str, float] = {}

        def on_event(problem: str, event: ev.Event) -> None:
            if isinstance(event, ev.RunStarted):  # also of a search that begins anew, since it lost an engine
                times[problem] = time.time()
                begun[problem].clear()
            begun[problem].append(event)  # measured once the search is over: nothing here may cost it time

        for result in self._solver.solve_many(
            self._problems(tasks), group.config, concurrency=concurrency,
            out_dir=self._folder / group.log_folder if group.plan.recipe.bench.logs else None,
            on_event=on_event, should_stop=self._should_stop,
        ):  # fmt: skip
            if result.stop_reason is StopReason.INTERRUPTED:
                continue  # half a search is no result: a resumed run does it again
            task = by_name[result.problem_id]
            about = task.about(times.get(result.problem_id, time.time()), self._log(task))
            events = begun.pop(result.problem_id, [])
            yield TaskEnd(task, measure(about, result, events, self._solver.equivalent))

    def _problems(self, tasks: Sequence[BenchTask]) -> Iterator[Problem]:
        for task in tasks:
            # What a kill left of an unfinished search is in the way of the new one.
            shutil.rmtree(self._folder / task.folder, ignore_errors=True)
            yield task.problem

    def _log(self, task: BenchTask) -> str | None:
        path = task.folder / LOG_FILE
        return path.as_posix() if (self._folder / path).is_file() else None

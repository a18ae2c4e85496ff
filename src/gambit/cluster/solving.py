"""Solves many problems on the engines of a pool, with the results and folders of a solver on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gambit.cluster.jobs import FinishedSearch, SearchJob
from gambit.cluster.pool import EnginePool
from gambit.cluster.slots import Work
from gambit.cluster.writing import write_search
from gambit.config.options import SearchConfig
from gambit.results.result import SearchResult
from gambit.solver import Solver
from gambit.types import Problem


class ClusterSolver:
    """As `Solver.solve_many`, with each engine taking the next problem when it is free."""

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
        """Results as they come; a problem that cannot be searched gives one with `error` set."""

        def work() -> Iterator[Work[Problem]]:
            for problem in problems:
                yield Work(SearchJob(problem, config, out_dir is not None, self._concurrency), problem)

        for end in self._pool.run(work(), should_stop=should_stop):
            if end.error is not None:
                self.num_given_up += 1
                yield SearchResult.failed(end.tag.id, config.policy, config.seed, end.error)
                continue
            assert isinstance(end.value, FinishedSearch)
            self._pool.told.tell(end.value.result.warnings)
            yield end.value.result if out_dir is None else write_search(end.value, out_dir / end.tag.id)

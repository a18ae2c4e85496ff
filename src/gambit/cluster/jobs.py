"""Jobs that search, and the descriptions that solvers are made from in the processes of engines."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gambit import events as ev
from gambit.cluster.actor import JobDesk
from gambit.cluster.plan import EngineNeeds, workers_of
from gambit.cluster.slots import TokensSoFar
from gambit.config.options import EngineConfig, SearchConfig
from gambit.results.result import SearchResult
from gambit.scorers.base import Scorer
from gambit.solver import Solver
from gambit.storage.run_folder import LOG_FILE
from gambit.types import Problem

EXECUTOR = "distributed_executor_backend"


@dataclass(frozen=True, slots=True)
class SolverMaker:
    """Makes a solver in an engine's process."""

    options: Mapping[str, Any]  # of `EngineConfig`, those that were given
    scorer: Scorer | None = None  # instead of the one that the options name
    environment: Mapping[str, str] = field(default_factory=dict)  # for libraries that look there when imported

    def __call__(self) -> Solver:
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        options = dict(self.options)
        scorer = self.scorer or options.pop("scorer", "auto")
        return Solver(**{**options, "scorer": scorer})


def engine_options(config: EngineConfig, needs: EngineNeeds) -> dict[str, Any]:
    """What a config sets, made to fit into a part of a machine."""
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
    log: bytes | None


@dataclass(frozen=True, slots=True)
class SearchJob:
    """Searches one problem."""

    problem: Problem
    config: SearchConfig
    keeps_log: bool = True
    concurrency: int = 1  # searches that this one may have beside it on its engine, itself included

    def __call__(self, solver: Solver, desk: JobDesk) -> FinishedSearch:
        return self.searched(solver, desk, lambda event: None)

    def searched(self, solver: Solver, desk: JobDesk, on_event: Callable[[ev.Event], None]) -> FinishedSearch:
        """As a local run does it, with the log in a folder of this machine's until it is whole."""
        has_begun = False

        def tell(_: str, event: ev.Event) -> None:
            nonlocal has_begun
            has_begun = True
            if isinstance(event, ev.Sample):
                desk.tell(TokensSoFar(event.generated))
            on_event(event)

        with tempfile.TemporaryDirectory(prefix="gambit-") as scratch:
            [result] = solver.solve_many(
                [self.problem], self.config, concurrency=self.concurrency, out_dir=scratch if self.keeps_log else None,
                on_event=tell, should_stop=lambda: has_begun and desk.should_stop(),
            )  # fmt: skip
            log = Path(scratch) / self.problem.id / LOG_FILE
            found = log.read_bytes() if log.is_file() else None
        return FinishedSearch(dataclasses.replace(result, out_dir=None, traces=()), found)

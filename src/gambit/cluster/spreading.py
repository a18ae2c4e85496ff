"""One search on several engines under Ray: each runs some of its islands, the driver merges them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

from gambit.cluster.actor import Failed, JobDesk, JobEnd, Make
from gambit.cluster.engines import EnginePool, EngineSlot, RemoteJob
from gambit.cluster.plan import OWN, ClusterPlan, EngineNeeds, check_plan, connected, engine_needs
from gambit.cluster.work import SolverMaker
from gambit.cluster.work import engine_options as fitted_options
from gambit.config.options import EngineConfig, SearchConfig, build
from gambit.models import files as models
from gambit.search.parts import PartNews, PartOrder, Report
from gambit.solver import Solver
from gambit.solver.builder import LengthHistory, SearchPlan
from gambit.solver.spread import SpreadSolver
from gambit.types import Problem

PARTS_PER_ENGINE = 2  # one that is ending, and the next


def run_part(order: PartOrder, allowed_step: int | None, solver: Solver, desk: JobDesk) -> None:
    """Runs a part of a search to its end; called in the process of its engine."""
    is_over = threading.Event()

    def report(news: PartNews) -> None:
        desk.send(news, at_once=True)
        if news.is_over:
            is_over.set()

    part = solver.start_part(order, report, allowed_step)
    desk.listen(part.stop, part.allow)
    is_over.wait()


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A part that runs in another process."""

    job: RemoteJob

    def allow(self, step: int | None) -> None:
        self.job.post(step)

    def stop(self) -> None:
        self.job.stop()


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A solver under Ray, for a spread search."""

    pool: EnginePool[Solver]
    slot: EngineSlot

    def plan(self, problem: Problem, config: SearchConfig, history: LengthHistory, num_engines: int) -> SearchPlan:
        self.pool.wait()  # for the other engines too: the clock of the search does not run yet
        plan: SearchPlan = self.pool.ask(self.slot, methodcaller("plan", problem, config, history, num_engines))
        return plan

    def start_part(self, order: PartOrder, report: Report, allowed_step: int | None) -> RemotePart:
        def on_end(end: JobEnd) -> None:
            if isinstance(end, Failed):
                error = f"engine {self.slot.number} died: {end.reason}"
                report(PartNews(-1, (), is_over=True, error=error, is_engines=True))

        return RemotePart(self.pool.begin(self.slot, partial(run_part, order, allowed_step), report, on_end))


@contextmanager
def spread_engines(
    make: Make[Solver], num_engines: int, needs: EngineNeeds
) -> Iterator[tuple[list[RemoteEngine], EnginePool[Solver]]]:
    """Yields engines under Ray for a `SpreadSolver`; this process must be a driver of Ray."""
    with EnginePool(make, num_engines, needs, jobs_per_engine=PARTS_PER_ENGINE) as pool:
        yield [RemoteEngine(pool, slot) for slot in pool.slots], pool


@contextmanager
def spread_on_ray(
    model: str = models.BUNDLED, *, engines: int, address: str = OWN, **engine_options: object
) -> Iterator[SpreadSolver]:
    """Yields a `SpreadSolver` on engines under Ray: at an address, or on this machine alone.

    `engine_options` are those of `Solver`.
    """
    config, plan = build(EngineConfig, {"model": model, **engine_options}), ClusterPlan(address, engines)
    check_plan(plan, config)
    with connected(plan) as resources:
        needs = engine_needs(plan, config, resources)
        make = SolverMaker(fitted_options(config, needs))
        with spread_engines(make, engines, needs) as (found, _), SpreadSolver(found) as solver:
            yield solver

"""Opens what a bench run searches with: an engine in this process, or engines under Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from gambit.bench.folder import BenchPlan, stamp
from gambit.bench.run import BenchMaker, LocalSearches, RaySearches, Searches, StampQuestion
from gambit.cli.progress import BenchScreen, engine_lines
from gambit.cli.session import loaded, loaded_in_cluster, needs_in_cluster, solver_maker
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan
from gambit.config.options import EngineConfig
from gambit.events import Json

ShouldStop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class BenchSession:
    """Engines that are loaded, or loading."""

    stamp: Callable[[ShouldStop], Mapping[str, Json] | None]  # what they run on; None where the wait was called off
    searches: Callable[[ShouldStop], Searches]


@contextmanager
def local_searches(
    engine: EngineConfig, plan: BenchPlan, folder: Path, progress: BenchScreen
) -> Iterator[BenchSession]:
    with loaded(engine, progress) as solver:
        yield BenchSession(
            lambda _: stamp(solver.engine.info, plan.identity),
            lambda should_stop: LocalSearches(solver, folder, should_stop),
        )


@contextmanager
def spread_searches(
    cluster: ClusterPlan, engine: EngineConfig, plan: BenchPlan, folder: Path, progress: BenchScreen
) -> Iterator[BenchSession]:
    """One search after the other, each on all engines."""
    with loaded_in_cluster(cluster, engine, progress) as (solver, pool):
        info = pool.ask(pool.slots[0], attrgetter("engine.info"))
        yield BenchSession(
            lambda _: stamp(info, plan.identity),
            lambda should_stop: LocalSearches(solver, folder, should_stop),
        )


@contextmanager
def ray_searches(
    cluster: ClusterPlan, engine: EngineConfig, plan: BenchPlan, folder: Path, progress: BenchScreen
) -> Iterator[BenchSession]:
    with needs_in_cluster(cluster, engine, progress) as needs:
        make = BenchMaker(solver_maker(engine, needs))
        progress.loading(engine.model)
        with EnginePool(make, cluster.num_engines, needs, jobs_per_engine=plan.recipe.bench.concurrency) as pool:
            progress.engine_lines = lambda: engine_lines(pool.slots)
            yield BenchSession(
                lambda should_stop: pool.ask_one(StampQuestion(plan.identity), should_stop),
                lambda should_stop: RaySearches(pool, folder, should_stop),
            )

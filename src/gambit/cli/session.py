"""Loads models for commands, here or under Ray, with warnings as lines on stderr."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from gambit.cli.terminal import say, warn
from gambit.engines.vllm import installed
from gambit.errors import GambitNote, GambitWarning

if TYPE_CHECKING:
    from gambit.bench.datasets import Benchmark
    from gambit.cluster.engines import EnginePool
    from gambit.cluster.plan import ClusterPlan, EngineNeeds
    from gambit.cluster.work import SolverMaker
    from gambit.config.options import EngineConfig
    from gambit.scorers.base import Scorer
    from gambit.solver import Solver
    from gambit.solver.spread import SpreadSolver

Loading: TypeAlias = Callable[[str], None]  # shows what is being loaded
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def check_model(model: str, *, is_quiet: bool = False, is_offline: bool = False) -> None:
    """Raises for a model that is not to be found. A download from the hub is announced, since it may take a while."""
    from gambit.models import files

    if is_offline:
        files.go_offline()
    if files.must_be_fetched(model) and not is_quiet:
        say(f"{model} is not on this machine: fetching it from {files.hub_address()}")
    with only_our_warnings(is_quiet=is_quiet):
        files.check_model(model)


def warn_of(benchmarks: Iterable[Benchmark], *, is_quiet: bool = False) -> None:
    """Warns of benchmarks on which figures are worth less than they seem."""
    for benchmark in benchmarks:
        if benchmark.caution is not None and not is_quiet:
            warn(f"{benchmark.name}: {benchmark.caution}")


def loaded(engine: EngineConfig, loading: Loading) -> Solver:
    """Loads a model on its engine."""
    from gambit.solver import Solver

    loading(engine.model)
    with _nothing_collected():
        return Solver(**engine.model_dump(exclude_unset=True))


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Exempts what is loaded from garbage collection, which takes time: all of it stays to the end."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def prepare_libraries() -> None:
    """Sets the environment variables of libraries, before a model is loaded."""
    for name, value in library_settings().items():
        os.environ.setdefault(name, value)


def library_settings() -> dict[str, str]:
    """Returns environment variables that keep libraries quiet and give vLLM a process of its own on a GPU.

    A search's own work is then off the path of vLLM's steps. `Solver` itself does not set them: a script without a main
    guard cannot start processes.
    """
    found = installed()
    is_on_gpu = found is not None and found[1] == "cuda"
    return {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if is_on_gpu else dict(QUIET)


@contextmanager
def sole_writer(folder: Path, *, is_quiet: bool = False) -> Iterator[None]:
    """Locks a folder, before a model is loaded; raises if another run is writing to it."""
    from gambit.storage.folders import locked

    with only_our_warnings(is_quiet=is_quiet), locked(folder):
        yield


@contextmanager
def only_our_warnings(
    paused: Callable[[], AbstractContextManager[None]] = nullcontext, *, is_quiet: bool = False
) -> Iterator[None]:
    """Prints Gambit's warnings as lines on stderr; drops those of libraries, which are meant for programmers.

    `paused` takes a live display away while a line is printed.
    """

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, GambitWarning) and not is_quiet:
            with paused():
                (say if issubclass(category, GambitNote) else warn)(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GambitWarning)
        warnings.showwarning = show
        yield


@contextmanager
def needs_in_cluster(
    plan: ClusterPlan, engine: EngineConfig, loading: Loading = lambda what: None
) -> Iterator[EngineNeeds]:
    """Connects to Ray, or starts it."""
    from gambit.cluster.plan import connected, engine_needs

    loading(f"Ray ({plan.address})")
    with connected(plan) as resources:
        yield engine_needs(plan, engine, resources)


def solver_maker(engine: EngineConfig, needs: EngineNeeds, scorer: Scorer | None = None) -> SolverMaker:
    """Returns the description of a solver, with the environment that commands give to libraries."""
    from gambit.cluster.work import SolverMaker, fitting_options
    from gambit.models.files import locate
    from gambit.scorers.choice import scorer_to_send

    scorer = scorer or scorer_to_send(engine.scorer, locate(engine.model), engine.model)
    return SolverMaker(fitting_options(engine, needs), scorer, library_settings())


@contextmanager
def loaded_in_cluster(
    plan: ClusterPlan, engine: EngineConfig, loading: Loading
) -> Iterator[tuple[SpreadSolver, EnginePool[Solver]]]:
    """Yields a solver that spreads each search over all engines, and these engines."""
    from gambit.cluster.work import spread_over

    with needs_in_cluster(plan, engine, loading) as needs:
        loading(engine.model)
        with spread_over(solver_maker(engine, needs), plan.num_engines, needs) as (solver, pool):
            pool.wait()
            yield solver, pool

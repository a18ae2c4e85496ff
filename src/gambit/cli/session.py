"""Models for commands: checked, loaded quietly here or under Ray, with warnings as lines on stderr."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TextIO

import typer

from gambit.cli.terminal import say, warn
from gambit.engines.vllm import installed
from gambit.errors import GambitWarning, UserError

if TYPE_CHECKING:
    from gambit.cluster.engines import EnginePool
    from gambit.cluster.plan import ClusterPlan, EngineNeeds
    from gambit.cluster.work import SolverMaker
    from gambit.config.options import EngineConfig
    from gambit.scorers.base import Scorer
    from gambit.solver import Solver
    from gambit.solver.spread import SpreadSolver

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Screen(Protocol):
    """A live view that can say what is loading and make room for lasting lines."""

    def loading(self, model: str) -> None: ...

    def paused(self) -> AbstractContextManager[None]: ...


def check_model(model: str, *, is_quiet: bool = False) -> None:
    """Refuse a model that cannot be had; one that the hub alone may have is announced, since that may take a while."""
    from gambit.models import files
    from gambit.models.hub import address

    if files.must_be_fetched(model) and not is_quiet:
        say(f"{model} is not on this machine: fetching it from {address()}")
    prepare_libraries()
    with only_our_warnings(is_quiet=is_quiet):
        files.check_model(model)


def loaded(engine: EngineConfig, screen: Screen) -> Solver:
    """The model on its engine; libraries keep their progress bars to themselves."""
    from gambit.solver import Solver

    screen.loading(engine.model)
    prepare_libraries()
    with _nothing_collected():
        return Solver(**engine.model_dump(exclude_unset=True))


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """What is imported and loaded stays for good: looking it over for garbage, now or at the end, is wasted time."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def prepare_libraries() -> None:
    """Before a model is loaded."""
    for name, value in library_settings().items():
        os.environ.setdefault(name, value)


def library_settings() -> dict[str, str]:
    """Environment variables: libraries keep quiet, and vLLM has a process of its own on a GPU, as by itself.

    A search's own work is then off the path of its steps. Only for commands: a script without a main guard cannot
    start processes, so that `Solver` alone does not.
    """
    found = installed()
    is_on_gpu = found is not None and found[1] == "cuda"
    return {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if is_on_gpu else dict(QUIET)


@contextmanager
def sole_writer(folder: Path, *, is_quiet: bool = False) -> Iterator[None]:
    """Entered before a model is loaded: a folder that another run is writing to is refused."""
    from gambit.storage.folders import locked

    with only_our_warnings(is_quiet=is_quiet), locked(folder):
        yield


@contextmanager
def only_our_warnings(screen: Screen | None = None, *, is_quiet: bool = False) -> Iterator[None]:
    """Gambit's warnings become one line each on stderr; those of libraries, meant for programmers, are dropped."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, GambitWarning) and not is_quiet:
            with screen.paused() if screen is not None else nullcontext():
                warn(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", GambitWarning)
        warnings.showwarning = show
        yield


# -- engines under Ray -----------------------------------------------------------------------------------------

PANEL = "Many engines"
MOST_ENGINES = 4096

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        rich_help_panel=PANEL,
        help="Run engines under Ray: in a cluster (its address, or auto), else on this machine alone.",
    ),
]
Engines = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_ENGINES, metavar="INT", rich_help_panel=PANEL, help="Engines under Ray (default: 1)."),
]
GpusPerEngine = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=64,
        metavar="NUMBER",
        rich_help_panel=PANEL,
        help="Part of a GPU, or GPUs (default: as many as one engine computes on, where there are any).",
    ),
]
Spread = Annotated[
    bool,
    typer.Option(
        "--spread",
        rich_help_panel=PANEL,
        help="Run every search on all engines at once, some of its islands on each.",
    ),
]
CpusPerEngine = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1024,
        metavar="NUMBER",
        rich_help_panel=PANEL,
        help="Cores and threads (default: an even part of this machine's, in a cluster 1).",
    ),
]


def cluster_plan(
    ray: str | None,
    engines: int | None,
    gpus: float | None,
    cpus: float | None,
    engine: EngineConfig,
    *,
    spread: bool = False,
) -> ClusterPlan | None:
    """None for a run without Ray; what cannot be meant is refused."""
    if ray is None:
        if spread:
            raise UserError("--spread is for engines under Ray: add --ray --engines 2, or leave it out")
        given = {"--engines": engines, "--gpus-per-engine": gpus, "--cpus-per-engine": cpus}
        for flag, value in given.items():
            if value is not None:
                raise UserError(f"{flag} {value:g} is for engines under Ray: add --ray, or leave it out")
        return None
    from gambit.cluster.plan import ADDRESS_VARIABLE, OWN, ClusterPlan, check_plan

    plan = ClusterPlan(ray or os.environ.get(ADDRESS_VARIABLE) or OWN, engines or 1, gpus, cpus, spread)
    if spread and plan.num_engines == 1:
        raise UserError("--spread needs more than one engine: add --engines 2, or leave it out")
    check_plan(plan, engine)
    return plan


def flags_of(plan: ClusterPlan | None) -> str:
    """As they would be typed again, with a space before each."""
    if plan is None:
        return ""
    from gambit.cluster.plan import OWN

    numbers = {"engines": plan.num_engines, "gpus-per-engine": plan.gpus, "cpus-per-engine": plan.cpus}
    given = "".join(f" --{name} {value:g}" for name, value in numbers.items() if value is not None)
    return f" --ray{'' if plan.address == OWN else f' {plan.address}'}{given}{' --spread' if plan.is_spread else ''}"


def check_alone(plan: ClusterPlan | None, concurrency: int) -> None:
    """A search on all engines has nothing beside it."""
    if plan is not None and plan.is_spread and concurrency > 1:
        raise UserError(f"--concurrency {concurrency} and --spread disagree: a search on all engines runs alone, leave "
                        "one of them out")  # fmt: skip


@contextmanager
def needs_in_cluster(plan: ClusterPlan, engine: EngineConfig, screen: Screen | None) -> Iterator[EngineNeeds]:
    """Connects to Ray, or starts it."""
    from gambit.cluster.plan import connected, engine_needs

    if screen is not None:
        screen.loading(f"Ray ({plan.address})")
    with connected(plan) as resources:
        yield engine_needs(plan, engine, resources)


def solver_maker(engine: EngineConfig, needs: EngineNeeds, scorer: Scorer | None = None) -> SolverMaker:
    """With the environment that commands give to libraries."""
    from gambit.cluster.work import SolverMaker, engine_options

    return SolverMaker(engine_options(engine, needs), scorer, library_settings())


@contextmanager
def loaded_in_cluster(
    plan: ClusterPlan, engine: EngineConfig, screen: Screen
) -> Iterator[tuple[SpreadSolver, EnginePool[Solver]]]:
    """Engines of which each runs a part of every search, as one solver, and these engines."""
    from gambit.cluster.spreading import spread_engines
    from gambit.solver.spread import SpreadSolver

    with needs_in_cluster(plan, engine, screen) as needs:
        screen.loading(engine.model)
        make = solver_maker(engine, needs)
        with (
            spread_engines(make, plan.num_engines, needs) as (engines, pool),
            SpreadSolver(engines) as solver,
        ):
            pool.wait()
            yield solver, pool

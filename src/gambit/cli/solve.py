"""`gambit solve`: checks everything that can be checked without the model, then loads it and searches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from gambit.cli.options import SEARCH_PANELS, SPREAD_PANEL, given, picked, with_options
from gambit.cli.results import Shown, Style, Tally
from gambit.cli.session import (
    check_model,
    loaded,
    loaded_in_cluster,
    needs_in_cluster,
    only_our_warnings,
    sole_writer,
    solver_maker,
)
from gambit.cli.terminal import FAILURE, is_watched, put, say, stderr, warn
from gambit.cluster.plan import ClusterConfig
from gambit.config.options import EngineConfig, SearchConfig, build, overlaid, read_config_file
from gambit.errors import StorageError, UserError
from gambit.storage.files import append_synced

if TYPE_CHECKING:
    from gambit.cli.progress import LiveScreen, SearchScreen
    from gambit.cli.terminal import StopSignal
    from gambit.cluster.plan import ClusterPlan
    from gambit.events import Event
    from gambit.results.result import SearchResult
    from gambit.solver import Solver
    from gambit.solver.spread import SpreadSolver
    from gambit.storage.problems import Problems

Grade = Callable[[str | None, str], bool]
FILE_HELP = "A .jsonl, .json, .csv or .tsv of problems, or a text file with one."
MAP_HELP = "Names of the file's columns, as in question=prompt,answer=target."


@dataclass(frozen=True, slots=True)
class SolveJob:
    """One call of `gambit solve`, checked as far as it can be without the model."""

    problems: Problems
    search: SearchConfig
    engine: EngineConfig
    folder: Path
    concurrency: int
    style: Style
    output: Path | None
    cluster: ClusterPlan | None = None


@with_options(SPREAD_PANEL, *SEARCH_PANELS)
def solve(
    problem: Annotated[
        str | None, typer.Argument(help="The problem; - or nothing reads it from stdin.", metavar="PROBLEM")
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    columns: Annotated[str | None, typer.Option("--map", metavar="KEY=VALUE", help=MAP_HELP)] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML of options; flags override it.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For logs and results (default: a new one in runs/).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line of JSON per problem to this new file too.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, metavar="INT", help="Problems of a file searched at a time.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the answer alone: no live view, table or warnings.")
    ] = False,
    **flags: str | bool | None,
) -> int:
    """Search for the answer to a problem, or to each of a file.

    Exit codes: 0 done, 1 failure, 2 your input, 3 not one problem got an answer, 130 interrupted.
    """

    from gambit.storage.problems import columns_of, new_run_folder, read_problems

    search, engine = read_configs(config, flags)
    cluster = picked(ClusterConfig, flags).plan(engine)
    if cluster is not None:
        cluster.check_alone(concurrency)
    problems = read_problems(problem, file, sys.stdin, columns_of(columns))
    folder = out or new_run_folder()
    style = Style(as_json, quiet, problems.is_many)
    job = SolveJob(problems, search, engine, folder, concurrency, style, output, cluster)
    _check(job)
    with sole_writer(folder, is_quiet=quiet):
        _check_free(job)
        return _run(job) if cluster is None or cluster.is_spread else _run_on_ray(job, cluster)


def read_configs(file: Path | None, flags: Mapping[str, str | bool | None]) -> tuple[SearchConfig, EngineConfig]:
    """Flags over the YAML file; what neither names is left to the model's preset."""
    from gambit.search.choice import check_search

    values = overlaid(read_config_file(file) if file else {}, given(flags))
    search = build(SearchConfig, {key: value for key, value in values.items() if key in SearchConfig.model_fields})
    engine = build(EngineConfig, {key: value for key, value in values.items() if key in EngineConfig.model_fields})
    check_search(search)  # an unknown policy or option is refused before the model is loaded
    return search, engine


def _check(job: SolveJob) -> None:
    """Whatever would only be found after the model is loaded."""
    from gambit.engines.base import check_engine
    from gambit.storage.run_folder import check_new_file, check_writable

    if job.cluster is not None and not job.cluster.is_spread and not job.problems.is_many:
        raise UserError("--ray hands the problems of a file to engines: give --file, or --spread to search one problem "
                        "on all of them, or leave --ray out")  # fmt: skip
    check_engine(job.engine)
    check_writable(job.folder)
    if job.output is not None:
        check_new_file(job.output)
    _check_questions(job.problems, job.engine.model)
    check_model(job.engine.model, is_quiet=job.style.is_quiet)


def _check_free(job: SolveJob) -> None:
    from gambit.storage.run_folder import check_free

    problems = job.problems.problems if job.problems.is_many else ()
    for folder in (job.folder, *(job.folder / problem.id for problem in problems)):
        check_free(folder)


def _check_questions(problems: Problems, model: str) -> None:
    """A model that answers only some questions says so of every one."""
    from gambit.models.files import named_model

    named = named_model(model)
    if named is None:
        return
    for problem in problems.problems:
        try:
            named.check_question(problem.last_message)
        except UserError as error:
            raise UserError(f"problem {problem.id}: {error}" if problems.is_many else str(error)) from error


def _run(job: SolveJob) -> int:
    """Load, search, show."""
    num_problems = len(job.problems.problems)
    with open_session(
        job.engine, job.folder, num_problems, is_quiet=job.style.is_quiet, cluster=job.cluster
    ) as session:
        code = _show_all(job, _results(job, session), session.solver.grade, session.display)
    return session.stop.exit_code or code


def _run_on_ray(job: SolveJob, cluster: ClusterPlan) -> int:
    """The same with engines elsewhere, whose files are written here."""
    from gambit.answers import Grader
    from gambit.cli.progress import PoolScreen
    from gambit.cli.terminal import StopSignal
    from gambit.cluster.engines import EnginePool
    from gambit.cluster.work import ClusterSolver

    problems = job.problems.problems
    with (
        PoolScreen(stderr(), is_live=is_watched() and not job.style.is_quiet, total=len(problems)) as screen,
        only_our_warnings(screen, is_quiet=job.style.is_quiet),
        needs_in_cluster(cluster, job.engine, screen) as needs,
        EnginePool(
            solver_maker(job.engine, needs), cluster.num_engines, needs, jobs_per_engine=job.concurrency
        ) as pool,
        StopSignal(screen.stopping) as stop,
        closing(Grader()) as grader,
    ):
        screen.watch(pool)
        solver = ClusterSolver(pool, job.concurrency)
        results = solver.solve_many(problems, job.search, out_dir=job.folder, should_stop=stop)
        code = _show_all(job, screen.counted(results), grader.grade, screen)
    return stop.exit_code or (FAILURE if solver.num_given_up else code)


@dataclass(frozen=True, slots=True)
class SolveSession:
    """A loaded model with what surrounds it on a terminal."""

    solver: Solver | SpreadSolver
    display: SearchScreen
    stop: StopSignal

    def listener(self, problem_id: str) -> Callable[[Event], None] | None:
        """Feeds the live view, where there is one."""
        return partial(self.display.on_event, problem_id) if self.display.is_live else None


@contextmanager
def open_session(
    engine: EngineConfig,
    folder: Path,
    num_problems: int = 1,
    *,
    is_quiet: bool = False,
    cluster: ClusterPlan | None = None,
) -> Iterator[SolveSession]:
    from gambit.cli.progress import SearchScreen
    from gambit.cli.terminal import StopSignal

    with (
        SearchScreen(stderr(), is_live=is_watched() and not is_quiet, num_problems=num_problems) as display,
        only_our_warnings(display, is_quiet=is_quiet),
        _loaded_solver(engine, cluster, display) as solver,
        StopSignal(display.stopping) as stop,
        _log_hint(folder),
    ):
        yield SolveSession(solver, display, stop)


@contextmanager
def _loaded_solver(
    engine: EngineConfig, cluster: ClusterPlan | None, display: SearchScreen
) -> Iterator[Solver | SpreadSolver]:
    if cluster is None:
        with loaded(engine, display) as solver:
            yield solver
    else:
        with loaded_in_cluster(cluster, engine, display) as (spread, _):
            yield spread


@contextmanager
def _log_hint(folder: Path) -> Iterator[None]:
    """A run that fails says where its votes so far are."""
    try:
        yield
    except Exception as error:
        if any(folder.glob("**/events.jsonl")) and not isinstance(error, UserError):
            error.add_note(f"what was found until then is logged: gambit replay {folder}")
        raise


def _results(job: SolveJob, session: SolveSession) -> Iterator[SearchResult]:
    """As they come."""
    solver, stop = session.solver, session.stop
    if job.problems.is_many:
        on_event = session.display.on_event if session.display.is_live else None
        return solver.solve_many(
            job.problems.problems, job.search, concurrency=job.concurrency, out_dir=job.folder, on_event=on_event,
            should_stop=stop,
        )  # fmt: skip
    [problem] = job.problems.problems
    listener = session.listener(problem.id)
    return iter([solver.solve(problem, job.search, out_dir=job.folder, should_stop=stop, on_event=listener)])


def _show_all(job: SolveJob, results: Iterable[SearchResult], grade: Grade, screen: LiveScreen) -> int:
    """Print each result as it comes; the exit code is that of the worst."""
    tally, expected = Tally(), job.problems.expected
    with ResultFile(job.output) as output:
        for result in results:
            gold = expected.get(result.problem_id)
            is_right = None if gold is None else grade(result.answer, gold)
            shown = Shown(result, gold, is_right)
            output.add(shown.to_json())
            with screen.paused():
                job.style.show(shown)
            tally.add(shown)
    if output.failure is not None:
        tally.codes.append(FAILURE)
    if missing := len(job.problems.problems) - len(tally.codes):
        say(f"stopped early: {missing} problems were not begun")
    if expected and not job.style.as_json and not job.style.is_quiet:
        put(f"{tally.num_right} of {len(expected)} right")
    return tally.exit_code


class ResultFile:
    """The file of `--output`, a line for each result as it comes; one that cannot be written any more is said once."""

    def __init__(self, path: Path | None) -> None:
        self.failure: str | None = None
        self._path = path
        self._file: BinaryIO | None = None

    def add(self, line: str) -> None:
        if self._file is None:
            return
        try:
            append_synced(self._file, line)
        except StorageError as error:
            self.failure = f"{error}: results from this one on are not in it"
            warn(self.failure)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ResultFile:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("xb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

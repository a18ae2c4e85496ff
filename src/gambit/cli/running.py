"""The work of `gambit solve`: loads the model, searches, prints results as they come."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from gambit.answers import Grader
from gambit.bench.folder import RUN_FILE
from gambit.cli.forecast import EFFORTS, Forecast
from gambit.cli.options import picked, read_configs
from gambit.cli.progress import LiveScreen, PoolScreen, SearchScreen
from gambit.cli.results import Shown, Style, code_of, worst
from gambit.cli.session import (
    check_model,
    loaded,
    loaded_in_cluster,
    needs_in_cluster,
    only_our_warnings,
    sole_writer,
    solver_maker,
)
from gambit.cli.solve import SolveOptions
from gambit.cli.terminal import FAILURE, NO_ANSWER, OK, StopSignal, is_watched, put, say, stderr, warn
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan
from gambit.cluster.work import ClusterSolver
from gambit.config.effort import Effort
from gambit.config.options import EngineConfig, SearchConfig
from gambit.engines.base import check_engine
from gambit.errors import StorageError, UserError
from gambit.events import Event
from gambit.models.files import named_model, usual_effort
from gambit.results.result import SearchResult
from gambit.solver import Solver
from gambit.solver.spread import SpreadSolver
from gambit.storage.files import append_synced
from gambit.storage.problems import Problems, columns_of, new_run_folder, read_problems
from gambit.storage.run_folder import check_free, check_new_file, check_writable
from gambit.types import count_of

Grade = Callable[[str | None, str], bool]


@dataclass(frozen=True, slots=True)
class SolveJob:
    """One call of `gambit solve`."""

    problems: Problems
    search: SearchConfig
    engine: EngineConfig
    folder: Path
    concurrency: int
    style: Style
    output: Path | None
    cluster: ClusterPlan | None


def run(problem: str | None, options: SolveOptions, flags: Mapping[str, str | bool | None]) -> int:
    """Searches and prints; whatever can be checked is checked before the model is loaded."""
    search, engine = read_configs(options.config, flags)
    cluster = picked(ClusterPlan, flags).checked(engine)
    problems = read_problems(problem, options.file, sys.stdin, columns_of(options.columns))
    style = Style(options.as_json, options.quiet, problems.is_many, options.trace, options.verbose)
    folder = options.out or new_run_folder()
    job = SolveJob(problems, search, engine, folder, options.concurrency, style, options.output, cluster)
    _check(job)
    search = search.with_usual(usual_effort(engine.model))
    style = dataclasses.replace(style, effort=EFFORTS[search.effort] if search.effort is Effort.MEDIUM else "")
    job = dataclasses.replace(job, search=search, style=style)
    with sole_writer(folder, is_quiet=style.is_quiet):
        for each in (folder, *(folder / problem.id for problem in problems.problems if problems.is_many)):
            check_free(each)
        if cluster is not None and not cluster.spread:
            return _run_on_ray(job, cluster)
        return _run(job)


def _check(job: SolveJob) -> None:
    """Raises for mistakes that would otherwise be found when the model is loaded."""
    if job.cluster is not None:
        job.cluster.check_alone(job.concurrency)
        if not job.cluster.spread and not job.problems.is_many:
            raise UserError("--ray hands the problems of a file to engines: give --file, or --spread to search one "
                            "problem on all of them, or leave --ray out")  # fmt: skip
    check_engine(job.engine)
    check_writable(job.folder)
    if (job.folder / RUN_FILE).exists():
        raise UserError(f"{job.folder} holds a bench run: choose another --out")
    if job.output is not None:
        check_new_file(job.output)
    _check_questions(job.problems, job.engine.model)
    check_model(job.engine.model, is_quiet=job.style.is_quiet, is_offline=job.engine.offline)


def _check_questions(problems: Problems, model: str) -> None:
    """Raises for the first question that a bundled model was not made for."""
    named = named_model(model)
    if named is None:
        return
    for problem in problems.problems:
        try:
            named.check_question(problem.last_message)
        except UserError as error:
            place = f"{problems.places[problem.id]}: " if problem.id in problems.places else ""
            raise UserError(f"{place}{error} Name one with --model.") from error


def _run(job: SolveJob) -> int:
    """Searches on an engine of this process, or spread over several."""
    num_problems = len(job.problems.problems)
    with open_session(
        job.engine, job.folder, num_problems, is_quiet=job.style.is_quiet, cluster=job.cluster
    ) as session:
        code = _show_all(job, _results(job, session), session.solver.grade, session.display)
    return session.stop.exit_code or code


def _run_on_ray(job: SolveJob, cluster: ClusterPlan) -> int:
    """Hands the problems of a file to engines under Ray; logs and results are written here."""
    problems = job.problems.problems
    with (
        PoolScreen(stderr(), is_live=is_watched() and not job.style.is_quiet, total=len(problems)) as screen,
        only_our_warnings(screen.paused, is_quiet=job.style.is_quiet),
        needs_in_cluster(cluster, job.engine, screen.loading) as needs,
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
    """A loaded model, its live display and the signals that stop it."""

    solver: Solver | SpreadSolver
    display: SearchScreen
    stop: StopSignal

    forecast: Forecast | None = None  # None: nothing but answers is printed

    def on_event(self, problem_id: str, event: Event) -> None:
        """Feeds the live display, where there is one, and the forecast."""
        if self.display.is_live:
            self.display.on_event(problem_id, event)
        if self.forecast is not None:
            self.forecast.on_event(problem_id, event)


@contextmanager
def open_session(
    engine: EngineConfig,
    folder: Path,
    num_problems: int = 1,
    *,
    is_quiet: bool = False,
    cluster: ClusterPlan | None = None,
) -> Iterator[SolveSession]:
    """Loads a model, with a live display on a terminal."""
    with (
        SearchScreen(stderr(), is_live=is_watched() and not is_quiet, num_problems=num_problems) as display,
        only_our_warnings(display.paused, is_quiet=is_quiet),
        _loaded_solver(engine, cluster, display) as solver,
        StopSignal(display.stopping) as stop,
        _log_hint(folder),
    ):

        def say_above(line: str) -> None:
            with display.paused():
                say(line)

        yield SolveSession(solver, display, stop, None if is_quiet else Forecast(say_above))


@contextmanager
def _loaded_solver(
    engine: EngineConfig, cluster: ClusterPlan | None, display: SearchScreen
) -> Iterator[Solver | SpreadSolver]:
    if cluster is None:
        with loaded(engine, display.loading) as solver:
            yield solver
    else:
        with loaded_in_cluster(cluster, engine, display.loading) as (spread, _):
            yield spread


@contextmanager
def _log_hint(folder: Path) -> Iterator[None]:
    """Adds to an error where the votes so far are logged."""
    try:
        yield
    except Exception as error:
        if any(folder.glob("**/events.jsonl")) and not isinstance(error, UserError):
            error.add_note(f"what was found until then is logged: gambit replay {folder}")
        raise


def _results(job: SolveJob, session: SolveSession) -> Iterator[SearchResult]:
    """Yields results as searches finish."""
    solver, stop = session.solver, session.stop
    if job.problems.is_many:
        return solver.solve_many(
            job.problems.problems, job.search, concurrency=job.concurrency, out_dir=job.folder,
            on_event=session.on_event, should_stop=stop,
        )  # fmt: skip
    [problem] = job.problems.problems
    listener = partial(session.on_event, problem.id)
    return iter([solver.solve(problem, job.search, out_dir=job.folder, should_stop=stop, on_event=listener)])


def _show_all(job: SolveJob, results: Iterable[SearchResult], grade: Grade, screen: LiveScreen) -> int:
    """Prints each result as it comes; returns the exit code of the worst, or NO_ANSWER if no problem has an answer."""
    expected = job.problems.expected
    codes: list[int] = []
    num_shown = num_right = num_answered = 0
    with ExitStack() as stack:
        output = None if job.output is None else stack.enter_context(_new_file(job.output))
        for result in results:
            gold = expected.get(result.problem_id)
            shown = Shown(result, gold, None if gold is None else grade(result.answer, gold))
            if output is not None and not _was_appended(output, shown.to_json()):
                output = None
                codes.append(FAILURE)
            with screen.paused():
                job.style.show(shown)
            codes.append(code_of(result))
            num_right += bool(shown.is_right)
            num_answered += result.answer is not None
            num_shown += 1
    if missing := len(job.problems.problems) - num_shown:
        say(f"stopped early: {count_of(missing, 'problem')} not begun")
    if expected and not job.style.as_json and not job.style.is_quiet:
        put(f"{num_right} of {len(expected)} right")
    return worst([*codes, OK if num_answered or not codes else NO_ANSWER])


def _new_file(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb")


def _was_appended(file: BinaryIO, line: str) -> bool:
    """Appends a result to the file of `--output`; warns and returns False if that fails, which ends the file."""
    try:
        append_synced(file, line)
    except StorageError as error:
        warn(f"{error}: results from this one on are not in it")
        return False
    return True

"""The command line: parses, prints, exits; what it does lives in the modules it calls.

Exit codes: 0 done (also when no trace gave an answer: the report says so), 2 the user's mistake, 1 a failure (also an
event log that became incomplete), 130 after Ctrl-C and 143 after SIGTERM, with the best vote so far printed.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperGroup

from gambit.cli import bench as cli_bench
from gambit.cli import prefix_value as cli_prefix_value
from gambit.cli import scorer as cli_scorer
from gambit.cli.policies import policies
from gambit.cli.session import loaded, only_our_warnings
from gambit.cli.terminal import FAILURE, OK, USER_MISTAKE, exit_with, put, say, stderr
from gambit.cli.view import view
from gambit.core.errors import UserError

if TYPE_CHECKING:
    from gambit.cli.display import Display
    from gambit.cli.signals import StopSignal
    from gambit.config.options import EngineConfig, SearchConfig
    from gambit.core.events import Event
    from gambit.results.record import SearchResult
    from gambit.solver import Solver
    from gambit.storage.problems import Problems


class _Group(TyperGroup):
    """Gives a command its forty options only when it is called: `gambit --help` must not wait for pydantic."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def] # typer's context class moves between releases
        name, command, rest = super().resolve_command(ctx, args)
        return name, LAZY[name]() if name is not None and name in LAZY else command, rest


app = typer.Typer(
    cls=_Group,
    name="gambit",
    help="Thought-level beam search for reasoning LLMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_scorer.app, name="scorer")


def main() -> None:
    """The entry point of the `gambit` command."""
    app(prog_name="gambit")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from gambit import __version__

        typer.echo(f"gambit {__version__}")
        raise typer.Exit(OK)


@app.callback()
def _root(
    is_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


# -- solve -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `gambit solve`, checked as far as it can be without the model."""

    problems: Problems
    search: SearchConfig
    engine: EngineConfig
    folder: Path
    concurrency: int
    as_json: bool


def solve(
    problem: Annotated[
        str | None, typer.Argument(help="The problem; - or nothing reads it from stdin.", metavar="PROBLEM")
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="A .jsonl of problems, or a text file with one.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of options; flags override it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for log and result (default: a new one in runs/).")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Problems of a .jsonl searched at a time.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    **flags: str | bool | None,
) -> None:
    """Search for the answer to a problem."""

    def body() -> int:
        from gambit.storage.problems import new_run_folder, read_problems
        from gambit.storage.run_folder import check_free

        search, engine = _configs(config, flags)
        problems = read_problems(problem, file, sys.stdin)
        folder = out or new_run_folder()
        check_free(folder)
        return _run(_Job(problems, search, engine, folder, concurrency, as_json))

    exit_with(body)


@app.command(name="solve", help=solve.__doc__)
def _solve_entry() -> NoReturn:
    raise AssertionError("listed by `gambit --help` only; _Group puts the full command in its place")


def _solve_command() -> object:
    from gambit.cli.options import with_config_options

    full = typer.Typer(add_completion=False)
    full.command(name="solve")(with_config_options(solve))
    return typer.main.get_command(full)


LAZY: Mapping[str, Callable[[], object]] = {
    "solve": _solve_command,
    "bench": cli_bench.bench_command,
    "prefix-value": cli_prefix_value.prefix_value_command,
}


def _configs(file: Path | None, flags: Mapping[str, str | bool | None]) -> tuple[SearchConfig, EngineConfig]:
    """Flags over the YAML file; what neither names is left to the model's preset."""
    from gambit.config.options import EngineConfig, SearchConfig, build, overlaid, read_config_file
    from gambit.search.choice import check_search

    given = {name: value for name, value in flags.items() if value is not None}
    values = overlaid(read_config_file(file) if file else {}, given)
    search = build(SearchConfig, {key: value for key, value in values.items() if key in SearchConfig.model_fields})
    engine = build(EngineConfig, {key: value for key, value in values.items() if key in EngineConfig.model_fields})
    check_search(search)  # an unknown policy or option is refused before the model is loaded
    return search, engine


def _run(job: _Job) -> int:
    """Load, search, show."""
    with _session(job.engine, job.folder, len(job.problems.problems)) as session:
        code = _show_all(_results(job, session), job, session)
    return session.stop.exit_code or code


@dataclass(frozen=True, slots=True)
class _Session:
    """A loaded model with what surrounds it on a terminal."""

    solver: Solver
    display: Display
    stop: StopSignal

    def listener(self, problem_id: str) -> Callable[[Event], None] | None:
        """Feeds the live view, where there is one."""
        return partial(self.display.on_event, problem_id) if self.display.is_live else None


@contextmanager
def _session(engine: EngineConfig, folder: Path, num_problems: int = 1) -> Iterator[_Session]:
    from gambit.cli.display import Display
    from gambit.cli.signals import StopSignal

    console = stderr()
    is_live = console.is_terminal and sys.stdout.isatty()
    with (
        Display(console, is_live=is_live, num_problems=num_problems) as display,
        only_our_warnings(display),
        loaded(engine, display) as solver,
        StopSignal(display.stopping) as stop,
        _log_hint(folder),
    ):
        yield _Session(solver, display, stop)


def _results(job: _Job, session: _Session) -> Iterator[SearchResult]:
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


@contextmanager
def _log_hint(folder: Path) -> Iterator[None]:
    """A run that fails says where its votes so far are."""
    try:
        yield
    except Exception as error:
        if any(folder.glob("**/events.jsonl")) and not isinstance(error, UserError):
            error.add_note(f"what was found until then is logged: gambit replay {folder}")
        raise


# -- results ---------------------------------------------------------------------------------------------------


def _show_all(results: Iterable[SearchResult], job: _Job, session: _Session) -> int:
    """Print each result as it comes; the exit code is that of the worst."""
    worst, num_right, num_shown, expected = OK, 0, 0, job.problems.expected
    for result in results:
        gold = expected.get(result.problem_id)
        is_right = None if gold is None else session.solver.grade(result.answer, gold)
        with session.display.paused():
            _show(result, job.as_json, has_title=job.problems.is_many, gold=gold, is_right=is_right)
        num_right += bool(is_right)
        num_shown += 1
        worst = _worse(worst, _code_of(result))
    if num_shown < len(job.problems.problems):
        say(f"stopped early: {len(job.problems.problems) - num_shown} problems were not begun")
    if expected and not job.as_json:
        put(f"{num_right} of {len(expected)} right")
    return worst


def _code_of(result: SearchResult) -> int:
    """A refused problem is the user's mistake; a log with holes is a failure even when the answer is there."""
    if result.log_error is not None:
        return FAILURE
    return USER_MISTAKE if result.error is not None else OK


def _worse(first: int, second: int) -> int:
    return next(code for code in (FAILURE, USER_MISTAKE, OK) if code in (first, second))


def _show(
    result: SearchResult, as_json: bool, *, has_title: bool = False, gold: str | None = None,
    is_right: bool | None = None,
) -> None:  # fmt: skip
    if as_json:
        graded = {} if gold is None else {"expected": gold, "is_right": is_right}
        typer.echo(json.dumps({**result.to_json(), **graded}, ensure_ascii=False))
        return
    from gambit.cli.display import report

    verdict = None if gold is None else f"{gold} ({'right' if is_right else 'wrong'})"
    put(report(result, title=result.problem_id if has_title else None, verdict=verdict))
    if has_title:
        put("")


# -- demo ------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    seed: Annotated[int | None, typer.Option(min=0, help="Which puzzle (default: any).", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the logs (default: a new one in runs/).")] = None,
) -> None:
    """Solve a puzzle that the bundled model has never seen, and see what plain voting makes of it."""

    def body() -> int:
        from gambit.cli.demo import MEASURED, comparison, unseen_problem
        from gambit.config.options import EngineConfig
        from gambit.storage.problems import new_run_folder
        from gambit.storage.run_folder import check_free

        folder = out or new_run_folder()
        check_free(folder)
        number = random.randrange(1000) if seed is None else seed
        problem, gold = unseen_problem(number)
        put(f"puzzle {number}, modulo 97: {problem.question}\n")
        with _session(EngineConfig(engine="local"), folder) as session:  # starts in seconds everywhere
            listener = session.listener(problem.id)
            verdicts = []
            for result in comparison(session.solver, problem, number, folder, listener, session.stop):
                is_right = result.answer == gold
                verdicts.append(f"{result.policy} {'right' if is_right else 'wrong'}")
                with session.display.paused():
                    _show(result, as_json=False, gold=gold, is_right=is_right)
                    put("")
        put(f"with the same tokens: {', '.join(verdicts)}. Over 300 unseen puzzles: {MEASURED}.")
        return session.stop.exit_code

    exit_with(body)


# -- the other commands ----------------------------------------------------------------------------------------


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="The folder that `gambit solve` wrote.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
) -> None:
    """Rebuild a run's result from its event log alone."""

    def body() -> int:
        from gambit.results.record import replay as replay_log
        from gambit.text.answers import Grader

        logs = sorted([*run_dir.glob("events.jsonl"), *run_dir.glob("*/events.jsonl")])
        if not logs:
            raise UserError(f"no events.jsonl in {run_dir}: give the folder of a run")
        with Grader() as grader:
            for log in logs:
                _show(replay_log(log, grader.equivalent), as_json, has_title=len(logs) > 1)
        return OK

    exit_with(body)


app.command()(policies)
app.command()(view)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what engines, devices and versions are here and what is missing."""

    def body() -> int:
        from gambit.cli.display import findings_table
        from gambit.cli.doctor import can_run, examine

        findings = examine()
        is_fit = can_run(findings)
        if as_json:
            rows = [dataclasses.asdict(finding) for finding in findings]
            typer.echo(json.dumps({"can_run": is_fit, "findings": rows}))
        else:
            put(findings_table(findings))
        return OK if is_fit else FAILURE

    exit_with(body)


cli_bench.register(app)
cli_prefix_value.register(app)

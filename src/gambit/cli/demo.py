"""`gambit demo`: one unseen puzzle, searched by Gambit and then by self-consistency with as many tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.commands import made_command
from gambit.cli.results import Shown, Style
from gambit.cli.solve import open_session
from gambit.cli.terminal import exit_with, put
from gambit.config.options import EngineConfig, SearchConfig
from gambit.core.events import Event
from gambit.core.problem import Problem
from gambit.pawn import Level, Split, generate
from gambit.results.record import SearchResult
from gambit.storage.problems import new_run_folder
from gambit.storage.run_folder import check_free, check_writable

if TYPE_CHECKING:
    from gambit.solver import Solver

MOST_PUZZLES = 10**9
# benchmarks/results/pawn_search.json, which a test holds this line to
MEASURED = "gambit 91.0 %, sc 59.3 %, with 7 % fewer tokens"


def demo(
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_PUZZLES, metavar="INT", help="Which puzzle (default: any).", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For the logs (default: a new one in runs/).")
    ] = None,
) -> None:
    """Solve a puzzle that the bundled model has not seen, and see what plain voting makes of it."""

    def body() -> int:
        folder = out or new_run_folder()
        check_free(folder)
        check_writable(folder)
        return _run(random.randrange(1000) if seed is None else seed, folder)

    exit_with(body)


def command() -> object:
    return made_command(demo, "demo")


def _run(number: int, folder: Path) -> int:
    problem, gold = unseen_problem(number)
    put(f"puzzle {number}, modulo 97: {problem.question}\n")
    verdicts = []
    with open_session(EngineConfig(engine="local"), folder) as session:  # starts in seconds everywhere
        listener = session.listener(problem.id)
        for result in comparison(session.solver, problem, number, folder, listener, session.stop):
            is_right = result.answer == gold
            verdicts.append(f"{result.policy} {'right' if is_right else 'wrong'}")
            with session.display.paused():
                Style().show(Shown(result, gold, is_right))
                put("")
    put(f"with the same tokens: {', '.join(verdicts)}. Over 300 unseen puzzles: {MEASURED}.")
    return session.stop.exit_code


def unseen_problem(seed: int) -> tuple[Problem, str]:
    """A puzzle of the test split and its answer."""
    puzzle = next(generate(Split.TEST, 1000 + seed, Level.HARD))
    return Problem(puzzle.text, id="demo"), str(puzzle.answer)


def comparison(
    solver: Solver,
    problem: Problem,
    seed: int,
    folder: Path,
    on_event: Callable[[Event], None] | None,
    should_stop: Callable[[], bool],
) -> Iterator[SearchResult]:
    """Gambit's result, then that of self-consistency held to the tokens Gambit took."""
    mine = solver.solve(
        problem, SearchConfig(seed=seed), out_dir=folder / "gambit", on_event=on_event, should_stop=should_stop
    )
    yield mine
    if should_stop():
        return
    plain = SearchConfig(policy="sc", seed=seed, budget_tokens=max(1, mine.tokens.generated))
    yield solver.solve(problem, plain, out_dir=folder / "sc", on_event=on_event, should_stop=should_stop)

"""The demo: one unseen puzzle, searched by Gambit and then by self-consistency with as many tokens; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gambit.config.options import SearchConfig
from gambit.core.events import Event
from gambit.core.problem import Problem
from gambit.pawn import Level, Split, generate
from gambit.results.record import SearchResult
from gambit.solver import Solver

# benchmarks/results/pawn_search.json, which a test holds this line to
MEASURED = "gambit 91.0 %, sc 59.3 %, with 7 % fewer tokens"


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

"""`gambit demo`: one unseen puzzle, searched by Gambit and by self-consistency."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from gambit.answers import Equivalent
from gambit.cli.results import Shown, Style
from gambit.cli.running import open_session
from gambit.cli.session import sole_writer
from gambit.cli.terminal import put
from gambit.config.options import EngineConfig, SearchConfig
from gambit.events import read_log
from gambit.pawn import Level, Split, generate
from gambit.results.record import SearchRecord, fold
from gambit.results.result import SearchResult
from gambit.results.vote import Ballot, VoteKind, ballots_of, count_votes
from gambit.storage.problems import new_run_folder
from gambit.storage.run_folder import LOG_FILE, check_free, check_writable
from gambit.types import Problem

MOST_PUZZLES = 10**9
POLICIES = "gambit", "sc"
# benchmarks/results/islands_noise.json, which a test holds this line to
MEASURED = "gambit 95.6 %, sc 66.7 %, with 5 % fewer tokens"


def demo(
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_PUZZLES, metavar="INT", help="Which puzzle (default: any).", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For the logs (default: a new one in runs/).")
    ] = None,
) -> int:
    """Solve a puzzle that the bundled model has not seen, and see what plain voting makes of it."""
    folder = out or new_run_folder()
    check_writable(folder)
    with sole_writer(folder):
        for each in (folder, *(folder / policy for policy in POLICIES)):
            check_free(each)
        return _run(random.randrange(1000) if seed is None else seed, folder)


def _run(number: int, folder: Path) -> int:
    """Searches by Gambit, then by self-consistency with as many traces, and compares them."""
    problem, gold = unseen_problem(number)
    put(f"puzzle {number}, modulo 97: {problem.question}\n")
    results: list[SearchResult] = []
    with open_session(EngineConfig(engine="local"), folder) as session:  # starts in seconds everywhere
        listener = session.listener(problem.id)
        for policy in POLICIES:
            if session.stop():
                break
            config = SearchConfig(policy=policy, seed=number)
            result = session.solver.solve(
                problem, config, out_dir=folder / policy, on_event=listener, should_stop=session.stop
            )
            results.append(result)
            with session.display.paused():
                Style().show(Shown(result, gold, result.answer == gold))
                put("")
        if len(results) == len(POLICIES) and results[-1].log_error is None:
            rivals_record = fold(read_log(folder / POLICIES[-1] / LOG_FILE))
            mine, rival = results
            put(fair_comparison(mine, rival, rivals_record, gold, session.solver.equivalent))
    return session.stop.exit_code


def unseen_problem(seed: int) -> tuple[Problem, str]:
    """Returns a puzzle of the test split and its answer."""
    puzzle = next(generate(Split.TEST, 1000 + seed, Level.HARD))
    return Problem(puzzle.text, id="demo"), str(puzzle.answer)


def fair_comparison(
    mine: SearchResult, rival: SearchResult, rivals_record: SearchRecord, gold: str, equivalent: Equivalent
) -> str:
    """Compares Gambit with plain voting over as many whole traces as Gambit's tokens pay for."""
    budget = mine.tokens.generated
    ballots = affordable(rivals_record, budget)
    fewer = count_votes(ballots, VoteKind.MAJORITY, equivalent)
    costs = rival.tokens.generated / max(budget, 1) - 1
    plain = rival.counts.completed
    return (
        f"gambit is {_verdict(mine.answer, gold)} with {budget:,} tokens. For as many, sc completes "
        f"{len(ballots)} of its {plain} traces and is {_verdict(fewer.answer, gold)}; with all {plain}, for "
        f"{costs:+.0%} tokens, it is {_verdict(rival.answer, gold)}.\n"
        f"Measured over 300 unseen puzzles, three seeds, all traces: {MEASURED}."
    )


def affordable(record: SearchRecord, tokens: int) -> list[Ballot]:
    """Returns the votes of the first traces that together take no more than so many tokens."""
    ballots = {ballot.trace: ballot for ballot in ballots_of(record.tree, VoteKind.MAJORITY)}
    lengths = accumulate(trace.num_tokens for trace in record.tree.traces)
    paid = [trace.id for trace, spent in zip(record.tree.traces, lengths, strict=True) if spent <= tokens]
    return [ballots[trace] for trace in paid if trace in ballots]


def _verdict(answer: str | None, gold: str) -> str:
    return "right" if answer == gold else "wrong"

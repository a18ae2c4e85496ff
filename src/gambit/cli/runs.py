"""`gambit view` and `gambit replay`: runs that are over, from their logs."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from gambit.answers import Equivalent, Grader
from gambit.cli.options import run_argument
from gambit.cli.results import Shown, Style
from gambit.cli.terminal import FAILURE, OK, put, warn
from gambit.errors import UserError
from gambit.results.record import authors_tree, replay_log
from gambit.storage.files import write_whole
from gambit.storage.problems import newest_run
from gambit.storage.run_folder import LOG_FILE, check_replaceable, check_writable, find_log, find_logs
from gambit.view import write_page
from gambit.view.race import race


def view(
    run: Annotated[Path | None, run_argument("RUN", "A run's folder or log (default: the newest in runs/).")] = None,
    other: Annotated[Path | None, run_argument("OTHER", "With --animate: a run for the same problem.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The page (default: tree.html beside the log).")
    ] = None,
    animation: Annotated[
        Path | None,
        typer.Option("--animate", metavar="FILE", help="Write an animated SVG of RUN and OTHER side by side instead."),
    ] = None,
    expected: Annotated[
        str | None, typer.Option(metavar="TEXT", help="With --animate: the right answer, to mark what is right.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Folder or hub name, where the one that the log names is not at hand."),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> int:
    """Write one HTML page that shows what a search did: its tree, its texts, its vote."""
    log = _newest_log() if run is None else find_log(run)
    if animation is not None:
        page = _animated(log, other, animation, expected)
    elif other is not None or expected is not None:
        raise UserError("OTHER and --expected are for an animation: add --animate FILE.svg, or leave them out")
    else:
        page = out or log.parent / "tree.html"
        check_writable(page.parent)
        write_page(log, page, tokenizer)
    typer.echo(page)
    if is_opened:
        typer.launch(page.resolve().as_uri())
    return OK


def _newest_log() -> Path:
    return max(find_logs(newest_run(LOG_FILE)), key=lambda log: log.stat().st_mtime)


def _animated(log: Path, other: Path | None, out: Path, expected: str | None) -> Path:
    if other is None:
        raise UserError("an animation shows two searches for one problem: give RUN and OTHER")
    check_replaceable(out, ".svg")
    with Grader() as grader:
        write_whole(out, race((log, find_log(other)), grader.equivalent, expected).encode())
    return out


def replay(
    run: Annotated[
        Path | None, run_argument("RUN", "The folder of a run or of several, or a log (default: the newest in runs/).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    is_verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all that is known.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Report whether the log is whole and its vote is that of its traces.")
    ] = False,
    form: Annotated[
        Literal["gambit-tree"] | None,
        typer.Option(
            "--as", metavar="TEXT", help="gambit-tree: print trees as JSON, as the authors' public code does."
        ),
    ] = None,
) -> int:
    """Rebuild a run's result from its event log alone."""
    logs, code = find_logs(newest_run(LOG_FILE) if run is None else run), OK
    if form is not None:
        for log in logs:
            typer.echo(json.dumps(authors_tree(log)))
        return OK
    style = Style(as_json, has_titles=len(logs) > 1, is_verbose=is_verbose)
    with Grader() as grader:
        for log in logs:
            if verify:
                code = max(code, _verified(log, grader.equivalent))
                continue
            replayed = replay_log(log, grader.equivalent)
            style.show(Shown(replayed.result))
            if replayed.finding is not None:
                warn(f"{log}: {replayed.finding}")
    return code


def _verified(log: Path, equivalent: Equivalent) -> int:
    try:
        replayed = replay_log(log, equivalent)
    except UserError as error:
        put(f"{log}: not verified: {error}")
        return FAILURE
    put(f"{log}: {replayed.verdict}")
    return OK if replayed.finding is None else FAILURE

"""`gambit view` and `gambit replay`: runs that are over, from their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.answers import Grader
from gambit.cli.results import Shown, Style
from gambit.cli.terminal import FAILURE, OK, put, warn
from gambit.results.record import replay_log
from gambit.storage.run_folder import check_writable, find_log, find_logs
from gambit.view import write_page


def view(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder that `gambit solve` wrote, or its log.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page (default: tree.html beside the log).")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Folder or hub name, where the one that the log names is not at hand."),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> int:
    """Write one HTML page that shows what a search did: its tree, its texts, its vote."""
    log = find_log(run)
    page = out or log.parent / "tree.html"
    check_writable(page.parent)
    write_page(log, page, tokenizer)
    typer.echo(page)
    if is_opened:
        typer.launch(page.resolve().as_uri())
    return OK


def replay(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a run or of several, or a log (.jsonl, .gz).", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Report whether the log is whole and its vote is that of its traces.")
    ] = False,
) -> int:
    """Rebuild a run's result from its event log alone."""
    logs, code = find_logs(run), OK
    style = Style(as_json, has_titles=len(logs) > 1)
    with Grader() as grader:
        for log in logs:
            replayed = replay_log(log, grader.equivalent)
            if verify:
                put(f"{log}: {replayed.verdict}")
                code = code if replayed.finding is None else FAILURE
                continue
            style.show(Shown(replayed.result))
            if replayed.finding is not None:
                warn(f"{log}: {replayed.finding}")
    return code

"""`gambit replay`: a run's result from its event log alone, and whether the log can be believed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.results import Shown, Style
from gambit.cli.terminal import FAILURE, OK, put, say


def replay(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="The folder of a run or of several, or a log (.jsonl, .gz).", show_default=False
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Say whether the log is whole and its vote is that of its traces.")
    ] = False,
) -> int:
    """Rebuild a run's result from its event log alone."""

    from gambit.answers import Grader
    from gambit.results.record import replay_log
    from gambit.storage.run_folder import find_logs

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
                say(f"warning: {log}: {replayed.finding}", style="yellow")
    return code

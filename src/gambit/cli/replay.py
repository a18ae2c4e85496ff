"""`gambit replay`: a run's result from its event log alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.commands import made_command
from gambit.cli.results import Shown, Style
from gambit.cli.terminal import OK, exit_with
from gambit.core.errors import UserError


def replay(
    run_dir: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that `gambit solve` wrote.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
) -> None:
    """Rebuild a run's result from its event log alone."""

    def body() -> int:
        from gambit.results.record import replay as replay_log
        from gambit.text.answers import Grader

        logs = sorted([*run_dir.glob("events.jsonl"), *run_dir.glob("*/events.jsonl")])
        if not logs:
            raise UserError(f"no events.jsonl in {run_dir}: give the folder of a run")
        style = Style(as_json, has_titles=len(logs) > 1)
        with Grader() as grader:
            for log in logs:
                style.show(Shown(replay_log(log, grader.equivalent)))
        return OK

    exit_with(body)


def command() -> object:
    return made_command(replay, "replay")

"""`gambit report`: tables, figures and a page of a bench run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.terminal import OK


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that `gambit bench` wrote.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    no_trees: Annotated[bool, typer.Option("--no-trees", help="Make no tree pages of single searches.")] = False,
) -> int:
    """Make tables, figures and a page of a bench run."""
    from gambit.bench.report import write_report

    made = write_report(folder, with_trees=not no_trees)
    typer.echo(made.to_json() if as_json else made.to_markdown())
    return OK

"""`gambit solve`: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gambit.cli.options import SEARCH_PANELS, SPREAD_PANEL, picked, read_configs, with_options
from gambit.cluster.plan import ClusterConfig

FILE_HELP = "A .jsonl, .json, .csv or .tsv of problems, or a text file with one."
MAP_HELP = "Names of the file's columns, as in question=prompt,answer=target."


@with_options(SPREAD_PANEL, *SEARCH_PANELS)
def solve(
    problem: Annotated[
        str | None, typer.Argument(help="The problem; - or nothing reads it from stdin.", metavar="PROBLEM")
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    columns: Annotated[str | None, typer.Option("--map", metavar="KEY=VALUE", help=MAP_HELP)] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML of options; flags override it.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For logs and results (default: a new one in runs/).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line of JSON per problem to this new file too.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, metavar="INT", help="Problems of a file searched at a time.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per problem.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print the answer alone: no live view, table or warnings.")
    ] = False,
    **flags: str | bool | None,
) -> int:
    """Search for the answer to a problem, or to each of a file.

    Exit codes: 0 done, 1 failure, 2 your input, 3 not one problem got an answer, 130 interrupted.
    """
    from gambit.cli.results import Style
    from gambit.cli.running import SolveJob, run
    from gambit.storage.problems import columns_of, new_run_folder, read_problems

    search, engine = read_configs(config, flags)
    cluster = picked(ClusterConfig, flags).plan(engine)
    problems = read_problems(problem, file, sys.stdin, columns_of(columns))
    style = Style(as_json, quiet, problems.is_many)
    return run(SolveJob(problems, search, engine, out or new_run_folder(), concurrency, style, output, cluster))

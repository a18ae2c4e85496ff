"""`gambit solve`: its options."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from gambit.cli.options import FILE, FOLDER, SEARCH_PANELS, SPREAD_PANEL, with_options
from gambit.config.options import CheckedModel


class SolveOptions(CheckedModel):
    """The options of `gambit solve` beside those of the search and the engine."""

    file: Path | None = Field(
        None, description="a .jsonl, .json, .csv or .tsv of problems, or a text file with one", json_schema_extra=FILE
    )
    columns: str | None = Field(None, description="names of the file's columns, as in question=prompt,answer=target")
    config: Path | None = Field(None, description="YAML of options; flags override it", json_schema_extra=FILE)
    out: Path | None = Field(
        None, description="for logs and results (default: a new one in runs/)", json_schema_extra=FOLDER
    )
    output: Path | None = Field(
        None, description="write a line of JSON per problem to this new file too", json_schema_extra=FILE
    )
    concurrency: int = Field(1, ge=1, le=1024, description="problems of a file searched at a time")
    as_json: bool = Field(False, description="print one JSON object per problem")
    trace: bool = Field(False, description="print all of the trace behind the answer, not its last lines alone")
    quiet: bool = Field(False, description="print the answer alone: no live view, table or warnings")
    verbose: bool = Field(False, description="print all that is known about the search")


@with_options(
    SPREAD_PANEL,
    *SEARCH_PANELS,
    usual=("file", "out", "as_json", "quiet", "verbose", "model", "scorer", "policy", "capacity", "seed"),
)
def solve(
    problem: Annotated[
        str | None, typer.Argument(help="The problem; - or nothing reads it from stdin.", metavar="PROBLEM")
    ] = None,
    *,
    options: SolveOptions,
    **flags: str | bool | None,
) -> int:
    """Search for the answer to a problem, or to each of a file.

    Exit codes: 0 done, 1 failure, 2 your input, 3 not one problem got an answer, 130 interrupted.
    """
    from gambit.cli.running import run

    return run(problem, options, flags)

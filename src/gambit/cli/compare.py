"""`gambit compare`: voting and Gambit at equal tokens on a user's own problems."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from gambit.cli.bench import BENCHMARK
from gambit.cli.options import FOLDER, MANY, SEARCH_PANELS, with_options
from gambit.config.options import CheckedModel

OWN = ("model", "policy", "policy_options", "budget_tokens", "budget_traces", "vote")


class CompareOptions(CheckedModel):
    """The options of `gambit compare` beside those of searches and engines."""

    minutes: float = Field(30.0, gt=0, le=100_000, description="the most time; the same --out goes on")
    concurrency: int | None = Field(
        None, ge=1, le=1024, description="problems at a time (default: as many as fit into the KV cache, 8 at most)"
    )
    limit: int | None = Field(None, ge=1, le=MANY, description="first problems only")
    columns: str | None = Field(None, description="names of the file's columns, as in question=prompt")
    out: Path | None = Field(
        None, description="for the outcome of each problem (default: a new one in runs/)", json_schema_extra=FOLDER
    )
    as_json: bool = Field(False, description="print one JSON object")
    quiet: bool = Field(False, description="no progress and no warnings")


@with_options(
    *SEARCH_PANELS,
    without=OWN,
    usual=("minutes", "limit", "out", "as_json", "quiet", "effort", "scorer", "engine", "capacity", "seed"),
)
def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name.", show_default=False)],
    file: Annotated[str, typer.Argument(metavar="FILE", help=f"{BENCHMARK}.", show_default=False)],
    *,
    options: CompareOptions,
    **flags: str | bool | None,
) -> int:
    """Compare voting and Gambit at equal tokens on your problems."""
    from gambit.cli import compare_work

    return compare_work.compare(model, file, options, flags)

"""The options of `gambit bench`, `report`, `merge` and `prefix-value`; their work is imported at the call."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from gambit.bench.datasets import GROUP, SYNTAX
from gambit.bench.recipe import NOT_VARIED
from gambit.cli.options import FILE, FOLDER, MANY, SEARCH_PANELS, SPREAD_PANEL, run_argument, with_options
from gambit.cli.scorer import MEMORY_RATIO, TRACES_AT_ONCE
from gambit.cli.terminal import OK
from gambit.config import registry
from gambit.config.options import MOST_TRACES_AT_ONCE, CheckedModel, EngineConfig, SearchConfig

BENCHMARK = "a name, hf:DATASET[:SPLIT], or a .jsonl, .json or .csv with question and answer"
SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "answer", "system_prompt", "enable_thinking",
)  # fmt: skip
# Options of searches and engines that have no meaning for `prefix-value`, or that it declares itself.
UNUSED = {
    *(set(SearchConfig.model_fields) - set(SAMPLING)),
    *(name for name in EngineConfig.model_fields if name.startswith("verifier_")),
    *("scorer", "any_weights", "memory_ratio"),
}


class BenchOptions(CheckedModel):
    """The options of `gambit bench` beside those of searches and engines."""

    benchmark: list[str] | None = Field(None, description=BENCHMARK)
    list_benchmarks: bool = Field(False, description="print the names of the benchmarks and exit")
    policies: str | None = Field(
        None, description="methods to compare (default: sc,gambit): policies or variants of --recipe"
    )
    seeds: str | None = Field(None, description="as in 0,1,2; default: 0")
    limit: int | None = Field(None, ge=1, le=MANY, description="first problems of each benchmark only")
    problems: str | None = Field(None, description="only these, as in 12,27, counted from 1")
    concurrency: int | None = Field(None, ge=1, le=1024, description="problems searched at a time")
    block: int | None = Field(None, ge=1, le=MANY, description="problems after which the next method has its turn")
    shard: str | None = Field(None, description="i/n: only every n-th problem, from the i-th on")
    no_logs: bool = Field(False, description="keep no event logs; the report needs none")
    recipe: Path | None = Field(None, description="YAML of options; flags override it", json_schema_extra=FILE)
    out: Path | None = Field(None, description="of the run (default: a new one in runs/)", json_schema_extra=FOLDER)
    columns: str | None = Field(None, description="names of a file's columns, as in question=prompt")
    dry_run: bool = Field(False, description="print what would run and about how many tokens, and exit")
    resume: bool = Field(False, description="go on with the run in --out")
    on_row: str | None = Field(None, description="MODULE:FUNCTION that is called with each row, as for a tracker")
    no_report: bool = Field(False, description="write no report at the end")
    quiet: bool = Field(False, description="print where the report is and nothing else")


@with_options(
    SPREAD_PANEL,
    *SEARCH_PANELS,
    without=NOT_VARIED,
    usual=("benchmark", "list_benchmarks", "policies", "seeds", "limit", "recipe", "out", "dry_run", "resume", "model"),
)
def bench(options: BenchOptions, **flags: str | bool | None) -> int:
    """Compare search methods on benchmarks."""
    if options.list_benchmarks:
        for name in (*registry.names(GROUP), *SYNTAX):
            typer.echo(name)
        return OK
    from gambit.cli import bench_work

    return bench_work.bench(options, flags)


def report(
    folder: Annotated[
        Path | None, run_argument("FOLDER", "What `gambit bench` wrote (default: the newest in runs/).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    no_trees: Annotated[bool, typer.Option("--no-trees", help="Make no tree pages of single searches.")] = False,
) -> int:
    """Make tables, figures and a page of a bench run."""
    from gambit.cli import bench_work

    return bench_work.report(folder, as_json=as_json, with_trees=not no_trees)


def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="The folders of the shards.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the whole run.")],
) -> int:
    """Put the shards of a bench run together."""
    from gambit.cli import bench_work

    return bench_work.merge(folders, out)


class PrefixOptions(CheckedModel):
    """The options of `gambit prefix-value` beside those of sampling and the engine."""

    benchmark: str = Field(description=BENCHMARK)
    out: Path = Field(description="of the run; resumed if it exists", json_schema_extra=FOLDER)
    limit: int | None = Field(None, ge=1, le=MANY, description="first problems only")
    problems: str | None = Field(None, description="only these, as in 12,27, counted from 1")
    traces: int = Field(16, ge=2, le=65_536, description="traces a problem")
    cuts: str = Field("0.25,0.5,0.75", description="shares of a trace's tokens at which it is cut")
    rollouts: int = Field(8, ge=2, le=65_536, description="continuations of each prefix")
    keep: int = Field(4, ge=1, le=65_536, description="best prefixes of a problem that are continued")
    scorer: list[str] | None = Field(None, description="scorers to compare (default: the model's own, and confidence)")
    traces_at_once: int | None = Field(None, ge=1, le=MOST_TRACES_AT_ONCE, description=TRACES_AT_ONCE)
    memory_ratio: float = Field(0.6, ge=0.05, le=1.0, description=MEMORY_RATIO)
    as_json: bool = Field(False, description="print the figures as one JSON object")
    quiet: bool = Field(False, description="no progress and no warnings")


@with_options(
    *SEARCH_PANELS,
    without=UNUSED,
    usual=("benchmark", "out", "limit", "traces", "cuts", "rollouts", "keep", "scorer", "model", "quiet"),
)
def prefix_value(options: PrefixOptions, **flags: str | bool | None) -> int:
    """Measure what the best prefixes gain, continued instead of random ones."""
    from gambit.cli import prefix_work

    return prefix_work.prefix_value(options, flags)

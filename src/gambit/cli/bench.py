"""`gambit bench`: reads the flags of a comparison, checks them, runs it and shows its first table."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.bench.recipe import NOT_VARIED
from gambit.cli.options import SEARCH_PANELS, SPREAD_PANEL, given, picked, with_options
from gambit.cli.terminal import NO_ANSWER, OK, is_watched, put, say, stderr, warn
from gambit.cluster.plan import ClusterConfig
from gambit.config import registry
from gambit.config.options import EngineConfig, build, overlaid
from gambit.errors import StorageError, UserError

if TYPE_CHECKING:
    from gambit.bench.datasets import Benchmark
    from gambit.bench.folder import BenchPlan
    from gambit.bench.recipe import BenchRecipe
    from gambit.bench.report import Report
    from gambit.cluster.plan import ClusterPlan

MANY = 10_000_000


@with_options(SPREAD_PANEL, *SEARCH_PANELS, without=NOT_VARIED)
def bench(
    *,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A name, or a .jsonl, .json or .csv with question and answer."),
    ] = None,
    list_benchmarks: Annotated[
        bool, typer.Option("--list-benchmarks", help="Print the names of the benchmarks and exit.")
    ] = False,
    policies: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Methods to compare (default: sc,gambit): policies or variants of --recipe."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="TEXT", help="As in 0,1,2; default: 0.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MANY, metavar="INT", help="First problems of each benchmark only.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="INT", help="Problems searched at a time.")
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=1, max=MANY, metavar="INT", help="Problems after which the next method has its turn."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="TEXT", help="i/n: only every n-th problem, from the i-th on.")
    ] = None,
    no_logs: Annotated[bool, typer.Option("--no-logs", help="Keep no event logs; the report needs none.")] = False,
    recipe: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML of options; flags override it.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the run (default: a new one in runs/).")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--map", metavar="KEY=VALUE", help="Names of a file's columns, as in question=prompt."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and about how many tokens, and exit.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report at the end.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print where the report is and nothing else.")] = False,
    **flags: str | bool | None,
) -> int:
    """Compare search methods on benchmarks."""
    from gambit.storage.problems import columns_of

    if list_benchmarks:
        return _list_benchmarks()
    named = {
        "benchmarks": benchmark,
        "seeds": _named(seeds, "--seeds"),
        "limit": limit,
        "concurrency": concurrency,
        "block": block,
        "shard": shard,
        "logs": False if no_logs else None,
        "columns": columns_of(columns) or None,
        **{name: value for name, value in flags.items() if name not in ClusterConfig.model_fields},
    }
    methods = _named(policies, "--policies")
    folder, plan_recipe = _recipe(recipe, given(named), methods, out, resume)
    if dry_run:
        return _show_plan(plan_recipe)
    engine = build(EngineConfig, plan_recipe.engine)
    cluster = picked(ClusterConfig, flags).plan(engine)
    if cluster is not None:
        cluster.check_alone(plan_recipe.bench.concurrency)
    return _run(plan_recipe, engine, cluster, folder, resume, not no_report, is_quiet=quiet)


def _list_benchmarks() -> int:
    from gambit import chains

    for name in (*registry.names("gambit.benchmarks"), *chains.SYNTAX):
        typer.echo(name)
    return OK


# -- flags -----------------------------------------------------------------------------------------------------


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _named(text: str | None, flag: str) -> list[str] | None:
    """A list that is given must have something in it."""
    parts = _split(text)
    if parts == []:
        raise UserError(f"{flag} {text!r} names nothing: give at least one, or leave {flag} out")
    return parts


def _recipe(
    file: Path | None, options: Mapping[str, object], methods: list[str] | None, out: Path | None, resume: bool
) -> tuple[Path, BenchRecipe]:
    """Returns the run's folder and recipe: flags over the file, over what the folder of a resumed run has stored."""
    from gambit.bench.folder import read_plan
    from gambit.bench.recipe import read_recipe, recipe_from, with_methods
    from gambit.storage.problems import new_run_folder

    if resume and out is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    stored = read_plan(out).recipe.flat() if resume and out is not None else {}
    values = overlaid(overlaid(stored, read_recipe(file) if file else {}), options)
    made = recipe_from(with_methods(values, methods) if methods else values)
    if not resume:
        made.check()
    return out or new_run_folder(), made


# -- dry run ---------------------------------------------------------------------------------------------------


def _show_plan(recipe: BenchRecipe) -> int:
    from rich.table import Table

    from gambit.bench.recipe import planned_searches

    planned = list(planned_searches(recipe))
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for name in ("method", "benchmark"):
        table.add_column(name)
    for name in ("problems", "searches", "traces of each", "tokens of a trace", "tokens"):
        table.add_column(name, justify="right")
    for part in planned:
        counts = (part.num_problems, part.num_searches, part.num_traces, part.trace_tokens)
        table.add_row(part.variant, part.benchmark, *(f"{count:,}" for count in counts), _about(part.num_tokens))
    put(table)
    num_searches, num_tokens = (sum(getattr(part, name) for part in planned) for name in ("num_searches", "num_tokens"))
    put(f"{num_searches:,} searches, about {_about(num_tokens)} tokens were every trace written in full; methods that "
        "prune or share prefixes write fewer")  # fmt: skip
    for missing in recipe.lacking():
        warn(f"the run itself would be refused here: {missing}")
    return OK


def _about(count: int) -> str:
    """Three figures are more than is known."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


# -- bench -----------------------------------------------------------------------------------------------------


def _run(
    recipe: BenchRecipe,
    engine: EngineConfig,
    cluster: ClusterPlan | None,
    folder: Path,
    resume: bool,
    wants_report: bool,
    *,
    is_quiet: bool,
) -> int:
    from gambit.bench.folder import begun, check_same, identity_of, is_complete, make_plan
    from gambit.cli.session import check_model, sole_writer
    from gambit.engines.base import check_engine
    from gambit.storage.problems import check_not_empty
    from gambit.storage.run_folder import check_writable

    for missing in recipe.lacking():
        raise UserError(missing)
    check_engine(engine)
    check_model(engine.model, is_quiet=is_quiet)
    check_writable(folder)
    plan, benchmarks = make_plan(recipe, identity_of(engine.model, engine.scorer))
    check_not_empty(recipe.bench.shard, plan.num_tasks)
    if resume:
        check_same(folder, plan)
    with sole_writer(folder, is_quiet=is_quiet), nullcontext() if resume else begun(folder, plan):
        code = OK if is_complete(folder, plan) else _search(plan, benchmarks, folder, engine, cluster, is_quiet)
    if wants_report and code == OK:
        from gambit.bench.report import write_report

        made = write_report(folder)
        if not is_quiet:
            _show(made)
        put(f"report: {folder / 'report.html'}")
    return code or _said_failures(folder, is_quiet=is_quiet)


def _said_failures(folder: Path, *, is_quiet: bool) -> int:
    """Why searches failed, which a report only counts; a run in which all of them did has found nothing."""
    from gambit.bench.rows import read_rows

    reasons = [row.error for row in read_rows(folder)]
    failures = [reason for reason in reasons if reason is not None]
    if failures and not is_quiet:
        warn(f"{len(failures):,} of {len(reasons):,} searches failed, the first because: {failures[0]}")
    return NO_ANSWER if failures and len(failures) == len(reasons) else OK


def _search(
    plan: BenchPlan,
    benchmarks: list[Benchmark],
    folder: Path,
    engine: EngineConfig,
    cluster: ClusterPlan | None,
    is_quiet: bool,
) -> int:
    from gambit.bench.folder import add_environment
    from gambit.bench.rows import ROWS_FILE, RowWriter, read_rows
    from gambit.bench.run import Runner
    from gambit.cli.bench_session import local_searches, ray_searches, spread_searches
    from gambit.cli.progress import BenchScreen
    from gambit.cli.session import only_our_warnings
    from gambit.cli.terminal import StopSignal

    with (
        RowWriter(folder) as writer,
        BenchScreen(stderr(), is_live=is_watched() and not is_quiet) as progress,
        only_our_warnings(progress, is_quiet=is_quiet),
        ExitStack() as stack,
    ):
        if cluster is None:
            opened = stack.enter_context(local_searches(engine, plan, folder, progress))
        else:
            searches_of = spread_searches if cluster.is_spread else ray_searches
            opened = stack.enter_context(searches_of(cluster, engine, plan, folder, progress))
        stop = stack.enter_context(StopSignal(progress.stopping))
        environment = opened.stamp(stop)
        if environment is not None:
            add_environment(folder, environment)
        before = list(read_rows(folder)) if (folder / ROWS_FILE).is_file() else []
        progress.begin(plan.num_tasks, [variant.label for variant in plan.variants], before)
        done = {row.key for row in before}
        searches = opened.searches(stop)
        runner = Runner(plan, benchmarks, searches, writer, done, on_row=progress.on_row, should_stop=stop)
        again = f"gambit bench --resume --out {folder}{'' if cluster is None else cluster.flags}"
        try:
            runner.run()
        except StorageError as error:
            error.add_note(f"rows written before are kept; once there is room: {again}")
            raise
    if stop.exit_code:
        say(f"go on with: {again}")
    return stop.exit_code


def _show(made: Report) -> None:
    """The first table and every sentence; the rest is for the page."""
    from rich.table import Table

    first = made.tables[0]
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for number, name in enumerate(first.columns):
        table.add_column(name, justify="left" if number < first.num_names else "right", overflow="fold")
    for row in first.rows:
        table.add_row(*row)
    put(table)
    for sentence in (*made.cautions, *made.findings):
        put(sentence)

"""The work of `gambit bench`, `report` and `merge`: checks the comparison, runs it and shows its first table."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import typer
from rich.table import Table

from gambit.bench.datasets import Benchmark, benchmark_for, numbers_of
from gambit.bench.folder import (
    BenchPlan,
    add_environment,
    begun,
    check_same,
    identity_of,
    is_complete,
    make_plan,
    merge_shards,
    read_plan,
    stamp,
    write_plan,
)
from gambit.bench.recipe import BenchRecipe, outlook, planned_searches, recipe_from, with_methods
from gambit.bench.report import Report, write_report
from gambit.bench.rows import ROWS_FILE, Row, RowWriter, read_rows
from gambit.bench.run import BenchEngine, LocalSearches, RaySearches, Runner, Searches, ShouldStop, stamp_of
from gambit.cli.bench import BenchOptions
from gambit.cli.on_row import OnRow, row_callback
from gambit.cli.options import given, picked
from gambit.cli.progress import BenchScreen, engine_lines
from gambit.cli.session import (
    check_model,
    loaded,
    loaded_in_cluster,
    needs_in_cluster,
    only_our_warnings,
    sole_writer,
    solver_maker,
    warn_of,
)
from gambit.cli.terminal import FAILURE, NO_ANSWER, OK, StopSignal, is_watched, put, say, stderr, stdout, warn
from gambit.cluster.engines import EnginePool
from gambit.cluster.plan import ClusterPlan
from gambit.config.options import EngineConfig, build, overlaid
from gambit.config.yaml_file import read_mapping
from gambit.engines.base import check_engine
from gambit.errors import StorageError, UserError
from gambit.events import Json
from gambit.models.files import locate
from gambit.scorers import published
from gambit.scorers.choice import fetch_published
from gambit.storage.problems import check_not_empty, columns_of, new_run_folder, newest_run
from gambit.storage.run_folder import check_writable

# Returns the environment of the engines, None if the wait for one was called off, and what searches on them.
Begin: TypeAlias = Callable[[ShouldStop], tuple[Mapping[str, Json] | None, Searches]]


def report(folder: Path | None, *, as_json: bool, with_trees: bool) -> int:
    made = write_report(newest_run(ROWS_FILE) if folder is None else folder, with_trees=with_trees)
    typer.echo(made.to_json() if as_json else made.to_markdown())
    return OK


def merge(folders: Sequence[Path], out: Path) -> int:
    check_writable(out)
    with sole_writer(out):
        notes = merge_shards(folders, out)
    for note in notes:
        say(note)
    return OK


def bench(options: BenchOptions, flags: Mapping[str, str | bool | None]) -> int:
    recipe = _recipe(options, flags)
    if options.dry_run:
        return _show_plan(recipe)
    engine = build(EngineConfig, recipe.engine)
    cluster = picked(ClusterPlan, flags).checked(engine)
    if cluster is not None:
        cluster.check_alone(recipe.bench.concurrency)
    for missing in recipe.lacking():
        raise UserError(missing)
    on_row = row_callback(options.on_row)
    folder = options.out or new_run_folder()
    check_engine(engine)
    check_model(engine.model, is_quiet=options.quiet, is_offline=engine.offline)
    with only_our_warnings(is_quiet=options.quiet):
        fetch_published(engine.scorer, locate(engine.model))
    check_writable(folder)
    plan, benchmarks = make_plan(recipe, identity_of(engine.model, engine.scorer))
    check_not_empty(recipe.bench.shard, plan.num_tasks)
    warn_of(benchmarks, is_quiet=options.quiet)
    if options.resume:
        plan = check_same(folder, plan)
    with sole_writer(folder, is_quiet=options.quiet), nullcontext() if options.resume else begun(folder, plan):
        is_done = is_complete(folder, plan)
        code = OK if is_done else _search(plan, benchmarks, folder, engine, cluster, options.quiet, on_row)
    if code == OK and not options.no_report:
        made = write_report(folder)
        if not options.quiet:
            _show(made)
        put(f"report: {folder / 'report.html'}")
    return code or _warn_of_failures(folder, is_quiet=options.quiet)


def _recipe(options: BenchOptions, flags: Mapping[str, str | bool | None]) -> BenchRecipe:
    """Returns the run's recipe: flags over the file, over what the folder of a resumed run has stored."""
    named = {
        "benchmarks": options.benchmark,
        "seeds": _listed(options.seeds, "--seeds"),
        "problems": numbers_of(options.problems) or None,
        "logs": False if options.no_logs else None,
        "columns": columns_of(options.columns) or None,
        **{name: getattr(options, name) for name in ("limit", "concurrency", "block", "shard")},
        **{name: value for name, value in flags.items() if name not in ClusterPlan.model_fields},
    }
    methods = _listed(options.policies, "--policies")
    if options.resume and options.out is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    stored = read_plan(options.out).recipe.flat() if options.resume and options.out is not None else {}
    values = overlaid(overlaid(stored, read_mapping(options.recipe, "recipe") if options.recipe else {}), given(named))
    made = recipe_from(with_methods(values, methods) if methods else values)
    made.check()
    return made


def _listed(text: str | None, flag: str) -> list[str] | None:
    """Splits a list at its commas; one that is given must have something in it."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"{flag} {text!r} names nothing: give at least one, or leave {flag} out")
    return names


def _show_plan(recipe: BenchRecipe) -> int:
    planned = list(planned_searches(recipe))
    rows = [
        (each.variant, each.benchmark, f"{each.num_problems:,}", f"{each.num_searches:,}", f"{each.num_traces:,}",
         f"{each.trace_tokens:,}", _about(each.num_tokens))
        for each in planned
    ]  # fmt: skip
    columns = ("method", "benchmark", "problems", "searches", "traces of each", "tokens of a trace", "tokens")
    _put_table(columns, rows, num_names=2)
    engine = build(EngineConfig, recipe.engine)
    if engine.scorer in ("auto", published.NAME) and (sentence := published.outlook(engine.model)) is not None:
        typer.echo(sentence)
    num_searches, num_tokens = sum(each.num_searches for each in planned), sum(each.num_tokens for each in planned)
    put(f"{num_searches:,} searches, about {_about(num_tokens)} tokens were every trace written in full; methods that "
        "prune or share prefixes write fewer")  # fmt: skip
    for sentence in outlook(recipe, planned):
        put(sentence)
    warn_of(benchmark_for(name, recipe.bench.columns) for name in recipe.bench.benchmarks)
    for missing in recipe.lacking():
        warn(f"the run itself would be refused here: {missing}")
    return OK


def _put_table(columns: Sequence[str], rows: Iterable[Sequence[str]], num_names: int) -> None:
    """Prints a table; columns after the first `num_names` hold numbers."""
    padding = 2 if stdout().width >= 80 else 1
    table = Table(box=None, pad_edge=False, padding=(0, padding), header_style="dim")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < num_names else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    put(table)


def _about(count: int) -> str:
    """Rounds to three figures, which is more than is known."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _search(
    plan: BenchPlan,
    benchmarks: Sequence[Benchmark],
    folder: Path,
    engine: EngineConfig,
    cluster: ClusterPlan | None,
    is_quiet: bool,
    on_row: OnRow,
) -> int:
    """Carries out the searches that have no row yet; returns the exit code."""
    with (
        RowWriter(folder) as writer,
        BenchScreen(stderr(), is_live=is_watched() and not is_quiet, is_quiet=is_quiet) as screen,
        only_our_warnings(screen.paused, is_quiet=is_quiet),
        _engines(plan, folder, engine, cluster, screen) as begin,
        StopSignal(screen.stopping) as stop,
    ):
        environment, searches = begin(stop)
        if environment is not None:
            add_environment(folder, environment)
            write_plan(folder, plan)  # a resumed run may have grown
        before = list(read_rows(folder)) if (folder / ROWS_FILE).is_file() else []
        screen.begin(plan.num_tasks, [variant.label for variant in plan.variants], before)
        done = {row.key for row in before}

        def report_row(row: Row) -> None:
            screen.on_row(row)
            on_row(row)

        again = f"gambit bench --resume --out {folder}{'' if cluster is None else cluster.flags}"
        try:
            Runner(plan, benchmarks, searches, writer, done, on_row=report_row, should_stop=stop).run()
        except StorageError as error:
            error.add_note(f"rows written before are kept; once there is room: {again}")
            raise
    if stop.exit_code:
        say(f"go on with: {again}")
    return stop.exit_code


@contextmanager
def _engines(
    plan: BenchPlan, folder: Path, engine: EngineConfig, cluster: ClusterPlan | None, screen: BenchScreen
) -> Iterator[Begin]:
    """Loads an engine in this process, or begins to load engines under Ray."""
    if cluster is None:
        with loaded(engine, screen.loading) as solver:
            yield lambda stop: (stamp(solver.engine.info, plan.identity), LocalSearches(solver, folder, stop))
    elif cluster.spread:
        with loaded_in_cluster(cluster, engine, screen.loading) as (spread, pool):
            info = pool.call(pool.slots[0], attrgetter("engine.info"))
            yield lambda stop: (stamp(info, plan.identity), LocalSearches(spread, folder, stop))
    else:
        with needs_in_cluster(cluster, engine, screen.loading) as needs:
            make = partial(BenchEngine, solver_maker(engine, needs))
            screen.loading(engine.model)
            with EnginePool(make, cluster.num_engines, needs, jobs_per_engine=plan.recipe.bench.concurrency) as engines:
                screen.engine_lines = lambda: engine_lines(engines.slots)
                ask = partial(stamp_of, identity=plan.identity)
                yield lambda stop: (engines.call_one(ask, stop), RaySearches(engines, folder, stop))


def _warn_of_failures(folder: Path, *, is_quiet: bool) -> int:
    """Warns why searches failed, which a report only counts; returns the exit code: that of a method, or of all."""
    rows = list(read_rows(folder))
    failed = [row for row in rows if row.error is not None]
    if failed and not is_quiet:
        warn(f"{len(failed):,} of {len(rows):,} searches failed, the first because: {failed[0].error}")
    if {row.variant for row in rows} <= {row.variant for row in rows if row.error is None}:
        return OK
    return NO_ANSWER if len(failed) == len(rows) else FAILURE


def _show(made: Report) -> None:
    """Prints the first table and every sentence; the rest is for the page."""
    first = made.tables[0]
    _put_table(first.columns, first.rows, first.num_names)
    for sentence in (*made.cautions, *made.findings):
        put(sentence)

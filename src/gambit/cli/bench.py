"""The commands `bench`, `report` and `merge`: they parse, show and exit; what they do lives in `gambit.bench`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gambit.cli.terminal import OK, exit_with, put, say, stderr
from gambit.core.errors import UserError

if TYPE_CHECKING:
    from gambit.bench.datasets import Benchmark
    from gambit.bench.folder import BenchPlan
    from gambit.bench.recipe import BenchRecipe
    from gambit.bench.report import BenchReport
    from gambit.config.options import EngineConfig

FOLDER = Annotated[Path, typer.Argument(help="The folder that `gambit bench` wrote.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the commands; the full `bench`, with all options, is made when it is called."""
    app.command(name="bench", help=bench.__doc__)(_bench_entry)
    app.command()(report)
    app.command()(merge)


def bench(
    *,
    benchmark: Annotated[list[str] | None, typer.Option(help="A name, or a .jsonl with question and answer.")] = None,
    policies: Annotated[str | None, typer.Option(help="Methods to compare, as in sc,gambit (the default).")] = None,
    seeds: Annotated[str | None, typer.Option(help="As in 0,1,2; default: 0.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First problems of each benchmark only.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="option=v,v,…: vary gambit's option; policy:option=… another's.")
    ] = None,
    sweep_mode: Annotated[str | None, typer.Option(help="product (default) or each: one option at a time.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="name:option=value,…: one more method; policy=… names its policy.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Problems searched at a time.")] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Problems after which the next method has its turn.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only every n-th problem, from the i-th on.")] = None,
    no_logs: Annotated[bool, typer.Option("--no-logs", help="Keep no event logs; the report needs none.")] = False,
    recipe: Annotated[Path | None, typer.Option(help="YAML file of options; flags override it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one in runs/).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report at the end.")] = False,
    **flags: str | bool | None,
) -> None:
    """Compare search methods on benchmarks."""

    def body() -> int:
        given = {
            "benchmarks": benchmark,
            "policies": _split(policies),
            "seeds": _split(seeds),
            "limit": limit,
            "sweep": _sweeps(sweep or []) or None,
            "sweep_mode": sweep_mode,
            "variants": _variants(variant or []) or None,
            "concurrency": concurrency,
            "block": block,
            "shard": shard,
            "logs": False if no_logs else None,
            **flags,
        }
        options = {name: value for name, value in given.items() if value is not None}
        folder, plan_recipe = _recipe(recipe, options, out, resume)
        return _run(plan_recipe, folder, resume, not no_report)

    exit_with(body)


def _bench_entry() -> NoReturn:
    raise AssertionError("listed by `gambit --help` only; the full command takes its place")


def bench_command() -> object:
    """The command with an option for every field of the configs."""
    from gambit.bench.recipe import NOT_VARIED
    from gambit.cli.options import with_config_options

    full = typer.Typer(add_completion=False)
    full.command(name="bench")(with_config_options(bench, without=NOT_VARIED))
    return typer.main.get_command(full)


# -- flags -----------------------------------------------------------------------------------------------------


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _sweeps(texts: list[str]) -> dict[str, list[object]]:
    found: dict[str, list[object]] = {}
    for text in texts:
        option, equals, values = text.partition("=")
        if not equals:
            raise UserError(f"--sweep {text!r} is not of the form option=value,value")
        if option in found:
            raise UserError(f"--sweep {option} is given twice: name all values at once")
        found[option.replace("-", "_")] = [_value(part) for part in _split(values) or []]
    return found


def _variants(texts: list[str]) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in _split(rest) or []]
        if not name or not colon or any(not equals for _, equals, _ in pairs):
            raise UserError(f"--variant {text!r} is not of the form name:option=value,option=value")
        found[name] = {key.replace("-", "_"): _value(value) for key, _, value in pairs}
    return found


def _value(text: str) -> object:
    """As in a YAML recipe: 2 is a number and true a truth."""
    import yaml

    value: object = yaml.safe_load(text)
    return value


def _recipe(
    file: Path | None, options: Mapping[str, object], out: Path | None, resume: bool
) -> tuple[Path, BenchRecipe]:
    """Flags over the recipe file; a resumed run knows its own and takes nothing that contradicts it."""
    from gambit.bench.folder import read_plan, with_changes
    from gambit.bench.recipe import read_recipe, recipe_from
    from gambit.config.options import overlaid
    from gambit.storage.problems import new_run_folder

    values = overlaid(read_recipe(file) if file else {}, options)
    if resume:
        if out is None:
            raise UserError("--resume needs the folder of the run: --out DIR")
        return out, with_changes(read_plan(out).recipe, values)
    made = recipe_from(values)
    made.check()
    return out or new_run_folder(), made


# -- bench -----------------------------------------------------------------------------------------------------


def _run(recipe: BenchRecipe, folder: Path, resume: bool, wants_report: bool) -> int:
    from gambit.bench.folder import check_same, create, is_complete, locked, make_plan
    from gambit.bench.stamp import identity_of
    from gambit.config.options import EngineConfig, build

    engine = build(EngineConfig, recipe.engine)
    plan, benchmarks = make_plan(recipe, identity_of(engine.model, engine.scorer))
    if resume:
        check_same(folder, plan)
    with locked(folder):
        if not resume:
            create(folder, plan)
        code = OK if is_complete(folder, plan) else _search(plan, benchmarks, folder, engine)
    if wants_report and code == OK:
        from gambit.bench.report import write_report

        _show(write_report(folder))
        put(f"report: {folder / 'report.html'}")
    return code


def _search(plan: BenchPlan, benchmarks: list[Benchmark], folder: Path, engine: EngineConfig) -> int:
    from gambit.bench.folder import add_environment
    from gambit.bench.rows import ROWS_FILE, RowWriter, read_rows
    from gambit.bench.runner import Runner
    from gambit.bench.stamp import stamp
    from gambit.cli.bench_progress import BenchProgress
    from gambit.cli.session import loaded, only_our_warnings
    from gambit.cli.signals import StopSignal

    console = stderr()
    with (
        RowWriter(folder) as writer,
        BenchProgress(console, is_live=console.is_terminal and sys.stdout.isatty()) as progress,
        only_our_warnings(progress),
        loaded(engine, progress) as solver,
        StopSignal(progress.stopping) as stop,
    ):
        add_environment(folder, stamp(solver.engine.info, plan.identity))
        before = list(read_rows(folder)) if (folder / ROWS_FILE).is_file() else []
        progress.begin(plan.num_tasks, [variant.label for variant in plan.variants], before)
        done = {row.key for row in before}
        Runner(plan, benchmarks, solver, folder, writer, done, on_row=progress.on_row, should_stop=stop).run()
    if stop.exit_code:
        say(f"go on with: gambit bench --resume --out {folder}")
    return stop.exit_code


def _show(made: BenchReport) -> None:
    """The first table and every sentence; the rest is for the page."""
    from rich.table import Table

    first = made.tables[0]
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    for number, name in enumerate(first.columns):
        table.add_column(name, justify="left" if number < first.num_names else "right", overflow="fold")
    for row in first.rows:
        table.add_row(*row)
    put(table)
    for sentence in made.sentences:
        put(sentence)


def report(
    folder: FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    no_trees: Annotated[bool, typer.Option("--no-trees", help="Make no tree pages of single searches.")] = False,
) -> None:
    """Make tables, figures and a page of a bench run."""

    def body() -> int:
        from gambit.bench.report import write_report

        made = write_report(folder, with_trees=not no_trees)
        typer.echo(made.json if as_json else made.markdown)
        return OK

    exit_with(body)


def merge(
    folders: Annotated[list[Path], typer.Argument(help="The folders of the shards.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the whole run.")],
) -> None:
    """Put the shards of a bench run together."""

    def body() -> int:
        from gambit.bench.merge import merge_shards

        for note in merge_shards(folders, out):
            say(note)
        return OK

    exit_with(body)

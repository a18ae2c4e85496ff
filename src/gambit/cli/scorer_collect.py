"""`gambit scorer collect` and `merge`: traces of problems, their grades and their states, on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.options import RAY_PANEL, given, key_values, picked, with_options
from gambit.cli.session import (
    check_model,
    needs_in_cluster,
    only_our_warnings,
    prepare_libraries,
    sole_writer,
    solver_maker,
)
from gambit.cli.terminal import OK, exit_with, put, say
from gambit.cluster.plan import ClusterConfig
from gambit.errors import EngineError, StorageError, UserError

if TYPE_CHECKING:
    from gambit.cli.terminal import StopSignal
    from gambit.cluster.plan import ClusterPlan
    from gambit.training.collect import CollectEngines, CollectPlan
    from gambit.training.sampling import Task

AUTO, NONE = "auto", "none"
GPU_TRACES, CPU_TRACES = 1024, 64  # traces sampled at a time
MANY = 10_000_000


class Positions(StrEnum):
    BEFORE = "before"
    BOUNDARY = "boundary"
    BOTH = "both"


Device = Annotated[str, typer.Option(metavar="TEXT", help="auto, cpu, cuda, cuda:0 or mps.")]
TracesAtOnce = Annotated[
    int | None,
    typer.Option(
        min=1, max=65_536, metavar="INT", help="Traces sampled at a time (default: 1024 on a GPU, 64 elsewhere)."
    ),
]
MemoryRatio = Annotated[
    float,
    typer.Option(
        min=0.05, max=1.0, metavar="NUMBER", help="The engine's share of a GPU; the states' model lies beside it."
    ),
]
Graders = Annotated[int, typer.Option(min=1, max=64, metavar="INT", help="Processes that compare answers.")]


@with_options(RAY_PANEL)
def collect(
    problems: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="A .jsonl, .json or .csv with question and answer; pawn:SPLIT (scorer, dev, test); chains:STEPS or "
            "moves:STEPS (of the train split, or with ,split=NAME: dev, judge, test).",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the collection; resumed if it exists.")],
    columns: Annotated[
        str | None,
        typer.Option("--map", metavar="KEY=VALUE", help="Names of the file's columns, as in question=prompt."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="TEXT", help="Folder or hub name.")] = "pawn",
    traces: Annotated[int, typer.Option(min=1, max=1_000_000, metavar="INT", help="Traces a problem.")] = 16,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MANY, metavar="INT", help="First problems only (puzzles, chains: 600).")
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="TEXT", help="i/n: only every n-th problem, from the i-th on; `merge` joins.")
    ] = "1/1",
    seed: Annotated[int, typer.Option(metavar="INT", help="Of puzzles and sampling.")] = 0,
    engine: Annotated[str, typer.Option(metavar="TEXT", help="local, vllm or auto.")] = AUTO,
    engine_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Passed to the engine.")] = None,
    device: Device = AUTO,
    dtype: Annotated[str, typer.Option(metavar="TEXT", help="auto, float32, float16 or bfloat16.")] = AUTO,
    memory_ratio: MemoryRatio = 0.6,
    traces_at_once: TracesAtOnce = None,
    layers: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Layers to store, such as -1,-9; -1 is the last, after its norm; none: for verifiers."
        ),
    ] = "-1",
    state_position: Annotated[Positions, typer.Option(metavar="TEXT", help="Which states to store.")] = Positions.BOTH,
    boundary: Annotated[
        str, typer.Option(metavar="TEXT", help="Where a thought ends: blank-line, or line: one thought a line.")
    ] = "blank-line",
    confidence: Annotated[bool, typer.Option(help="Store token confidence too: the baseline of `eval`.")] = True,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, max=MANY, metavar="INT", help="Longest trace (default: the model's).")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=100, metavar="NUMBER", help="Default: the model's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="NUMBER", help="Default: the model's own.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=MANY, metavar="INT", help="Default: the model's own.")] = None,
    system_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Default: as in `gambit solve`.")] = None,
    answer: Annotated[
        str, typer.Option(metavar="TEXT", help="How an answer is read: boxed, choice, number or text.")
    ] = "boxed",
    graders: Graders = 2,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="INT", help="Tokens a pass of the states' model.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no warnings.")] = False,
    **flags: str | None,
) -> int:
    """Sample traces of problems, grade them and store the states at their thought boundaries."""
    from gambit.config.options import EngineConfig, SearchConfig, build
    from gambit.engines.base import check_engine
    from gambit.storage.problems import check_not_empty, columns_of, shard_of
    from gambit.storage.run_folder import check_writable
    from gambit.text.boundary import check_boundary_rule
    from gambit.training.collect import CollectPlan
    from gambit.training.sampling import PAWN_SOURCE
    from gambit.types import StatePosition

    check_boundary_rule(boundary)
    first, every = shard_of(shard)
    tasks = _tasks(problems, columns_of(columns), limit, seed)[first::every]
    check_not_empty(shard, len(tasks))
    settings = {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p,
                "top_k": top_k, "system_prompt": system_prompt, "answer": answer}  # fmt: skip
    options = {"model": model, "engine": engine, "device": device, "dtype": dtype, "memory_ratio": memory_ratio,
               "engine_options": key_values(engine_option or [], "--engine-option")}  # fmt: skip
    plan = CollectPlan(
        out=out,
        source=problems if problems.startswith(PAWN_SOURCE) else Path(problems).name,
        engine=build(EngineConfig, options),
        search=build(SearchConfig, given(settings)),
        traces_per_problem=traces,
        traces_at_once=traces_at_once or usual_traces_at_once(device),
        layers=() if layers == NONE else layers_of(layers, NONE),
        positions=tuple(StatePosition) if state_position is Positions.BOTH else (StatePosition(state_position),),
        with_confidence=confidence,
        boundary=boundary,
        batch_tokens=batch_tokens,
        num_graders=graders,
    )
    check_engine(plan.engine)
    check_model(plan.engine.model, is_quiet=quiet)
    check_writable(out)
    cluster = picked(ClusterConfig, flags).plan(plan.engine)
    with sole_writer(out, is_quiet=quiet):
        if cluster is None:
            return _collect(tasks, plan, quiet)
        return _collect_on_ray(tasks, plan, cluster, quiet, is_size_open=traces_at_once is None)


def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="That `collect --shard` wrote.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the whole collection.")],
) -> None:
    """Put collections that were made in the same way together."""

    def body() -> int:
        from gambit.storage.run_folder import check_writable
        from gambit.training.storage import merge as run

        check_writable(out)
        with sole_writer(out):
            num_problems = run(parts, out)
        put(f"{out}: {num_problems} problems")
        return OK

    exit_with(body)


def _collect(tasks: Sequence[Task], plan: CollectPlan, is_quiet: bool) -> int:
    from gambit.cli.progress import progress_bar
    from gambit.cli.terminal import StopSignal

    prepare_libraries()
    with (
        only_our_warnings(is_quiet=is_quiet),
        progress_bar("collecting", is_quiet=is_quiet) as advance,
        StopSignal(lambda: None) as stop,
    ):
        return _sample_and_store(tasks, plan, None, advance, stop)


def _collect_on_ray(
    tasks: Sequence[Task], plan: CollectPlan, cluster: ClusterPlan, is_quiet: bool, *, is_size_open: bool
) -> int:
    """`is_size_open`: how many traces an engine samples at a time is left to what it runs on."""
    from gambit.cli.progress import engine_lines, progress_bar
    from gambit.cli.terminal import StopSignal
    from gambit.cluster.engines import EnginePool
    from gambit.training.collect import sampling_engine, thought_scorer
    from gambit.training.ray_sampling import CollectMaker, RayEngines

    with (
        only_our_warnings(is_quiet=is_quiet),
        needs_in_cluster(cluster, plan.engine, None) as needs,
    ):
        if is_size_open:
            plan = replace(plan, traces_at_once=GPU_TRACES if needs.gpus else CPU_TRACES)
        make = CollectMaker(solver_maker(sampling_engine(plan), needs, thought_scorer(plan)), plan)
        with (
            EnginePool(make, cluster.num_engines, needs, jobs_per_engine=plan.most_problems_at_once) as pool,
            progress_bar("collecting", is_quiet=is_quiet, lines=lambda: engine_lines(pool.slots)) as advance,
            StopSignal(lambda: None) as stop,
        ):
            return _sample_and_store(tasks, plan, lambda: RayEngines(pool, stop), advance, stop)


def _sample_and_store(
    tasks: Sequence[Task],
    plan: CollectPlan,
    engines: Callable[[], CollectEngines] | None,
    advance: Callable[[int, int], None],
    stop: StopSignal,
) -> int:
    from gambit.cli.scorer_display import summary_line
    from gambit.training.collect import collect as run

    began = time.monotonic()
    try:
        made = None if engines is None else engines()
        summary = run(tasks, plan, engines=made, on_progress=advance, should_stop=stop)
    except StorageError as error:
        error.add_note("problems written before are kept; once there is room, the same command goes on from there")
        raise
    except EngineError:
        if stop():  # before an engine was ready
            return stop.exit_code
        raise
    put(summary_line(summary, plan.out, time.monotonic() - began))
    for reason in summary.refused[:5]:
        say(f"left out: {reason}", style="yellow")
    return stop.exit_code


def _tasks(source: str, columns: Mapping[str, str], limit: int | None, seed: int) -> list[Task]:
    from gambit.chains import FAMILIES, SYNTAX
    from gambit.storage.problems import MANY_SUFFIXES, read_problem_file
    from gambit.training.sampling import PAWN_SOURCE, Task, generated_tasks, pawn_tasks

    if source.partition(":")[0] in FAMILIES:
        return generated_tasks(source, limit or 600, seed)
    if source.startswith(PAWN_SOURCE):
        return pawn_tasks(source.removeprefix(PAWN_SOURCE), limit or 600, seed)
    path = Path(source)
    if path.suffix.lower() not in MANY_SUFFIXES:
        known = " nor ".join((f"a file of problems ({', '.join(MANY_SUFFIXES)})", "pawn:SPLIT", *SYNTAX))
        raise UserError(f"{source!r} is neither {known}")
    found = read_problem_file(path, columns)
    unanswered = [problem.id for problem in found.problems if problem.id not in found.expected]
    if unanswered:
        raise UserError(f'{source}: {unanswered[0]} has no "answer", and a trace can only be graded by one')
    return [Task(problem, found.expected[problem.id]) for problem in found.problems[:limit]]


def usual_traces_at_once(device: str) -> int:
    from gambit.engines.local.model import pick_device

    return GPU_TRACES if pick_device(device).type == "cuda" else CPU_TRACES


def layers_of(text: str, word: str) -> tuple[int, ...]:
    """`word`: what may stand there instead of numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"layers {text!r}: give numbers such as -1,-9, or {word}") from error
    if len(set(found)) < len(found):
        raise UserError(f"layers {text!r}: one of them is there twice, leave it out")
    return found

"""`gambit scorer …`: parses, prints, exits; collecting, fitting and judging live in gambit.training."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.session import prepare_libraries
from gambit.cli.terminal import OK, exit_with, put, say
from gambit.core.errors import UserError

if TYPE_CHECKING:
    from gambit.scorers.base import ScorerInfo
    from gambit.training.collect import Plan
    from gambit.training.sampling import Task

app = typer.Typer(help="Make a scorer for a model: collect, merge, train, eval; import, show.", no_args_is_help=True)

AUTO = "auto"
GPU_TRACES, CPU_TRACES = 1024, 64  # traces sampled at a time


class Positions(StrEnum):
    BEFORE = "before"
    BOUNDARY = "boundary"
    BOTH = "both"


Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")]
SkipCorrupted = Annotated[bool, typer.Option(help="Go on without shards whose checksum is wrong.")]


# -- collect ---------------------------------------------------------------------------------------------------


@app.command()
def collect(
    problems: Annotated[
        str, typer.Option(help="A .jsonl with question and answer, or pawn:SPLIT (scorer, dev, test).")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the collection; one that was begun is gone on with.")],
    model: Annotated[str, typer.Option(help="Folder or hub name.")] = "pawn",
    traces: Annotated[int, typer.Option(min=1, help="Traces a problem.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems (pawn: 600).")] = None,
    shard: Annotated[str, typer.Option(help="i/n: only every n-th problem, from the i-th on; `merge` joins.")] = "1/1",
    seed: Annotated[int, typer.Option(help="Of puzzles and sampling.")] = 0,
    engine: Annotated[str, typer.Option(help="local, vllm or auto.")] = AUTO,
    engine_option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Passed to the engine.")] = None,
    device: Device = AUTO,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = AUTO,
    memory_ratio: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="The engine's share of a GPU; the states' model lies beside it.")
    ] = 0.6,
    traces_at_once: Annotated[
        int | None, typer.Option(min=1, help="Traces sampled at a time (default: 1024 on a GPU, 64 elsewhere).")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers to store, such as -1,-9; -1 is the last, after its norm.")] = "-1",
    state_position: Annotated[Positions, typer.Option(help="Which states to store.")] = Positions.BOTH,
    confidence: Annotated[bool, typer.Option(help="Store token confidence too: the baseline of `eval`.")] = True,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest trace (default: the model's).")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Default: the model's own.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Default: the model's own.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Default: as in `gambit solve`.")] = None,
    answer: Annotated[str, typer.Option(help="How an answer is read: boxed, choice, number or text.")] = "boxed",
    graders: Annotated[int, typer.Option(min=1, help="Processes that compare answers.")] = 2,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens a pass of the states' model.")] = None,
    rollouts: Annotated[
        int, typer.Option(min=0, help="Continuations of each prefix, for `train --labels values`; 0: none.")
    ] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes a trace, each up to a random thought.")] = 1,
) -> None:
    """Sample traces of problems, grade them and store the states at their thought boundaries."""

    def body() -> int:
        from gambit.cli.options import key_values
        from gambit.config.options import EngineConfig, SearchConfig, build
        from gambit.core.types import StatePosition
        from gambit.storage.problems import shard_of
        from gambit.training.collect import Plan
        from gambit.training.sampling import PAWN_SOURCE

        first, every = shard_of(shard)
        tasks = _tasks(problems, limit, seed)[first::every]
        settings = {"seed": seed, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p,
                    "top_k": top_k, "system_prompt": system_prompt, "answer": answer}  # fmt: skip
        options = {"model": model, "engine": engine, "device": device, "dtype": dtype, "memory_ratio": memory_ratio,
                   "engine_options": key_values(engine_option or [], "--engine-option")}  # fmt: skip
        plan = Plan(
            out=out,
            source=problems if problems.startswith(PAWN_SOURCE) else Path(problems).name,
            engine=build(EngineConfig, options),
            search=build(SearchConfig, {name: value for name, value in settings.items() if value is not None}),
            traces_per_problem=traces,
            traces_at_once=traces_at_once or _traces_at_once(device),
            layers=_layers(layers),
            positions=tuple(StatePosition) if state_position is Positions.BOTH else (StatePosition(state_position),),
            with_confidence=confidence,
            batch_tokens=batch_tokens,
            num_graders=graders,
            num_rollouts=rollouts,
            prefixes_per_trace=prefixes,
        )
        return _collect(tasks, plan)

    exit_with(body)


@app.command()
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders that `collect --shard` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the whole collection.")],
) -> None:
    """Put collections that were made in the same way together."""

    def body() -> int:
        from gambit.training.storage import merge as run
        from gambit.training.values import merge_values

        put(f"{out}: {run(parts, out)} problems")
        merge_values(parts, out)
        return OK

    exit_with(body)


def _collect(tasks: Sequence[Task], plan: Plan) -> int:
    from gambit.cli.scorer_display import our_warnings, progress, summary_line
    from gambit.cli.signals import StopSignal
    from gambit.training.collect import collect as run

    began = time.monotonic()
    prepare_libraries()
    with our_warnings(), progress("collecting") as advance, StopSignal(lambda: None) as stop:
        summary = run(tasks, plan, on_progress=advance, should_stop=stop)
    put(summary_line(summary, plan.out, time.monotonic() - began))
    for reason in summary.refused[:5]:
        say(f"left out: {reason}", style="yellow")
    return stop.exit_code


def _tasks(source: str, limit: int | None, seed: int) -> list[Task]:
    from gambit.storage.problems import read_problems
    from gambit.training.sampling import PAWN_SOURCE, Task, pawn_tasks

    if source.startswith(PAWN_SOURCE):
        return pawn_tasks(source.removeprefix(PAWN_SOURCE), limit or 600, seed)
    path = Path(source)
    if path.suffix != ".jsonl":
        raise UserError(f"{source!r} is neither a .jsonl file nor pawn:SPLIT")
    found = read_problems(None, path, typer.get_text_stream("stdin"))
    unanswered = [problem.id for problem in found.problems if problem.id not in found.expected]
    if unanswered:
        raise UserError(f'{source}: {unanswered[0]} has no "answer", and a trace can only be graded by one')
    return [Task(problem, found.expected[problem.id]) for problem in found.problems[:limit]]


def _traces_at_once(device: str) -> int:
    from gambit.engines.local.model import pick_device

    return GPU_TRACES if pick_device(device).type == "cuda" else CPU_TRACES


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"layers {text!r}: give numbers such as -1,-9") from error


# -- train -----------------------------------------------------------------------------------------------------


@app.command()
def train(
    data: Annotated[Path, typer.Option(help="Folder that `gambit scorer collect` wrote.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write (.safetensors).")],
    architecture: Annotated[str, typer.Option(help="mlp (STEP's), mlp+confidence or sequence.")] = "mlp",
    objective: Annotated[
        str, typer.Option(help="auto, ridge, bce, last-step-bce, prefix, pairwise, or a sum such as prefix+pairwise.")
    ] = AUTO,
    state_position: Annotated[str, typer.Option(help="before, boundary, or auto: the better one.")] = AUTO,
    layers: Annotated[
        str, typer.Option(help="Layers to read, concatenated; auto: each alone and all together, the best is kept.")
    ] = AUTO,
    labels: Annotated[
        str, typer.Option(help="outcomes, or values: of the prefixes that `collect --rollouts` continued.")
    ] = "outcomes",
    validation: Annotated[float, typer.Option(help="Share of problems to choose by.")] = 0.15,
    test: Annotated[float, typer.Option(help="Share of problems kept for `eval`.")] = 0.15,
    seed: Annotated[int, typer.Option(help="Of weights and batches; the split has its own.")] = 0,
    split_seed: Annotated[int, typer.Option(help="Of the split by problem.")] = 0,
    epochs: Annotated[int | None, typer.Option(min=1, help="Most epochs (default: the recipe's).")] = None,
    balance: Annotated[
        bool | None, typer.Option(help="Weigh right and wrong alike (default: in the published recipes).")
    ] = None,
    normalise: Annotated[
        bool | None, typer.Option(help="Normalise the input of an mlp (default: but as published).")
    ] = None,
    width: Annotated[int | None, typer.Option(min=8, help="Of the sequence scorer (256), a multiple of 8.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Transformer blocks of the sequence scorer (2).")] = None,
    device: Device = AUTO,
    skip_corrupted: SkipCorrupted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checkpoint's metadata.")] = False,
    verbose: Annotated[bool, typer.Option(help="Tell every epoch.")] = False,
) -> None:
    """Fit scorers to a collection and keep the one that ranks held-out problems best."""

    def body() -> int:
        from gambit.cli.scorer_display import progress, show_training, warn
        from gambit.scorers.checkpoint import save_checkpoint
        from gambit.training.dataset import Division
        from gambit.training.train import TrainPlan, datasets_of, recipes_for
        from gambit.training.train import train as run

        changes = {"seed": seed, "max_epochs": epochs, "is_balanced": balance, "normalises": normalise,
                   "width": width, "blocks": blocks}  # fmt: skip
        given = {name: value for name, value in changes.items() if value is not None}
        division = Division(validation, test, split_seed)
        plan = TrainPlan(data, architecture, objective, state_position, None if layers == AUTO else _layers(layers),
                         division, given, device, skip_corrupted, labels)  # fmt: skip
        recipes_for(architecture, objective, given)  # a mistake is told before gigabytes are read
        skipped: list[str] = []
        datasets = datasets_of(plan, skipped)
        for line in dict.fromkeys(skipped):
            warn(line)
        with progress("training") as advance:
            trained = run(plan, datasets, advance, say if verbose else lambda _: None)
        save_checkpoint(trained.best.scorer, out, trained.metadata)
        show_training(out, trained, as_json)
        return OK

    exit_with(body)


# -- eval ------------------------------------------------------------------------------------------------------


@app.command(name="eval")
def evaluate(
    scorers: Annotated[list[str], typer.Argument(help="Checkpoints, or names of registered scorers.")],
    data: Annotated[Path, typer.Option(help="Folder that `gambit scorer collect` wrote.")],
    part: Annotated[
        str,
        typer.Option(help="all, test, validation, train; auto: test of the collection it was trained on, else all."),
    ] = AUTO,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the ranking curves as PNG (needs matplotlib).")] = None,
    rollouts: Annotated[int, typer.Option(min=0, help="pawn only: rollouts of the perfect judge, the ceiling.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes of the judge.")] = 1,
    device: Device = AUTO,
    skip_corrupted: SkipCorrupted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Judge scorers by how they rank right above wrong traces of a problem, beside what needs no training."""

    def body() -> int:
        from gambit.cli.scorer_display import our_warnings, show_report, warn
        from gambit.training.judging import judge_scorers, report_json

        if plot is not None:
            from gambit.training.plot import check_installed

            check_installed()
        with our_warnings():
            found = judge_scorers(
                scorers, data, part, device=device, num_rollouts=rollouts, num_workers=workers,
                skip_corrupted=skip_corrupted, warn=warn,
            )  # fmt: skip
        text = json.dumps(report_json(found), indent=2)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")
        if plot is not None:
            from gambit.training.plot import draw

            draw(found, plot)
        if as_json:
            typer.echo(text)
        else:
            show_report(found)
        return OK

    exit_with(body)


# -- import, show ----------------------------------------------------------------------------------------------


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="A published STEP checkpoint (.pt).")],
    out: Annotated[Path, typer.Option(help="The checkpoint to write (.safetensors).")],
    base_model: Annotated[str | None, typer.Option(help="The model it was trained for: folder or hub name.")] = None,
    state_position: Annotated[
        str | None, typer.Option(help="boundary (STEP's own) or before: which state it was trained on.")
    ] = None,
    aggregation: Annotated[str, typer.Option(help="mean (STEP's own) or last.")] = "mean",
    boundary_rule: Annotated[str, typer.Option(help="How thoughts were cut.")] = "blank-line",
) -> None:
    """Turn a published STEP checkpoint into a safetensors one; nothing in it is executed."""

    def body() -> int:
        from gambit.scorers.checkpoint import import_published, save_checkpoint

        info = _import_info(base_model, state_position, aggregation, boundary_rule)
        scorer = import_published(file, info)
        save_checkpoint(scorer, out, {"training": {"imported_from": file.name}})
        put(f"{out}: mlp for {info.base_model}, hidden size {scorer.info.hidden_size}, state {info.state_position}")
        if info.base_model_hash is None:
            say(f"note: the weights of {base_model} are not on this disk, so the checkpoint holds no hash of them")
        return OK

    exit_with(body)


def _import_info(base_model: str | None, position: str | None, aggregation: str, rule: str) -> ScorerInfo:
    from gambit.core.types import Aggregation, StatePosition
    from gambit.models import files as models
    from gambit.scorers.base import ScorerInfo

    needed = {"--base-model NAME": base_model, "--state-position boundary|before": position}
    missing = [flag for flag, value in needed.items() if value is None]
    if base_model is None or position is None:
        raise UserError(f"the file does not say what it was trained on: give {' and '.join(missing)}")
    for value, kind, flag in ((position, StatePosition, "state-position"), (aggregation, Aggregation, "aggregation")):
        if value not in list(kind):
            raise UserError(f"--{flag} {value!r}: use {' or '.join(kind)}")
    source = models.locate(base_model) if base_model == models.BUNDLED else base_model
    return ScorerInfo(
        "mlp", StatePosition(position), Aggregation(aggregation), boundary_rule=rule,
        hidden_size=models.hidden_size_on_disk(source), base_model=models.name_of(base_model),
        base_model_hash=models.weight_hash(source),
    )  # fmt: skip


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A scorer checkpoint (.safetensors).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a scorer was made for, from what, and how good it was."""

    def body() -> int:
        from gambit.cli.scorer_display import metadata_table
        from gambit.scorers.checkpoint import load_checkpoint, read_metadata

        scorer = load_checkpoint(file)  # a file that engines would refuse is refused here too
        metadata = read_metadata(file)
        if as_json:
            typer.echo(json.dumps({**metadata, "layers": list(scorer.info.layers)}))
            return OK
        put(metadata_table(metadata))
        return OK

    exit_with(body)

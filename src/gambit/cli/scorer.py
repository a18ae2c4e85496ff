"""`gambit scorer …`: makes a scorer for a model, judges it, imports and shows checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gambit.cli.commands import PlainCommand, PlainGroup, runs
from gambit.cli.scorer_collect import AUTO, Device, collect, layers_of, merge
from gambit.cli.scorer_verifier import VERIFIER, export, train_verifier
from gambit.cli.session import only_our_warnings, prepare_libraries
from gambit.cli.terminal import OK, exit_with, put, say, warn
from gambit.errors import UserError

if TYPE_CHECKING:
    from gambit.scorers.base import ScorerInfo
    from gambit.training.train import TrainPlan

app = typer.Typer(
    cls=PlainGroup,
    help="Make a scorer for a model: collect, merge, train, eval; export, import, show.",
    no_args_is_help=True,
)

SkipCorrupted = Annotated[bool, typer.Option(help="Go on without shards whose checksum is wrong.")]
MOST_SEED = 2**63 - 1
CHECKPOINT = ".safetensors"
app.command(cls=PlainCommand)(runs(collect))
app.command(cls=PlainCommand)(merge)
app.command(cls=PlainCommand)(export)


def command() -> object:
    return typer.main.get_command(app)


# -- train -----------------------------------------------------------------------------------------------------


@app.command(cls=PlainCommand)
def train(
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that `gambit scorer collect` wrote.")],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The checkpoint to write (.safetensors; of a verifier: a folder)."),
    ],
    architecture: Annotated[
        str, typer.Option(metavar="TEXT", help="mlp (STEP's), mlp+confidence, sequence or verifier (LoRA).")
    ] = "mlp",
    objective: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="auto, ridge, bce, last-thought-bce, prefix, pairwise, or a sum such as prefix+pairwise.",
        ),
    ] = AUTO,
    state_position: Annotated[
        str, typer.Option(metavar="TEXT", help="before, boundary, or auto: the better one.")
    ] = AUTO,
    layers: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Layers to read, concatenated; auto: each alone and all together, the best is kept."
        ),
    ] = AUTO,
    labels: Annotated[
        str,
        typer.Option(metavar="TEXT", help="outcomes of traces, or a .jsonl with a label of each thought."),
    ] = "outcomes",
    validation: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="NUMBER", help="Share of problems to choose by (0.15).")
    ] = None,
    test: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="NUMBER", help="Share of problems kept for `eval` (0.15).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, metavar="INT", help="Of weights and batches; the split has its own.")
    ] = 0,
    split_seed: Annotated[
        int | None, typer.Option(min=0, max=MOST_SEED, metavar="INT", help="Of the split by problem (0).")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=100_000, metavar="INT", help="Most epochs (default: the recipe's).")
    ] = None,
    balance: Annotated[
        bool | None, typer.Option(help="Weigh right and wrong alike (default: in the published recipes).")
    ] = None,
    normalise: Annotated[
        bool | None, typer.Option(help="Normalise the input of an mlp (default: but as published).")
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(min=8, max=65_536, metavar="INT", help="Of the sequence scorer (256), a multiple of 8."),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="INT", help="Transformer blocks of the sequence scorer (2).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="verifier: the model that wrote the traces, folder or hub name.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="verifier: go on from one that was trained before.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, metavar="NUMBER", help="verifier: train for so long at most.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="INT", help="verifier: of the LoRA (16).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0, max=1, metavar="NUMBER", help="verifier: highest learning rate (2e-4).")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="TEXT", help="verifier: layers with LoRA, such as q_proj,v_proj (all-linear).")
    ] = None,
    train_problems: Annotated[
        int | None, typer.Option(min=1, metavar="INT", help="verifier: so many only, for a learning curve.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="INT", help="verifier: tokens a step of the optimiser.")
    ] = None,
    pass_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=10**9, metavar="INT", help="verifier: tokens a pass, for the memory's sake."),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(help="verifier: keep no activations for the way back (default: if memory is short)."),
    ] = None,
    device: Device = AUTO,
    skip_corrupted: SkipCorrupted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checkpoint's metadata.")] = False,
    verbose: Annotated[bool, typer.Option(help="Tell every epoch.")] = False,
) -> None:
    """Fit scorers to a collection and keep the one that ranks held-out problems best."""

    def body() -> int:
        from gambit.cli.options import given

        _check_architecture(architecture, start)
        shares = given({"validation": validation, "test": test, "seed": split_seed})
        if architecture == VERIFIER:
            changes = given({"seed": seed, "epochs": epochs, "seconds": seconds, "rank": rank, "rate": rate,
                             "targets": targets, "update_tokens": batch_tokens, "pass_tokens": pass_tokens,
                             "recomputes": recompute, "num_problems": train_problems})  # fmt: skip
            train_verifier(data, out, model, start, changes, shares, labels, device, skip_corrupted, as_json)
            return OK
        from gambit.training.dataset import Division
        from gambit.training.train import TrainPlan

        changed = given({"seed": seed, "max_epochs": epochs, "is_balanced": balance, "normalises": normalise,
                         "width": width, "blocks": blocks})  # fmt: skip
        division = Division(**shares)  # type: ignore[arg-type]
        numbers = None if layers == AUTO else layers_of(layers, AUTO)
        plan = TrainPlan(data, architecture, objective, state_position, numbers, division, changed, device,
                         skip_corrupted, labels)  # fmt: skip
        _train_on_states(plan, out, as_json, verbose)
        return OK

    exit_with(body)


def _train_on_states(plan: TrainPlan, out: Path, as_json: bool, verbose: bool) -> None:
    from gambit.cli.progress import progress_bar
    from gambit.cli.scorer_display import show_training
    from gambit.scorers.checkpoint import save_checkpoint
    from gambit.storage.run_folder import check_replaceable
    from gambit.training.train import datasets_of, recipes_for
    from gambit.training.train import train as run

    check_replaceable(out, CHECKPOINT)
    recipes_for(plan.architecture, plan.objective, plan.changes)  # a mistake is told before gigabytes are read
    skipped: list[str] = []
    datasets = datasets_of(plan, skipped)
    for line in dict.fromkeys(skipped):
        warn(line)
    with progress_bar("training") as advance:
        trained = run(plan, datasets, advance, say if verbose else lambda _: None)
    save_checkpoint(trained.best.scorer, out, trained.metadata)
    show_training(out, trained, as_json)


def _check_architecture(architecture: str, start: str | None) -> None:
    from gambit.training.networks import ARCHITECTURES

    known = (*ARCHITECTURES, VERIFIER)
    if architecture not in known:
        raise UserError(f"unknown architecture {architecture!r}: use {', '.join(known)}")
    if start is not None and architecture != VERIFIER:
        raise UserError(f"--start is for verifiers: leave it out, {architecture} is fitted anew in minutes")


# -- eval ------------------------------------------------------------------------------------------------------


@app.command(name="eval", cls=PlainCommand)
def evaluate(
    scorers: Annotated[
        list[str],
        typer.Argument(metavar="SCORER...", help="Checkpoints, folders of verifiers, or registered scorers."),
    ],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that `gambit scorer collect` wrote.")],
    part: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="all, test, validation, train; auto: test of the collection it was trained on, else all.",
        ),
    ] = AUTO,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ranking curves as PNG (needs matplotlib).")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the figures into the checkpoints: searches trust them by these.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of a verifier, where its own name does not lead to the weights.")
    ] = None,
    device: Device = AUTO,
    skip_corrupted: SkipCorrupted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Judge scorers by how they rank right above wrong traces of a problem, beside what needs no training."""

    def body() -> int:
        prepare_libraries()
        from gambit.cli.scorer_display import show_report
        from gambit.storage.run_folder import check_replaceable
        from gambit.training.judging import check_writable_trust, judge_scorers, report_json, write_figures
        from gambit.verifiers.names import trained_scorer

        names = [trained_scorer(each) for each in scorers]
        if write:
            check_writable_trust(names, data, part)
        if out is not None:
            check_replaceable(out, ".json")
        if plot is not None:
            from gambit.training.plot import check_installed

            check_replaceable(plot, ".png")
            check_installed()
        with only_our_warnings():
            found = judge_scorers(
                names, data, part, device=device, model=model, skip_corrupted=skip_corrupted, warn=warn
            )
        if write:
            write_figures(names, found)
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


@app.command(name="import", cls=PlainCommand)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A published STEP checkpoint (.pt).")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The checkpoint to write (.safetensors).")],
    base_model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The model it was trained for: folder or hub name.")
    ] = None,
    state_position: Annotated[
        str | None, typer.Option(metavar="TEXT", help="boundary (STEP's own) or before: which state it was trained on.")
    ] = None,
    aggregation: Annotated[str, typer.Option(metavar="TEXT", help="mean (STEP's own) or last.")] = "mean",
    boundary_rule: Annotated[str, typer.Option(metavar="TEXT", help="How thoughts were cut.")] = "blank-line",
) -> None:
    """Turn a published STEP checkpoint into a safetensors one; nothing in it is executed."""

    def body() -> int:
        from gambit.scorers.checkpoint import import_published, save_checkpoint
        from gambit.storage.run_folder import check_replaceable

        check_replaceable(out, CHECKPOINT)
        info = _import_info(base_model, state_position, aggregation, boundary_rule)
        scorer = import_published(file, info)
        save_checkpoint(scorer, out, {"training": {"imported_from": file.name}})
        put(f"{out}: mlp for {info.base_model}, hidden size {scorer.info.hidden_size}, state {info.state_position}")
        if info.base_model_hash is None:
            say(f"note: the weights of {base_model} are not on this disk, so the checkpoint holds no hash of them")
        return OK

    exit_with(body)


def _import_info(base_model: str | None, position: str | None, aggregation: str, rule: str) -> ScorerInfo:
    from gambit.models import files as models
    from gambit.scorers.base import ScorerInfo
    from gambit.types import Aggregation, StatePosition

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


@app.command(cls=PlainCommand)
def show(
    scorer: Annotated[
        str,
        typer.Argument(metavar="SCORER", help="A checkpoint (.safetensors) or the folder of a verifier."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a scorer was made for, from what, and how good it was."""

    def body() -> int:
        from gambit.cli.scorer_display import metadata_table

        metadata = _metadata_of(scorer)
        if as_json:
            typer.echo(json.dumps(metadata))
        else:
            put(metadata_table(metadata))
        return OK

    exit_with(body)


def _metadata_of(scorer: str) -> dict[str, Any]:
    from gambit.scorers.checkpoint import load_checkpoint, read_metadata
    from gambit.verifiers.lora_folder import read_info
    from gambit.verifiers.names import VerifierName, parse_scorer, trained_scorer

    found, path = parse_scorer(scorer), Path(trained_scorer(scorer))
    if isinstance(found, str):
        raise UserError(f"scorer {scorer!r} has no checkpoint to show: give a .safetensors file, or the folder of a "
                        "verifier")  # fmt: skip
    if isinstance(found, VerifierName):
        return read_info(path).model_dump(mode="json")
    loaded = load_checkpoint(path)  # a file that engines would refuse is refused here too
    return {**read_metadata(path), "layers": list(loaded.info.layers)}

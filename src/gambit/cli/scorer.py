"""`gambit scorer …`: the options of its commands; their work is in `scorer_work`, which is imported at the call."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from gambit.cli.commands import PlainGroup, kind_of, runs
from gambit.cli.options import FILE, FOLDER, MANY, RAY_PANEL, with_options
from gambit.config.options import MOST_TRACES_AT_ONCE, CheckedModel

AUTO, NONE = "auto", "none"
MOST_SEED = 2**63 - 1
DEVICES = "auto, cpu, cuda, cuda:0 or mps"
TRACES_AT_ONCE = "traces sampled at a time (default: 1024 on a GPU, 64 elsewhere)"
MEMORY_RATIO = "the engine's share of a GPU; the model of the states lies beside it"
COLLECTION = "folder that `gambit scorer collect` wrote"
SKIP_CORRUPTED = "go on without shards whose checksum is wrong"
PRESENT = "default: the model's own"

app = typer.Typer(
    cls=PlainGroup,
    help="Make a scorer for a model, judge it, take a published one, or send one to the hub.",
    no_args_is_help=True,
)


def command(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers a function as a command; it leaves with the exit code that the function returns."""

    def registered(function: Callable[..., int]) -> Callable[..., int]:
        app.command(name, cls=kind_of(function))(runs(function))
        return function

    return registered


class CollectOptions(CheckedModel):
    """The options of `gambit scorer collect`."""

    problems: str = Field(
        description="a benchmark, hf:DATASET[:SPLIT], or a .jsonl, .json or .csv with question and answer; pawn:SPLIT "
        "(scorer, dev, test); chains:STEPS or moves:STEPS (of the train split, or with ,split=NAME: dev, judge, test)"
    )
    out: Path = Field(description="of the collection; resumed if it exists", json_schema_extra=FOLDER)
    columns: str | None = Field(None, description="names of the file's columns, as in question=prompt")
    model: str = Field("pawn", description="folder or hub name")
    traces: int = Field(16, ge=1, le=1_000_000, description="traces a problem")
    limit: int | None = Field(None, ge=1, le=MANY, description="first problems only (puzzles, chains: 600)")
    only: str | None = Field(None, description="only the problems with these numbers, counted from 1, as in 12,27")
    shard: str = Field("1/1", description="i/n: only every n-th problem, from the i-th on; `merge` joins")
    seed: int = Field(0, description="of puzzles and sampling")
    engine: str = Field(AUTO, description="local, vllm or auto")
    engine_options: dict[str, object] = Field(default_factory=dict, description="passed to the engine")
    lora: str | None = Field(None, description="LoRA adapter of the model to sample and read with; vllm")
    device: str = Field(AUTO, description=DEVICES)
    dtype: str = Field(AUTO, description="auto, float32, float16 or bfloat16")
    memory_ratio: float = Field(0.6, ge=0.05, le=1.0, description=MEMORY_RATIO)
    traces_at_once: int | None = Field(None, ge=1, le=MOST_TRACES_AT_ONCE, description=TRACES_AT_ONCE)
    layers: str = Field(
        "-1", description="layers to store, such as -1,-9; -1 is the last, after its norm; none: for verifiers"
    )
    state_position: Literal["before", "boundary", "both"] = Field("both", description="which states to store")
    boundary: str = Field("blank-line", description="where a thought ends: blank-line, line, sentence or stride:N")
    confidence: bool = Field(True, description="store token confidence too: the baseline of `eval`")
    max_new_tokens: int | None = Field(None, ge=1, le=MANY, description="longest trace (default: the model's)")
    temperature: float | None = Field(None, ge=0, le=100, description=PRESENT)
    top_p: float | None = Field(None, ge=0, le=1, description=PRESENT)
    top_k: int | None = Field(None, ge=0, le=MANY, description=PRESENT)
    system_prompt: str | None = Field(None, description="default: as in `gambit solve`")
    answer: str = Field("boxed", description="how an answer is read: boxed, choice, number or text")
    graders: int = Field(2, ge=1, le=64, description="processes that compare answers")
    batch_tokens: int | None = Field(None, ge=1, le=10**9, description="tokens a pass of the states' model")
    quiet: bool = Field(False, description="no progress and no warnings")


@command("collect")
@with_options(
    RAY_PANEL,
    usual=("problems", "out", "model", "engine", "traces", "limit", "max_new_tokens", "temperature", "layers", "quiet"),
)
def collect(options: CollectOptions, **flags: str | None) -> int:
    """Sample traces of problems, grade them and store the states at their thought boundaries."""
    from gambit.cli import scorer_work

    return scorer_work.collect(options, flags)


@command("merge")
def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="That `collect --shard` wrote.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the whole collection.")],
) -> int:
    """Put collections that were made in the same way together."""
    from gambit.cli import scorer_work

    return scorer_work.merge(folders, out)


@command("export")
def export(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Of a verifier that `train` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the model to write.")],
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The weights under it, where its own name does not lead to them.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="TEXT", help=f"{DEVICES}.")] = AUTO,
) -> int:
    """Merge a verifier's adapter into its model: a sequence classifier with one label for transformers and vLLM."""
    from gambit.cli import scorer_work

    return scorer_work.export(folder, out, model, device)


class TrainOptions(CheckedModel):
    """The options of `gambit scorer train`."""

    data: Path = Field(description=COLLECTION, json_schema_extra=FOLDER)
    out: Path = Field(
        description="the checkpoint to write (.safetensors; of a verifier: a folder)", json_schema_extra=FILE
    )
    architecture: str = Field("mlp", description="mlp (STEP's), mlp+confidence, sequence or verifier (LoRA)")
    objective: str = Field(
        AUTO, description="auto, ridge, bce, last-thought-bce, prefix, pairwise, or a sum such as prefix+pairwise"
    )
    state_position: str = Field(AUTO, description="before, boundary, or auto: the better one")
    layers: str = Field(
        AUTO, description="layers to read, concatenated; auto: each alone and all together, the best is kept"
    )
    labels: str = Field("outcomes", description="outcomes of traces, or a .jsonl with a label of each thought")
    validation: float | None = Field(None, ge=0, le=1, description="share of problems to choose by (0.15)")
    test: float | None = Field(None, ge=0, le=1, description="share of problems kept for `eval` (0.15)")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="of weights and batches; the split has its own")
    split_seed: int | None = Field(None, ge=0, le=MOST_SEED, description="of the split by problem (0)")
    epochs: int | None = Field(None, ge=1, le=100_000, description="most epochs (default: the recipe's)")
    balance: bool | None = Field(None, description="weigh right and wrong alike (default: in the published recipes)")
    normalise: bool | None = Field(None, description="normalise the input of an mlp (default: but as published)")
    width: int | None = Field(None, ge=8, le=65_536, description="of the sequence scorer (256), a multiple of 8")
    blocks: int | None = Field(None, ge=1, le=256, description="transformer blocks of the sequence scorer (2)")
    model: str | None = Field(None, description="verifier: the model that wrote the traces, folder or hub name")
    start: str | None = Field(
        None, description="verifier: go on from one that was trained before", json_schema_extra=FOLDER
    )
    seconds: float | None = Field(None, ge=1, description="verifier: train for so long at most")
    rank: int | None = Field(None, ge=1, le=1024, description="verifier: of the LoRA (16)")
    rate: float | None = Field(None, ge=0, le=1, description="verifier: highest learning rate (2e-4)")
    targets: str | None = Field(None, description="verifier: layers with LoRA, such as q_proj,v_proj (all-linear)")
    train_problems: int | None = Field(None, ge=1, description="verifier: so many only, for a learning curve")
    batch_tokens: int | None = Field(None, ge=1, le=10**9, description="verifier: tokens a step of the optimiser")
    pass_tokens: int | None = Field(None, ge=1, le=10**9, description="verifier: tokens a pass, for the memory's sake")
    recompute: bool | None = Field(
        None, description="verifier: keep no activations for the way back (default: if memory is short)"
    )
    device: str = Field(AUTO, description=DEVICES)
    skip_corrupted: bool = Field(False, description=SKIP_CORRUPTED)
    as_json: bool = Field(False, description="print the checkpoint's metadata")
    verbose: bool = Field(False, description="report every epoch")


@command("train")
@with_options(
    usual=("data", "out", "architecture", "objective", "state_position", "layers", "epochs", "seed", "device",
           "verbose"),
)  # fmt: skip
def train(options: TrainOptions) -> int:
    """Fit scorers to a collection and keep the one that ranks held-out problems best."""
    from gambit.cli import scorer_work

    return scorer_work.train(options)


class EvalOptions(CheckedModel):
    """The options of `gambit scorer eval`."""

    data: Path | None = Field(None, description=COLLECTION, json_schema_extra=FOLDER)
    problems: str | None = Field(
        None,
        description="with a MODEL for the SCORER: judge its own scorer on these, collected first (as in `collect`)",
    )
    traces: int = Field(16, ge=2, le=1_000_000, description="with --problems: traces a problem")
    limit: int | None = Field(None, ge=1, le=MANY, description="with --problems: first problems only")
    max_new_tokens: int | None = Field(None, ge=1, le=MANY, description="with --problems: longest trace")
    part: str = Field(
        AUTO, description="all, test, validation, train; auto: test of the collection it was trained on, else all"
    )
    out: Path | None = Field(None, description="write the report as JSON", json_schema_extra=FILE)
    plot: Path | None = Field(None, description="write plots of ranks and calibration (.svg)", json_schema_extra=FILE)
    write: bool = Field(False, description="write the figures into the checkpoints: searches trust them by these")
    model: str | None = Field(None, description="of a verifier, where its own name does not lead to the weights")
    device: str = Field(AUTO, description=DEVICES)
    skip_corrupted: bool = Field(False, description=SKIP_CORRUPTED)
    as_json: bool = Field(False, description="print the report as JSON")


@command("eval")
@with_options(usual=("data", "problems", "traces", "limit", "part", "out", "plot", "write", "device", "as_json"))
def evaluate(
    scorers: Annotated[
        list[str],
        typer.Argument(metavar="SCORER...", help="Checkpoints, folders of verifiers, registered scorers, or a model."),
    ],
    options: EvalOptions,
) -> int:
    """Judge scorers by how they rank right above wrong traces of a problem, beside what needs no training."""
    from gambit.cli import scorer_work

    return scorer_work.evaluate(scorers, options)


class ImportOptions(CheckedModel):
    """The options of `gambit scorer import`."""

    out: Path = Field(description="the checkpoint to write (.safetensors)", json_schema_extra=FILE)
    base_model: str | None = Field(None, description="the model it was trained for: folder or hub name")
    state_position: str | None = Field(
        None, description="boundary (STEP's own) or before: which state it was trained on"
    )
    aggregation: str = Field("mean", description="mean (STEP's own) or last")
    boundary_rule: str = Field("blank-line", description="how thoughts were cut")


@command("import")
@with_options()
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A published STEP checkpoint (.pt).")],
    options: ImportOptions,
) -> int:
    """Turn a published STEP checkpoint into a safetensors one; nothing in it is executed."""
    from gambit.cli import scorer_work

    return scorer_work.import_checkpoint(file, options)


@command("show")
def show(
    scorer: Annotated[
        str, typer.Argument(metavar="SCORER", help="A checkpoint (.safetensors), the folder of a verifier, or a model.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all that is known.")] = False,
) -> int:
    """Show what a scorer was made for, from what, and how good it was."""
    from gambit.cli import scorer_work

    return scorer_work.show(scorer, as_json=as_json, is_verbose=is_verbose)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, or the folder of a model called like it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


@command("get")
def get(model: Model, as_json: AsJson = False) -> int:
    """Fetch the scorer that is published for a model, check it and keep it where searches look."""
    from gambit.cli import scorer_published

    return scorer_published.get(model, as_json=as_json)


@command("list")
def list_published(as_json: AsJson = False) -> int:
    """List the models for which a scorer is published, and which of them are on this machine."""
    from gambit.cli import scorer_published

    return scorer_published.show_list(as_json=as_json)


@command("push")
def push(
    scorer: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint (.safetensors).")],
    repository: Annotated[str, typer.Argument(metavar="ORG/REPO", help="On the hub; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others cannot read.")] = False,
    card: Annotated[bool, typer.Option("--card", help="Print the card and send nothing.")] = False,
) -> int:
    """Send a scorer to the hub, with a card of its figures; others name it as --scorer hf:ORG/REPO."""
    from gambit.cli import scorer_published

    return scorer_published.push_scorer(scorer, repository, is_private=private, only_card=card)

"""`gambit scorer train --architecture verifier` and `gambit scorer export`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gambit.cli.scorer_collect import AUTO, Device
from gambit.cli.session import only_our_warnings, prepare_libraries
from gambit.cli.terminal import OK, exit_with, put, say, warn
from gambit.errors import UserError

if TYPE_CHECKING:
    from gambit.training.verifier.train import TrainedVerifier

VERIFIER = "verifier"


def train_verifier(
    data: Path,
    out: Path,
    model: str | None,
    start: str | None,
    changes: Mapping[str, object],
    shares: Mapping[str, float],
    labels: str,
    device: str,
    skip_corrupted: bool,
    as_json: bool,
) -> None:
    """Progress goes to stderr line by line: such a training is often watched through a file."""
    prepare_libraries()
    from gambit.storage.run_folder import check_replaceable_folder
    from gambit.training.dataset import Division
    from gambit.training.verifier.recipe import VerifierPlan, VerifierRecipe, continued, division_of
    from gambit.training.verifier.train import passages_of
    from gambit.training.verifier.train import train_verifier as run
    from gambit.verifiers.lora import check_installed
    from gambit.verifiers.lora_folder import is_verifier, read_info
    from gambit.verifiers.names import verifier_folder

    if model is None:
        raise UserError("a verifier is trained on the weights of the model that wrote the traces: name it with --model")
    if out.suffix == ".safetensors":
        raise UserError(f"a verifier is a folder, {out} looks like a file: give --out without .safetensors")
    check_replaceable_folder(out, "a verifier", is_own=is_verifier(out))
    check_installed()
    recipe = VerifierRecipe(**changes)  # type: ignore[arg-type]
    division = Division()
    begun = None if start is None else verifier_folder(start)
    if begun is not None:
        recipe = continued(recipe, begun, frozenset(changes))
        division = division_of(read_info(begun)) or division
    division = dataclasses.replace(division, **shares)  # type: ignore[arg-type]
    plan = VerifierPlan(data, model, recipe, division, labels, device, skip_corrupted, begun)
    skipped: list[str] = []
    passages = passages_of(plan, skipped)
    for line in dict.fromkeys(skipped):
        warn(line)
    with only_our_warnings():
        trained = run(plan, passages, say)
    files = trained.verifier.save(out)
    _show(out, trained, [path.stat().st_size for path in files], as_json)


def _show(out: Path, trained: TrainedVerifier, sizes: list[int], as_json: bool) -> None:
    if as_json:
        typer.echo(trained.verifier.info.model_dump_json())
        return
    quarters = " / ".join(f"{auc:.3f}" for auc in trained.quarters)
    put(f"{out}: verifier, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB; {trained.seconds:.0f} s at "
        f"{trained.tokens_per_second:,.0f} tokens/s; held-out AUC within problems {trained.held_out_auc:.4f}, at "
        f"25 / 50 / 75 / 100 %: {quarters}")  # fmt: skip


def export(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Of a verifier that `train` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the model to write.")],
    model: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The weights under it, where its own name does not lead to them.")
    ] = None,
    device: Device = AUTO,
) -> None:
    """Merge a verifier's adapter into its model: a sequence classifier with one label for transformers and vLLM."""

    def body() -> int:
        prepare_libraries()
        from gambit.engines.local.model import pick_device
        from gambit.storage.run_folder import check_replaceable_folder
        from gambit.verifiers.lora import LoraVerifier, is_exported
        from gambit.verifiers.lora import export as run
        from gambit.verifiers.names import verifier_folder

        check_replaceable_folder(out, "an exported verifier", is_own=is_exported(out))
        with only_our_warnings():
            run(LoraVerifier.load(verifier_folder(folder), pick_device(device), model), out, model)
        put(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:,.0f} MB")
        return OK

    exit_with(body)

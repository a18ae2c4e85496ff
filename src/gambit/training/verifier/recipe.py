"""The settings of a verifier's training, and the verifier that it starts from: fresh, or trained before."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.base import check_fit
from gambit.training.dataset import OUTCOMES, Division
from gambit.training.storage import Header
from gambit.training.train import AUTO
from gambit.verifiers.lora import LoraVerifier, info_for
from gambit.verifiers.lora_folder import ALL_LINEAR, HEAD, LoraInfo, read_info, read_weights

# Tokens of one step of the optimiser and, at most, of one pass, which keeps about 3 MB a token of a 1.5B model to go
# back; on CUDA it is measured how many of them the memory holds.
UPDATE_TOKENS = {"cuda": 24_576, "mps": 8_192, "cpu": 1_024}
PASS_TOKENS = {"cuda": 32_768, "mps": 4_096, "cpu": 1_024}
SHAPE = ("rank", "alpha", "targets")  # of an adapter: one that is continued keeps it


@dataclass(frozen=True, slots=True)
class VerifierRecipe:
    """The settings of one training."""

    rank: int = 16
    alpha: float = 32.0
    targets: str = ALL_LINEAR
    rate: float = 2e-4  # of the adapter, at its highest
    head_rate: float = 5e-3
    warmup: float = 0.05  # share of the training over which the rate rises; then it falls to 0 in a line
    weight_decay: float = 0.0
    most_gradient: float = 1.0  # its norm is cut to this
    chance_weight: float = 0.5  # of the cross-entropy, beside the ranking loss
    traces_per_problem: int = 8  # in an epoch; half of them right where there are enough
    uniform_traces: int = 2  # of a problem with right or wrong traces only
    num_problems: int | None = None  # of those to train on, drawn at random: for a learning curve
    epochs: int = 4  # at most
    seconds: float | None = None  # at most; the rate is 0 when they are over
    update_tokens: int | None = None  # None: what suits the device
    pass_tokens: int | None = None
    recomputes: bool | None = None  # activations on the way back: less memory, a third more time; None: if need be
    seed: int = 0


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """A training: a model, a collection, a recipe."""

    data: Path
    model: str
    recipe: VerifierRecipe = field(default_factory=VerifierRecipe)
    division: Division = field(default_factory=Division)
    labels: str = OUTCOMES
    device: str = AUTO
    start: Path | None = None  # the folder of a verifier to continue


def continued(recipe: VerifierRecipe, start: Path, given: frozenset[str]) -> VerifierRecipe:
    """Returns the recipe with the shape of the adapter that it continues, except for values that the user gave."""
    info = read_info(start)
    return dataclasses.replace(recipe, **{name: getattr(info, name) for name in SHAPE if name not in given})


def division_of(info: LoraInfo) -> Division | None:
    """Returns how the problems were divided when a verifier was trained; None where its folder does not hold it."""
    found = info.training.get("division")
    return Division(**found) if isinstance(found, dict) else None


def starting_verifier(plan: VerifierPlan, header: Header, device: torch.device) -> LoraVerifier:
    """Returns the verifier to train. It needs the model that wrote the traces."""
    info = info_for(plan.model, boundary_rule=header.boundary_rule,
                    **{name: getattr(plan.recipe, name) for name in SHAPE})  # fmt: skip
    found = info.made_for(plan.model)
    check_fit(header.made_for(f"{plan.data}"), found, "give the model that wrote the traces", needs_weights=True)
    if plan.start is not None:
        _check_continues(plan.start, info, header, plan.division)
    verifier = LoraVerifier.fresh(models.locate(plan.model), info, device)
    if plan.start is not None:
        tensors = read_weights(plan.start)
        verifier.head.weight.data.copy_(tensors.pop(HEAD))
        verifier.set_adapter(tensors)
    return verifier


def _check_continues(start: Path, now: LoraInfo, header: Header, division: Division) -> None:
    """Raises if the adapter is for another model or of another shape, or was trained on problems now held out.

    A problem's part follows from its id: what is held out now must have been held out then.
    """
    before = read_info(start)
    own = "an adapter fits its own model only"
    check_fit(before.made_for(f"{start}"), now.made_for("this model"), own, needs_weights=True)
    for name in SHAPE:
        mine, theirs = getattr(now, name), getattr(before, name)
        if mine != theirs:
            raise UserError(f"{start} has {name} {theirs}, this training has {mine}: leave that option out, or train "
                            "anew without --start")  # fmt: skip
    then = division_of(before)
    if before.training.get("source") != header.source or then is None:
        return
    held_out = division.validation + division.test
    if division.seed != then.seed or held_out > then.validation + then.test + 1e-9:
        raise UserError(f"{start} was trained with --validation {then.validation} --test {then.test} --split-seed "
                        f"{then.seed}: with {division.validation}, {division.test} and {division.seed} it would be "
                        "judged by problems that it was trained on: hold out no more than then")  # fmt: skip

"""The verifier that a training begins with: a fresh adapter, or one that was trained before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.base import check_fit
from gambit.training.dataset import Division
from gambit.training.storage import Header
from gambit.training.verifier.recipe import VerifierPlan, VerifierRecipe
from gambit.verifiers.lora import LoraVerifier, info_for
from gambit.verifiers.lora_folder import HEAD, LoraInfo, read_info, read_weights


def beginning(plan: VerifierPlan, header: Header, device: torch.device) -> LoraVerifier:
    """On the model that wrote the traces; no other will do."""
    recipe = plan.recipe
    info = info_for(plan.model, rank=recipe.rank, alpha=recipe.alpha, targets=recipe.targets,
                    boundary_rule=header.boundary_rule)  # fmt: skip
    found = info.made_for(plan.model)
    check_fit(header.made_for(f"{plan.data}"), found, "give the model that wrote the traces", needs_weights=True)
    if plan.start is None:
        return LoraVerifier.fresh(models.locate(plan.model), info, device)
    _check_same(plan.start, read_info(plan.start), info)
    _check_division(plan.start, read_info(plan.start), header, plan.division)
    tensors = read_weights(plan.start)
    verifier = LoraVerifier.fresh(models.locate(plan.model), info, device)
    verifier.head.weight.data.copy_(tensors.pop(HEAD))
    verifier.set_adapter(tensors)
    return verifier


def _check_same(start: Path, before: LoraInfo, now: LoraInfo) -> None:
    own = "an adapter fits its own model only"
    check_fit(before.made_for(f"{start}"), now.made_for("this model"), own, needs_weights=True)
    for name in ("rank", "alpha", "targets"):
        mine, theirs = getattr(now, name), getattr(before, name)
        if mine != theirs:
            raise UserError(f"{start} has {name} {theirs}, {mine} was asked for: leave that out, or begin anew "
                            "without --start")  # fmt: skip


def _check_division(start: Path, before: LoraInfo, header: Header, now: Division) -> None:
    """A problem's part follows from its id: what is held out now must have been held out then."""
    if before.training.get("source") != header.source:
        return
    then = division_of(before)
    if then is None or (now.seed == then.seed and now.validation + now.test <= then.validation + then.test + 1e-9):
        return
    raise UserError(f"{start} was trained with --validation {then.validation} --test {then.test} --split-seed "
                    f"{then.seed}: with {now.validation}, {now.test} and {now.seed} it would be judged by problems "
                    "that it was trained on; hold out no more than then")  # fmt: skip


def division_of(info: LoraInfo) -> Division | None:
    found = info.training.get("division")
    return Division(**found) if isinstance(found, dict) else None


def continued(recipe: VerifierRecipe, start: Path, given: frozenset[str]) -> VerifierRecipe:
    """With the adapter's own shape, where no other was given."""
    info = read_info(start)
    shape = {name: getattr(info, name) for name in ("rank", "alpha", "targets") if name not in given}
    return dataclasses.replace(recipe, **shape)

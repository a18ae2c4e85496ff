"""Puts the shards of one bench run into one folder."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from gambit.bench.folder import (
    LOGS_FOLDER,
    BenchPlan,
    add_environment,
    create,
    differences,
    read_environments,
    read_plan,
)
from gambit.bench.recipe import BenchRecipe
from gambit.bench.rows import RowWriter, TaskKey, read_rows
from gambit.errors import UserError


def merge_shards(folders: Sequence[Path], out: Path) -> list[str]:
    """Put rows, environments and logs of all shards into `out`; gives warnings, such as a missing shard."""
    if out in folders:
        raise UserError(f"--out {out} is one of the shards: choose a new folder")
    plans = {folder: read_plan(folder) for folder in folders}
    whole = _whole_plan(plans)
    _check_disjoint(folders)
    create(out, whole)
    with RowWriter(out) as writer:
        for folder in folders:
            for row in read_rows(folder):
                writer.write(row)
    for folder in folders:
        for environment in read_environments(folder):
            add_environment(out, environment)
        if (folder / LOGS_FOLDER).is_dir():
            shutil.copytree(folder / LOGS_FOLDER, out / LOGS_FOLDER, dirs_exist_ok=True)
    return _missing(list(plans.values()))


def _without_shard(plan: BenchPlan) -> BenchPlan:
    bench = plan.recipe.bench.model_copy(update={"shard": "1/1"})
    return dataclasses.replace(plan, recipe=BenchRecipe(bench, plan.recipe.search, plan.recipe.engine))


def _whole_plan(plans: dict[Path, BenchPlan]) -> BenchPlan:
    """The plan that they share, without the shard."""
    (first_folder, first), *others = plans.items()
    whole = _without_shard(first)
    for folder, plan in others:
        found = list(differences(whole.to_json(), _without_shard(plan).to_json()))
        if found:
            raise UserError(f"{first_folder} and {folder} are not shards of one run ({'; '.join(found)})")
    return whole


def _check_disjoint(folders: Sequence[Path]) -> None:
    seen: dict[TaskKey, Path] = {}
    for folder in folders:
        for row in read_rows(folder):
            if row.key in seen:
                raise UserError(f"{seen[row.key]} and {folder} both hold {' / '.join(map(str, row.key))}")
            seen[row.key] = folder


def _missing(plans: Sequence[BenchPlan]) -> list[str]:
    counts = {plan.recipe.bench.part[1] for plan in plans}
    if len(counts) > 1:
        return [f"the shards are cut differently ({', '.join(plan.recipe.bench.shard for plan in plans)})"]
    here = {plan.recipe.bench.part[0] for plan in plans}
    absent = [number + 1 for number in range(*counts) if number not in here]
    return [f"shard {number} of {next(iter(counts))} is missing" for number in absent]

"""Every recipe of the paper from its start to its report, with pawn in the model's place and everything small."""

from pathlib import Path

import pytest

from gambit.bench.folder import create, make_plan
from gambit.bench.recipe import BenchRecipe, recipe_from
from gambit.bench.report import write_report
from gambit.bench.rows import RowWriter, read_rows
from gambit.bench.run import LocalSearches, Runner
from gambit.config.yaml_file import read_mapping
from gambit.solver import Solver
from support import ROOT
from support.tables import table

pytestmark = pytest.mark.system
RECIPES = sorted((ROOT / "benchmarks" / "paper").glob("*.yaml"))
SMALL = {
    "model": "pawn", "engine": "local", "engine_options": {}, "scorer": "auto", "benchmarks": ["pawn"], "problems": [3],
    "seeds": [0, 1], "capacity": 8, "num_traces": 8, "swap_size": 2, "check_interval": 16, "warmup_tokens": 24,
    "max_new_tokens": 90, "system_prompt": "",
}  # fmt: skip
SMALLER = {"swap_size": 1, "check_interval": 8, "warmup_tokens": 16, "num_traces": 12, "capacity": 12}
EMBEDDER = "policy_options.embedder"  # a package that is not here


def miniature(path: Path) -> BenchRecipe:
    """The recipe with all its methods, options and sweeps; numbers alone are smaller."""
    values = {**read_mapping(path, "recipe"), **SMALL}
    variants = values.get("variants", {})
    small = {
        label: {key: SMALLER.get(key, value) for key, value in options.items() if key != EMBEDDER}
        for label, options in variants.items()
    }
    sweep = {key: [SMALLER[key]] for key in values.get("sweep", {})}
    return recipe_from({**values, "variants": small, "sweep": sweep})


@pytest.fixture(scope="module")
def solver():
    with Solver("pawn", engine="local", kv_budget_tokens=600) as found:
        yield found


@table("path", RECIPES)
def test_a_miniature_runs_to_its_report(path, solver, tmp_path, monkeypatch):
    if path != RECIPES[0]:
        monkeypatch.setattr("gambit.bench.report.draw_all", lambda *_: [])  # pictures take longer than the searches
    recipe = miniature(path)
    recipe.check()
    folder = tmp_path / path.stem
    plan, benchmarks = make_plan(recipe, {})
    create(folder, plan)
    with RowWriter(folder) as writer:
        Runner(plan, benchmarks, LocalSearches(solver, folder, lambda: False), writer, set()).run()
    rows = list(read_rows(folder))
    assert len(rows) == plan.num_tasks == 2 * len(plan.variants) and not any(row.error for row in rows)
    assert all(row.completed for row in rows)
    report = write_report(folder, with_trees=False)
    assert {cell["variant"] for cell in report.figures["cells"]} == {variant.label for variant in plan.variants}
    written = {file.name for file in (folder / "tables").iterdir()}
    assert {
        "accuracy_and_tokens.csv",
        "accuracy_and_tokens.tex",
        "seeds.csv",
        "pass_at_k_and_majority_at_k.csv",
    } <= written

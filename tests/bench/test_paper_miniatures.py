"""Every recipe and script of the paper from start to report, with pawn in the model's place and everything small."""

import json
from pathlib import Path

import pytest
import yaml
from benchmarks.paper import prefix_value, scorer_architecture

from gambit import events as ev
from gambit.bench.folder import create, make_plan
from gambit.bench.recipe import BenchRecipe, recipe_from
from gambit.bench.report import write_report
from gambit.bench.rows import RowWriter, read_rows
from gambit.bench.run import LocalSearches, Runner
from gambit.config.yaml_file import read_mapping
from gambit.solver import Solver
from gambit.types import EndReason
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
def test_a_miniature_runs_to_its_report(path, solver, tmp_path):
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


def test_the_best_prefix_is_continued_as_often_as_there_were_traces(tmp_path, capsys):
    values = {**read_mapping(prefix_value.RECIPE, "recipe"), **SMALL}
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(values))
    words = ["--recipe", str(recipe), "--out", str(tmp_path / "out")]
    prefix_value.main(words)
    printed = capsys.readouterr().out
    file = tmp_path / "out" / prefix_value.ARMS_FILE
    arms = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(arm["problem"], arm["seed"]) for arm in arms] == [("test-0002", 0), ("test-0002", 1)]
    for arm in arms:
        traces, continued = arm["traces"], arm["continued"]
        assert traces["completed"] == continued["completed"] == 8 and 0 <= continued["right"] <= 8
        assert continued["tokens"] < traces["tokens"], "what they share is not generated again"
        assert 0 < continued["kv_peak"] < traces["kv_peak"] < traces["kv_capacity"]
        assert 0 < arm["prefix"]["tokens"] < 90 and 1 <= arm["prefix"]["candidates"] <= 8
    assert "| test-0002 | from the best prefix | 2 |" in printed
    prefix_value.main(words)  # goes on where it ended: nowhere
    assert capsys.readouterr().out == printed and len(file.read_text().splitlines()) == 2
    prefix_value.main(["--recipe", str(recipe), "--dry-run"])
    assert "1 problems of pawn, 8 traces and as many continuations" in capsys.readouterr().out


def test_the_prefix_with_the_best_mean_at_the_pause_is_taken():
    def ended(trace, length):
        return ev.Finished(9, trace, EndReason.STOP, None, tuple(range(length)), None)

    scored = [ev.Scored(1, (0, 1, 2), (0.9, 0.2, 1.0), (2, 2, 2)), ev.Scored(2, (0, 1), (0.1, 0.6), (4, 4)),
              ev.Scored(3, (0,), (1.0,), (6,))]  # fmt: skip
    events = [*scored, ended(0, 10), ended(1, 8), ended(2, 3)]  # the third is over by then
    best = prefix_value.best_prefix(events, 0.5)
    assert (best.trace, best.candidates, best.tokens) == (0, 2, (0, 1, 2, 3)) and best.score == pytest.approx(0.5)
    assert prefix_value.best_prefix(events, 0.1) is None


def test_the_scorers_architectures_from_their_problems_to_the_table(tmp_path, capsys, monkeypatch):
    small = {
        **SMALL,
        "max_new_tokens": 300,
        "scorer": "of this folder",
        "policies": ["step"],
        "variants": {"gambit": {"policy": "gambit"}},
    }
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(small))
    words = ["--recipe", str(recipe), "--problems", "pawn:scorer", "--traces", "6", "--collect=--limit 12 --quiet",
             "--train=--epochs 1", "--bench=--quiet --no-logs", "--out", str(tmp_path / "out")]  # fmt: skip
    scorer_architecture.main(words)
    found = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[1] for line in found[2:]] == ["step", "gambit"] and len(found) == 4
    commands = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in commands if ": gambit " in line] == [
        "collect",
        "train",
        "mlp",
        "sequence",
    ]

    def run(*args, **options):
        raise AssertionError("what is done is done again")

    monkeypatch.setattr(scorer_architecture.subprocess, "run", run)
    scorer_architecture.main(words)

"""The examples: each runs on the bundled model as its first lines say."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import ROOT
from support.notebooks import run_cells
from support.serving import serving

pytestmark = pytest.mark.system
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "01_quickstart.ipynb"
REPORT = EXAMPLES / "07_report.html"
RECIPE = EXAMPLES / "07_compare_methods.yaml"
PUZZLES = str(EXAMPLES / "puzzles.jsonl")
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def run(folder, *command, timeout=600, **variables):
    done = subprocess.run(
        command, cwd=folder, env={**ENVIRONMENT, **variables}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def script(folder, name, *args):
    return run(folder, sys.executable, "-W", "ignore", str(EXAMPLES / name), *args)


def test_the_list_of_examples_is_whole():
    listed = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md")


def without_figures(outputs):
    """What cells show, without numbers, times and coordinates."""
    return re.sub(r"[\d.,]+", "#", json.dumps(outputs))


def test_the_notebook_shows_what_it_says(tmp_path, monkeypatch, request):
    """If it does not: `--renew`."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    outputs = run_cells(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if request.config.getoption("--renew"):
        for count, (cell, found) in enumerate(zip(cells, outputs, strict=True), start=1):
            cell["execution_count"] = count
            cell["outputs"] = [
                {**each, "execution_count": count} if "execution_count" in each else each for each in found
            ]
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    text = json.dumps(outputs)
    assert "voting: 20;" in text and "gambit: 25;" in text
    assert text.count("gambit-result") == 2 and (tmp_path / "tree.html").stat().st_size > 10_000
    kept = [[{**each, "execution_count": None} if "execution_count" in each else each for each in cell["outputs"]]
            for cell in cells]  # fmt: skip
    assert len(without_figures(kept)) == pytest.approx(len(without_figures(outputs)), rel=0.2)
    assert [len(each) for each in kept] == [len(each) for each in outputs]


@pytest.mark.parametrize("engine", ["local", pytest.param("vllm", marks=pytest.mark.weekly)])
def test_problems_are_solved_with_a_model_of_ones_own(engine, tmp_path):
    if engine == "vllm":
        pytest.importorskip("vllm")
    out = script(tmp_path, "02_vllm.py", "pawn", PUZZLES, "--engine", engine, "--capacity", "16", "--out", "logs")
    assert out.splitlines()[-1] == "4 of 4 right"
    assert len(list(tmp_path.glob("logs/*/events.jsonl"))) == 4


def test_problems_need_no_ids_and_the_time_is_that_of_all(tmp_path):
    rows = [json.loads(line) for line in Path(PUZZLES).read_text().splitlines()]
    plain = tmp_path / "mine.jsonl"
    plain.write_text("".join(json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in rows))
    words = ("02_vllm.py", "pawn", plain, "--engine", "local", "--capacity", "8")
    assert script(tmp_path, *words).splitlines()[0].startswith("1: ")
    assert script(tmp_path, *words, "--minutes", "0").splitlines()[-1].startswith("0 of 4 right")


def test_a_client_gets_answers_votes_and_a_stream(pawn_solver, tmp_path):
    with serving(pawn_solver, keys=()) as served:
        out = script(tmp_path, "03_openai_client.py", f"{served.url}/v1")
    assert out.startswith("answer: \\boxed{68}")
    assert "'68'" in out and out.count("\n---\n") == 1 and out.strip().endswith("\\boxed{68}")


def test_a_policy_is_an_object(tmp_path):
    lines = script(tmp_path, "04_own_policy.py").splitlines()
    assert sum("right" in line for line in lines if "gambit" in line) == 3
    assert all(re.search(r"right: [1-9]\d* traces pruned", line) for line in lines[2:8:4])


def test_a_scorer_that_was_never_judged_acts_where_it_is_allowed_to(tmp_path):
    lines = script(tmp_path, "05_own_scorer.py").splitlines()
    branched = {name: [int(count) for line in lines if name in line for count in re.findall(r"(\d+) branched", line)]
                for name in ("by itself", "with room", "voting")}  # fmt: skip
    assert branched["by itself"] == branched["voting"] == [0, 0]
    assert all(count > 5 for count in branched["with room"])


@pytest.mark.weekly
def test_the_trained_scorer_helps(tmp_path):
    out = run(tmp_path, "sh", str(EXAMPLES / "06_train_a_scorer.sh"), timeout=3000)
    checkpoint = tmp_path / "runs" / "own_scorer" / "scorer.safetensors"
    shown = json.loads(run(tmp_path, "gambit", "scorer", "show", str(checkpoint), "--json"))
    assert shown["trust"]["auc"]["0.5"] > 0.7
    assert out.splitlines()[-1] == f"--scorer {checkpoint.relative_to(tmp_path)}: 25"


def test_the_report_is_that_of_the_recipe(tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text())
    out = run(tmp_path, "gambit", "bench", "--recipe", str(RECIPE), "--engine", "local", "--dry-run")
    report = REPORT.read_text()
    assert all(method in out and method in report for method in recipe["policies"])
    assert f"{recipe['limit']} problems" in report


@pytest.mark.weekly
def test_the_recipe_runs(tmp_path):
    run(tmp_path, "gambit", "bench", "--recipe", str(RECIPE), "--limit", "3", "--out", "compared")
    assert (tmp_path / "compared" / "report.html").exists()


def test_a_batch_goes_on_where_it_was_stopped(tmp_path):
    args = ("08_batch_jsonl.py", PUZZLES, "answers.jsonl", "--engine", "local")
    assert script(tmp_path, *args).startswith("4 of 4 problems are left")
    answers = tmp_path / "answers.jsonl"
    found = {row["id"]: row["answer"] for row in map(json.loads, answers.read_text().splitlines())}
    assert found == {row["id"]: row["answer"] for row in map(json.loads, Path(PUZZLES).read_text().splitlines())}
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:3]))
    assert script(tmp_path, *args).startswith("1 of 4 problems are left")
    assert len(answers.read_text().splitlines()) == 4

"""Runs and a bench of event log format 2, made by commit 04879f6 with pawn: replayed, viewed, reported on, resumed."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.bench.folder import RUN_FILE, read_plan
from gambit.bench.recipe import recipe_from
from gambit.bench.rows import ROWS_FILE, read_rows
from gambit.cli.app import app
from gambit.models.files import identity_hash
from support import GOLDEN as KEPT

GOLDEN = KEPT / "runs"
RUNS = ["gambit", "sc", "deepconf"]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden files as the working directory."""
    shutil.copytree(GOLDEN, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def gambit(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(words))
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def without_clock(result: dict) -> dict:
    return {key: value for key, value in result.items() if key not in ("seconds", "out_dir", "warnings")}


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_a_run_replays_to_its_result(old: Path, run: str) -> None:
    code, out, err = gambit("replay", run, "--json")
    assert code == 0, err
    written = json.loads((old / run / "result.json").read_text())
    assert without_clock(json.loads(out)).items() >= without_clock(written).items()
    code, out, err = gambit("replay", run, "--verify")
    assert code == 0 and ": verified" in " ".join(out.split()), out


def test_the_runs_hold_what_they_are_to_test() -> None:
    """Every kind of event that a search with a policy of its own records but a cut-off trace."""
    seen = {json.loads(line)["event"] for path in GOLDEN.rglob("events.jsonl") for line in path.read_text().split("\n")
            if line}  # fmt: skip
    assert seen >= {"RunStarted", "Created", "Branched", "Admitted", "Queued", "Scored", "Pruned", "Evicted",
                    "Discarded", "Finished", "Sample", "Waited", "Stopped", "Voted"}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_viewed_with_its_text(old: Path, run: str) -> None:
    code, out, err = gambit("view", run)
    assert code == 0, err
    assert "token numbers" not in Path(out.strip()).read_text()  # though pawn lay elsewhere when it was made


# -- the bench -------------------------------------------------------------------------------------------------


def test_a_bench_is_reported_on_as_it_was_then(old: Path) -> None:
    before = json.loads((old / "bench" / "report.json").read_text())
    code, out, err = gambit("report", "bench", "--json")
    assert code == 0, err
    now = json.loads(out)
    cells = [cell | cell["means"] for cell in now["cells"]]  # where some figures stand since
    known = [{name: cell[name] for name in then} for cell, then in zip(cells, before["cells"], strict=True)]
    assert known == before["cells"] and now["plan"]["recipe"].items() >= before["plan"]["recipe"].items()
    assert now["environment"]["options"] == before["environment"]["options"]
    assert len(list((old / "bench" / "trees").glob("*.html"))) == 2


@pytest.mark.contract
def test_a_stopped_bench_goes_on_to_the_same_answers(old: Path) -> None:
    def told(row: dict) -> dict:
        return {name: row[name] for name in ("variant", "problem", "seed", "answer", "generated", "stop_reason")}

    rows = old / "bench" / ROWS_FILE
    before = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(before[:4]) + before[4][:100])  # the last line is torn
    code, _, err = gambit("bench", "--resume", "--out", "bench", "--no-report")
    assert code == 0, err
    after = rows.read_text().splitlines(keepends=True)
    assert after[:4] == before[:4]
    assert [told(json.loads(line)) for line in after] == [told(json.loads(line)) for line in before]


def test_options_given_again_contradict_nothing(old: Path) -> None:
    same = ("--child-temperature", "1", "--capacity", "4", "--preset", "model")
    code, _, err = gambit("bench", "--resume", "--out", "bench", "--no-report", *same)
    assert code == 0, err
    code, _, err = gambit("bench", "--resume", "--out", "bench", "--no-report", "--hard-floor", "0.2")
    assert code == 2 and "hard_floor: null there, 0.2 now" in err


def test_a_bench_of_another_model_is_refused(old: Path) -> None:
    plan = json.loads((old / "bench" / RUN_FILE).read_text())
    plan["identity"]["model_hash"] = "another"
    (old / "bench" / RUN_FILE).write_text(json.dumps(plan))
    code, _, err = gambit("bench", "--resume", "--out", "bench", "--no-report")
    assert code == 2 and "identity.model_hash" in err


# -- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_keeps_the_options_that_a_later_version_would_default_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gambit.bench.folder import create, make_plan

    plan, _ = make_plan(recipe_from({"benchmarks": ["pawn"], "limit": 1}), {})
    create(tmp_path / "bench", plan)
    monkeypatch.setattr("gambit.bench.recipe.BENCH_DEFAULTS", {"own_noise": False, "child_temperature": 0.5})
    resumed = read_plan(tmp_path / "bench").recipe
    config = resumed.search_config(resumed.variants()[0], 0, {})
    assert config.own_noise and config.child_temperature == 1.0


def test_a_benchmark_still_chooses_how_its_answers_are_read_in_a_resumed_run(tmp_path: Path) -> None:
    from gambit.bench.folder import create, make_plan

    plan, _ = make_plan(recipe_from({"benchmarks": ["pawn"], "limit": 1}), {})
    create(tmp_path / "bench", plan)
    resumed = read_plan(tmp_path / "bench").recipe
    assert resumed.search_config(resumed.variants()[0], 0, {"answer": "choice"}).answer == "choice"


# -- models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(tiny_folder, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def test_a_models_identity_is_its_weights_configuration_and_tokenizer(model: Path) -> None:
    before = identity_hash("model")
    (model / "README.md").write_text("new")
    assert identity_hash("model") == before
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        path = model / name
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert identity_hash("model") != before, name
        path.write_bytes(content)
    assert identity_hash("model") == before
    assert identity_hash("elsewhere/unknown") is None


def test_a_bench_goes_on_after_its_models_readme_changed_and_its_folder_moved(model: Path) -> None:
    line = json.dumps({"id": "p0", "question": "a=1", "answer": "7"})
    Path("problems.jsonl").write_text(line + "\n" + line.replace("p0", "p1") + "\n")
    words = ("--benchmark", "problems.jsonl", "--scorer", "constant", "--engine", "local", "--capacity", "2",
             "--max-new-tokens", "8", "--no-report", "--out", "new")  # fmt: skip
    code, _, err = gambit("bench", "--model", "model", *words)
    assert code == 0, err
    rows = Path("new", ROWS_FILE)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    (model / "README.md").write_text("changed")
    model.rename("moved")
    code, _, err = gambit("bench", "--resume", "--out", "new", "--no-report", "--model", "moved")
    assert code == 0, err
    assert len(list(read_rows(Path("new")))) == 4

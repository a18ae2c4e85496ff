"""What Gambit 0.1.0 (commit 62a1978) wrote can still be viewed, replayed, reported on, searched with and resumed."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.bench.folder import policy_defaults, read_plan
from gambit.bench.recipe import recipe_from
from gambit.bench.rows import read_rows
from gambit.cli.app import app
from gambit.config import registry
from gambit.config.options import EngineConfig, SearchConfig
from gambit.models.files import identity_hash
from gambit.scorers.checkpoint import load_checkpoint
from gambit.storage.past_options import IN_0_1_0, POLICIES_IN_0_1_0, in_effect

GOLDEN = Path(__file__).parent / "golden" / "v0.1.0"
RUNS = ["runs/gambit", "runs/sc", "runs/deepconf", "batch/p0", "batch/p1"]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden files, with the folder they were made in as working directory."""
    shutil.copytree(GOLDEN, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def gambit(*words: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, list(words))
    assert "Traceback" not in result.output, result.output
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


NEWER = ("forms", "islands")  # in an entry of a vote


def without_clock(result: dict) -> dict:
    """What a result of 0.1.0 says, but for times and places; its votes told neither forms nor islands yet."""
    votes = [{key: value for key, value in vote.items() if key not in NEWER} for vote in result["votes"]]
    kept = {key: value for key, value in result.items() if key not in ("seconds", "out_dir", "warnings")}
    return {**kept, "votes": votes}


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS)
def test_a_run_replays_to_its_result(old: Path, run: str) -> None:
    code, out, err = gambit("replay", run, "--json")
    assert code == 0, err
    written = json.loads((old / run / "result.json").read_text())
    replayed = json.loads(out)
    assert without_clock(replayed).items() >= without_clock(written).items()
    sharing = replayed["sharing"]
    assert sharing["total_tokens"] > sharing["unique_tokens"] > written["tokens"]["generated"]


def test_the_runs_hold_what_they_are_to_test() -> None:
    """Every kind of event that 0.1.0 wrote, but Cancelled and Discarded, which need a budget and Slim-SC."""
    seen = {json.loads(line)["event"] for path in GOLDEN.rglob("events.jsonl") for line in path.read_text().split("\n")
            if line}  # fmt: skip
    assert seen >= {"RunStarted", "Created", "Branched", "Admitted", "Queued", "Scored", "Pruned", "Evicted",
                    "Finished", "Sample", "Waited", "Stopped", "Voted"}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_viewed_with_its_text(old: Path, run: str) -> None:
    code, out, err = gambit("view", run)
    assert code == 0, err
    page = Path(out.strip()).read_text()
    assert "token numbers" not in page  # pawn's path is another machine's, the other model lies beside the runs


# -- scorers and collections -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mlp+confidence", "sequence"])
def test_a_checkpoint_is_shown_judged_and_searched_with(old: Path, name: str) -> None:
    path = f"scorers/{name}.safetensors"
    assert load_checkpoint(old / path).info.architecture == name
    code, out, err = gambit("scorer", "show", path)
    assert code == 0 and "16" in out, err
    code, out, err = gambit(
        "scorer", "eval", path, "--data", "collection", "--part", "all", "--json", "--device", "cpu"
    )
    assert code == 0, err
    assert json.loads(out)["num_problems"] == 20
    code, out, err = gambit("solve", "a=1", "--model", "model", "--scorer", path, "--engine", "local", "--capacity",
                            "2", "--max-new-tokens", "12", "--out", f"new/{name}")  # fmt: skip
    assert code == 0 and "weights" not in err, err


def test_a_collection_goes_on(old: Path) -> None:
    code, _, err = gambit("scorer", "collect", "--problems", "collected.jsonl", "--model", "model", "--out",
                            "collection", "--traces", "8", "--max-new-tokens", "40", "--engine", "local")  # fmt: skip
    assert code == 0, err
    lines = (old / "collection" / "index.jsonl").read_text().splitlines()
    assert sum(len(json.loads(line)["problems"]) for line in lines) == 24
    code, _, err = gambit("scorer", "train", "--data", "collection", "--out", "new.safetensors", "--objective",
                            "ridge", "--state-position", "before", "--device", "cpu")  # fmt: skip
    assert code == 0, err


# -- benches ---------------------------------------------------------------------------------------------------


def test_a_bench_is_reported_on_as_it_was_then(old: Path) -> None:
    before = json.loads((old / "bench-complete" / "report.json").read_text())
    code, out, err = gambit("report", "bench-complete", "--json")
    assert code == 0, err
    now = json.loads(out)
    known = [{name: cell[name] for name in then} for cell, then in zip(now["cells"], before["cells"], strict=True)]
    assert known == before["cells"] and now["plan"]["recipe"].items() >= before["plan"]["recipe"].items()
    assert all(cell["sharing"] is None for cell in now["cells"]), "rows of then do not tell"
    assert len(list((old / "bench-complete" / "trees").glob("*.html"))) == 2


def test_a_stopped_bench_goes_on_with_the_same_model(old: Path) -> None:
    kept = [row.key for row in read_rows(old / "bench-stopped")]
    code, _, err = gambit("bench", "--resume", "--out", "bench-stopped", "--no-report")
    assert code == 0, err
    rows = [row.key for row in read_rows(old / "bench-stopped")]
    assert rows[: len(kept)] == kept and len(kept) == 4
    assert sorted(rows) == sorted(row.key for row in read_rows(old / "bench-complete"))


def test_options_given_again_contradict_nothing(old: Path) -> None:
    same = ("--hard-floor", "0.1", "--capacity", "4", "--preset", "model")
    code, _, err = gambit("bench", "--resume", "--out", "bench-complete", "--no-report", *same)
    assert code == 0, err
    code, _, err = gambit("bench", "--resume", "--out", "bench-complete", "--no-report", "--hard-floor", "0.2")
    assert code == 2 and "hard_floor: 0.1 there, 0.2 now" in err


def test_other_weights_are_refused(old: Path) -> None:
    weights = old / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = gambit("bench", "--resume", "--out", "bench-stopped", "--no-report")
    assert code == 2 and "identity.model_hash" in err


# -- identity and options --------------------------------------------------------------------------------------


def test_a_models_identity_is_its_weights_configuration_and_tokenizer(old: Path) -> None:
    before = identity_hash("model")
    (old / "model" / "README.md").write_text("changed")
    (old / "model" / "notes.txt").write_text("new")
    assert identity_hash("model") == before
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "model.safetensors"):
        path = old / "model" / name
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert identity_hash("model") != before, name
        path.write_bytes(content)
    assert identity_hash("model") == before
    assert identity_hash("elsewhere/unknown") is None


def test_a_new_folder_goes_on_after_its_models_readme_changed_and_its_folder_moved(old: Path) -> None:
    words = ("--benchmark", "problems.jsonl", "--scorer", "constant", "--engine", "local", "--capacity", "2",
             "--max-new-tokens", "8", "--no-report", "--out", "new-bench")  # fmt: skip
    code, _, err = gambit("bench", "--model", "model", "--limit", "1", *words)
    assert code == 0, err
    (old / "model" / "README.md").write_text("changed")
    (old / "model").rename(old / "moved")
    code, _, err = gambit("bench", "--resume", "--out", "new-bench", "--no-report", "--model", "moved")
    assert code == 0, err


def test_every_option_has_a_value_in_effect_in_0_1_0() -> None:
    """Whoever adds an option says in storage/past_options.py what was done without it."""
    missing = {*SearchConfig.model_fields, *EngineConfig.model_fields} - IN_0_1_0.keys()
    assert not missing, "storage/past_options.py does not say what was in effect before these options"


def test_every_option_of_a_policys_own_has_a_value_in_effect_in_0_1_0() -> None:
    for policy, defaults in policy_defaults(registry.names("gambit.policies")).items():
        missing = defaults.keys() - POLICIES_IN_0_1_0.get(policy, {}).keys()
        assert not missing, f"storage/past_options.py does not say what {policy} did before these options"


def test_a_policys_default_that_changed_stays_as_it_was_in_an_old_folder(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = old / "bench-complete" / "run.json"
    raw = json.loads(plan.read_text())
    variant = {"label": "deepconf", "policy": "deepconf", "changes": {}, "swept": []}
    plan.write_text(json.dumps({**raw, "variants": [*raw["variants"], variant]}))
    now = {"deepconf": {"warmup_traces": 16, "window_tokens": 64, "percentile": 90.0}}
    monkeypatch.setattr("gambit.bench.folder.policy_defaults", lambda policies: now)
    assert read_plan(plan.parent).recipe.search["policy_options"] == {"window_tokens": 2048}
    then = {"deepconf": {"warmup_traces": 4, "window_tokens": 64, "percentile": 90.0}}
    given = {**raw["recipe"], "policy_options": {"percentile": 10}}
    plan.write_text(json.dumps({**raw, "recipe": given, "variants": [variant], "policy_defaults": then}))
    assert read_plan(plan.parent).recipe.search["policy_options"] == {"warmup_traces": 4, "percentile": 10}


def test_an_old_bench_goes_on_voting_as_it_did(old: Path) -> None:
    plan = old / "bench-complete" / "run.json"
    raw = json.loads(plan.read_text())
    variants = [{"label": name, "policy": name, "changes": {}, "swept": []} for name in ("gambit", "sc")]

    def voted(**more: object) -> list[object]:
        plan.write_text(json.dumps({**raw, "variants": variants, **more}))
        return [variant.changes.get("vote") for variant in read_plan(plan.parent).variants]

    assert voted() == ["score", None], "Gambit has voted by position only since"
    assert voted(votes={"gambit": "position", "sc": "majority"}) == [None, None]
    assert voted(votes={"gambit": "position", "sc": "concise"}) == [None, "concise"]
    assert voted(recipe={**raw["recipe"], "vote": "best"}) == [None, None], "somebody chose it for all"


def test_an_option_unknown_to_a_folder_has_the_value_of_then() -> None:
    now = {"capacity": None, "islands": "auto", "hard_floor": 0.1}
    assert in_effect({"capacity": 4}, IN_0_1_0, now) == {"capacity": 4, "islands": 1}
    assert in_effect({"islands": 2}, IN_0_1_0, now) == {"islands": 2}
    assert in_effect({}, {"islands": "auto"}, now) == {}  # a folder of today


def test_problems_of_an_old_bench_go_on_sharing_their_random_numbers(old: Path) -> None:
    recipe = read_plan(old / "bench-complete").recipe
    assert recipe.search["own_noise"] is False
    assert recipe_from({"benchmarks": ["pawn"]}).search_config(recipe.variants()[0], 0, {}).own_noise


def test_a_default_that_changed_stays_as_it_was_in_an_old_folder(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gambit.bench.folder._defaults", lambda: {"hard_floor": 0.5, "memory_ratio": 0.9})
    recipe = read_plan(old / "bench-complete").recipe
    assert recipe.search["hard_floor"] == 0.1 and "memory_ratio" not in recipe.engine

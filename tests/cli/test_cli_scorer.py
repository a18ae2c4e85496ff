"""`gambit scorer …` as a user types it: from a model to a judged scorer, and the messages on the way."""

import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.cli.scorer_work import show_training
from gambit.cli.terminal import NO_ANSWER, OK
from gambit.models import files as models
from gambit.scorers.base import ThoughtBatch
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.simple import ConstantScorer
from gambit.training.dataset import Division, load_dataset
from gambit.training.networks import recipe_for
from gambit.training.train import Fitted, Trained
from gambit.types import Aggregation, StatePosition
from support.collected import make_collection

pytestmark = pytest.mark.system


class Outcome:
    def __init__(self, *args: object) -> None:
        result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["scorer", *map(str, args)])
        self.code, self.out, self.err = result.exit_code, result.stdout, " ".join(result.stderr.split())
        assert "Traceback" not in result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_collection(tmp_path_factory.mktemp("collection"), num_problems=40)


# -- the whole way ---------------------------------------------------------------------------------------------


def test_from_problems_to_a_search_with_the_new_scorer(tiny_folder, tmp_path):
    problems = tmp_path / "p.jsonl"
    # the tiny model answers 7 or 8 as it likes: half of the problems ask for one, half for the other
    rows = [{"id": f"p{i}", "question": "abcdefgh"[i % 8] + f"={i % 7}", "answer": "78"[i % 2]} for i in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--model", tiny_folder, "--engine", "local", "--device", "cpu", "--temperature", "2", "--top-p", "1")
    for shard in ("1", "2"):
        made = Outcome("collect", "--problems", problems, "--out", tmp_path / shard, *flags, "--top-k", "0",
                       "--max-new-tokens", "60", "--traces", "6", "--shard", f"{shard}/2")  # fmt: skip
        assert made.code == 0 and "6 problems; 36 traces" in made.out, made.err
        assert made.err == "", "nothing but the result in a pipe"
    merged = Outcome("merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "data")
    assert merged.code == 0 and merged.out.endswith("data: 12 problems\n")
    scorer = tmp_path / "s.safetensors"
    trained = Outcome("train", "--data", tmp_path / "data", "--out", scorer, "--device", "cpu", "--epochs", "2",
                      "--validation", "0.3", "--test", "0.3", "--objective", "prefix+pairwise")  # fmt: skip
    assert trained.code == 0, trained.err
    shown = json.loads(Outcome("show", scorer, "--json").out)
    assert shown["base_model"] == tiny_folder.name and shown["base_model_hash"] == models.weight_hash(str(tiny_folder))
    judged = Outcome("eval", scorer, "--data", tmp_path / "data", "--device", "cpu", "--json")
    assert judged.code == 0 and json.loads(judged.out)["rankings"][0]["name"] == "s"
    command = ["solve", "a=1", "--model", tiny_folder, "--engine", "local", "--scorer", scorer, "--capacity", "4",
               "--max-new-tokens", "30", "--out", tmp_path / "run", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, [*map(str, command)])
    assert result.exit_code == 0 and json.loads(result.stdout)["counts"]["roots"] == 4
    assert "weights" not in result.stderr


def test_training_tells_what_was_tried(folder, tmp_path):
    out = tmp_path / "new" / "mlp.safetensors"
    trained = Outcome("train", "--data", folder, "--out", out, "--device", "cpu", "--epochs", "1")
    assert trained.code == 0 and trained.out.count("pairwise") >= 3 and "held-out AUC within problems" in trained.out
    said = " ".join(trained.out.split())
    assert "mlp, objective " in said and "test problems have right and wrong traces, of 20" in said
    assert load_checkpoint(out).info.hidden_size == 8
    as_json = Outcome("train", "--data", folder, "--out", out, "--device", "cpu", "--epochs", "1", "--objective", "bce",
                      "--json", "--state-position", "before", "--no-balance")  # fmt: skip
    told = json.loads(as_json.out)
    assert told["training"]["is_balanced"] is False and told["candidates"][0]["state_position"] == "before"


def test_training_says_why_it_keeps_what_does_not_look_best(tmp_path, capsys):
    recipe = recipe_for("bce", "mlp")
    data = load_dataset(make_collection(tmp_path / "c"), StatePosition.BEFORE)
    scorer, aucs = ConstantScorer(), ([0.5, 0.7], [0.4, 0.9])
    simple, lucky = (Fitted(data, recipe, scorer, np.array(found), 1, 1, 0.0) for found in aucs)
    for best, is_told in ((simple, True), (lucky, False)):
        tried = (simple, lucky)
        show_training(tmp_path / "s.safetensors", Trained(tried, best, Division(), torch.device("cpu")), as_json=False)
        assert ("kept because it is the simplest" in capsys.readouterr().out) == is_told


def test_a_report_is_a_table_json_and_a_picture(folder, tmp_path):
    scorer, report, plot = tmp_path / "a.safetensors", tmp_path / "r" / "a.json", tmp_path / "a.svg"
    Outcome("train", "--data", folder, "--out", scorer, "--device", "cpu", "--epochs", "2", "--objective", "prefix")
    judged = Outcome("eval", scorer, "confidence", "--data", folder, "--part", "all", "--device", "cpu",
                     "--out", report, "--plot", plot)  # fmt: skip
    assert judged.code == 0, judged.err
    assert "a beats every baseline" in judged.out and "confidence is not shown to beat token confidence" in judged.out
    assert "40 with both right and wrong traces" in judged.out and plot.read_text().count('class="title"') == 8
    assert {"num_problems", "rankings", "comparisons", "conclusions"} <= set(json.loads(report.read_text()))


def test_a_scorer_of_the_models_own_is_judged_by_its_name(tmp_path):
    hidden = load_checkpoint(Path(models.locate("pawn")) / "scorers" / "mlp.safetensors").info.hidden_size
    data = make_collection(tmp_path / "c", num_problems=6, model="pawn", hidden_size=hidden)
    judged = Outcome("eval", "mlp", "auto", "confidence", "--data", data, "--device", "cpu", "--json")
    assert judged.code == 0, judged.err
    names = [ranking["name"] for ranking in json.loads(judged.out)["rankings"]]
    assert names[:3] == ["mlp", "scorer", "confidence"]
    refused = Outcome("eval", "mlp", "--data", data, "--write", "--device", "cpu")
    assert refused.code == 2 and "'mlp' is no checkpoint file" in refused.err, "the model's own file stays as it is"


def test_two_scorers_of_one_name_are_told_apart_or_refused(folder, tmp_path):
    paths = [tmp_path / name / "s.safetensors" for name in "ab"]
    for path in paths:
        Outcome("train", "--data", folder, "--out", path, "--device", "cpu", "--epochs", "1", "--objective", "prefix")
    judged = Outcome("eval", *paths, "--data", folder, "--device", "cpu")
    assert judged.code == 2 and "two scorers are called 's': rename one" in judged.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["collect", "--problems", "p.txt", "--out", "o"], "'p.txt' is neither a file of problems"),
        (["collect", "--problems", "pawn:val", "--out", "o"], "unknown split 'val'"),
        (["collect", "--problems", "pawn:dev", "--out", "o", "--layers", "last"], "layers 'last': give numbers"),
        (["train", "--data", "nowhere", "--out", "o"], "no collection.json in nowhere"),
        (["train", "--data", "DATA", "--out", "o", "--objective", "auc"], "unknown objective 'auc'"),
        (["train", "--data", "DATA", "--out", "o", "--state-position", "after"], "unknown state position 'after'"),
        (["train", "--data", "DATA", "--out", "o", "--test", "0.9"], "leave no problem to train on"),
        (["eval", "none.safetensors", "--data", "DATA"], "none.safetensors: cannot be read"),
        (["eval", "nonsense", "--data", "DATA"], "unknown scorer 'nonsense'"),
        (["show", "none.safetensors"], "none.safetensors: cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(folder, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    outcome = Outcome(*(str(folder) if arg == "DATA" else arg for arg in args))
    assert outcome.code == 2 and message in outcome.err, outcome.err


def test_corrupted_shards_are_skipped_on_request_only(tmp_path):
    data = make_collection(tmp_path / "c", num_problems=40)
    (data / "shard-00003.safetensors").write_bytes(b"rubbish")
    flags = ("train", "--data", data, "--out", tmp_path / "s.safetensors", "--device", "cpu", "--epochs", "1",
             "--objective", "bce", "--state-position", "before")  # fmt: skip
    refused = Outcome(*flags)
    assert refused.code == 2 and "shard-00003.safetensors is corrupted" in refused.err
    done = Outcome(*flags, "--skip-corrupted")
    assert (
        done.code == 0 and "shard-00003.safetensors is corrupted" in done.err and "5 problems are left out" in done.err
    )


# -- published checkpoints -------------------------------------------------------------------------------------


def published(hidden=32, width=512):
    generator = torch.Generator().manual_seed(0)
    shapes = {"net.0.weight": (width, hidden), "net.0.bias": (width,), "net.2.weight": (1, width), "net.2.bias": (1,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("layout", [lambda state: state, lambda state: {"epoch": 3, "model_state_dict": state}])
def test_both_published_layouts_are_imported(tmp_path, tiny_folder, layout):
    state = published()
    torch.save(layout(state), tmp_path / "p.pt")
    out = tmp_path / "s.safetensors"
    done = Outcome(
        "import", tmp_path / "p.pt", "--out", out, "--base-model", tiny_folder, "--state-position", "boundary"
    )
    assert done.code == 0, done.err
    scorer = load_checkpoint(out)
    assert scorer.info.state_position is StatePosition.BOUNDARY and scorer.info.aggregation is Aggregation.MEAN
    assert scorer.info.hidden_size == 32 and scorer.info.base_model_hash == models.weight_hash(str(tiny_folder))
    states = torch.randn(3, 32)
    w1, b1, w2, b2 = (each.double() for each in state.values())
    expected = torch.sigmoid(torch.relu(states.double() @ w1.T + b1) @ w2.T + b2).squeeze(-1).float()
    assert torch.allclose(scorer.score(ThoughtBatch(states, torch.zeros(3))), expected, atol=1e-6)


def with_old_names(path):
    """The same file as numpy 1 would have written it."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


@pytest.mark.parametrize("is_old", [False, True])
def test_a_published_checkpoint_with_numpy_metrics_is_imported(tmp_path, tiny_folder, is_old):
    metrics = {"auc": np.float64(0.8), "f1": np.float32(0.7), "count": np.int64(3), "is_best": np.bool_(True)}
    torch.save({"metrics": metrics, "best_score": np.float64(0.75), "model_state_dict": published()}, tmp_path / "p.pt")
    if is_old:
        with_old_names(tmp_path / "p.pt")
    out = tmp_path / "s.safetensors"
    done = Outcome("import", tmp_path / "p.pt", "--out", out, "--base-model", tiny_folder,
                   "--state-position", "boundary")  # fmt: skip
    assert done.code == 0, done.err
    assert torch.equal(load_checkpoint(out).weights[0], published()["net.0.weight"])


class Payload:
    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"net.0.weight": torch.ones(4, 8)}, "missing keys: net.0.bias, net.2.bias, net.2.weight; unknown keys: none"),
        ({**published(), "norm.weight": torch.ones(1)}, "missing keys: none; unknown keys: norm.weight"),
        ({**published(), "net.2.weight": torch.ones(2, 512)}, "net.2.weight (2, 512)"),
        (published(hidden=48), "p.pt expects hidden size 48, "),
        ([1, 2], "holds a list, not a state dict"),
        (Payload(), "nothing in it was executed"),
        ({**published(), "metrics": np.ones(3)}, "nothing in it was executed"),
        ({"metrics": {"auc": np.float64(0.8)}, "extra": Payload(), **published()}, "nothing in it was executed"),
        ({**published(), "net.0.bias": np.float64(1)}, "shapes do not fit an MLP scorer"),
        ({**published(), "net.2.bias": torch.tensor([float("nan")])}, "p.pt: 1 of the 1 values of tensor net.2.bias"),
    ],
)
def test_anything_else_is_refused(tmp_path, tiny_folder, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "p.pt")
    done = Outcome(
        "import", "p.pt", "--out", "s.safetensors", "--base-model", tiny_folder, "--state-position", "before"
    )
    assert done.code == 2 and message in done.err, done.err
    assert not Path("s.safetensors").exists() and not Path("executed").exists()


def test_missing_metadata_is_asked_for_by_its_flags(tmp_path):
    torch.save(published(), tmp_path / "p.pt")
    done = Outcome("import", tmp_path / "p.pt", "--out", tmp_path / "s.safetensors")
    assert done.code == 2 and "--base-model NAME and --state-position boundary|before" in done.err
    done = Outcome("import", tmp_path / "p.pt", "--out", tmp_path / "s.safetensors", "--base-model", "org/name",
                   "--state-position", "after")  # fmt: skip
    assert done.code == 2 and "--state-position 'after': use before or boundary" in done.err
    done = Outcome("import", tmp_path / "p.pt", "--out", tmp_path / "s.safetensors", "--base-model", "org/name",
                   "--state-position", "before")  # fmt: skip
    assert done.code == 0 and "holds no hash" in done.err


# -- hashes ----------------------------------------------------------------------------------------------------


def test_other_weights_are_warned_of_unless_the_user_knows(tiny_folder, tmp_path):
    torch.save(published(), tmp_path / "p.pt")
    scorer = tmp_path / "s.safetensors"
    Outcome("import", tmp_path / "p.pt", "--out", scorer, "--base-model", "pawn", "--state-position", "before")
    assert not scorer.exists(), "pawn has hidden size 256"
    Outcome("import", tmp_path / "p.pt", "--out", scorer, "--base-model", tiny_folder, "--state-position", "before")
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    for file in tiny_folder.iterdir():
        (quantised / file.name).write_bytes(file.read_bytes())
    weights = bytearray((quantised / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (quantised / "model.safetensors").write_bytes(weights)
    flags = ["solve", "a=1", "--engine", "local", "--scorer", str(scorer), "--capacity", "2", "--max-new-tokens", "10"]

    def said(model, *more):
        command = [*flags, "--model", str(model), "--out", str(tmp_path / f"run{time.monotonic_ns()}"), *more]
        result = CliRunner().invoke(app, command)
        assert result.exit_code in (OK, NO_ANSWER), result.stderr
        return " ".join(result.stderr.split())

    assert "weights" not in said(tiny_folder)
    message = said(quantised)
    assert models.weight_hash(str(tiny_folder))[:20] in message and models.weight_hash(str(quantised))[:20] in message
    assert "weights" not in said(quantised, "--any-weights")


def num_bytes_read():
    """By this process so far, from whatever file; only Linux tells."""
    told = Path("/proc/self/io")
    return int(re.search(r"rchar: (\d+)", told.read_text())[1]) if told.exists() else 0


def test_a_large_model_is_hashed_in_no_time(tmp_path):
    """Sparse files of 8 GB: what counts is that hardly any of it is read."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.write((16).to_bytes(8, "little") + b'{"a": "header"}  ')
            file.truncate(4 << 30)
    (tmp_path / models.WEIGHTS_INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    (tmp_path / models.SCORER_FILE).write_bytes(b"not weights")
    before = num_bytes_read()
    first = models.weight_hash(str(tmp_path))
    assert num_bytes_read() - before < 1 << 26 and first.startswith("sampled:")
    (tmp_path / models.SCORER_FILE).write_bytes(b"another")
    assert models.weight_hash(str(tmp_path)) == first
    with (tmp_path / names[1]).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert models.weight_hash(str(tmp_path)) != first
    assert models.weight_hash(str(tmp_path / "nowhere")) is None
    (tmp_path / names[0]).unlink()
    assert models.weight_hash(str(tmp_path)) is None, "half of a model has no hash"


# -- a scorer of somebody else's -------------------------------------------------------------------------------

THEIRS = """
import torch
from gambit.scorers.base import ScorerInfo

class Brevity:
    info = ScorerInfo("brevity", is_probability=False)
    def to(self, device): return self
    def score(self, thoughts): return -thoughts.states.float().norm(dim=-1)
"""


def test_an_installed_package_brings_its_scorer(tiny_folder, folder, tmp_path):
    """As pip would leave it: a module and a dist-info with entry points, nothing changed in Gambit."""
    site = tmp_path / "site"
    info = site / "their_scorers-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "their_scorers.py").write_text(THEIRS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-scorers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gambit.scorers]\nbrevity = their_scorers:Brevity\n")
    solve = ["solve", "a=1", "--model", tiny_folder, "--engine", "local", "--scorer", "brevity", "--capacity", "2",
             "--max-new-tokens", "20", "--json", "--out", tmp_path / "run"]  # fmt: skip
    judge = ["scorer", "eval", "brevity", "--data", folder, "--device", "cpu", "--json"]
    script = f"""
import sys; sys.path.insert(0, {str(site)!r})
from typer.testing import CliRunner
from gambit.cli.app import app
from gambit.cli.terminal import NO_ANSWER, OK
for command in ({[*map(str, solve)]}, {[*map(str, judge)]}):
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    print(done.stdout.replace(chr(10), " "))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    solved, judged = map(json.loads, done.stdout.splitlines())
    assert solved["counts"]["roots"] == 2 and judged["rankings"][0]["name"] == "brevity"


def test_traces_are_collected_for_a_benchmark_by_its_name(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GAMBIT_BENCHMARKS", str(tmp_path))
    (tmp_path / "gsm8k.jsonl").write_text('{"id": "g1", "question": "1 + 1?", "answer": "so it is #### 2"}\n')
    out, flags = tmp_path / "data", ("--model", tiny_folder, "--engine", "local", "--device", "cpu")
    made = Outcome("collect", "--problems", "gsm8k", "--out", out, *flags, "--traces", "2", "--max-new-tokens", "20")
    assert made.code == 0 and "1 problems; 2 traces" in made.out, made.err
    assert json.loads((out / "collection.json").read_text())["source"] == "gsm8k"
    wrong = Outcome("collect", "--problems", "hf:nothing", "--out", tmp_path / "other", *flags)
    assert wrong.code == 2 and "is not of the form hf:ORG/NAME" in wrong.err

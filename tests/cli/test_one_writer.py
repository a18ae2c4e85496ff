"""A folder that another run is writing to: every command that writes folders is refused before it loads a model."""

import errno
import fcntl
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.engines.local import model
from gambit.pawn import Level, Split, generate
from gambit.storage.folders import LOCK_FILE, locked
from gambit.training import collect
from support.collected import make_collection

BENCH = ("bench", "--benchmark", "pawn", "--limit", "1", "--policies", "sc", "--seeds", "0")
COMMANDS = {
    "solve": ("solve", "a = 17; b = 5; c = a * b; d = c - a; d?", "--out", "out"),
    "solve a file": ("solve", "--file", "problems.jsonl", "--out", "out"),
    "solve on Ray": ("solve", "--file", "problems.jsonl", "--out", "out", "--ray", "--engines", "2"),
    "demo": ("demo", "--seed", "1", "--out", "out"),
    "bench": (*BENCH, "--out", "out"),
    "bench of a shard": (*BENCH, "--shard", "1/2", "--out", "out"),
    "bench on Ray": (*BENCH, "--ray", "--engines", "2", "--out", "out"),
    "collect": ("scorer", "collect", "--problems", "pawn:dev", "--limit", "1", "--out", "out"),
    "collect on Ray": ("scorer", "collect", "--problems", "pawn:dev", "--limit", "1", "--out", "out", "--ray"),
    "merge collections": ("scorer", "merge", "part", "--out", "out"),
    "prefix-value": ("prefix-value", "--benchmark", "pawn", "--limit", "1", "--out", "out"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No command of these may load a model."""

    def refuse(*_: object) -> None:
        raise AssertionError("a model is loaded")

    for module, name in ((model, "read_llama"), (model, "read_with_transformers"), (collect, "read_with_transformers")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.chdir(tmp_path)
    puzzle = next(generate(Split.TEST, 0, Level.HARD))
    Path("problems.jsonl").write_text(json.dumps({"id": "one", "question": puzzle.text}) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_with_a_writer_is_refused_and_left_as_it_is(name: str) -> None:
    make_collection(Path("part"))
    with locked(Path("out")):
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(COMMANDS[name]))
        assert [path.name for path in Path("out").iterdir()] == [LOCK_FILE]
    assert done.exit_code == 2, done.output
    assert done.stderr == "error: another run is writing to out: wait until it has ended, or choose another --out\n"


@pytest.mark.parametrize(("command", "log"), [("solve a file", "one"), ("demo", "sc"), ("solve", "")])
def test_a_folder_that_holds_results_is_refused_before_a_model_is_loaded(command: str, log: str) -> None:
    path = Path("out", log, "events.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("")
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(COMMANDS[command]))
    assert done.exit_code == 2 and f"{path} exists already" in done.stderr, done.output


def test_where_there_are_no_locks_a_command_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    make_collection(Path("part"))
    monkeypatch.setattr(fcntl, "flock", flock)
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(COMMANDS["merge collections"]))
    assert (done.exit_code, done.stderr) == (0, "warning: out cannot be locked (Operation not supported): "
                                                "let no second run write to it meanwhile\n")  # fmt: skip
    assert Path("out", "collection.json").is_file()

"""Scorers, collections and runs in folders of another user: a sentence that names the path, and nothing is changed."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app
from gambit.models import files as models
from support.tables import table

NOBODY = 65534
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of one user and read them as another"),
]
PUZZLE = "a = 17; b = 61; c = a + b; c?"
SMALL = ("--engine", "local", "--capacity", "2")
COLLECT = ("scorer", "collect", "--problems", "pawn:dev", "--traces", "6", "--engine", "local", "--out", "{}/data")
TRAIN = ("scorer", "train", "--data", "{}/data", "--objective", "ridge")
BENCH = ("bench", "--benchmark", "pawn", "--limit", "1", "--policies", "single", *SMALL, "--no-report")
COMMANDS = [
    (*COLLECT, "--limit", "12", "--quiet"),
    ("solve", PUZZLE, *SMALL, "--scorer", "{}/open.safetensors", "--out", "{}/warm/solved"),
    ("scorer", "show", "{}/open.safetensors"),
    ("scorer", "eval", "{}/own/open.safetensors", "--data", "{}/data", "--part", "all", "--write"),
    (*TRAIN, "--out", "{}/warm/trained.safetensors"),
    (*BENCH, "--out", "{}/warm/b"),
]


@contextmanager
def as_nobody(folder):
    """Takes root's rights from this process for a while, which then stands in a folder that all may write."""
    before = Path.cwd()
    os.chdir(folder)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.chdir(before)


def gambit(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture(scope="module")
def folder():
    """Root's scorers: one that all may read, one that nobody may, one behind a closed door; and a collection.

    Every command has been called by root before, so that nothing is left to be imported when nobody calls it.
    """
    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are closed to other users
        base = Path(made)
        base.chmod(0o755)
        scorer = Path(models.locate("pawn")) / models.SCORER_FILE
        for name in ("open", "closed", "door/open", "own/open"):
            place = base / f"{name}.safetensors"
            place.parent.mkdir(exist_ok=True)
            shutil.copy(scorer, place)
        for words in COMMANDS:
            code, said = gambit(*(word.replace("{}", made) for word in words))
            assert code == 0, said
        (base / "anyone").mkdir()
        (base / "anyone").chmod(0o777)
        (base / "closed.pt").write_bytes(b"PK")
        for name in ("closed.safetensors", "closed.pt"):
            (base / name).chmod(0o600)
        (base / "door").chmod(0o700)
        yield base


def state_of(folder):
    """Everything but what nobody has begun in a folder for all."""
    paths = [path for path in folder.rglob("*") if "anyone" not in path.parts]
    return {path: (path.stat().st_mode, path.read_bytes() if path.is_file() else None) for path in paths}


@table("words, path", [
    (("solve", PUZZLE, *SMALL, "--scorer", "{}/closed.safetensors"), "closed.safetensors"),
    (("solve", PUZZLE, *SMALL, "--scorer", "{}/door/open.safetensors"), "door"),
    (("solve", PUZZLE, *SMALL, "--scorer", "{}/open.safetensors", "--out", "{}/mine"), "mine"),
    (("solve", PUZZLE, *SMALL, "--out", "{}/warm/solved"), "solved"),
    (("scorer", "show", "{}/closed.safetensors"), "closed.safetensors"),
    (("scorer", "show", "{}/door/open.safetensors"), "door"),
    (("scorer", "eval", "{}/open.safetensors", "--data", "{}/data", "--part", "all", "--write"), "{}"),
    (("scorer", "eval", "{}/closed.safetensors", "--data", "{}/data", "--part", "all"), "closed.safetensors"),
    ((*TRAIN, "--out", "{}/open.safetensors"), "{}"),
    ((*TRAIN, "--out", "{}/new.safetensors"), "{}"),
    (("scorer", "train", "--data", "{}/door/data", "--objective", "ridge", "--out", "new.safetensors"), "door"),
    ((*COLLECT, "--limit", "13"), "data"),
    (("scorer", "import", "{}/closed.pt", "--base-model", "pawn", "--state-position", "before",
      "--out", "new.safetensors"), "closed.pt"),
    (("solve", PUZZLE, *SMALL, "--scorer", "{}/closed.pt"), "closed.pt"),
    (("scorer", "merge", "{}/data", "--out", "{}/merged"), "merged"),
    ((*BENCH, "--out", "{}/warm/b", "--resume"), "warm/b"),
    ((*BENCH, "--out", "{}/bench"), "bench"),
    (("export", "{}/door/run", "--as", "sft", "--out", "exported"), "door"),
])  # fmt: skip
def test_a_command_says_what_it_may_not_read_or_write(words, path, folder):
    before = state_of(folder)
    with as_nobody(folder / "anyone"):
        code, said = gambit(*(str(word).replace("{}", str(folder)) for word in words))
    assert code == 2 and path.replace("{}", str(folder)) in said and "Traceback" not in said, said
    assert "ermission denied" in said or "cannot write" in said, said
    assert state_of(folder) == before


def test_a_scorer_that_all_may_read_is_used_by_all(folder):
    with as_nobody(folder / "anyone"):
        code, said = gambit("solve", PUZZLE, *SMALL, "--scorer", folder / "open.safetensors", "--quiet")
    assert code == 0 and said == "78", said

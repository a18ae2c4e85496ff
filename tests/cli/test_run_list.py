"""`gambit runs`, and folders that a search must not write into."""

import shutil

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app
from support import GOLDEN


def invoked(*args, width=200):
    done = CliRunner(env={"COLUMNS": str(width)}).invoke(app, list(args))
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_each_run_has_a_line_the_newest_first(runs):
    shutil.copytree(GOLDEN / "runs" / "gambit", runs / "20260101T000000Z-aaaa")
    shutil.copytree(GOLDEN / "runs" / "bench", runs / "20260102T000000Z-bbbb")
    for policy in ("sc", "gambit"):
        shutil.copytree(GOLDEN / "runs" / policy, runs / "20260103T000000Z-cccc" / policy)
    (runs / "20260103T000000Z-cccc" / "sc" / "result.json").unlink()
    (runs / "20260104T000000Z-dddd").mkdir()
    (runs / "20260104T000000Z-dddd" / "pairs.jsonl").write_text('{"problem": "1"}\n')
    (runs / "20260105T000000Z-eeee").mkdir()
    code, out, _ = invoked("runs")
    head, *lines = out.splitlines()
    assert code == 0 and head.split()[-4:] == ["how", "far", "result", "what"]
    assert [line.split()[0][-4:] for line in lines] == ["eeee", "dddd", "cccc", "bbbb", "aaaa"]
    empty, compared, unfinished, bench, single = lines
    assert "no events.jsonl" in empty and "compare" in compared and "1 problem " in compared
    assert "gambit, sc: " in unfinished and "1 of 2" in unfinished
    assert "bench problems" in bench and "12 of 12" in bench and "sc " in bench and "%" in bench
    assert "gambit: " in single and "1 of 1" in single


def test_names_of_runs_stay_whole_on_a_narrow_terminal(runs, monkeypatch):
    shutil.copytree(GOLDEN / "runs" / "bench", runs / "20260102T000000Z-bbbb")
    monkeypatch.setattr("gambit.cli.terminal.PIPE_WIDTH", 60)
    lines = invoked("runs", width=60)[1].splitlines()
    assert lines[1].startswith("runs/20260102T000000Z-bbbb ") and max(map(len, lines)) <= 60


def test_without_a_run_it_says_how_to_make_one(runs):
    code, _, err = invoked("runs")
    assert code == 2 and "no run is in runs/: `gambit demo`" in err


def test_a_search_does_not_write_into_a_bench_run(runs):
    shutil.copytree(GOLDEN / "runs" / "bench", runs / "bench")
    code, _, err = invoked("solve", "a = 2; b = 3; c = a + b; c?", "--out", str(runs / "bench"))
    assert code == 2 and "holds a bench run: choose another --out" in err
    assert not (runs / "bench" / "events.jsonl").exists()

"""`gambit bench --on-row`: the user's function gets every row, and what it does wrong is named."""

import json

import pytest
from typer.testing import CliRunner

from gambit.cli.app import app

BENCH = ("bench", "--benchmark", "pawn", "--limit", "2", "--policies", "single", "--engine", "local", "--no-report",
         "--quiet", "--no-logs")  # fmt: skip


def bench(*args):
    return CliRunner().invoke(app, [*BENCH, *map(str, args)])


@pytest.mark.system
def test_every_row_reaches_the_function_after_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tracker_of_rows.py").write_text(
        "from pathlib import Path\n"
        "def log(row):\n"
        "    written = len(Path('out/rows.jsonl').read_text().splitlines())\n"
        "    with open('seen', 'a') as file:\n"
        "        print(row.problem, row.correct, written, file=file)\n"
        "def fail(row):\n"
        "    raise RuntimeError('no connection')\n"
    )
    done = bench("--out", "out", "--on-row", "tracker_of_rows:log")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert (tmp_path / "seen").read_text().splitlines() == [
        f"{row['problem']} {row['correct']} {number}" for number, row in enumerate(rows, 1)
    ]
    failed = bench("--out", "other", "--on-row", "tracker_of_rows:fail")
    assert failed.exit_code == 1 and "no connection" in failed.output and "--resume" in failed.output
    assert len((tmp_path / "other" / "rows.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["nowhere:log", "json:log", "json", ":log"])
def test_a_function_that_is_not_there_is_refused_before_a_model_is_loaded(name, tmp_path):
    refused = bench("--out", tmp_path / "out", "--on-row", name)
    assert refused.exit_code == 2 and "MODULE:NAME" in refused.output
    assert not (tmp_path / "out").exists()

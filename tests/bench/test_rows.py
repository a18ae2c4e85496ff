"""Rows of a bench on disk: what is written is read again, whole lines only, and what is damaged is named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gambit.bench.rows import ROWS_FILE, Row, RowWriter, Series, Spent, TaskKey, read_rows
from gambit.errors import UserError


def row(problem: str = "p1", **changes: object) -> Row:
    plain = {"variant": "gambit", "benchmark": "math", "problem": problem, "seed": 3, "answer": "½", "gold": "0.5",
             "correct": True, "stop_reason": "completed"}  # fmt: skip
    return Row(**{**plain, **changes})  # type: ignore[arg-type]


FULL = row(
    seconds=Spent(9.0, 4.0, 2.0, 1.0, 0.5),
    series=Series((0.5, 1.5), (4, 3), (0, 1), (0, 2), (10, 20)),
    unique_lengths=(5, 7),
    total_lengths=(5, 12),
    revotes={"majority": False},
    shard="2/3",
    log="logs/p1/events.jsonl",
)


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    with RowWriter(tmp_path) as writer:
        writer.write(FULL)
        writer.write(row("p2"))
    assert list(read_rows(tmp_path)) == [FULL, row("p2")]
    assert FULL.key == TaskKey("gambit", "math", "p1", 3)


def test_a_line_is_compact_and_keeps_letters_as_they_are(tmp_path: Path) -> None:
    line = row().to_json()
    assert '"answer":"½"' in line and ", " not in line and "\n" not in line


def test_every_row_is_on_the_disk_before_the_next_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    with RowWriter(tmp_path) as writer:
        writer.write(row("p1"))
        writer.write(row("p2"))
    assert len(sizes) == 2 and 0 < sizes[0] < sizes[1] == (tmp_path / ROWS_FILE).stat().st_size


def test_a_writer_adds_to_what_is_there_and_drops_what_a_kill_cut_short(tmp_path: Path) -> None:
    whole = row("p1").to_json() + "\n"
    (tmp_path / ROWS_FILE).write_text(whole + whole[:40], encoding="utf-8")
    assert [found.problem for found in read_rows(tmp_path)] == ["p1"]
    with RowWriter(tmp_path) as writer:
        writer.write(row("p2"))
    assert [found.problem for found in read_rows(tmp_path)] == ["p1", "p2"]


def test_a_closed_writer_is_closed(tmp_path: Path) -> None:
    with RowWriter(tmp_path) as writer:
        pass
    with pytest.raises(ValueError, match="closed"):
        writer.write(row())


def without(name: str) -> Callable[[str], str]:
    def cut(line: str) -> str:
        record = json.loads(line)
        del record[name]
        return json.dumps(record)

    return cut


@pytest.mark.parametrize(
    "damage",
    [lambda line: line[:-5], lambda _: "7", lambda _: "[]", without("series"), without("gold"), without("seconds")],
)
def test_a_damaged_row_is_named_by_its_line(tmp_path: Path, damage: Callable[[str], str]) -> None:
    lines = [row("p1").to_json(), damage(row("p2").to_json()), row("p3").to_json()]
    (tmp_path / ROWS_FILE).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    rows = read_rows(tmp_path)
    assert next(rows).problem == "p1"
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: not a row of this version \(.+\)"):
        next(rows)


def test_a_folder_without_rows_is_no_bench(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no rows\.jsonl: give the folder of a `gambit bench`"):
        next(read_rows(tmp_path))


def test_what_no_part_claims_is_other() -> None:
    assert Spent(10.0, 4.0, 2.0, 1.0, 0.5).other == 2.5
    assert Spent(1.0, 4.0).other == 0.0

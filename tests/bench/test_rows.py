"""Rows of a bench on disk: what is written is read again, whole lines only, and what is damaged is named."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gambit import events as ev
from gambit.bench.rows import (
    NUM_MOMENTS,
    ROWS_FILE,
    Row,
    RowWriter,
    Series,
    Spent,
    TaskKey,
    measure,
    read_rows,
    series_of,
)
from gambit.errors import UserError
from gambit.results.result import Counts, Cuts, SearchResult, Seconds, Tokens, VerifierCost
from gambit.types import EndReason, PoolSettings, StopReason
from support.searching import make_header, make_settings


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


# -- measuring -------------------------------------------------------------------------------------------------


def sample(step: int, seconds: float = 1.0, **changes: int) -> ev.Sample:
    counts = {"running": 2, "waiting": 1, "completed": 0, "kv_used_tokens": 10 * step, **changes}
    return ev.Sample(
        step=step, ghosts=0, generated=0, kv_capacity_tokens=500, seconds_total=seconds, seconds_engine=seconds / 2,
        seconds_scoring=seconds / 4, seconds_scheduling=seconds / 16, seconds_search=seconds / 8, **counts,
    )  # fmt: skip


# Trace 0 ends wrong and its children right; 4 is pruned, but a token of it is in 5; 1 ends without an answer.
EVENTS = [
    make_header(make_settings(capacity=6)),
    *(event for trace in (0, 1, 2) for event in (ev.Created(0, trace), ev.Admitted(0, trace, 0, 0, 0))),
    ev.Queued(2, 1, 2),
    ev.Branched(4, 3, 0, 3, 1.0),
    ev.Admitted(4, 3, 3, 0, 0),
    ev.Admitted(5, 1, 0, 2, 3),
    sample(5, 2.0, kv_used_tokens=90),
    ev.Branched(6, 4, 2, 1, 1.0),
    ev.Admitted(6, 4, 1, 0, 0),
    ev.Branched(8, 5, 4, 2, 1.0),
    ev.Admitted(8, 5, 2, 0, 0),
    ev.Pruned(9, 4, "tournament", None, (7, 8)),
    ev.Finished(9, 0, EndReason.LENGTH, "8", (1, 2, 3, 4, 5)),
    ev.Finished(9, 3, EndReason.STOP, "7", (6, 7)),
    ev.Finished(9, 5, EndReason.STOP, "9", (6,)),
    ev.Finished(10, 1, EndReason.STOP, None, (1, 2, 3, 4)),
    ev.Finished(10, 2, EndReason.STOP, "8", (1, 2, 3)),
    ev.Waited(10, (1,), (3,), (0.5,)),
    sample(10, 4.0, running=0, waiting=0, completed=5, kv_used_tokens=60),
]
RESULT = SearchResult(
    "p1", "7", (), 0.0, 0, "gambit", 3, Counts(3, 3, 1, 2, 5, 4), Tokens(20, 6, 2), Seconds(4.5, 2.0, 0.5),
    StopReason.COMPLETED,
)  # fmt: skip


def measured(result: SearchResult = RESULT, events: list[ev.Event] = EVENTS, gold: str = "7") -> Row:
    return measure(row(gold=gold), result, events, str.__eq__)


def test_a_search_is_measured_from_its_events() -> None:
    found = measured()
    assert (found.right_traces, found.wrong_traces, found.at_limit) == (1, (2, 1), 1)
    assert (found.children_right, found.parents_right) == (1, 0)
    assert found.productive == 5 + 4 + 3 + 2 + 1 + 1, "of each completed trace its own, and the token of 4 that 5 has"
    assert (found.queued, found.waited_steps, found.waited_seconds, found.steps) == (1, 3, 0.5, 10)
    cut = measured(dataclasses.replace(RESULT, cuts=Cuts(forced=3, looped=2)))
    assert (found.forced, found.looped, cut.forced, cut.looped) == (0, 0, 3, 2)
    assert found.seconds == Spent(4.5, 2.0, 1.0, 0.5, 0.25), "the last sample's, and the vote in the total"
    assert (found.kv_peak, found.kv_capacity, found.engines) == (90, 500, 1)
    assert found.unique_lengths == (5, 4, 3, 2, 1) and found.total_lengths == (5, 4, 3, 5, 3)
    assert found.series == Series((2.0, 4.0), (2, 0), (1, 0), (0, 5), (90, 60))
    assert not found.revotes["majority"] and measured(gold="8").revotes["majority"]


def test_an_answer_is_right_if_it_is_there_and_equals_the_right_one() -> None:
    def result(answer: str | None, error: str | None = None) -> SearchResult:
        return dataclasses.replace(RESULT, answer=answer, error=error)

    assert measured().correct and measured(events=[]).correct
    assert not measured(result("8")).correct and not measured(result(None)).correct
    assert not measured(result("7", "out of memory")).correct


def test_a_row_has_the_figures_of_its_result() -> None:
    plain = measured(events=[])
    assert (plain.answer, plain.stop_reason, plain.error) == ("7", "completed", None)
    assert (plain.generated, plain.reused, plain.recomputed) == (20, 6, 2)
    assert (plain.roots, plain.branched, plain.pruned, plain.evicted, plain.completed, plain.cancelled) == (
        3, 3, 1, 2, 5, 4,
    )  # fmt: skip
    assert (plain.pool, plain.warmup_tokens, plain.verifier_thoughts) == ("", 0, 0)
    pool = PoolSettings(2, 4, 6, 30, why="trusted")
    verifier = VerifierCost("v", 9, 8, 7, 600, 5.5, 4.5, is_repeatable=True)
    found = measured(dataclasses.replace(RESULT, pool=pool, verifier=verifier), [])
    assert (found.pool, found.warmup_tokens) == (str(pool), 30)
    assert (found.verifier_thoughts, found.verifier_needed, found.verifier_in_time) == (9, 8, 7)
    assert (found.verifier_tokens, found.verifier_seconds, found.verifier_waited) == (600, 5.5, 4.5)
    assert found.correct and found.generated == 20


@pytest.mark.parametrize("count", [0, 1, 2, NUM_MOMENTS - 1, NUM_MOMENTS, NUM_MOMENTS + 1, 1000])
def test_a_series_has_few_moments_and_the_last_one(count: int) -> None:
    found = series_of([sample(step, float(step), completed=step) for step in range(1, count + 1)])
    columns = dataclasses.astuple(found)
    assert {len(column) for column in columns} == {len(found.seconds)} and len(found.seconds) <= NUM_MOMENTS
    assert found.seconds[:1] == (1.0,) * (count > 0) and found.seconds[-1:] == (float(count),) * (count > 0)
    assert found.completed == found.seconds and len(found.seconds) >= min(count, NUM_MOMENTS // 2)

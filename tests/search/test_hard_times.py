"""A full disk, a folder that vanishes or becomes a file, a clock that jumps: the answer comes, the loss is said."""

import json
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gambit import events as ev
from gambit.bench.rows import ROWS_FILE
from gambit.cli.app import app
from gambit.config.options import SearchConfig
from gambit.errors import GambitWarning, StorageError, UserError
from gambit.results.record import replay_log
from gambit.solver import Solver
from gambit.storage.files import append_synced, opened_to_append, whole_lines, write_whole
from gambit.training.storage import read_index
from gambit.types import Problem

pytestmark = pytest.mark.system
OPTIONS = {"capacity": 6, "swap_size": 2, "check_interval": 6, "warmup_tokens": 8, "max_new_tokens": 60,
           "temperature": 1.0, "top_p": 1.0, "top_k": 0}  # fmt: skip
PROBLEMS = [Problem(f"a={i}", id=f"p{i}") for i in range(4)]


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the kernel refuses, as on a full disk, with another word for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def become_a_file(folder: Path) -> None:
    """As good as read-only, for the superuser too."""
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.fixture(scope="module")
def solver(tiny_folder: Path) -> Iterator[Solver]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solver = Solver(str(tiny_folder), engine="local", device="cpu")
    yield solver
    solver.close()


@pytest.fixture(scope="module")
def answers(solver: Solver) -> dict[str, str | None]:
    return {result.problem_id: result.answer for result in solver.solve_many(PROBLEMS, SearchConfig(**OPTIONS))}


# -- files --------------------------------------------------------------------------------------------------------


def test_a_line_that_does_not_fit_leaves_the_lines_before_it_and_no_piece_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with opened_to_append(path) as file:
        append_synced(file, "first")
        with full_disk(100), pytest.raises(StorageError, match=r"cannot write to .*lines: File too large"):
            append_synced(file, "x" * 1000)
        append_synced(file, "second")
    assert path.read_text() == "first\nsecond\n"


def test_lines_into_a_file_that_was_taken_away_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    with opened_to_append(path) as file:
        path.unlink()
        with pytest.raises(StorageError, match="No such file"):
            append_synced(file, "lost")
        path.write_text("another's\n")
        with pytest.raises(StorageError, match="another file stands in its place"):
            append_synced(file, "lost")
    assert path.read_text() == "another's\n"
    with pytest.raises(StorageError, match="No such file or directory"):
        opened_to_append(tmp_path / "gone" / "lines")


def test_a_file_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"before")
    with full_disk(100), pytest.raises(StorageError, match=r"cannot write .*file: File too large"):
        write_whole(path, b"x" * 1000)
    assert path.read_bytes() == b"before" and [found.name for found in tmp_path.iterdir()] == ["file"]


# -- solve --------------------------------------------------------------------------------------------------------


def test_every_answer_comes_although_no_log_fits(
    solver: Solver, answers: dict[str, str | None], tmp_path: Path
) -> None:
    with full_disk(2000), pytest.warns(GambitWarning, match="incomplete: File too large"):
        results = list(solver.solve_many(PROBLEMS, SearchConfig(**OPTIONS), out_dir=tmp_path, concurrency=2))
    assert {result.problem_id: result.answer for result in results} == answers
    assert all(result.log_error and "File too large" in result.log_error for result in results)
    for log in tmp_path.rglob("events.jsonl"):
        found = replay_log(log, str.__eq__)
        assert found.num_lines == len(list(whole_lines(log))) > 0 and "ends before the vote" in found.verdict
    assert not list(tmp_path.rglob("result.json*"))


@pytest.mark.parametrize("happen", [vanish, become_a_file])
def test_every_answer_comes_although_the_folder_does_not_stay(
    solver: Solver, answers: dict[str, str | None], tmp_path: Path, happen: Callable[[Path], None]
) -> None:
    folder, seen = tmp_path / "run", []

    def on_event(problem: str, event: ev.Event) -> None:
        seen.append(event)
        if len(seen) == 20:
            happen(folder)

    with pytest.warns(GambitWarning, match="incomplete: "):
        results = list(solver.solve_many(PROBLEMS, SearchConfig(**OPTIONS), out_dir=folder, on_event=on_event))
    assert {result.problem_id: result.answer for result in results} == answers
    incomplete = [result.problem_id for result in results if result.log_error is not None]
    assert incomplete == (["p0"] if happen is vanish else list(answers))  # a folder that is gone is made again


def test_a_folder_that_was_never_writable_is_refused_before_anything_is_searched(
    solver: Solver, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", Path("/proc/gambit")):
        with pytest.raises(UserError, match=f"cannot write to {folder}"):
            next(solver.solve_many(PROBLEMS, SearchConfig(**OPTIONS), out_dir=folder))


class Command:
    """A command's exit code, answers on stdout, and everything it said on stderr."""

    def __init__(self, *words: object) -> None:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
        assert "Traceback" not in result.output, result.output
        self.code, self.out, self.err = result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    lines = [{"id": problem.id, "question": problem.question, "answer": "7"} for problem in PROBLEMS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def flags(tiny_folder: Path) -> list[str]:
    options = {"model": tiny_folder, "engine": "local", "device": "cpu"}
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def searching(options: dict[str, object]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_results_that_do_not_fit_into_their_file_are_still_printed(
    flags: list[str], problems: Path, answers: dict[str, str | None], tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    with full_disk(1500):
        made = Command("solve", "--file", problems, "--out", tmp_path / "run", "--output", file, "--json", *flags,
                       "--scorer", "confidence", *searching(OPTIONS))  # fmt: skip
    shown = [json.loads(line) for line in made.out.splitlines()]
    assert made.code == 1 and [result["problem_id"] for result in shown] == list(answers)
    assert made.err.count("results from this one on are not in it") == 1
    kept = [json.loads(line)["problem_id"] for line in file.read_text().splitlines()]
    assert kept == list(answers)[: len(kept)] and len(kept) < len(answers)


# -- bench and collect --------------------------------------------------------------------------------------------


def keys_in(folder: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (folder / ROWS_FILE).read_text().splitlines()]
    return [(row["variant"], row["problem"]) for row in rows]


def test_a_bench_on_a_full_disk_says_so_and_is_gone_on_with(flags: list[str], problems: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["bench", "--benchmark", problems, "--no-logs", "--no-report", *flags, "--scorer", "constant"]
    with full_disk(4000):
        made = Command(*words, "--out", run, *searching(OPTIONS))
    assert made.code == 1 and f"cannot write to {run / ROWS_FILE}: File too large" in made.err
    assert f"gambit bench --resume --out {run}" in made.err
    before = keys_in(run)
    assert 0 < len(before) < 8
    assert Command("bench", "--resume", "--out", run, "--no-report").code == 0
    assert keys_in(run)[: len(before)] == before and len(set(keys_in(run))) == len(keys_in(run)) == 8


def test_a_bench_whose_folder_vanishes_does_not_write_into_nothing(
    flags: list[str], problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gambit.cli.progress import BenchScreen

    run, seen = tmp_path / "run", []

    def on_row(self: BenchScreen, row: object) -> None:
        seen.append(row)
        vanish(run)

    monkeypatch.setattr(BenchScreen, "on_row", on_row)
    made = Command("bench", "--benchmark", problems, "--no-report", *flags, "--scorer", "constant", "--out", run,
                   *searching(OPTIONS))  # fmt: skip
    assert made.code == 1 and f"cannot write to {run / ROWS_FILE}: No such file" in made.err and len(seen) == 1


COLLECT = ["--traces", 3, "--traces-at-once", 3, "--batch-tokens", 64, "--max-new-tokens", 40, "--graders", 1]


def test_a_collection_on_a_full_disk_says_so_and_is_gone_on_with(
    flags: list[str], problems: Path, tmp_path: Path
) -> None:
    words = ["scorer", "collect", "--problems", problems, "--out", tmp_path / "data", *flags, *COLLECT]
    with full_disk(1200):
        made = Command(*words)
    assert made.code == 1 and "cannot write " in made.err and "File too large" in made.err
    assert "the same command goes on from there" in made.err
    assert Command(*words).code == 0
    found = [problem.id for entry in read_index(tmp_path / "data") for problem in entry.problems]
    assert sorted(found) == ["p0", "p1", "p2", "p3"]


def test_a_collection_whose_folder_vanishes_says_so(
    flags: list[str], problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gambit.training.collect import StateReader

    read, data = StateReader.read, tmp_path / "data"

    def read_after(self: StateReader, readings: object) -> object:
        vanish(data)
        return read(self, readings)

    monkeypatch.setattr(StateReader, "read", read_after)
    made = Command("scorer", "collect", "--problems", problems, "--out", data, *flags, *COLLECT)
    assert made.code == 1 and f"cannot write {data}" in made.err and "No such file" in made.err


# -- clocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_changes_no_answer(
    solver: Solver, answers: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """A day forward or back, again and again."""
    asked = 0

    def jumping(clock: Callable[[], float]) -> Callable[[], float]:
        def now() -> float:
            nonlocal asked
            asked += 1
            return clock() + jump * (asked // 10)

        return now

    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, jumping(getattr(time, name)))
    results = list(solver.solve_many(PROBLEMS, SearchConfig(**OPTIONS), out_dir=tmp_path, concurrency=2))
    assert asked > 100 and {result.problem_id: result.answer for result in results} == answers
    assert all(replay_log(log, str.__eq__).finding is None for log in tmp_path.rglob("events.jsonl"))


def test_a_clock_that_jumps_over_a_budget_ends_the_search_with_its_best_vote(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, late = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (86_400.0 if late else 0.0))

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.Finished):
            late.append(event)

    result = solver.solve(PROBLEMS[0], SearchConfig(**OPTIONS, budget_seconds=3600), on_event=on_event)
    assert result.stop_reason == "budget_seconds" and result.counts.completed >= 1

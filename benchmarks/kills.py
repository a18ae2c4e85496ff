"""SIGKILL at random moments over `gambit bench`, `scorer collect` and `solve`: what is left must be right.

    python benchmarks/kills.py --out benchmarks/results/kills.json        # 100 kills, about ten minutes on one core

The bundled model. A killed bench or collection is resumed, killed again and so on to its end. After every kill nothing
that was there may be lost or doubled, and every event log must replay up to its last whole line; a finished run equals
one that was left alone. A killed `solve` leaves logs that say how far it came; solved again, it gives the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gambit.bench.rows import ROWS_FILE
from gambit.errors import UserError
from gambit.pawn import Level, Split, generate
from gambit.results.record import Replay, replay_log
from gambit.storage.files import whole_lines
from gambit.storage.run_folder import LOG_FILE
from gambit.training.storage import INDEX_FILE, read_index, read_shards

NUM_PROBLEMS = 6
SMALL = ["--engine", "local", "--capacity", "6", "--check-interval", "8", "--warmup-tokens", "8"]
CLOCKS = ("began", "seconds", "waited_seconds", "series")  # what differs between two runs of one search
PATIENCE_SECONDS = 120.0

# Imports are paid for once; each command is a process of its own all the same.
NURSERY = """
import json, os, sys
import torch, gambit.bench.run, gambit.engines.local.engine, gambit.solver, gambit.training.collect
from gambit.cli.app import app

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        app(json.loads(line))
    print(pid, flush=True)
    sys.stdin.readline()  # until then its number stays its own
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Nursery:
    """Starts `gambit` commands and tells how they ended."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent

    def start(self, words: list[str]) -> int:
        """Gives the number of the process."""
        return self._ask(json.dumps(words))

    def status(self) -> int:
        """Waits for the end of the last one."""
        return self._ask("")

    def _ask(self, line: str) -> int:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(line + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


@contextmanager
def nursery() -> Iterator[Nursery]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NURSERY], stdin=pipe, stdout=pipe, text=True) as parent:
        yield Nursery(parent)
        assert parent.stdin is not None
        parent.stdin.close()


# -- what a command leaves -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A command to be killed: how it begins, goes on, and what of it is on the disk by key."""

    name: str
    first: Callable[[Path], list[str]]
    again: Callable[[Path], list[str]] | None  # None: it is begun anew, elsewhere
    kept: Callable[[Path], dict[str, object]]
    growing: str  # the file whose first line says that something is there to be lost


def bench_rows(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for _, line in whole_lines(folder / ROWS_FILE):
        row = json.loads(line)
        add_new(found, f"{row['variant']}/{row['problem']}/{row['seed']}", {k: row[k] for k in row if k not in CLOCKS})
    return found


def collected_problems(folder: Path) -> dict[str, object]:
    """Every problem of the index, its shard being whole."""
    found: dict[str, object] = {}
    for shard in read_shards(folder, skip_corrupted=False):
        for problem in shard.entry.problems:
            add_new(found, problem.id, problem.model_dump())
    assert len(found) == sum(len(entry.problems) for entry in read_index(folder))
    return found


def solved_lines(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for _, line in whole_lines(folder / "results.jsonl"):
        result = json.loads(line)
        add_new(found, result["problem_id"], [result["answer"], result["tokens"]["generated"]])
    return found


def add_new(found: dict[str, object], key: str, value: object) -> None:
    if key in found:
        raise Wrong(f"{key} is there twice")
    found[key] = value


class Wrong(Exception):  # noqa: N818 # a finding, not an error of this script
    """A promise that a kill has broken."""


def commands(problems: Path, num_problems: int) -> dict[str, Command]:
    few = ["--limit", str(num_problems)]
    bench = ["bench", "--benchmark", str(problems), *few, "--block", "2", *SMALL, "--no-report", "--quiet"]
    collect = ["scorer", "collect", "--problems", str(problems), *few, "--traces", "4", "--traces-at-once", "8",
               "--batch-tokens", "64", "--engine", "local", "--quiet", "--graders", "1"]  # fmt: skip
    solve = ["solve", "--file", str(problems), *SMALL, "--json", "--quiet"]
    return {
        "bench": Command("bench", lambda folder: [*bench, "--out", str(folder)],
                         lambda folder: ["bench", "--resume", "--no-report", "--quiet", "--out", str(folder)],
                         bench_rows, ROWS_FILE),
        "collect": Command("collect", lambda folder: [*collect, "--out", str(folder)],
                           lambda folder: [*collect, "--out", str(folder)], collected_problems, INDEX_FILE),
        "solve": Command("solve", lambda folder: [*solve, "--out", str(folder), "--output",
                                                  str(folder / "results.jsonl")],
                         None, solved_lines, "0/events.jsonl"),
    }  # fmt: skip


def write_problems(path: Path, count: int) -> None:
    puzzles = [puzzle for puzzle, _ in zip(generate(Split.DEV, 5, Level.EASY), range(count), strict=False)]
    lines = [{"id": str(i), "question": puzzle.text, "answer": str(puzzle.answer)} for i, puzzle in enumerate(puzzles)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


# -- logs ----------------------------------------------------------------------------------------------------------


def check_logs(folder: Path, counts: Counter[str]) -> None:
    """Every log replays; a whole one is verified, and one that was cut says so."""
    for path in sorted(folder.rglob(LOG_FILE)):
        if not any(True for _ in whole_lines(path)):
            counts["logs without a whole line"] += 1
            continue
        try:
            found = replay_log(path, str.__eq__)
        except (UserError, AssertionError) as error:
            raise Wrong(f"{path} does not replay: {error}") from error
        counts[verdict(path, found)] += 1


def verdict(path: Path, found: Replay) -> str:
    lines = [line for _, line in whole_lines(path)]
    if found.num_lines != len(lines):
        raise Wrong(f"{path}: {found.num_lines} of {len(lines)} lines were read")
    if json.loads(lines[-1])["event"] == "Voted":
        if found.finding is not None:
            raise Wrong(f"{path}: {found.finding}")
        return "whole logs verified"
    if found.finding != "the log ends before the vote":
        raise Wrong(f"{path}: cut short, and the replay says {found.finding!r}")
    return "cut logs replayed to their last whole line"


def check_rows_have_whole_logs(folder: Path) -> None:
    for _, line in whole_lines(folder / ROWS_FILE):
        log = folder / json.loads(line)["log"]
        if replay_log(log, str.__eq__).finding is not None:
            raise Wrong(f"{log} belongs to a row and is not whole")


# -- kills ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Killer:
    """Kills one command again and again until it has ended so often as wanted."""

    command: Command
    nursery: Nursery
    rng: random.Random
    reference: dict[str, object]
    seconds: float  # of the unbroken run, from its first line on
    counts: Counter[str] = field(default_factory=Counter)

    def kill(self, num_kills: int, folder: Path) -> None:
        life = 0
        while self.counts["kills"] < num_kills:
            self._one_life(folder / str(life), num_kills)
            life += 1

    def _one_life(self, folder: Path, num_kills: int) -> None:
        """Runs from the first start to the end, resumed after every kill; a `solve` without a log is started again."""
        words, kept = self.command.first(folder), dict[str, object]()
        while True:
            is_last = self.counts["kills"] >= num_kills or self.rng.random() < 0.1
            missing = 1 - len(kept) / len(self.reference)
            killed = not is_last and self._start_and_kill(words, folder, missing * self.seconds)
            if is_last:
                self._start_and_wait(words)
            kept = self._check(folder, kept)
            if not killed:
                break
            if self.command.again is None:
                return
            words = self.command.again(folder) if self._has_begun(folder) else words
        if kept != self.reference:
            different = [key for key in kept.keys() | self.reference.keys() if kept.get(key) != self.reference.get(key)]
            raise Wrong(f"{folder}: the finished run differs from the unbroken one in {different}")
        self.counts["runs finished like the unbroken one"] += 1

    def _has_begun(self, folder: Path) -> bool:
        return self.command.name != "bench" or (folder / "run.json").exists()

    def _start_and_wait(self, words: list[str]) -> None:
        self.nursery.start(words)
        if (status := self.nursery.status()) != 0:
            raise Wrong(f"{words} ended with {status}")

    def _start_and_kill(self, words: list[str], folder: Path, seconds: float) -> bool:
        """Returns whether the kill came in time; `seconds` is the time that the rest takes."""
        waits = self.rng.random() < 0.9
        delay = self.rng.random() * seconds
        pid = self.nursery.start(words)
        if waits:
            wait_for_growth(folder / self.command.growing, pid)
        time.sleep(delay)
        after_first = has_lines(folder / self.command.growing)
        os.kill(pid, signal.SIGKILL)
        if (status := self.nursery.status()) == 0:
            return False
        if status != signal.SIGKILL:
            raise Wrong(f"{words} ended with {status} before it was killed")
        self.counts["kills"] += 1
        self.counts["kills after the first row or event"] += after_first
        return True

    def _check(self, folder: Path, before: dict[str, object]) -> dict[str, object]:
        kept = self.command.kept(folder)
        for key, value in before.items():
            if kept.get(key) != value:
                raise Wrong(f"{folder}: {key} was there and is lost or changed")
        for key, value in kept.items():
            if self.reference.get(key) != value:
                raise Wrong(f"{folder}: {key} is not what it is in the unbroken run")
        check_logs(folder, self.counts)
        if self.command.name == "bench":
            check_rows_have_whole_logs(folder)
        return kept


def has_lines(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def wait_for_growth(path: Path, pid: int) -> None:
    """Waits until the file has one more line than now, or its writer has ended."""
    size, until = path.stat().st_size if path.exists() else 0, time.monotonic() + PATIENCE_SECONDS
    while (path.stat().st_size if path.exists() else 0) <= size and is_running(pid):
        if time.monotonic() > until:
            raise Wrong(f"{path} did not grow within {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.001)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def unbroken(command: Command, at: Nursery, folder: Path) -> tuple[dict[str, object], float]:
    """Returns what the command leaves when it is not killed, and its seconds from the first line on."""
    pid = at.start(command.first(folder))
    wait_for_growth(folder / command.growing, pid)
    began = time.monotonic()
    if at.status() != 0:
        raise Wrong(f"{command.name} failed by itself")
    return command.kept(folder), time.monotonic() - began


def kill_all(folder: Path, num_kills: dict[str, int], seed: int, num_problems: int = NUM_PROBLEMS) -> dict[str, object]:
    """Counts by command; raises `Wrong` at the first thing that is."""
    problems = folder / "puzzles.jsonl"
    write_problems(problems, num_problems)
    report: dict[str, object] = {"seed": seed, "problems": num_problems}
    with nursery() as at:
        for name, command in commands(problems, num_problems).items():
            if not num_kills.get(name):
                continue
            reference, seconds = unbroken(command, at, folder / name / "unbroken")
            killer = Killer(command, at, random.Random(f"{seed} {name}"), reference, seconds)
            killer.kill(num_kills[name], folder / name)
            report[name] = {"entries of one run": len(reference), **killer.counts}
            print(name, report[name], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all, shared by the three commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shares = {"bench": options.kills - 2 * (options.kills // 3), "collect": options.kills // 3,
              "solve": options.kills // 3}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = kill_all(Path(folder), shares, options.seed)
    report["lost, doubled or changed"] = 0  # the first one ends the script
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

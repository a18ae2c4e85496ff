"""SIGKILL at random moments over all long commands: what is left must be right.

    python benchmarks/kills.py --out benchmarks/results/kills.json        # 100 kills, a quarter of an hour on two cores
    python benchmarks/kills.py --only train,serve --kills 20

The bundled model. A killed bench, collection or measurement of prefix values is resumed, killed again and so on to its
end. After every kill nothing that was there may be lost or doubled, and every event log must replay up to its last
whole line; a finished run equals one that was left alone. A killed `solve` leaves logs that say how far it came; solved
again, it gives the same answers. A killed training leaves no checkpoint or a whole one. A killed server on two engines
under Ray leaves the whole log of every answer that a client has got, and no engine.
"""

from __future__ import annotations

import argparse
import hashlib
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from safetensors.numpy import load_file

from gambit.bench.prefix_value import ROLLOUTS_FILE
from gambit.bench.rows import ROWS_FILE
from gambit.errors import UserError
from gambit.pawn import Level, Split, generate
from gambit.results.record import Replay, replay_log
from gambit.storage.files import whole_lines
from gambit.storage.run_folder import LOG_FILE
from gambit.training.storage import HEADER_FILE, INDEX_FILE, read_index, read_shards

NUM_PROBLEMS = 6
DATA = "data"  # a collection, to train on
TO_TRAIN_ON = ["scorer", "collect", "--problems", "pawn:scorer", "--limit", "30", "--traces", "8", "--engine", "local",
               "--state-position", "boundary", "--quiet"]  # fmt: skip
SMALL = ["--engine", "local", "--capacity", "6", "--check-interval", "8", "--warmup-tokens", "8"]
CLOCKS = ("began", "seconds", "waited_seconds", "series")  # what differs between two runs of one search
PATIENCE_SECONDS = 300.0
KEY, NUM_CLIENTS, ENDS_SECONDS = "sk-kills", 4, 60.0
SHARES = {"bench": 20, "collect": 20, "solve": 20, "prefix-value": 16, "train": 16, "serve": 8}  # of 100 kills

# Imports are paid for once; each command is a process of its own all the same.
NURSERY = """
import json, os, sys
import torch, gambit.bench.run, gambit.engines.local.engine, gambit.solver, gambit.training.collect
import gambit.cli.scorer_work, gambit.cli.prefix_work
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
    growing: str | None  # the file whose first line says that something is there to be lost; None: it is there or not


def bench_rows(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for _, line in whole_lines(folder / ROWS_FILE):
        row = json.loads(line)
        add_new(found, f"{row['variant']}/{row['problem']}/{row['seed']}", {k: row[k] for k in row if k not in CLOCKS})
    return found


def collected_problems(folder: Path) -> dict[str, object]:
    """Every problem of the index, its shard being whole."""
    found: dict[str, object] = {}
    if not (folder / HEADER_FILE).exists():  # killed before it wrote anything
        return found
    for shard in read_shards(folder):
        for problem in shard.entry.problems:
            add_new(found, problem.id, problem.model_dump())
    assert len(found) == sum(len(entry.problems) for entry in read_index(folder))
    return found


def continued_prefixes(folder: Path) -> dict[str, object]:
    """Every problem that was sampled, and every prefix that was continued."""
    found = collected_problems(folder)
    for _, line in whole_lines(folder / ROLLOUTS_FILE):
        rollouts = json.loads(line)
        add_new(found, rollouts["prefix"], rollouts["is_right"])
    return found


def checkpoint(folder: Path) -> dict[str, object]:
    """The scorer by its weights, once it is there."""
    path = folder / "scorer.safetensors"
    if not path.exists():
        return {}
    weights = load_file(path)
    digest = hashlib.sha256(b"".join(name.encode() + weights[name].tobytes() for name in sorted(weights)))
    return {path.name: digest.hexdigest()}


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
    values = ["prefix-value", "--benchmark", str(problems), *few, "--traces", "6", "--rollouts", "2", "--keep", "1",
              "--cuts", "0.3,0.6", "--traces-at-once", "6", "--engine", "local", "--quiet"]  # fmt: skip
    train = ["scorer", "train", "--data", str(problems.parent / DATA), "--objective", "bce", "--epochs", "20"]
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
        "prefix-value": Command("prefix-value", lambda folder: [*values, "--out", str(folder)],
                                lambda folder: [*values, "--out", str(folder)], continued_prefixes, ROLLOUTS_FILE),
        "train": Command("train", lambda folder: [*train, "--out", str(made(folder) / "scorer.safetensors")],
                         lambda folder: [*train, "--out", str(folder / "scorer.safetensors")], checkpoint, None),
    }  # fmt: skip


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        pid, growing = self.nursery.start(words), self.command.growing
        if waits and growing is not None:
            wait_for_growth(folder / growing, pid)
        time.sleep(delay)
        after_first = growing is not None and has_lines(folder / growing)
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it is gone
        return False


def unbroken(command: Command, at: Nursery, folder: Path) -> tuple[dict[str, object], float]:
    """Returns what the command leaves when it is not killed, and its seconds from the first line on."""
    pid = at.start(command.first(folder))
    if command.growing is not None:
        wait_for_growth(folder / command.growing, pid)
    began = time.monotonic()
    if at.status() != 0:
        raise Wrong(f"{command.name} failed by itself")
    return command.kept(folder), time.monotonic() - began


# -- a server on engines under Ray -------------------------------------------------------------------------------------


def kill_servers(folder: Path, problems: Path, num_kills: int, rng: random.Random) -> Counter[str]:
    """Kills a server under load, starts it again with the same folder of logs, and so on."""
    counts: Counter[str] = Counter()
    questions = [json.loads(line)["question"] for line in problems.read_text(encoding="utf-8").splitlines()]
    answers: dict[str, str | None] = {}
    for _ in range(num_kills):
        before = len(answers)
        with running_server(folder) as (process, url), ThreadPoolExecutor(NUM_CLIENTS) as clients:
            asking = [clients.submit(ask_until_it_dies, url, questions, answers) for _ in range(NUM_CLIENTS)]
            wait_for(lambda before=before: len(answers) > before, "an answer")
            time.sleep(5 * rng.random())
            children = descendants(process.pid)
            process.kill()
            for each in asking:
                each.result()
        counts["kills"] += 1
        counts += left_of(children)
        check_logs(folder, counts)
        for search, answer in answers.items():
            found = replay_log(folder / search / LOG_FILE, str.__eq__)
            if found.finding is not None or found.result.answer != answer:
                raise Wrong(
                    f"{search} was answered with {answer!r}, its log says {found.finding or found.result.answer!r}"
                )
    counts["answers with a whole log"] = len(answers)
    return counts


@contextmanager
def running_server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "gambit", "serve", "pawn", "--port", "0", "--api-key", KEY, "--out", str(folder),
               "--ray", "--engines", "2", "--capacity", "4", "--max-running", str(NUM_CLIENTS)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process, next(line.split()[-1] for line in process.stderr if "/v1" in line)
        finally:
            process.kill()


def ask_until_it_dies(url: str, questions: list[str], answers: dict[str, str | None]) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(timeout=PATIENCE_SECONDS, headers=headers) as client, suppress(httpx.TransportError):
        while True:
            body = {"model": "pawn", "messages": [{"role": "user", "content": random.choice(questions)}]}
            reply = client.post(f"{url}/chat/completions", json=body)
            if reply.status_code == 200:
                answers[reply.json()["gambit"]["search_id"]] = reply.json()["gambit"]["answer"]


def descendants(pid: int) -> list[int]:
    parents = {int(stat.parent.name): parent_of(stat) for stat in Path("/proc").glob("[0-9]*/stat")}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def parent_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def left_of(processes: list[int]) -> Counter[str]:
    """Waits for the engines to end by themselves; ends what is left, and counts it by name."""
    engines = [pid for pid in processes if name_of(pid).startswith("ray::EngineActor")]
    wait_for(lambda: not any(map(is_running, engines)), "the end of all engines", ENDS_SECONDS)
    left = [pid for pid in processes if is_running(pid)]
    names = Counter(f"{name_of(pid)} left behind" for pid in left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return names


def name_of(pid: int) -> str:
    """Returns the name of a process, as Ray sets it; empty once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    return ""


def wait_for(is_so: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise Wrong(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.05)


def kill_all(folder: Path, num_kills: dict[str, int], seed: int, num_problems: int = NUM_PROBLEMS) -> dict[str, object]:
    """Counts by command; raises `Wrong` at the first thing that is."""
    problems = folder / "puzzles.jsonl"
    write_problems(problems, num_problems)
    report: dict[str, object] = {"seed": seed, "problems": num_problems}
    if num_kills.get("serve"):
        servers = made(folder / "serve")
        report["serve"] = dict(kill_servers(servers, problems, num_kills["serve"], random.Random(f"{seed} serve")))
        print("serve", report["serve"], flush=True)
    with nursery() as at:
        if num_kills.get("train"):
            at.start([*TO_TRAIN_ON, "--out", str(folder / DATA)])
            if at.status() != 0:
                raise Wrong("there is nothing to train on")
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
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--only", default=",".join(SHARES), help="of these commands alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only.split(",")
    whole = sum(SHARES[name] for name in names)
    shares = {name: round(options.kills * SHARES[name] / whole) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        report = kill_all(Path(folder), shares, options.seed)
    report["lost, doubled or changed"] = 0  # the first one ends the script
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

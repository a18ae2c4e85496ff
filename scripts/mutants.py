"""Mutation testing: small faults are put into the code one at a time, and the tests that run it must notice.

    python -m scripts.mutants --sample 500 --out mutants.json                  # about 2 s of one core for each mutant
    python -m scripts.mutants --sample 500 --out mutants.json --survivors      # again, after tests were added
    python -m scripts.mutants --sample 500 --out mutants.json --workers 12     # where there are cores

Mutants are made inside functions with the default operators of mutmut 3. Which tests run which lines is recorded first,
and a mutant gets those that run its own, quickest first, until one fails. Results are kept as they come: a run that was
interrupted goes on where it stopped. A survivor that no test can tell from the code has its reason in
`equivalent_mutants.json` beside this file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from scripts.mutation.bench import PASSED, TIMEOUT, Bench, Json, import_heavy
from scripts.mutation.operators import Mutant
from scripts.mutation.plugins import Choice
from scripts.mutation.reach import FileRecord, Part, Reach, record
from scripts.mutation.targets import GROUP_OF, GROUPS, ROOT, TESTS, all_mutants

REASONS = Path(__file__).with_name("equivalent_mutants.json")
PR_SET_PDEATHSIG = 1  # of Linux
NO_REASON = "a test is missing"
KILLED, SURVIVED, SKIPPED = "killed", "survived", "skipped"
# A GPU is no place for so many processes, and its driver wants more address space than they have.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class Verdict(NamedTuple):
    """The end of a mutant: by which test, after how many seconds."""

    mutant: Mutant
    outcome: str
    by: str
    seconds: float


class Worker:
    """One process that tries mutants, one after the other, each in forks of itself."""

    def __init__(self, folder: Path, options: argparse.Namespace, reach: Reach) -> None:
        self._bench = Bench(Path(tempfile.mkdtemp(dir=folder)))
        self._options = options
        self._reach = reach

    def look_at(self, file: str) -> FileRecord:
        return FileRecord.of(file, record(self._bench, file, self._options.cache))

    def try_out(self, mutant: Mutant) -> Verdict:
        began = time.monotonic()
        if self._options.until and began > self._options.until:
            return Verdict(mutant, SKIPPED, "", 0.0)
        self._bench.put(mutant)
        try:
            outcome, by = self._outcome(mutant)
        finally:
            self._bench.restore(mutant)
        return Verdict(mutant, outcome, by, time.monotonic() - began)

    def _outcome(self, mutant: Mutant) -> tuple[str, str]:
        for parts in filter(None, self._reach.parts(mutant, self._options.seconds)):
            seconds = 10 + 5 * sum(part.seconds for part in parts)
            found = self._bench.fork(partial(self._run_tests, parts), seconds)
            if found["end"] == TIMEOUT:
                return TIMEOUT, ""
            if found["end"] != PASSED:
                return KILLED, str(found.get("by", found["end"]))
        return SURVIVED, ""

    def _run_tests(self, parts: Iterable[Part]) -> Json:
        """Runs in a fork."""
        for part in parts:
            choice = Choice(part.tests)
            if self._bench.pytest(part.file, choice):
                return {"end": "failed", "by": choice.failed}
        return {"end": PASSED}


def on_workers(task: str, items: Sequence[object], options: argparse.Namespace, reach: Reach) -> Iterator[object]:
    """Yields the results of a method of `Worker` for each item, as they come."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        start = (Path(folder), options, reach)
        # No `multiprocessing.Pool`: its processes may not have children, and some tests start some.
        with ProcessPoolExecutor(options.workers, get_context("fork"), _start_worker, start) as pool:
            for done in as_completed([pool.submit(_work, task, item) for item in items]):
                yield done.result()


def _start_worker(folder: Path, options: argparse.Namespace, reach: Reach) -> None:
    global _worker
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # an interrupted run leaves nothing behind
    _worker = Worker(folder, options, reach)


def _work(task: str, item: object) -> object:
    return getattr(_worker, task)(item)


# -- the results ---------------------------------------------------------------------------------------------------


class Results:
    """The ends of all mutants, written to disk after each."""

    def __init__(self, path: Path, options: dict[str, object]) -> None:
        self.entries: dict[str, dict[str, object]] = {}
        self._path, self._options = path, options
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            self.entries = {entry["key"]: entry for entry in before["mutants"]}

    def add(self, verdict: Verdict) -> None:
        mutant = verdict.mutant
        self.entries[mutant.key] = {
            "key": mutant.key, "verdict": verdict.outcome, "by": verdict.by, "seconds": round(verdict.seconds, 1),
            "line": mutant.line, "module": mutant.module,
        }  # fmt: skip
        temporary = self._path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.report(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    def report(self) -> dict[str, object]:
        entries = sorted(self.entries.values(), key=lambda entry: (str(entry["module"]), int(str(entry["line"]))))
        reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.is_file() else {}
        for entry in entries:
            entry.pop("reason", None)
            if entry["verdict"] == SURVIVED:
                entry["reason"] = reasons.get(entry["key"], NO_REASON)
        return {**self._options, "summary": summary(entries), "mutants": entries}

    def brief(self) -> dict[str, object]:
        """Returns the result file: counts, and the survivors with their reasons."""
        report = self.report()
        kept = ("key", "line", "reason")
        survivors = [{name: entry[name] for name in kept} for entry in report.pop("mutants") if "reason" in entry]  # type: ignore[attr-defined]
        return {"what": "scripts/mutants.py", "sample": len(self.entries), **report, "survivors": survivors}


def summary(entries: list[dict[str, object]]) -> dict[str, object]:
    table: dict[str, Counter[str]] = {}
    for entry in entries:
        for name in (GROUP_OF[str(entry["module"])], "all"):
            table.setdefault(name, Counter())[str(entry["verdict"])] += 1
    return {name: {**counts, "killed_share": round(share(counts), 4)} for name, counts in sorted(table.items())}


def share(counts: Counter[str]) -> float:
    return (counts[KILLED] + counts[TIMEOUT]) / counts.total()


def run(mutants: list[Mutant], results: Results, options: argparse.Namespace) -> None:
    import_heavy()
    records = []
    for found in on_workers("look_at", TESTS, options, Reach([])):
        assert isinstance(found, FileRecord)
        print(f"{found.file}: {len(found.seconds)} tests, {sum(found.seconds.values()):.1f} s", flush=True)
        if found.failed:
            print(f"  left out, for they fail without any fault: {', '.join(found.failed)}", flush=True)
        records.append(found)
    for verdict in on_workers("try_out", mutants, options, Reach(records)):
        assert isinstance(verdict, Verdict)
        if verdict.outcome != SKIPPED:
            results.add(verdict)
            count = len(results.entries)
            print(f"{count} {verdict.outcome:9}{verdict.seconds:5.1f} s  {verdict.mutant.key[:150]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500, help="how many of all mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=20, help="of tests for one mutant, as long as they take without it"
    )
    parser.add_argument("--minutes", type=float, help="begin no more mutants after this time")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--brief", type=Path, help="a second file, for counts and survivors alone")
    parser.add_argument("--cache", type=Path, default=ROOT / ".mutants", help="for what is known of the tests")
    parser.add_argument("--survivors", action="store_true", help="run again those of --out that survived")
    parser.add_argument("--only", choices=GROUPS, action="append", help="of these groups")
    options = parser.parse_args()
    with_environment()
    options.until = time.monotonic() + 60 * options.minutes if options.minutes else None
    found = all_mutants()
    sample = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    results = Results(options.out, {"all_mutants": len(found), "seed": options.seed, "commit": commit()})
    wanted = [mutant for mutant in sample if is_wanted(mutant, results, options)]
    print(f"{len(found)} mutants, {len(sample)} of them drawn, {len(wanted)} to run", flush=True)
    run(wanted, results, options)
    if options.brief:
        options.brief.write_text(json.dumps(results.brief(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(results.report()["summary"], indent=1))


def with_environment() -> None:
    """Restarts with the environment that all tests have in common: hash seeds, for one, are fixed at the start."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, **ENVIRONMENT})


def commit() -> str:
    """Returns the commit of the code, marked if the mutated or tested files have changed since."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src", "tests"], capture_output=True, text=True).stdout
    return f"{name}{' with changes' if changed else ''}"


def is_wanted(mutant: Mutant, results: Results, options: argparse.Namespace) -> bool:
    if options.only and GROUP_OF[mutant.module] not in options.only:
        return False
    entry = results.entries.get(mutant.key)
    return entry is None if not options.survivors else entry is not None and entry["verdict"] == SURVIVED


if __name__ == "__main__":
    main()

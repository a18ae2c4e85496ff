"""Records which tests run a line and how long each takes, once for each test file, until it or the sources change."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import mmap
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.mutation import tracer
from scripts.mutation.bench import Bench, Json
from scripts.mutation.operators import Mutant
from scripts.mutation.plugins import OUTSIDE, Watch
from scripts.mutation.targets import MODULES, ROOT, SOURCE, concerns

RECORDING_SECONDS = 900.0
FIRST_SECONDS = 2.0  # of the quickest files, tried before the others: most mutants die there


class TimedTest(NamedTuple):
    file: str
    id: str
    seconds: float


class Part(NamedTuple):
    """Some tests of one file, quickest first."""

    file: str
    tests: tuple[str, ...]
    seconds: float


# -- recording -----------------------------------------------------------------------------------------------------


def record(bench: Bench, file: str, cache: Path) -> Json:
    """Returns the record of a test file, from the cache if its tests and the sources are the same."""
    kept = cache / f"{Path(file).stem}-{digest(file)}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    traced = bench.fork(lambda: with_lines(bench, file), RECORDING_SECONDS, {tracer.SWITCH: switch(bench)})
    found = {**traced, "lines": lines_of(bench)}
    cache.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def digest(file: str) -> str:
    """Hashes the sources, a test file, and the files beside it that it imports."""
    paths = [*sorted((SOURCE / "gambit").rglob("*.py")), *sorted(with_imports(ROOT / "tests" / file, set()))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def with_imports(path: Path, found: set[Path]) -> set[Path]:
    if path in found or not path.is_file():
        return found
    found.add(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module] if isinstance(node, ast.ImportFrom) else names:
            with_imports((ROOT / "tests" / (name or "").replace(".", "/")).with_suffix(".py"), found)
    return with_imports(ROOT / "tests" / "conftest.py", found)


def watched(bench: Bench, file: str, watch: Watch) -> Json:
    """Runs in a fork, without `-x`, so that a test that fails costs that test alone."""
    import pytest

    code = pytest.main(
        ["-q", "--tb=line", "-p", "_hypothesis_pytestplugin", "--hypothesis-profile=quick",
         f"--basetemp={bench.folder / 'tmp'}", str(ROOT / "tests" / file)], plugins=[watch],
    )  # fmt: skip
    return {"code": int(code), "seconds": watch.seconds, "failed": sorted(watch.failed)}


def with_lines(bench: Bench, file: str) -> Json:
    trace = json.loads(switch(bench))
    Path(trace["current"]).write_bytes(bytes(4))
    with Path(trace["current"]).open("r+b") as opened:
        context = mmap.mmap(opened.fileno(), 4)

    def change(number: int) -> None:
        context[:4] = number.to_bytes(4, "little")

    watch = Watch(change)
    tracer.start(**trace)
    found = watched(bench, file, watch)
    return {**found, "contexts": watch.contexts, "fixtures": watch.fixtures}


def switch(bench: Bench) -> str:
    shutil.copy(tracer.__file__, bench.folder / "sitecustomize.py")
    modules = {str(bench.source / module): module for module in MODULES}
    files = {"log": str(bench.folder / "lines.txt"), "current": str(bench.folder / "context")}
    return json.dumps({"modules": modules, **files, "uncached": [str(bench.source), str(ROOT / "tests")]})


def lines_of(bench: Bench) -> dict[str, dict[str, list[int]]]:
    """Context number, module, lines."""
    found: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    log = bench.folder / "lines.txt"
    for line in log.read_text().splitlines() if log.is_file() else ():
        context, module, number = line.split()
        found[context][module].add(int(number))
    log.unlink(missing_ok=True)
    return {context: {module: sorted(lines) for module, lines in of.items()} for context, of in found.items()}


# -- asking --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One test file: its sound tests with their seconds and the lines each runs."""

    file: str
    seconds: dict[str, float]
    lines: dict[str, set[tuple[str, int]]]
    failed: tuple[str, ...]

    @classmethod
    def of(cls, file: str, found: Json) -> FileRecord:
        contexts: dict[str, int] = found.get("contexts", {})  # type: ignore[assignment]
        fixtures: dict[str, list[str]] = found.get("fixtures", {})  # type: ignore[assignment]
        took: dict[str, float] = found.get("seconds", {})  # type: ignore[assignment]
        by_number: dict[str, dict[str, list[int]]] = found.get("lines", {})  # type: ignore[assignment]
        ran = {int(number): set(places(of)) for number, of in by_number.items()}
        seconds, reached = {}, {}
        failed: list[str] = found.get("failed", [])  # type: ignore[assignment]
        for test in sorted(fixtures.keys() & took.keys() - set(failed)):
            shared = fixtures[test]
            seconds[test] = took[test] + sum(took.get(name, 0.0) for name in shared)
            numbers = [OUTSIDE, contexts[test], *(contexts[name] for name in shared if name in contexts)]
            reached[test] = set().union(*(ran.get(number, set()) for number in numbers))
        return cls(file, seconds, reached, tuple(failed))

    def tests(self, wanted: set[tuple[str, int]]) -> list[TimedTest]:
        """Returns the tests that run one of these lines."""
        return [TimedTest(self.file, test, self.seconds[test]) for test, ran in self.lines.items() if ran & wanted]


def places(lines: dict[str, list[int]]) -> Iterator[tuple[str, int]]:
    return ((module, number) for module, numbers in lines.items() for number in numbers)


class Reach:
    """The tests for a mutant, as far as they run the statement that it is in."""

    def __init__(self, records: Iterable[FileRecord]) -> None:
        self._records = list(records)
        self._statements = {module: statements((SOURCE / module).read_text(encoding="utf-8")) for module in MODULES}

    def parts(self, mutant: Mutant, most_seconds: float) -> tuple[list[Part], list[Part]]:
        """First the quick ones of the files that concern the module, then theirs and others' up to some seconds."""
        first, last = self._statements[mutant.module][mutant.line]
        wanted = {(mutant.module, line) for line in range(first, last + 1)}
        found = [(concerns(each.file, mutant.module), each) for each in self._records]
        own = [test for is_own, each in found if is_own for test in each.tests(wanted)]
        other = [test for is_own, each in found if not is_own for test in each.tests(wanted)]
        own, early = within(own, most_seconds), within(own, FIRST_SECONDS)
        late = [test for test in own if test not in set(early)] + within(other, most_seconds / 2)
        return by_file(early or late), by_file(late if early else [])


def within(tests: Iterable[TimedTest], seconds: float) -> list[TimedTest]:
    """The quickest, as many as there is time for, and one in any case."""
    ordered = sorted(tests, key=lambda test: test.seconds)
    ends = itertools.accumulate(test.seconds for test in ordered)
    return [test for number, (test, end) in enumerate(zip(ordered, ends, strict=True)) if end <= seconds or not number]


def by_file(tests: Iterable[TimedTest]) -> list[Part]:
    """The quickest file first, and in it the quickest test."""
    files: dict[str, list[TimedTest]] = {}
    for test in sorted(tests, key=lambda test: test.seconds):
        files.setdefault(test.file, []).append(test)
    parts = (Part(name, tuple(t.id for t in of), sum(t.seconds for t in of)) for name, of in files.items())
    return sorted(parts, key=lambda part: part.seconds)


def statements(source: str) -> dict[int, tuple[int, int]]:
    """Returns for each line the first and last one of its innermost statement, of a compound one without its body."""
    found: dict[int, tuple[int, int]] = {}
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt | ast.match_case | ast.ExceptHandler):
            body = getattr(node, "body", None)
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            last = max(first, body[0].lineno - 1) if isinstance(body, list) else node.end_lineno or first
            found.update(dict.fromkeys(range(first, last + 1), (first, last)))
    return found

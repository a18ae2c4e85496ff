"""A place to run tests in: a copy of the sources, and forks of this process, which has imported what takes long."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.mutation.operators import Mutant, applied
from scripts.mutation.targets import ROOT, SOURCE

HEAVY = (
    "math_verify", "numpy", "pydantic", "rich", "safetensors.torch", "sympy", "torch", "transformers",
    "typer", "hypothesis", "hypothesis.strategies", "_hypothesis_pytestplugin", "pytest", "unittest.mock",
)  # fmt: skip
MEMORY_BYTES = 16 << 30  # address space of one mutant's tests
OPTIONS = ("-x", "-q", "--tb=no", "--no-header", "-p", "_hypothesis_pytestplugin")  # of the plugins only this one
QUICK = "--hypothesis-profile=quick"  # of tests/conftest.py: few examples, drawn alike every time
TIMEOUT, PASSED = "timeout", "passed"
Json = dict[str, object]


def import_heavy() -> None:
    """Imports libraries before the first fork, and nothing of gambit: every fork imports that with its own fault."""
    import importlib

    for name in HEAVY:
        importlib.import_module(name)
    assert "gambit" not in sys.modules and len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread"  # noqa: PTH208


class Bench:
    """A copy of the sources in which one fault stands at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "src"
        self._clock = 1_000_000_000
        shutil.copytree(SOURCE / "gambit", self.source / "gambit", ignore=shutil.ignore_patterns("__pycache__"))
        for path in self.source.rglob("*.py"):
            os.utime(path, (self._clock, self._clock))

    def put(self, mutant: Mutant) -> None:
        self._write(self.source / mutant.module, applied((SOURCE / mutant.module).read_bytes(), mutant))

    def restore(self, mutant: Mutant) -> None:
        self._write(self.source / mutant.module, (SOURCE / mutant.module).read_bytes())

    def _write(self, path: Path, content: bytes) -> None:
        """Bytecode is told from its source's size and second: each version has a second of its own."""
        path.write_bytes(content)
        self._clock += 1
        os.utime(path, (self._clock, self._clock))

    def fork(self, work: Callable[[], Json], seconds: float, environment: Mapping[str, str] = {}) -> Json:
        """Returns a function's result from a process of its own, or `{"end": …}` if that process ended otherwise."""
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._run(work, seconds, environment, answer)
        ended = wait_for(child, seconds)
        if not ended:
            return {"end": TIMEOUT}
        return json.loads(answer.read_text()) if answer.is_file() else {"end": "died"}

    def _run(self, work: Callable[[], Json], seconds: float, environment: Mapping[str, str], answer: Path) -> None:
        """Runs in the fork, and does not return."""
        try:
            os.setsid()
            limit(seconds)
            self._redirect()
            os.chdir(ROOT)
            sys.path[:0] = [str(self.source), str(ROOT / "tests"), str(ROOT)]
            os.environ.update({"PYTHONPATH": os.pathsep.join([str(self.folder), str(self.source)]), **environment})
            result = json.dumps(work())
            answer.with_suffix(".part").write_text(result)
            answer.with_suffix(".part").replace(answer)
        finally:
            os._exit(0)

    def _redirect(self) -> None:
        out = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(descriptor, target)

    def pytest(self, file: str, plugin: object) -> int:
        """Runs in a fork."""
        import pytest

        path = str(ROOT / "tests" / file)
        return int(pytest.main([*OPTIONS, QUICK, f"--basetemp={self.folder / 'tmp'}", path], plugins=[plugin]))


def wait_for(child: int, seconds: float) -> bool:
    """Returns whether it ended by itself; kills the processes that it leaves behind."""
    watch = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    ended = bool(poll.poll(1000 * seconds))
    os.close(watch)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)  # it has not come to its own group yet
    os.waitpid(child, 0)
    return ended


def limit(seconds: float) -> None:
    """Limits time and memory of the tests, and of everything that a broken module makes them leave behind."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 10, int(seconds) + 10))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

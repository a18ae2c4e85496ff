"""Measures a source tree: its size, its shape, its prose, and how many functions a decode step and a search call.

    python scripts/house.py                        counts of this tree, as a table
    python scripts/house.py --root PATH --json     the same for another tree, as JSON
    python scripts/house.py --walk --cases         also runs a search under a profiler, and collects the tests

`FRAGMENTS` are first words of docstrings that have neither subject nor verb; test_prose.py limits their share.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType

HERE = Path(__file__).resolve()
FRAGMENTS = re.compile(
    r"\W*(?:After|As|At|Before|By|For|From|How|In|Of|On|Once|So|That|Those|To|Until|What|When|Where|Whether|Which|While"
    r"|Who|Whoever|Whose|Why|With|Without)\b"
)
OPTIONS = {
    "json": "print JSON",
    "walk": "count the functions of a step and of a search, too",
    "cases": "count the test cases, too",
    "fragments": "list the docstrings that open as fragments, and nothing else",
}
ASSETS = {".c", ".css", ".html", ".js", ".json", ".yaml", ".yml"}
PUZZLE = "a = 17; b = 61; c = a + b; d = c - a; e = d + b; f = e + c; f?"
IS_FUNCTION = 0x1  # CO_OPTIMIZED: bodies of modules and of classes have it not


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def num_lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def spans(nodes: list[ast.AST], *kinds: type[ast.stmt]) -> list[int]:
    """Returns the lines of each node of these kinds, shortest first."""
    return sorted(node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, kinds) and node.end_lineno)


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def fragments(package: Path) -> tuple[list[str], int]:
    """Returns where docstrings open as fragments, with their first line, and the number of all docstrings."""
    found, total = [], 0
    for path in sources(package):
        for line, text in docstrings(ast.parse(path.read_text())):
            total += 1
            if FRAGMENTS.match(text):
                found.append(f"{path.relative_to(package)}:{line} {text.splitlines()[0]}")
    return found, total


def public_names(package: Path) -> int:
    """Counts the names in `__all__` of the module that users import."""
    texts = [path.read_text() for path in (package / "__init__.py", package / "api.py") if path.exists()]
    lists = [node.value for text in texts for node in ast.parse(text).body
             if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]  # fmt: skip
    return len({name for each in lists for name in ast.literal_eval(each)} - {"__version__"})


def counts(root: Path) -> dict[str, object]:
    package = root / "src" / "gambit"
    paths = sources(package)
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lengths = spans(nodes, ast.FunctionDef, ast.AsyncFunctionDef)
    file_lengths = [num_lines([path]) for path in paths]
    lines, imports = sum(file_lengths), sum(spans(nodes, ast.Import, ast.ImportFrom))
    opened, num_docstrings = fragments(package)
    packages: Counter[str] = Counter()
    for path, length in zip(paths, file_lengths, strict=True):
        packages["(top)" if path.parent == package else path.relative_to(package).parts[0]] += length
    assets = [path for path in package.rglob("*") if path.suffix in ASSETS]
    return {
        "lines": lines,
        "lines_not_blank": sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines()),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "files": len(paths),
        "lines_a_file_median": statistics.median(file_lengths),
        "classes": len(classes),
        "dataclasses": sum(map(is_dataclass, classes)),
        "functions": len(lengths),
        "lines_a_function_median": statistics.median(lengths),
        "lines_a_function_p90": lengths[int(len(lengths) * 0.9)],
        "lines_a_function_max": lengths[-1],
        "import_lines": imports,
        "import_share": round(imports / lines, 4),
        "public_names": public_names(package),
        "docstrings": num_docstrings,
        "fragments": len(opened),
        "fragment_share": round(len(opened) / num_docstrings, 4),
        "asset_lines": num_lines(assets),
        "test_lines": num_lines(sources(root / "tests")),
        "benchmark_lines": num_lines(sources(root / "benchmarks")),
        "script_lines": num_lines(sources(root / "scripts")),
        "packages": dict(packages.most_common()),
    }


class Walk:
    """Named functions of the package that run, over all threads and, on the engine's, from one step to the next."""

    def __init__(self, package: Path):
        self._prefix = str(package) + os.sep
        self.step: CodeType | None = None
        self._thread = 0
        self._now: list[CodeType] = []
        self.all: set[CodeType] = set()
        self.steps: list[list[CodeType]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & IS_FUNCTION and not code.co_name.startswith("<")  # no lambda or comprehension
        if event != "call" or not is_function or not code.co_filename.startswith(self._prefix):
            return
        if code not in self.all and not self._is_importing(frame):
            self.all.add(code)
        if code is self.step:
            self._thread = threading.get_ident()
            self.steps.append(self._now)
            self._now = []
        if threading.get_ident() == self._thread:
            self._now.append(code)

    def _is_importing(self, frame: FrameType | None) -> bool:
        while frame is not None:
            code = frame.f_code
            if not code.co_flags & IS_FUNCTION and code.co_filename.startswith(self._prefix):
                return True
            frame = frame.f_back
        return False

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    @staticmethod
    def stop() -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def files_of(codes: Iterable[CodeType]) -> int:
    return len({code.co_filename for code in codes})


def walk_steps(package: Path) -> dict[str, object]:
    from gambit.api import SearchConfig, Solver

    walk = Walk(package)
    walk.start()
    with Solver("pawn") as solver:
        walk.step = type(solver.engine).step.__code__
        solver.solve(PUZZLE, SearchConfig(capacity=8, num_traces=16, seed=1))
    walk.stop()
    steps = walk.steps[2:]  # without what came before the first call, and the first call itself
    idle = min(steps, key=lambda codes: (len(set(codes)), len(codes)))
    busiest = max(steps, key=lambda codes: len(set(codes)))
    return {
        "idle_functions": len(set(idle)), "idle_files": files_of(idle),
        "idle_file_changes": sum(a.co_filename != b.co_filename for a, b in pairwise(idle)),
        "busiest_functions": len(set(busiest)), "busiest_files": files_of(busiest), "steps": len(steps),
        "idle_walk": [f"{Path(c.co_filename).relative_to(package)} {c.co_qualname}" for c in dict.fromkeys(idle)],
    }  # fmt: skip


def walk_solve(package: Path) -> dict[str, object]:
    from gambit.cli import main

    walk = Walk(package)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["gambit", "solve", PUZZLE, "--engine", "local", "--seed", "1", "--out", f"{folder}/run", "--json"]
        walk.start()
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        finally:
            walk.stop()
    return {"solve_functions": len(walk.all), "solve_files": files_of(walk.all)}


def in_tree(root: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *args], cwd=root, env=environment, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else sys.exit(done.stdout[-2000:] + done.stderr[-2000:])


def walked(root: Path) -> dict[str, object]:
    """Each in a process of its own, since the second would find everything imported and cached."""
    found: dict[str, object] = {}
    for part in ("steps", "solve"):
        found |= json.loads(in_tree(root, str(HERE), "--root", str(root), "--child", part).splitlines()[-1])
    return found


def num_cases(root: Path) -> int:
    listed = in_tree(root, "-m", "pytest", "-o", "addopts=-p no:cacheprovider", "--collect-only", "-q")
    return sum("::" in line for line in listed.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=HERE.parents[1])
    for name, about in OPTIONS.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
    parser.add_argument("--child", choices=["steps", "solve"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = args.root.resolve()
    package = root / "src" / "gambit"
    if args.child:
        found = (walk_steps if args.child == "steps" else walk_solve)(package)
    else:
        found = counts(root) | (walked(root) if args.walk else {}) | ({"cases": num_cases(root)} if args.cases else {})
    if args.fragments:
        print(*fragments(package)[0], sep="\n")
    elif args.json or args.child:
        print(json.dumps(found, indent=None if args.child else 1))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in found.items() if name != "idle_walk"))


if __name__ == "__main__":
    main()

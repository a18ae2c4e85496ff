"""Mutation testing: small faults are put into the code one at a time, and the tests that concern it must notice.

    python scripts/mutants.py --sample 500 --workers 2 --out mutants.json       # about 3 s of one core for each mutant
    python scripts/mutants.py --sample 500 --out mutants.json --survivors       # again, after tests were added

Mutants are made inside functions with the default operators of mutmut 3. Results are kept as they come: a run that was
interrupted goes on where it stopped. A survivor that no test can tell from the code has its reason in
`equivalent_mutants.json` beside this file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
REASONS = Path(__file__).with_name("equivalent_mutants.json")
MEMORY_BYTES = 16 << 30  # of one mutant's tests, address space
PLUGIN = "_hypothesis_pytestplugin"  # the only one that is loaded: others take time and may not be there
QUICK = "quick"  # the profile of tests/conftest.py with few examples, drawn alike every time


@dataclass(frozen=True, slots=True)
class Group:
    """Modules and the tests that concern them, the fastest first: most mutants die in the first file."""

    name: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]


ANSWERS = "gambit/text/answers"
GROUPS = (
    Group("tree", ("gambit/core/tree.py",), ("test_tree.py", "test_loop.py", "test_log.py", "test_islands.py")),
    Group(
        "loop",
        tuple(f"gambit/search/{name}.py" for name in ("loop", "execution", "judging", "limits")),
        ("test_loop.py", "test_log.py", "test_consensus.py", "test_islands.py", "test_search_properties.py"),
    ),
    Group("tournament", ("gambit/search/policies/tournament.py",), ("test_tournament.py", "test_islands.py")),
    Group(
        "vote",
        ("gambit/results/vote.py", "gambit/results/ballots.py"),
        ("test_vote.py", "test_ballots.py", "test_consensus.py", "test_log.py"),
    ),
    Group(
        "answers",
        tuple(
            f"{ANSWERS}/{name}.py"
            for name in ("brackets", "equality", "extraction", "forms", "notation", "numbers", "relations", "units")
        ),
        ("test_answer_forms.py", "test_answer_extraction.py"),
    ),
    Group(
        "grader",
        (f"{ANSWERS}/grader.py", f"{ANSWERS}/process.py", f"{ANSWERS}/worker.py"),
        ("test_grader.py", "test_answer_forms.py"),
    ),
    Group("events", ("gambit/core/events.py", "gambit/core/chain.py"), ("test_log.py", "test_tree.py")),
    Group("rows", ("gambit/bench/rows.py", "gambit/storage/lines.py"), ("test_rows.py", "test_files.py")),
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a piece of a module's source, given by its place in bytes, and what stands there instead."""

    module: str
    function: str
    line: int
    start: int
    end: int
    before: str
    after: str
    number: int = 1  # among those of its function that read the same

    @property
    def key(self) -> str:
        """The same after lines have moved, and short enough to read in a list of reasons."""
        number = f" (no. {self.number})" if self.number > 1 else ""
        change = f"{' '.join(self.before.split())} -> {' '.join(self.after.split())}"
        return f"{self.module}::{self.function}: {change}{number}"


# -- making mutants ------------------------------------------------------------------------------------------------

SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "/", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip
METHODS = {
    name: other
    for pair in (("lower", "upper"), ("lstrip", "rstrip"), ("find", "rfind"), ("ljust", "rjust"), ("index", "rindex"),
                 ("split", "rsplit"), ("removeprefix", "removesuffix"), ("partition", "rpartition"))
    for name, other in (pair, pair[::-1])
}  # fmt: skip


def written(node: ast.AST, **changes: object) -> str:
    """The code of a node with other fields."""
    fields = {name: getattr(node, name) for name in node._fields if hasattr(node, name)}
    return ast.unparse(ast.fix_missing_locations(type(node)(**{**fields, **changes})))


def changed(node: ast.AST) -> Iterator[str]:
    """Every way in which a piece of code is made wrong."""
    match node:
        case ast.Constant():
            yield from changed_constant(node.value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield f"({ast.unparse(left)}) {SWAPS[type(op)]} ({ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            yield f" {SWAPS[type(op)]} ".join(f"({ast.unparse(value)})" for value in values)
        case ast.Compare():
            yield from changed_comparison(node)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield ast.unparse(operand)
        case ast.Call():
            yield from changed_call(node)
        case ast.Lambda(body=body):
            yield written(node, body=ast.Constant(0 if is_none(body) else None))
        case ast.Break():
            yield "return"
        case ast.Continue():
            yield "break"
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            yield written(node, value=ast.Constant("" if is_none(value) else None))
        case ast.AugAssign(target=target, op=op, value=value):
            yield f"{ast.unparse(target)} = {ast.unparse(value)}"
            if type(op) in SWAPS:
                yield f"{ast.unparse(target)} {SWAPS[type(op)]}= {ast.unparse(value)}"


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def changed_constant(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield repr(not value)
    elif isinstance(value, int | float):
        yield repr(value + 1)
    elif isinstance(value, str | bytes):
        mark = "XX" if isinstance(value, str) else b"XX"
        variants = (mark + value + mark, value.lower(), value.upper())  # type: ignore[operator]
        yield from (repr(variant) for variant in dict.fromkeys(variants) if variant != value)


def changed_comparison(node: ast.Compare) -> Iterator[str]:
    parts = [node.left, *node.comparators]
    for place, op in enumerate(node.ops):
        words = [SWAPS[type(op)] if i == place else ast.unparse(written_op(each)) for i, each in enumerate(node.ops)]
        yield f"({ast.unparse(parts[0])})" + "".join(
            f" {word} ({ast.unparse(part)})" for word, part in zip(words, parts[1:], strict=True)
        )


def written_op(op: ast.cmpop) -> ast.AST:
    """`ast.unparse` writes no operator by itself, so its word comes from a comparison."""
    text = ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))
    return ast.Name(text.removeprefix("a ").removesuffix(" b"))


def changed_call(node: ast.Call) -> Iterator[str]:
    """Arguments become None or go; methods of strings become their opposites."""
    for place, argument in enumerate(node.args):
        if not is_none(argument) and not isinstance(argument, ast.Starred):
            yield written(node, args=[ast.Constant(None) if i == place else arg for i, arg in enumerate(node.args)])
        if len(node.args) + len(node.keywords) > 1:
            yield written(node, args=[arg for i, arg in enumerate(node.args) if i != place])
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and not is_none(keyword.value):
            nothing = ast.keyword(keyword.arg, ast.Constant(None))
            yield written(node, keywords=[nothing if i == place else kw for i, kw in enumerate(node.keywords)])
        if len(node.args) + len(node.keywords) > 1:
            yield written(node, keywords=[kw for i, kw in enumerate(node.keywords) if i != place])
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield written(node, func=ast.Attribute(node.func.value, METHODS[node.func.attr]))


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    content = source.encode()
    for function, node in places(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = content[start:end].decode()
        for after in dict.fromkeys(changed(node)):
            after = f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else after
            mutant = Mutant(module, function, node.lineno, start, end, before, after)
            if meaning(after) not in (None, meaning(before)):
                yield mutant


def meaning(piece: str) -> str | None:
    """What an expression or a simple statement says; None where it is no Python."""
    try:
        return ast.dump(ast.parse(f"({piece})", mode="eval"))
    except SyntaxError:
        pass
    try:
        return ast.dump(ast.parse(piece))
    except SyntaxError:
        return None


def applied(content: bytes, mutant: Mutant) -> bytes:
    return content[: mutant.start] + mutant.after.encode() + content[mutant.end :]


def places(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """Statements and expressions inside functions, but for annotations, decorators, defaults and docstrings."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".lstrip(".")
            for statement in body_of(child):
                yield from (
                    below(statement, name) if isinstance(child, ast.FunctionDef) else places_in_class(statement, name)
                )


def places_in_class(statement: ast.stmt, name: str) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    return places(ast.Module([statement], []), name)


def body_of(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def below(node: ast.AST, function: str) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    if isinstance(node, ast.FunctionDef):  # one inside another
        for statement in body_of(node):
            yield from below(statement, f"{function}.{node.name}")
        return
    if isinstance(node, ast.stmt | ast.expr):
        yield function, node
    skipped = {id(getattr(node, "annotation", None)), id(getattr(node, "type_params", None))}
    if isinstance(node, ast.JoinedStr):  # mostly messages, and what is put into one may not hold its quotes
        return
    for child in ast.iter_child_nodes(node):
        if id(child) not in skipped:
            yield from below(child, function)


def all_mutants() -> list[Mutant]:
    seen: Counter[str] = Counter()
    mutants = []
    for module in (module for group in GROUPS for module in group.modules):
        for mutant in mutants_of(module, (SOURCE / module).read_text(encoding="utf-8")):
            seen[mutant.key] += 1
            mutants.append(replace(mutant, number=seen[mutant.key]))
    return mutants


# -- running tests -------------------------------------------------------------------------------------------------


class Bench:
    """A copy of the sources for one worker, in which one fault stands at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = 1_000_000_000
        shutil.copytree(SOURCE / "gambit", folder / "src" / "gambit", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder / "src").rglob("*.py"):
            os.utime(path, (self._clock, self._clock))

    def verdict(self, mutant: Mutant | None, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        """killed, timeout or survived; and by which test."""
        if mutant is None:
            return self._run(tests, seconds)
        path = self._folder / "src" / mutant.module
        content = path.read_bytes()
        self._write(path, applied(content, mutant))
        try:
            return self._run(tests, seconds)
        finally:
            self._write(path, content)

    def _write(self, path: Path, content: bytes) -> None:
        """Bytecode is told from its source's size and second: each version has a second of its own."""
        path.write_bytes(content)
        self._clock += 1
        os.utime(path, (self._clock, self._clock))

    def _run(self, tests: tuple[str, ...], seconds: float) -> tuple[str, str]:
        paths = [str(ROOT / "tests" / name) for name in tests]
        options = ["-x", "-q", "--tb=no", "--no-header", "-p", PLUGIN, f"--hypothesis-profile={QUICK}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, f"--basetemp={self._folder / 'tmp'}", *paths],
            cwd=ROOT, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=lambda: limit(seconds),
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", ""
        if process.returncode == 0:
            return "survived", ""
        return ("killed" if process.returncode in (1, 2, 3, 4) or process.returncode < 0 else "odd"), killer(output)

    def _environment(self) -> dict[str, str]:
        paths = [str(self._folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        # A GPU is no place for so many processes, and its driver wants more address space than they have.
        return {**os.environ, **own, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}


def limit(seconds: float) -> None:
    """Of the tests and of everything that a broken module makes them leave behind."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 10, int(seconds) + 10))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(5)


def killer(output: str) -> str:
    """The first test that failed, or the last thing that was said."""
    failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or output.strip().splitlines()[-1:] or [""])[0].replace(f"{ROOT}/", "")[:200]


# -- the results ---------------------------------------------------------------------------------------------------


class Results:
    """What became of each mutant, on the disk after every one."""

    def __init__(self, path: Path, options: dict[str, object]) -> None:
        self.entries: dict[str, dict[str, object]] = {}
        self._path, self._options = path, options
        self._lock = Lock()
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            self.entries = {entry["key"]: entry for entry in before["mutants"]}

    def add(self, mutant: Mutant, verdict: str, by: str, seconds: float) -> None:
        place = {"line": mutant.line, "module": mutant.module}
        with self._lock:
            self.entries[mutant.key] = {
                "key": mutant.key, "verdict": verdict, "by": by, "seconds": round(seconds, 1), **place,
            }  # fmt: skip
            self._save()

    def _save(self) -> None:
        temporary = self._path.with_suffix(".partial")
        temporary.write_text(json.dumps(self.report(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    def report(self) -> dict[str, object]:
        entries = sorted(self.entries.values(), key=lambda entry: (str(entry["module"]), int(str(entry["line"]))))
        reasons = json.loads(REASONS.read_text(encoding="utf-8")) if REASONS.is_file() else {}
        for entry in entries:
            if entry["verdict"] == "survived":
                entry["reason"] = reasons.get(entry["key"], "a test is missing")
        return {**self._options, "summary": summary(entries), "mutants": entries}


def summary(entries: list[dict[str, object]]) -> dict[str, object]:
    groups = {module: group.name for group in GROUPS for module in group.modules}
    table: dict[str, Counter[str]] = {}
    for entry in entries:
        for name in (groups[str(entry["module"])], "all"):
            table.setdefault(name, Counter())[str(entry["verdict"])] += 1
    return {name: {**counts, "killed_share": round(share(counts), 4)} for name, counts in sorted(table.items())}


def share(counts: Counter[str]) -> float:
    return (counts["killed"] + counts["timeout"]) / counts.total()


def run(mutants: list[Mutant], results: Results, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        benches: SimpleQueue[Bench] = SimpleQueue()
        for number in range(options.workers):
            benches.put(Bench(Path(folder) / str(number)))

        def one(mutant: Mutant) -> None:
            if options.until and time.monotonic() > options.until:
                return
            bench, began = benches.get(), time.monotonic()
            try:
                verdict, by = bench.verdict(mutant, tests[mutant.module], options.seconds)
            finally:
                benches.put(bench)
            results.add(mutant, verdict, by, time.monotonic() - began)
            print(
                f"{len(results.entries)} {verdict:9}{time.monotonic() - began:5.1f} s  {mutant.key[:150]}", flush=True
            )

        sound = sound_tests(benches, options)
        tests = {
            module: tuple(name for name in group.tests if name in sound) for group in GROUPS for module in group.modules
        }
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(one, mutants))


def sound_tests(benches: SimpleQueue[Bench], options: argparse.Namespace) -> set[str]:
    """Test files that pass as the code is; any other would kill every mutant, and is left out and named."""

    def passes(name: str) -> bool:
        bench = benches.get()
        verdict, by = bench.verdict(None, (name,), 5 * options.seconds)
        benches.put(bench)
        if verdict != "survived":
            print(f"{name} is left out: without any fault it is {verdict} {by}", flush=True)
        return verdict == "survived"

    names = sorted({name for group in GROUPS for name in group.tests})
    with ThreadPoolExecutor(options.workers) as pool:
        return {name for name, sound in zip(names, pool.map(passes, names), strict=True) if sound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500, help="how many of all mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="the limit for one mutant's tests")
    parser.add_argument("--minutes", type=float, help="begin no more mutants after this time")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--survivors", action="store_true", help="run again those of --out that survived")
    parser.add_argument("--only", choices=[group.name for group in GROUPS], action="append", help="of these groups")
    options = parser.parse_args()
    options.until = time.monotonic() + 60 * options.minutes if options.minutes else None
    found = all_mutants()
    sample = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    sources = hashlib.sha256("".join(sorted(mutant.key for mutant in found)).encode()).hexdigest()[:12]
    results = Results(options.out, {"all_mutants": len(found), "seed": options.seed, "sources": sources})
    wanted = [mutant for mutant in sample if is_wanted(mutant, results, options)]
    print(f"{len(found)} mutants, {len(sample)} of them drawn, {len(wanted)} to run")
    run(wanted, results, options)
    print(json.dumps(results.report()["summary"], indent=1))


def is_wanted(mutant: Mutant, results: Results, options: argparse.Namespace) -> bool:
    groups = {module: group.name for group in GROUPS for module in group.modules}
    if options.only and groups[mutant.module] not in options.only:
        return False
    entry = results.entries.get(mutant.key)
    return entry is None if not options.survivors else entry is not None and entry["verdict"] == "survived"


if __name__ == "__main__":
    main()

"""Checks the list of vLLM names that Gambit uses against vLLM's source, and renews its table in the docs.

python scripts/vllm_names.py                                          # renew the table
python scripts/vllm_names.py --version 0.27.0 --source site-packages/vllm     # check a version; nothing is imported

A version that is not in the list is compared with the newest that is.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.vllm_touched import TOUCHED, VERSIONS, Touched, Use  # noqa: E402

PAGE = ROOT / "docs" / "vllm-internals.md"
BEGIN, END = "<!-- vllm-names: begin -->", "<!-- vllm-names: end -->"
COMPAT = ROOT / "src" / "gambit" / "engines" / "vllm" / "compat"
# Files that are not imported where a version of vLLM was not tried and nothing else wants them.
OPTIONAL = {"fast_decode": "short cuts", "forest": "forest attention", "pooling": "verifiers on vLLM"}


# -- the list against vLLM's source ---------------------------------------------------------------------------------


def wrong_names(source: Path, version: str) -> list[str]:
    """Names that a version should have and has not, or the other way round, with the files of `compat` that use them.

    `source`: the folder of `vllm`.
    """
    found, listed = [], version if version in VERSIONS else VERSIONS[-1]
    for touched in TOUCHED:
        defined = _defined(source, touched.module, touched.owner)
        for name in sorted({name for name, _ in touched.uses()}):
            if (name in defined) != (listed in touched.versions(name)):
                verb = "is not" if name not in defined else "is, unlisted,"
                place = ".".join(filter(None, (touched.module, touched.owner, name)))
                found.append(f"{place} {verb} in vLLM {version} ({_needed_for(name)})")
    return found


def _needed_for(name: str) -> str:
    """Returns the purposes of a name; without those of OPTIONAL Gambit still runs, in vLLM's own way."""
    files = [file for file in COMPAT.glob("*.py") if name in used_names([file])]
    return ", ".join(sorted({OPTIONAL.get(file.stem, "needed everywhere") for file in files})) or "listed only"


@functools.cache
def _defined(source: Path, module: str, owner: str) -> frozenset[str]:
    tree = _tree(source, module)
    if not owner:
        return frozenset(_module_names(tree))
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
    return frozenset(name for body in bodies for name in (owner, *_class_names(body)))


def _tree(source: Path, module: str) -> ast.Module:
    path = source.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])


def _module_names(tree: ast.Module) -> Iterator[str]:
    is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_lazy and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # names that are imported when asked for stand in a table


def _class_names(body: ast.ClassDef) -> Iterator[str]:
    """Methods, fields, and what methods set on self."""
    for node in body.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# -- the list against Gambit's source -------------------------------------------------------------------------------


def declared_uses() -> dict[str, set[Use]]:
    """Returns the declared uses of each name, whatever its owner."""
    found: dict[str, set[Use]] = defaultdict(set)
    for touched in TOUCHED:
        for name, use in touched.uses():
            found[name] |= {"read", "set"} if use == "replaced" else {use}
    return dict(found)


def used_names(files: list[Path]) -> dict[str, set[Use]]:
    """Every attribute that these files use, and every name that they import from vLLM."""
    found: dict[str, set[Use]] = defaultdict(set)
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            for name, use in _uses(node, called):
                found[name].add(use)
    return dict(found)


def _uses(node: ast.AST, called: set[int]) -> Iterator[tuple[str, Use]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        yield from ((alias.name, "imported") for alias in node.names)
    elif isinstance(node, ast.ClassDef):
        yield from ((name, "overridden") for name in _overrides(node))
    elif isinstance(node, ast.Attribute) and not _is_super(node.value):
        is_set = isinstance(node.ctx, ast.Store)
        yield node.attr, "set" if is_set else "called" if id(node) in called else "read"
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
        yield node.target.attr, "read"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        yield from ((name, "read") for name in _strings(node.args[1]))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Attribute):
        is_exports = isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
        yield from ((name, "read") for name in (() if is_exports else _strings(node.value)))  # for getattr


def _strings(node: ast.AST) -> list[str]:
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return [value for value in constants if isinstance(value, str) and value.isidentifier()]


def _overrides(node: ast.ClassDef) -> Iterator[str]:
    """Methods of a class that calls its base, or has a base of vLLM's."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    imported = {name for name, uses in declared_uses().items() if "imported" in uses}
    if bases & imported or any(_is_super(each) for each in ast.walk(node)):
        yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


# -- the table ------------------------------------------------------------------------------------------------------


def table() -> str:
    rows = [_row(touched) for touched in TOUCHED]
    return "\n".join([f"| in vLLM | what Gambit does | in which of {', '.join(VERSIONS)} |", "|---|---|---|", *rows])


def _row(touched: Touched) -> str:
    by_use: dict[Use, list[str]] = defaultdict(list)
    for name, use in touched.uses():
        by_use[use].append(f"`{name}`")
    uses = "; ".join(f"{use}: {', '.join(names)}" for use, names in by_use.items())
    partly = {name: touched.versions(name) for name, _ in touched.uses() if touched.versions(name) != VERSIONS}
    versions = ["all", *(f"`{name}`: {', '.join(known)}" for name, known in sorted(partly.items()))]
    owner = f"`{touched.module}`" + (f" `{touched.owner}`" if touched.owner else "")
    return f"| {owner} | {uses} | {'; '.join(versions)} |"


def renewed(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default=VERSIONS[-1])
    parser.add_argument("--source", type=Path, help="the folder `vllm` of that version")
    args = parser.parse_args()
    if args.source:
        wrong = wrong_names(args.source, args.version)
        sys.exit("\n".join(wrong) or 0)
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

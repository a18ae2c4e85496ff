"""Every file, class, method and function that the page on the code names is there; the words are few."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gambit
from support import ROOT

SOURCE = Path(gambit.__file__).parent
PAGE, WORDS = ROOT / "docs" / "code.md", ROOT / "docs" / "how-it-works.md"
FILE = re.compile(r"`([\w/]+(?:\.py|/))`")
IN_FILE = re.compile(r"`([\w/]+\.py)`: `([\w.]+)(?:\(\))?`")
IN_DRAWING = re.compile(r"\b(\w+/\w+\.py|[A-Z]\w+\.\w+)")
NAME = re.compile(r"`([A-Z]\w+(?:\.\w+)?|\w+(?=\(\)`))(?:\(\))?`")
MOST_WORDS = 40


def defined(tree: ast.AST) -> Iterator[str]:
    """Yields the classes, functions and constants of a module, and what its classes define as `Class.name`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in defined(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def names_of(path: Path) -> set[str]:
    return set(defined(ast.parse(path.read_text(encoding="utf-8"))))


def missing(text: str) -> Iterator[str]:
    """Yields the files and names in a text that are not in the package, or not in the file named beside them."""
    drawn = IN_DRAWING.findall("".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL)))
    text += "".join(f"`{name}`" for name in drawn)
    everything = set().union(*map(names_of, SOURCE.rglob("*.py")))
    yield from (name for name in FILE.findall(text) if not (SOURCE / name).exists() and not (ROOT / name).exists())
    yield from (name for name in NAME.findall(text) if name not in everything)
    for file, name in IN_FILE.findall(text):
        if (SOURCE / file).exists() and name not in names_of(SOURCE / file):
            yield f"{file}: {name}"


def test_what_the_page_names_is_there() -> None:
    assert list(missing(PAGE.read_text(encoding="utf-8"))) == []


def test_what_is_gone_is_found() -> None:
    text = "`cli/gone.py`, `cli/app.py`: `run()`, `Search.conclude`, `Search.gone`, `gone()`, `gone/`, `Solver`"
    assert list(missing(text)) == ["cli/gone.py", "gone/", "Search.gone", "gone", "cli/app.py: run"]
    assert list(missing("```text\n cli/gone.py ─▶ Search.gone, Search.fail\n```")) == ["cli/gone.py", "Search.gone"]


def test_the_words_are_few_and_each_is_explained_once() -> None:
    table = WORDS.read_text(encoding="utf-8").partition("## Words\n")[2].partition("\n## ")[0]
    words = [word for row in table.splitlines()[3:] if row for word in row.split("|")[1].strip().split(", ")]
    assert len(words) == len(set(words)) <= MOST_WORDS and len(words) > MOST_WORDS / 2

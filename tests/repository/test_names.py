"""No class name means two things: each is defined once in the package."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import gambit

SOURCE = Path(gambit.__file__).parent


def classes(text: str) -> Iterable[str]:
    return (node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def defined_twice(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Class names with the modules that define them, where these are several; private ones count too."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, text in texts:
        for name in classes(text):
            homes[name].append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def modules() -> Iterable[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")


def test_no_class_name_is_defined_twice() -> None:
    assert defined_twice(modules()) == {}


def test_a_second_definition_is_found() -> None:
    texts = [("one.py", "class Plan: pass\nclass _Run: pass"), ("two.py", "class Plan: pass\nclass Other: pass")]
    assert defined_twice(texts) == {"Plan": ["one.py", "two.py"]}

"""Imports only go down the floors (scripts/floors.py), and nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

from scripts.floors import LEVEL

import gambit

SOURCE = Path(gambit.__file__).parent
ENTRY = {"__init__", "__main__"}


def floor_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(text):
    """Names of the floors that a module imports from, wherever in the module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gambit":
            below = node.module.split(".")[1:2]
            yield from below or [alias.name for alias in node.names if alias.name in LEVEL]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gambit."))


def upward(floor, text):
    return [name for name in imported(text) if name != floor and LEVEL[name] >= LEVEL[floor]]


def modules():
    return [path for path in sorted(SOURCE.rglob("*.py")) if floor_of(path) not in ENTRY]


def test_every_module_stands_on_a_floor():
    assert {floor_of(path) for path in modules()} <= set(LEVEL), "scripts/floors.py says where a package belongs"


def test_imports_only_go_down():
    found = [f"{path.relative_to(SOURCE)}: {upward(floor_of(path), path.read_text())}" for path in modules()]
    assert [line for line in found if not line.endswith("[]")] == []


def test_an_import_that_goes_up_is_found():
    assert upward("types", "from gambit.search.loop import Search") == ["search"]
    assert upward("search", "def f():\n    from gambit import solver") == ["solver"]
    assert upward("search", "import gambit.cli.app") == ["cli"]


def test_vllm_is_imported_in_its_own_folder_only():
    for path in modules():
        text = path.read_text()
        if path.relative_to(SOURCE).parts[:2] != ("engines", "vllm"):
            assert "import vllm" not in text and "from vllm" not in text, path


def test_the_solver_knows_no_model_and_no_engine_by_name():
    for path in (SOURCE / "solver").glob("*.py"):
        text = path.read_text().lower()
        assert "pawn" not in text and "vllm" not in text, path


def test_the_api_is_imported_without_torch():
    code = "import gambit, sys; gambit.SearchConfig; assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

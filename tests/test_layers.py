"""Layers import downwards only (design.md), and nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import gambit

SOURCE = Path(gambit.__file__).parent
# Lowest first; modules of one layer may import each other.
LAYERS = [
    {"errors", "live", "types"},
    {"answers", "_grader_worker", "prompts", "vote", "events", "pawn"},
    {"config", "tree"},
    {"ballots", "record", "registry", "models", "sink"},
    {"scorers", "view"},
    {"engines"},
    {"search"},
    {"solver"},
    {"problems"},
    {"training", "bench"},
    {
        "cli_bench",
        "cli_options",
        "cli_policies",
        "cli_view",
        "demo",
        "display",
        "doctor",
        "scorer_display",
        "session",
        "signals",
        "terminal",
    },
    {"cli", "cli_scorer", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts != ("__init__",):
            yield path, parts[0]


def imported(path):
    """Names of Gambit's own top-level modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gambit":
            below = node.module.split(".")[1:2]
            yield from below or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gambit."))


def test_every_module_has_a_layer():
    assert {name for _, name in modules()} <= set(LEVEL), "a new top-level module must say where it belongs"


def test_imports_go_downwards_only():
    upward = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path, layer in modules()
        for name in imported(path)
        if LEVEL.get(name, -1) > LEVEL[layer]
    ]
    assert upward == []


def test_vllm_is_imported_in_its_own_folder_only():
    for path, _ in modules():
        text = path.read_text()
        where = path.relative_to(SOURCE).parts
        if where[:2] != ("engines", "vllm"):
            assert "import vllm" not in text and "from vllm" not in text, path


def test_the_api_is_imported_without_torch():
    code = "import gambit, sys; gambit.SearchConfig; assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

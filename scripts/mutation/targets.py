"""The modules that are mutated, and the tests that may notice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from scripts.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"


class Group(NamedTuple):
    """Modules and the test files that concern them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


ANSWERS = "gambit/answers"
GROUPS = {
    "tree": Group(
        ("gambit/tree.py",),
        ("search/tree", "search/loop", "search/log", "search/golden_logs", "policies/islands", "policies/doubt"),
    ),
    "loop": Group(
        tuple(f"gambit/search/{name}.py" for name in ("loop", "pool", "scores", "limits")),
        (
            "search/loop",
            "search/scores",
            "search/limits",
            "search/log",
            "search/consensus",
            "search/first_traces",
            "search/verification",
            "search/golden_logs",
            "policies/islands",
            "policies/doubt",
        ),
    ),
    "tournament": Group(
        tuple(f"gambit/policies/{name}.py" for name in ("tournament", "islands", "doubt")),
        ("policies/tournament", "policies/islands", "policies/doubt", "search/spread"),
    ),
    "vote": Group(
        ("gambit/results/vote.py",),
        ("results/vote", "results/ballots", "search/consensus", "search/log"),
    ),
    "answers": Group(
        tuple(f"{ANSWERS}/{name}.py" for name in ("extract", "forms", "spelling")),
        ("answers/answer_forms", "answers/answer_equality", "answers/answer_extraction"),
    ),
    "grader": Group(
        tuple(f"{ANSWERS}/{name}.py" for name in ("grader", "worker")),
        ("answers/algebra", "answers/grader", "answers/answer_forms"),
    ),
    "events": Group(("gambit/events.py",), ("search/log", "search/tree")),
    "rows": Group(
        ("gambit/bench/rows.py", "gambit/storage/files.py"),
        ("bench/rows", "bench/bench_run", "results/golden", "storage/files", "storage/json_file"),
    ),
}
GROUP_OF = {module: name for name, group in GROUPS.items() for module in group.modules}
MODULES = tuple(GROUP_OF)
# Files that concern none of them in the first place, but look at what they do.
OTHERS = ("policies/baselines", "policies/deepconf", "policies/slim_sc")


def path_of(name: str) -> str:
    """Returns the path of a test file in the folder `tests`: "search/loop" is search/test_loop.py."""
    folder, stem = name.split("/")
    return f"{folder}/test_{stem}.py"


TESTS = tuple(map(path_of, sorted({*OTHERS, *(name for group in GROUPS.values() for name in group.tests)})))


def concerns(file: str, module: str) -> bool:
    return file in map(path_of, GROUPS[GROUP_OF[module]].tests)


def all_mutants() -> list[Mutant]:
    seen: Counter[str] = Counter()
    mutants = []
    for module in MODULES:
        for mutant in mutants_of(module, (SOURCE / module).read_text(encoding="utf-8")):
            seen[mutant.key] += 1
            mutants.append(replace(mutant, number=seen[mutant.key]))
    return mutants

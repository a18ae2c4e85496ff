"""What is mutated, and the tests that may notice."""

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
    "tree": Group(("gambit/tree.py",), ("tree", "loop", "log", "islands", "doubt")),
    "loop": Group(
        tuple(f"gambit/search/{name}.py" for name in ("loop", "execution", "judging", "limits")),
        ("loop", "judging", "limits", "log", "consensus", "islands", "doubt"),
    ),
    "tournament": Group(("gambit/policies/tournament.py",), ("tournament", "islands", "doubt")),
    "vote": Group(("gambit/results/vote.py",), ("vote", "ballots", "consensus", "log")),
    "answers": Group(
        tuple(
            f"{ANSWERS}/{name}.py"
            for name in ("brackets", "equality", "extraction", "forms", "notation", "numbers", "relations", "units")
        ),
        ("answer_forms", "answer_equality", "answer_extraction"),
    ),
    "grader": Group(
        tuple(f"{ANSWERS}/{name}.py" for name in ("grader", "process", "worker")), ("algebra", "grader", "answer_forms")
    ),
    "events": Group(("gambit/events.py",), ("log", "tree")),
    "rows": Group(("gambit/bench/rows.py", "gambit/storage/lines.py"), ("rows", "files")),
}
GROUP_OF = {module: name for name, group in GROUPS.items() for module in group.modules}
MODULES = tuple(GROUP_OF)
# Files that concern none of them in the first place, but look at what they do.
OTHERS = ("baselines", "deepconf", "slim_sc")
TESTS = tuple(f"test_{name}.py" for name in sorted({*OTHERS, *(n for group in GROUPS.values() for n in group.tests)}))


def concerns(file: str, module: str) -> bool:
    return file.removeprefix("test_").removesuffix(".py") in GROUPS[GROUP_OF[module]].tests


def all_mutants() -> list[Mutant]:
    seen: Counter[str] = Counter()
    mutants = []
    for module in MODULES:
        for mutant in mutants_of(module, (SOURCE / module).read_text(encoding="utf-8")):
            seen[mutant.key] += 1
            mutants.append(replace(mutant, number=seen[mutant.key]))
    return mutants

"""What is mutated, and the tests that may notice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from scripts.mutation.operators import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

ANSWERS = "gambit/text/answers"
GROUPS: dict[str, tuple[str, ...]] = {
    "tree": ("gambit/core/tree.py",),
    "loop": tuple(f"gambit/search/{name}.py" for name in ("loop", "execution", "judging", "limits")),
    "tournament": ("gambit/search/policies/tournament.py",),
    "vote": ("gambit/results/vote.py", "gambit/results/ballots.py"),
    "answers": tuple(
        f"{ANSWERS}/{name}.py"
        for name in ("brackets", "equality", "extraction", "forms", "notation", "numbers", "relations", "units")
    ),
    "grader": tuple(f"{ANSWERS}/{name}.py" for name in ("grader", "process", "worker")),
    "events": ("gambit/core/events.py", "gambit/core/chain.py"),
    "rows": ("gambit/bench/rows.py", "gambit/storage/lines.py"),
}
GROUP_OF = {module: group for group, modules in GROUPS.items() for module in modules}
MODULES = tuple(GROUP_OF)

# Files whose tests look at what these modules do. Others run them too, by the way and slowly: commands, servers, vLLM.
TESTS = tuple(
    f"test_{name}.py"
    for name in (
        "answer_extraction", "answer_forms", "ballots", "baselines", "bench_run", "consensus", "deepconf", "files",
        "golden", "grader", "hard_times", "host", "islands", "log", "loop", "originals", "rows", "search_properties",
        "slim_sc", "solver", "storage", "tournament", "tree", "trust", "verification", "view", "vote",
    )
)  # fmt: skip


def all_mutants() -> list[Mutant]:
    seen: Counter[str] = Counter()
    mutants = []
    for module in MODULES:
        for mutant in mutants_of(module, (SOURCE / module).read_text(encoding="utf-8")):
            seen[mutant.key] += 1
            mutants.append(replace(mutant, number=seen[mutant.key]))
    return mutants

"""The faults that mutation testing makes: each changes one piece of one function, and nothing else."""

import ast
from pathlib import Path

from scripts.mutants import GROUPS, REASONS, ROOT, all_mutants, applied, mutants_of

CODE = '''
"""Not inside a function."""
LIMIT = 3

def clip(items: list[int], most: int = 5) -> list[int]:
    """A docstring stays."""
    found = []
    for item in items:
        if item < 0 and not found:
            continue
        found.append(item + 1)
    return sorted(found, key=lambda entry: -entry, reverse=True)[:most]
'''


def test_every_fault_is_made_once_inside_functions() -> None:
    made = [(mutant.before, mutant.after) for mutant in mutants_of("m.py", CODE)]
    assert ("item < 0", "((item) <= (0))") in made
    assert ("item < 0 and not found", "((item < 0) or (not found))") in made
    assert ("not found", "(found)") in made
    assert ("continue", "break") in made
    assert ("item + 1", "((item) - (1))") in made
    assert ("1", "2") in made and ("True", "False") in made
    assert ("found = []", "found = None") in made
    assert ("lambda entry: -entry", "(lambda entry: None)") in made
    assert ("found.append(item + 1)", "(found.append(None))") in made
    assert not [before for before, _ in made if before in ("3", "5", "LIMIT") or "docstring" in before]
    assert len(set(made)) == len(made)


def test_a_fault_leaves_the_rest_as_it_is() -> None:
    for mutant in mutants_of("m.py", CODE):
        changed = applied(CODE.encode(), mutant).decode()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(CODE))
        assert len(changed) - len(CODE) == len(mutant.after) - len(mutant.before)


def test_modules_and_tests_of_the_table_exist_and_reasons_belong_to_mutants() -> None:
    assert all((ROOT / "src" / module).is_file() for group in GROUPS for module in group.modules)
    assert all((ROOT / "tests" / name).is_file() for group in GROUPS for name in group.tests)
    keys = {mutant.key for mutant in all_mutants()}
    assert ast.literal_eval(Path(REASONS).read_text()).keys() <= keys

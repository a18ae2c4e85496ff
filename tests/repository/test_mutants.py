"""The faults that mutation testing makes: each changes one piece of one function, and nothing else."""

import ast
from pathlib import Path

from scripts.mutants import REASONS
from scripts.mutation.operators import applied, mutants_of
from scripts.mutation.reach import FileRecord, Reach, statements
from scripts.mutation.targets import MODULES, ROOT, TESTS, all_mutants

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
    assert all((ROOT / "src" / module).is_file() for module in MODULES)
    assert all((ROOT / "tests" / name).is_file() for name in TESTS)
    keys = {mutant.key for mutant in all_mutants()}
    assert ast.literal_eval(Path(REASONS).read_text()).keys() <= keys


def test_a_statement_ends_where_its_body_begins() -> None:
    found = statements(
        "def f(a):\n    if (a and\n            not a):\n        return g(\n            a)\n    return 0\n"
    )
    assert found[2] == found[3] == (2, 3)
    assert found[4] == found[5] == (4, 5) and found[6] == (6, 6)


def test_a_mutant_gets_the_tests_that_run_its_statement_those_that_concern_it_first() -> None:
    mutant = next(mutant for mutant in all_mutants() if mutant.module == "gambit/tree.py")
    here, elsewhere = {(mutant.module, mutant.line)}, {("gambit/other.py", mutant.line)}
    own = FileRecord(
        "search/test_tree.py",
        {"t::long": 9.0, "t::slow": 3.0, "t::x": 0.5, "t::y": 0.2, "t::z": 0.1},
        {"t::long": here, "t::slow": here, "t::x": here, "t::y": here, "t::z": elsewhere},
        (),
    )
    other = FileRecord("view/test_view.py", {"v::one": 0.1, "v::two": 6.0}, {"v::one": here, "v::two": here}, ())
    early, late = Reach([other, own]).parts(mutant, 10)
    assert [part.tests for part in early] == [("t::y", "t::x")]
    assert [part.tests for part in late] == [("v::one",), ("t::slow",)], "and no more than there is time for"
    early, late = Reach([other]).parts(mutant, 10)
    assert [part.tests for part in early] == [("v::one",)] and not late


def test_lines_that_a_shared_fixture_ran_count_for_each_of_its_tests() -> None:
    found = {
        "contexts": {"t::one": 1, "fixture ::search": 2, "t::two": 3},
        "fixtures": {"t::one": ["fixture ::search"], "t::two": ["fixture ::search"], "t::bad": []},
        "seconds": {"t::one": 0.1, "t::two": 0.1, "fixture ::search": 1.0, "t::bad": 0.1},
        "lines": {"0": {"m.py": [1]}, "1": {"m.py": [10]}, "2": {"m.py": [20]}},
        "failed": ["t::bad"],
    }
    record = FileRecord.of("t.py", found)
    assert record.lines == {"t::one": {("m.py", 1), ("m.py", 10), ("m.py", 20)}, "t::two": {("m.py", 1), ("m.py", 20)}}
    assert record.seconds["t::two"] == 1.1 and record.failed == ("t::bad",)

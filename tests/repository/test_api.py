"""The public names: complete for what extends Gambit, documented, free of torch."""

import inspect
import subprocess
import sys
import typing
from types import UnionType

import pytest
import torch

import gambit
import gambit.api as api
from support import GOLDEN, ROOT
from support.tables import table

PROTOCOLS = [api.Policy, api.Scorer, api.SplitScorer, api.HistoryScorer, api.Engine]
RECORDS = [api.Benchmark, api.StepBatch, api.SearchStep, api.SearchSpec, api.ScorerInfo]  # that extensions make
KEPT = GOLDEN / "public_names.txt"


def test_all_is_there_once_and_nothing_else_is_public() -> None:
    assert len(set(api.__all__)) == len(api.__all__)
    public = {name for name, value in vars(api).items() if not name.startswith("_") and name != "annotations"}
    assert public == set(api.__all__)


def test_a_public_name_is_a_promise(request: pytest.FixtureRequest) -> None:
    """Each is added or taken away on purpose: `python -m pytest tests/repository/test_api.py --renew`."""
    if request.config.getoption("renew"):
        KEPT.write_text("\n".join(sorted(api.__all__)) + "\n")
    assert sorted(api.__all__) == KEPT.read_text().split() and len(api.__all__) <= 81


def test_importing_it_loads_no_torch() -> None:
    code = "import gambit.api, sys; assert not {'torch', 'transformers', 'vllm', 'IPython'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_of_gambit_itself_are_the_same() -> None:
    for name in set(gambit.__all__) - {"__version__"}:
        assert getattr(gambit, name) is getattr(api, name)


@table("name", [n for n in api.__all__ if inspect.isclass(getattr(api, n)) or inspect.isroutine(getattr(api, n))])
def test_every_class_and_function_says_what_it_is(name: str) -> None:
    found = inspect.getdoc(getattr(api, name)) or ""
    is_made_up = found.startswith(f"{name}(")  # what a dataclass without a docstring gets
    assert len(found.split()) >= 3 and not is_made_up, f"{name} has no docstring that stands alone"


@table("kind", [*PROTOCOLS, api.Solver])
def test_every_method_that_is_called_or_implemented_is_documented(kind: type) -> None:
    members = {name: value for base in kind.__mro__ for name, value in vars(base).items() if not name.startswith("_")}
    methods = {name: value for name, value in members.items() if callable(value) or isinstance(value, property)}
    assert [name for name, value in methods.items() if not value.__doc__] == []


def gambit_types(annotation: object) -> set[type]:
    """The classes of Gambit that an annotation names."""
    if isinstance(annotation, str):
        return set()
    inner = set().union(*map(gambit_types, typing.get_args(annotation)), set())
    if (
        inspect.isclass(annotation)
        and annotation.__module__.startswith("gambit.")
        and not isinstance(annotation, UnionType)
    ):
        inner.add(annotation)
    return inner


def annotations_of(kind: type) -> set[type]:
    """What one must name to implement a protocol or to fill in a record."""
    found: set[type] = set()
    spaces = {**vars(sys.modules[kind.__module__]), "torch": torch, "Json": object}
    holders = [kind, *(member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                       for base in kind.__mro__ if base.__module__.startswith("gambit")
                       for member in vars(base).values())]  # fmt: skip
    for holder in holders:
        if getattr(holder, "__annotations__", None):
            for annotation in typing.get_type_hints(holder, spaces).values():
                found |= gambit_types(annotation)
    return found


@table("kind", PROTOCOLS + RECORDS)
def test_every_type_that_a_protocol_needs_is_exported(kind: type) -> None:
    exported = {id(getattr(api, name)) for name in api.__all__}
    missing = sorted(found.__name__ for found in annotations_of(kind) if id(found) not in exported)
    assert not missing, f"{kind.__name__} needs {missing}, which gambit.api does not export"


def test_the_check_of_types_can_fail() -> None:
    assert api.PoolView in annotations_of(api.Policy) and api.StepBatch in annotations_of(api.Engine)
    assert api.ScorerInfo in annotations_of(api.Scorer) and api.Item in annotations_of(api.Benchmark)


def test_internal_packages_are_imported_by_none_of_the_examples() -> None:
    """docs/extending.md shows how to build on Gambit: with gambit and gambit.api alone."""
    page = (ROOT / "docs" / "extending.md").read_text()
    imports = {line.split()[1] for line in page.splitlines() if line.startswith(("from gambit", "import gambit"))}
    assert imports <= {"gambit", "gambit.api"}, imports

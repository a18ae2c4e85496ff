"""Import paths of 0.1.0 work for one release more, and say where to look instead."""

import importlib
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import gambit.api as api
from gambit._old_paths import MODULES, NAMES
from gambit.core import types

OLD_NAMES = json.loads((Path(__file__).parent / "golden" / "v0.1.0" / "names.json").read_text())
# What a package built on 0.1.0 had to import, for want of a public face. Of the others only the modules are looked for.
PUBLIC = (
    "answers", "ballots", "bench.datasets", "bench.folder", "bench.recipe", "bench.report", "bench.rows",
    "bench.summary", "config", "engines.base", "engines.confidence", "engines.draft", "engines.layers",
    "engines.projection", "engines.sampling", "errors", "events", "problems", "prompts", "record", "registry",
    "scorers.base", "scorers.checkpoint", "scorers.history", "scorers.mlp", "scorers.sequence", "scorers.simple",
    "search.best_of_n", "search.deepconf", "search.policy", "search.self_consistency", "search.single",
    "search.slim_sc", "search.step", "search.tournament", "sink", "tree", "training.collect", "training.dataset",
    "training.evaluate", "training.objectives", "training.sampling", "training.storage", "training.train", "types",
    "vote",
)  # fmt: skip


# Patterns, limits and aliases that served inside their modules alone, and went with what they served; and what our own
# engines keep of scores, which settles ties now and is called RunScores.
GONE = {
    "answers": str.isupper,
    "ballots": {"TOP_SHARE"}.__contains__,
    "config": {"Positive"}.__contains__,
    "scorers.simple": {"RunQuantiles"}.__contains__,
}


def moved(module: str, name: str) -> object:
    """A name under its old path, which must be announced as old where the module is no longer there."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = getattr(importlib.import_module(f"gambit.{module}"), name)
    if module in MODULES or name in NAMES.get(module, {}):
        assert any(f"gambit.{module}.{name} is deprecated" in str(each.message) for each in said), (module, name)
        assert all(each.category is DeprecationWarning for each in said)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_of_0_1_0_is_found(module: str) -> None:
    is_gone = GONE.get(module, lambda name: False)
    for name in OLD_NAMES[module]:
        if not is_gone(name):
            moved(module, name)


@pytest.mark.parametrize("module", sorted(OLD_NAMES))
def test_every_module_of_0_1_0_is_found(module: str) -> None:
    importlib.import_module(f"gambit.{module}")


def test_old_names_are_the_same_objects() -> None:
    assert moved("types", "Aggregation") is types.Aggregation is api.Aggregation
    assert moved("types", "Admitted") is api.Admission and moved("events", "Admitted") is api.Admitted
    assert moved("search.policy", "Needs") is api.Requirements
    assert moved("config", "SearchConfig") is api.SearchConfig
    assert moved("prompts", "BoundaryRule") is api.BoundaryRule
    assert importlib.import_module("gambit.solver").Problem is api.Problem


def test_the_warning_names_the_new_place_and_points_at_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"goes in 0\.3: use gambit\.api\.SearchConfig") as said:
        from gambit.config import SearchConfig  # noqa: F401
    assert said[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use gambit\.text\.boundary\.pack"):
        from gambit.prompts import pack  # noqa: F401


def test_what_is_in_use_today_warns_of_nothing() -> None:
    code = "import gambit.config.options, gambit.models.files, gambit.bench.folder, gambit.api, gambit.cli.app"
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:gambit", "-c", code], check=True)


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from gambit.types import Nothing  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nowhere'"):
        from gambit.search.loop import Nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("gambit.nowhere")
    assert not hasattr(importlib.import_module("gambit.config"), "nothing")


def test_star_imports_and_old_pickles() -> None:
    space: dict[str, object] = {}
    with pytest.warns(DeprecationWarning):
        exec("from gambit.vote import *", space)
    assert space["VoteKind"] is api.VoteKind
    old = pickle.dumps(types.StatePosition.BEFORE, protocol=0).replace(b"gambit.core.types", b"gambit.types")
    with pytest.warns(DeprecationWarning):
        assert pickle.loads(old) is types.StatePosition.BEFORE

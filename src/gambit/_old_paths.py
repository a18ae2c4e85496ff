"""Import paths and names of Gambit 0.1.0: they work until 0.3 and say with a DeprecationWarning where to look instead.

Two tables say what went where, and one finder in `sys.meta_path` answers for them: it makes a module for a path that
is gone, and adds the names that left it to a module that is still there.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

UNTIL = "0.3"

# Modules that moved as a whole: old path -> new path, both without the leading "gambit.".
MODULES: Mapping[str, str] = {
    "answers": "text.answers",
    "ballots": "results.ballots",
    "bench.progress": "cli.bench_progress",
    "cli_bench": "cli.bench",
    "cli_options": "cli.options",
    "cli_policies": "cli.policies",
    "cli_scorer": "cli.scorer",
    "cli_view": "cli.view",
    "demo": "cli.demo",
    "display": "cli.display",
    "doctor": "cli.doctor",
    "engines.confidence": "engines.shared.confidence",
    "engines.draft": "engines.shared.step_builder",
    "engines.layers": "engines.shared.layers",
    "engines.pressure": "engines.shared.eviction",
    "engines.projection": "engines.shared.projection",
    "engines.sampling": "engines.shared.sampling",
    "errors": "core.errors",
    "events": "core.events",
    "live": "cli.live",
    "problems": "storage.problems",
    "prompts": "text.prompts",
    "record": "results.record",
    "registry": "config.registry",
    "scorer_display": "cli.scorer_display",
    "scorers.history": "scorers.memory",
    "search.best_of_n": "search.policies.best_of_n",
    "search.deepconf": "search.policies.deepconf",
    "search.facts": "search.recorder",
    "search.policy": "search.policies.base",
    "search.self_consistency": "search.policies.self_consistency",
    "search.single": "search.policies.single",
    "search.slim_sc": "search.policies.slim_sc",
    "search.step": "search.policies.step",
    "search.tournament": "search.policies.tournament",
    "search.view": "search.views",
    "session": "cli.session",
    "signals": "cli.signals",
    "sink": "storage.run_folder",
    "terminal": "cli.terminal",
    "tree": "core.tree",
    "types": "core.types",
    "vote": "results.vote",
    # Packages now, of which the old module's names went to the modules inside.
    "config": "config.options",
    "models": "models.files",
}

# Names that did not go where their module went, or have another name: old module -> name -> "new.module:Name".
NAMES: Mapping[str, Mapping[str, str]] = {
    "answers": {
        name: f"text.answers.extraction:{name}" for name in ("extract_choice", "extract_number", "extract_text")
    },
    "bench.folder": {"Plan": "bench.folder:BenchPlan", "locked": "storage.locks:locked"},
    "bench.recipe": {"Recipe": "bench.recipe:BenchRecipe", "Variant": "bench.recipe:BenchVariant"},
    "bench.report": {"Report": "bench.report:BenchReport"},
    "bench.summary": {"Comparison": "bench.summary:MethodComparison", "Summary": "bench.summary:BenchSummary"},
    "config": {
        name: f"config.presets:{name}"
        for name in (
            "DEFAULT_CAPACITY",
            "DEFAULT_MAX_NEW_TOKENS",
            "PAPER",
            "PRESET_FILE",
            "ModelDefaults",
            "Preset",
            "SearchSettings",
            "preset_for",
            "resolve",
            "system_prompt_of",
        )
    },
    "engines.pressure": {"search_to_tax": "engines.shared.eviction:most_over_quota"},
    "prompts": {
        "ChatMessage": "core.problem:ChatMessage",
        "BoundaryRule": "text.boundary:BoundaryRule",
        "ThoughtState": "text.boundary:ThoughtState",
        "ThoughtTables": "text.boundary:ThoughtTables",
        "Tokenizer": "text.tokenizers:Tokenizer",
        "advance": "text.boundary:advance",
        "boundaries": "text.boundary:boundaries",
        "boundary_rule": "text.boundary:boundary_rule",
        "load_tokenizer": "text.tokenizers:load_tokenizer",
        "pack": "text.boundary:pack",
        "single_token": "text.tokenizers:single_token",
        "unpack": "text.boundary:unpack",
    },
    "record": {"replay": "results.replay:replay"},
    "search.facts": {"Facts": "search.recorder:Recorder", "Hooks": "search.recorder:Callbacks"},
    "search.loop": {"run_searches": "search.batch:run_searches"},
    "search.policy": {
        "Needs": "search.policies.base:Requirements",
        "Split": "search.policies.base:ThoughtSplit",
        "needs_of": "search.policies.base:requirements_of",
    },
    "search.step": {"Step": "search.policies.step:StepPruning"},
    "training.collect": {"Plan": "training.collect:CollectPlan", "Summary": "training.collect:CollectSummary"},
    "training.evaluate": {
        "Comparison": "training.evaluate:ScorerComparison",
        "Ranking": "training.evaluate:ScorerRanking",
        "Report": "training.evaluate:ScorerReport",
    },
    "training.objectives": {"Recipe": "training.objectives:FitRecipe"},
    "training.sampling": {"Order": "training.sampling:SamplingOrder", "Trace": "training.sampling:SampledTrace"},
    "types": {
        "Admitted": "core.types:Admission",
        "Evicted": "core.types:Eviction",
        "Finished": "core.types:TraceEnd",
    },
}


def install() -> None:
    """Once per process."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())


class OldPaths(MetaPathFinder):
    """Answers for the modules in the tables."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "gambit" or (name not in MODULES and name not in NAMES):
            return None
        real = PathFinder.find_spec(fullname, path, target)
        if real is None:
            return ModuleSpec(fullname, _Moved(name))
        assert real.loader is not None
        real.loader.exec_module = _and_forwarding(real.loader.exec_module, name)  # type: ignore[method-assign, assignment]
        return real


class _Moved(Loader):
    """Makes an empty module that forwards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        _forward(module, self._name)


def _and_forwarding(execute: Callable[[ModuleType], None], name: str) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        _forward(module, name)

    return exec_module


def _forward(module: ModuleType, old: str) -> None:
    """Look up what the module lacks where it is now."""

    def get(name: str) -> object:
        if name == "__all__":  # of a star import
            return sorted(_public_names(old))
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        home, new = _new_place(old, name)
        if (home, new) == (old, name):  # this module's own, and it has none
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        try:
            found = getattr(importlib.import_module(f"gambit.{home}"), new)
        except AttributeError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}") from None
        warnings.warn(f"gambit.{old}.{name} {_hint(home, new)}", DeprecationWarning, stacklevel=2)
        return found

    module.__getattr__ = get  # type: ignore[method-assign]


def _new_place(old: str, name: str) -> tuple[str, str]:
    home, _, new = NAMES.get(old, {}).get(name, f"{MODULES.get(old, old)}:{name}").partition(":")
    return home, new


def _public_names(old: str) -> set[str]:
    moved = importlib.import_module(f"gambit.{MODULES[old]}") if old in MODULES else None
    return {name for name in (*dir(moved), *NAMES.get(old, ())) if not name.startswith("_")}


def _hint(home: str, name: str) -> str:
    from gambit import api

    place = "gambit.api" if name in api.__all__ else f"gambit.{home}"
    return f"is deprecated and goes in {UNTIL}: use {place}.{name}"

"""Finds policies, scorers, models, engines, benchmarks by name: built-in ones and those that packages register."""

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from gambit.config.options import unknown_key
from gambit.errors import UserError, named

BENCHMARKS = (
    "aime_2024", "aime_2025", "aime_2026", "authors_aime_2025", "authors_gpqa_diamond", "authors_hmmt_2024",
    "authors_hmmt_2025", "beyond_aime", "gpqa_diamond", "gsm8k", "hmmt_2012_2023", "hmmt_feb_2024", "hmmt_feb_2025",
    "hmmt_feb_2026", "hmmt_nov_2025", "math_500", "pawn",
)  # fmt: skip
BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "gambit.policies": {
        "adaptive": "gambit.policies.baselines:Adaptive",
        "beam-search": "gambit.policies.beam_search:BeamSearch",
        "best-of-n": "gambit.policies.baselines:BestOfN",
        "deepconf": "gambit.policies.deepconf:DeepConf",
        "dvts": "gambit.policies.beam_search:Dvts",
        "gambit": "gambit.policies.islands:Gambit",
        "gambit-authors": "gambit.policies.authors:AuthorsGambit",
        "particle-filtering": "gambit.policies.beam_search:ParticleFiltering",
        "sc": "gambit.policies.baselines:SelfConsistency",
        "slim-sc": "gambit.policies.slim_sc:SlimSc",
        "single": "gambit.policies.baselines:Single",
        "step": "gambit.policies.baselines:StepPruning",
    },
    "gambit.scorers": {
        "confidence": "gambit.scorers.simple:ConfidenceScorer",
        "constant": "gambit.scorers.simple:ConstantScorer",
    },
    "gambit.models": {"pawn": "gambit.pawn:MODEL"},
    "gambit.engines": {
        "local": "gambit.engines.local.engine:start_local",
        "vllm": "gambit.engines.vllm.start:start_vllm",
    },
    "gambit.benchmarks": {name: f"gambit.bench.datasets:{name.upper()}" for name in BENCHMARKS},
}

KINDS = {"gambit.policies": "policy", "gambit.scorers": "scorer", "gambit.models": "model",
         "gambit.engines": "engine", "gambit.benchmarks": "benchmark"}  # fmt: skip


# Groups whose names may be MODULE:NAME or FILE.py:NAME too.
_BY_IMPORT = ("gambit.policies", "gambit.scorers")
_IMPORT = re.compile(r"(?!(hf|verifier):)[^:]+:[A-Za-z_]\w*")


def knows(group: str, name: str) -> bool:
    """Returns True for a known name; looks at installed packages, which is slow, only if it is not built in."""
    return name in BUILT_IN[group] or (group in _BY_IMPORT and is_import(name)) or name in _installed(group)


def names(group: str) -> list[str]:
    """Returns all names of a group."""
    return sorted({*BUILT_IN[group], *_installed(group)})


def load(group: str, name: str) -> object:
    """Returns the object behind a name; built-in names cannot be taken by another package."""
    if name in BUILT_IN[group]:
        module, _, attribute = BUILT_IN[group][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if group in _BY_IMPORT and is_import(name):
        return imported(name, KINDS[group])
    installed = _installed(group)
    if name not in installed:
        raise UserError(unknown_key(name, dict.fromkeys(names(group)), KINDS[group]))
    try:
        return installed[name].load()
    except Exception as error:
        package = getattr(installed[name].dist, "name", "unknown")
        raise UserError(f"the {KINDS[group]} {name!r} of the package {package} cannot be loaded ({named(error)}): mend "
                        "or remove that package") from error  # fmt: skip


def is_import(name: str) -> bool:
    """Returns True for MODULE:NAME and FILE.py:NAME."""
    return _IMPORT.fullmatch(name) is not None


def imported(name: str, what: str) -> object:
    """Returns what MODULE:NAME or FILE.py:NAME names; modules may lie in the folder that commands run in."""
    module, _, attribute = name.partition(":")
    file = Path(module).expanduser().resolve() if module.endswith(".py") else None
    folder = str(Path.cwd() if file is None else file.parent)
    sys.path.insert(0, folder)
    try:
        source = importlib.import_module(module if file is None else file.stem)
        if file is not None and source.__file__ != str(file):
            raise ImportError(f"another module is called {file.stem}, rename the file")
        found: object = getattr(source, attribute)
    except Exception as error:
        raise UserError(f"{what} {name!r} cannot be imported ({named(error)}): give MODULE:NAME, as in tracker:log, or "
                        "FILE.py:NAME") from error  # fmt: skip
    finally:
        sys.path.remove(folder)
    sys.path.extend({folder} - set(sys.path))  # for processes that this one starts, which import it again
    return found


def source_hash(name: str) -> str | None:
    """Returns the hash of the file in which MODULE:NAME is written; None for other names."""
    if not is_import(name):
        return None
    file = inspect.getsourcefile(sys.modules[getattr(imported(name, "source"), "__module__", "builtins")])
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}

"""Finds policies, scorers, models, engines, benchmarks by name: built-in ones and those that packages register."""

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from gambit.config.options import unknown_key
from gambit.errors import UserError

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


def knows(group: str, name: str) -> bool:
    """Returns True for a known name; looks at installed packages, which is slow, only if it is not built in."""
    return name in BUILT_IN[group] or name in _installed(group)


def names(group: str) -> list[str]:
    """Returns all names of a group."""
    return sorted({*BUILT_IN[group], *_installed(group)})


def load(group: str, name: str) -> object:
    """Returns the object behind a name; built-in names cannot be taken by another package."""
    if name in BUILT_IN[group]:
        module, _, attribute = BUILT_IN[group][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    installed = _installed(group)
    if name not in installed:
        raise UserError(unknown_key(name, dict.fromkeys(names(group)), KINDS[group]))
    return installed[name].load()


def _installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}

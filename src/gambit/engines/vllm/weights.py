"""A view of a model's folder without its scorer: vLLM would load every safetensors file in it as weights."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from gambit.errors import UserError
from gambit.models.files import SCORER_FILE
from gambit.storage.cache import cache_folder

_INDEX = "model.safetensors.index.json"  # where there is one, vLLM reads what it names and nothing else


def weights_folder(model: str) -> str:
    """`model` itself, or a folder of links to everything in it but the scorer.

    The folder has the same name at every start: vLLM files what it has compiled under the model's name.
    """
    source = Path(model)
    if not (source / SCORER_FILE).is_file() or (source / _INDEX).is_file():
        return model
    view = _view_of(source.resolve())
    wanted = {entry.name: entry.resolve() for entry in source.iterdir() if entry.name != SCORER_FILE}
    for link in list(view.iterdir()):
        if not link.is_symlink() or link.resolve() != wanted.get(link.name):
            link.unlink()
    for name, target in wanted.items():
        if not (view / name).is_symlink():
            (view / name).symlink_to(target)
    return str(view)


def _view_of(source: Path) -> Path:
    """In the cache, or in the folder for temporary files where the cache cannot be written."""
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    parts = ("models", f"{source.name}-{digest}")
    try:
        view = cache_folder(*parts)
        view.mkdir(parents=True, exist_ok=True)
        if os.access(view, os.W_OK):
            return view
    except (OSError, UserError):
        pass
    view = Path(tempfile.gettempdir(), "gambit", *parts)
    view.mkdir(parents=True, exist_ok=True)
    return view

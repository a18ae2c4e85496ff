"""Verifiers of one's own as they were trained: an adapter on the generator's weights, loaded or merged into a copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from gambit.models import files as models
from gambit.scorers.readers.heads import Head, Linear
from gambit.storage.cache import cache_folder
from gambit.storage.hashing import files_hash

if TYPE_CHECKING:
    import torch

MERGED = "verifiers"  # in the cache folder


def load_adapter(folder: Path, model: str, device: str) -> tuple[torch.nn.Module, Head]:
    """The model with the adapter in its weights, and its calibrated head."""
    import torch

    from gambit.scorers.verifier.model import Verifier

    verifier = Verifier.load(folder, torch.device(device), model)
    calibration = verifier.info.calibration
    weight = verifier.head.weight.detach().float() * verifier.input_scale * calibration.slope
    return verifier.network, Head((Linear(weight, weight.new_tensor([calibration.offset])),))


def merged_folder(folder: Path, model: str) -> Path:
    """A sequence classifier made of both, for engines that load whole models; made once."""
    import torch

    from gambit.scorers.verifier.export import export
    from gambit.scorers.verifier.model import Verifier

    out = cache_folder(MERGED, f"{folder.resolve().name}-{identity(folder)}")
    if (out / "config.json").is_file():
        return out
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")  # several processes may be at it
    shutil.rmtree(unfinished, ignore_errors=True)
    export(Verifier.load(folder, torch.device("cpu"), model, _dtype_of(model)), unfinished, model)
    try:
        unfinished.rename(out)
    except OSError:
        if not (out / "config.json").is_file():
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def _dtype_of(model: str) -> torch.dtype | None:
    """That of the weights: a copy in float32 would be twice as large, and engines would round it in their own way."""
    from transformers import AutoConfig

    found: torch.dtype | None = AutoConfig.from_pretrained(models.locate(model)).dtype
    return found


def identity(folder: Path) -> str:
    """A hash of the adapter and what it says about itself."""
    return files_hash(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))[-16:]

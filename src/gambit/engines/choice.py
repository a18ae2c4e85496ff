"""Chooses an engine by name or by what the machine offers, and starts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from gambit.config import registry
from gambit.config.options import EngineConfig
from gambit.engines.base import Engine
from gambit.engines.vllm import versions
from gambit.models.files import check_weights
from gambit.scorers.base import Scorer

StartEngine = Callable[[EngineConfig, str, Scorer], Engine]


def start_engine(config: EngineConfig, source: str, scorer: Scorer) -> Engine:
    """`source` is the model's folder or hub name."""
    name = _auto_engine(config.device) if config.engine == "auto" else config.engine
    start = cast("StartEngine", registry.load("gambit.engines", name))
    check_weights(source)
    return start(config, source, scorer)


def _auto_engine(device: str) -> str:
    """vLLM where a build that was tried is installed and its GPU is there; the embedded engine runs everywhere."""
    found = versions.installed()
    is_tried = found is not None and found[1] == "cuda" and versions.note_on(*found) is None
    if not is_tried or device.partition(":")[0] not in ("auto", "cuda"):
        return "local"
    import torch

    return "vllm" if torch.cuda.is_available() else "local"

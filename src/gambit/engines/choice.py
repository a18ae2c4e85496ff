"""Chooses an engine by name or by what the machine offers, and starts it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

from gambit.config import registry
from gambit.config.options import EngineConfig
from gambit.engines.base import Engine
from gambit.engines.vllm import versions
from gambit.errors import UserError
from gambit.models.files import check_weights
from gambit.scorers.base import Scorer

GROUP = "gambit.engines"
_LOADING = threading.Lock()  # transformers and vLLM patch torch while they load a model: one at a time
StartEngine = Callable[[EngineConfig, str, Scorer], Engine]


def check_engine(config: EngineConfig) -> str:
    """The engine that will run; what can be known to be wrong without starting it is refused."""
    name = _auto_engine(config.device) if config.engine == "auto" else config.engine
    if not registry.knows(GROUP, name):
        registry.load(GROUP, name)  # says what is known
    if name == "local" and config.engine_options:
        given = ", ".join(f"--engine-option {key}" for key in config.engine_options)
        raise UserError(f"the local engine has no options of its own, but was given {given}: leave it out, or use "
                        "--engine vllm")  # fmt: skip
    return name


def start_engine(config: EngineConfig, source: str, scorer: Scorer) -> Engine:
    """`source` is the model's folder or hub name."""
    start = cast("StartEngine", registry.load(GROUP, check_engine(config)))
    check_weights(source)
    with _LOADING:
        return start(config, source, scorer)


def _auto_engine(device: str) -> str:
    """vLLM where a build that was tried is installed and its GPU is there; the embedded engine runs everywhere."""
    found = versions.installed()
    is_tried = found is not None and found[1] == "cuda" and versions.note_on(*found) is None
    if not is_tried or device.partition(":")[0] not in ("auto", "cuda"):
        return "local"
    import torch

    return "vllm" if torch.cuda.is_available() else "local"

"""Chooses what runs the verifier of a scorer `verifier:…`, and divides the memory between it and the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.verifiers.base import Verifier
from gambit.verifiers.names import VerifierName


def prepare_verifier(name: VerifierName, config: EngineConfig) -> tuple[Callable[[], Verifier], bool]:
    """Returns what starts the verifier, and whether that may happen while the engine starts, which takes as long.

    Wrong files of a verifier on vLLM are found here, before anything large is loaded.
    """
    if config.verifier_gpu_share < 1 and (name.is_served or not _runs_on_vllm(config, _device(config))):
        raise UserError(
            "--verifier-gpu-share is for a verifier that vLLM runs here, in a process of its own: leave it out"
        )
    if name.is_served:
        from gambit.verifiers.http import start_http_verifier

        return partial(start_http_verifier, name, config), False
    device = _device(config)
    if _runs_on_vllm(config, device):
        from gambit.verifiers.vllm import prepare_vllm_verifier

        # At the same time only where neither takes a share of what the other leaves free: vLLM measures that.
        in_bytes = config.verifier_part.num_bytes is not None and "kv_cache_memory_bytes" in config.engine_options
        return prepare_vllm_verifier(name, config, device), in_bytes or not _shares_gpu(config)
    from gambit.verifiers.transformers import start_local_verifier

    return partial(start_local_verifier, name, config, device), False


def beside_verifier(config: EngineConfig, name: VerifierName | None) -> EngineConfig:
    """Returns the options of the engine, whose memory ends where the verifier's begins if both are on one GPU."""
    if name is None or name.is_served or not _shares_gpu(config):
        return config
    import torch

    total = torch.cuda.get_device_properties(_device(config)).total_memory
    left = config.memory_ratio - config.verifier_part.share_of(total)
    if left <= 0:
        raise UserError(f"--memory-ratio {config.memory_ratio} less --verifier-memory {config.verifier_memory} leaves "
                        "nothing for the model: raise the first or lower the second")  # fmt: skip
    return config.model_copy(update={"memory_ratio": left})


def _shares_gpu(config: EngineConfig) -> bool:
    """Returns whether verifier and model are on the same GPU."""
    own, model = _device(config), _resolved(config.device)
    return own.startswith("cuda") and (own.partition(":")[2] or "0") == (model.partition(":")[2] or "0")


def _device(config: EngineConfig) -> str:
    return _resolved(config.device if config.verifier_device == "auto" else config.verifier_device)


def _resolved(device: str) -> str:
    """Returns the device that the engines take for `auto`."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _runs_on_vllm(config: EngineConfig, device: str) -> bool:
    if config.verifier_engine != "auto":
        return config.verifier_engine == "vllm"
    return device.startswith("cuda") and find_spec("vllm") is not None

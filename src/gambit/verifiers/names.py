"""Reads the name of a scorer (a verifier, a checkpoint, or a registered name), and starts the verifier it names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.choice import is_checkpoint_file
from gambit.verifiers.base import Verifier
from gambit.verifiers.families import FAMILIES, Family, family_of
from gambit.verifiers.lora_folder import is_verifier

PREFIX = "verifier:"
SCHEMES = ("http://", "https://")


@dataclass(frozen=True, slots=True)
class VerifierName:
    """A verifier as the user named it: a folder, a hub name or the address of a server."""

    family: str | None  # None: recognised by its files
    model: str  # a folder, a hub name or an address

    @property
    def is_served(self) -> bool:
        return self.model.startswith(SCHEMES)


def parse_scorer(text: str) -> VerifierName | Path | str:
    """Returns what a name stands for: a verifier, the checkpoint of a scorer of hidden states, or a name as it is.

    Names are `auto`, registered ones and the model's own. The folder of a trained verifier needs no prefix.
    """
    if not text.strip():
        raise UserError(f"scorer {text!r}: the name is empty, give auto, a file, a folder or a registered name")
    if (verifier := parse_verifier(text)) is not None:
        return verifier
    if is_verifier(text):
        return VerifierName(None, text)
    if is_checkpoint_file(text):
        return Path(text)
    if Path(text).is_dir():
        raise UserError(f"scorer {text!r}: the folder holds no verifier of `gambit scorer train`; name a whole "
                        f"model verifier:{text}")  # fmt: skip
    return text


def parse_verifier(scorer: str) -> VerifierName | None:
    """Reads the name of a verifier; returns None for another scorer."""
    if not scorer.startswith(PREFIX):
        return None
    text = scorer.removeprefix(PREFIX)
    first, _, rest = text.partition(":")
    if first in FAMILIES and rest:
        return VerifierName(first, rest)
    if not text or (not text.startswith(SCHEMES) and ":" in text and not Path(text).exists()):
        raise UserError(f"scorer {scorer!r}: give verifier:FOLDER, verifier:NAME, verifier:FORMAT:FOLDER or "
                        f"verifier:http://HOST:PORT; formats are {', '.join(FAMILIES)}")  # fmt: skip
    return VerifierName(None, text)


def trained_scorer(text: str) -> str:
    """Returns a checkpoint's path without a prefix, or a name as it is."""
    found = parse_scorer(text)
    if not isinstance(found, VerifierName):
        return str(found)
    if not is_verifier(found.model):
        raise UserError(f"scorer {text!r} is no folder that `gambit scorer train --architecture verifier` wrote")
    return found.model


def verifier_folder(text: str) -> Path:
    """Returns the folder of a verifier that `gambit scorer train` wrote, named with or without its prefix."""
    if not isinstance(parse_scorer(text), VerifierName):
        raise UserError(
            f"{text!r} is no verifier: give a folder that `gambit scorer train --architecture verifier` wrote"
        )
    return Path(trained_scorer(text))


def model_folder(name: VerifierName) -> Path:
    """Returns the folder with a verifier's files; those of a hub name are downloaded first."""
    source = models.locate(name.model)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def family_named(name: VerifierName, folder: Path) -> Family:
    """Returns the family that the name states, else the one that the files show."""
    return FAMILIES[name.family] if name.family is not None else family_of(folder)


# -- starting ---------------------------------------------------------------------------------------------------


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

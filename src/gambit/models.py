"""What travels with a model besides its weights: where it is, its preset, its scorer, its sampling defaults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gambit.config import PRESET_FILE, ModelDefaults, preset_for
from gambit.errors import UserError

SCORER_FILE = "scorer.safetensors"
BUNDLED = "pawn"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(model: str) -> str:
    """What transformers should load: the bundled model's folder for its name, anything else as it is."""
    if model != BUNDLED:
        _check_exists(model)
        return model
    folder = Path(__file__).parent / "pawn" / "model"
    if not folder.is_dir():
        raise UserError(f"the bundled model is missing from this installation ({folder}): name one with --model")
    return str(folder)


def _check_exists(model: str) -> None:
    """Asked once, before anything else: without a network each further file would cost half a minute of retries."""
    if Path(model).is_dir():
        return
    if not HUB_NAME.fullmatch(model):
        raise UserError(f"cannot load model {model!r}: there is no such folder, and it is no hub name")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        hf_hub_download(model, "config.json")
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"cannot load model {model!r}: there is no such folder, and the hub cannot be reached"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"cannot load model {model!r}: there is no such folder, and the hub says: {reason}") from error


def side_file(model: str, filename: str) -> Path | None:
    """A file beside a model's weights, in its folder or on the hub; None where there is none or no network."""
    if Path(model).is_dir():
        path = Path(model) / filename
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, filename))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Generation:
    """A model's generation_config: ids that end its turn, and the sampling its makers recommend."""

    eos_ids: tuple[int, ...]
    sampling: dict[str, float]


def generation_of(model: str) -> Generation:
    """Empty for a model without one."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return Generation((), {})
    eos: int | Sequence[int] | None = config.eos_token_id
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    names = ("temperature", "top_p", "top_k", "min_p")
    given = {name: getattr(config, name, None) for name in names} if config.do_sample else {}
    return Generation(ids, {name: value for name, value in given.items() if value is not None})


def defaults_of(model: str, generation: Generation) -> ModelDefaults:
    """What the model itself says about how to search with it."""
    path = side_file(model, PRESET_FILE)
    return ModelDefaults(preset_for(model, path.parent if path else None), generation.sampling)

"""A model's files: where they are, their hashes, and what lies beside the weights (preset, scorer, sampling)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gambit.config import registry
from gambit.config.presets import PRESET_FILE, ModelDefaults, preset_for
from gambit.errors import UserError
from gambit.models.hub import fetch_config, is_offline, work_offline_if_silent
from gambit.storage.files import read_object
from gambit.storage.identity import files_hash
from gambit.types import NamedModel

SCORER_FILE = "scorer.safetensors"
SCORERS_FOLDER = "scorers"  # further ones; in a folder of their own, since vLLM takes every safetensors for weights
MODELS = "gambit.models"
BUNDLED = "pawn"  # the model of those who name none
WEIGHTS_FILE = "model.safetensors"
GENERATION_FILE = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth")  # where there is no safetensors
# Beside the weights these decide what a model says: its configuration and its tokenizer. A README does not.
CONFIGURATION_FILES = ("config.json", "generation_config.json", PRESET_FILE)
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def named_model(model: str) -> NamedModel | None:
    """The model that a package brings along under this name."""
    if not registry.knows(MODELS, model):
        return None
    return cast("NamedModel", registry.load(MODELS, model))


def locate(model: str) -> str:
    """What transformers should load: a named model's folder, anything else as it is."""
    named = named_model(model)
    if named is None:
        _check_exists(model)
        return model
    if not named.folder.is_dir():
        raise UserError(f"the model {model!r} is missing from this installation ({named.folder}): name another one "
                        "with --model")  # fmt: skip
    return str(named.folder)


def _check_exists(model: str) -> None:
    """Asked before anything else, so that nothing waits for a hub that does not answer."""
    if Path(model).is_dir():
        return
    if folder_on_disk(model) is not None:
        work_offline_if_silent(model)
    elif (mistake := _mistake_in(model)) is not None:
        raise UserError(f"cannot load model {model!r}: {mistake}")
    else:
        fetch_config(model)


def _mistake_in(model: str) -> str | None:
    """Why a name that is no folder cannot be meant for the hub either."""
    if not HUB_NAME.fullmatch(model):
        return "there is no such folder, and it is no hub name"
    if Path(model).exists():
        return "it is a file; give the folder that holds it and config.json"
    return None


def must_be_fetched(model: str) -> bool:
    """Whether the hub will be asked for all of it."""
    is_here = named_model(model) is not None or Path(model).is_dir() or folder_on_disk(model) is not None
    return not is_here and _mistake_in(model) is None and not is_offline()


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


def own_scorer(model: str, name: str) -> Path | None:
    """A further scorer that travels with a model: `scorers/NAME.safetensors`."""
    return side_file(model, f"{SCORERS_FOLDER}/{name}.safetensors") if re.fullmatch(r"[\w-]+", name) else None


@dataclass(frozen=True, slots=True)
class Generation:
    """A model's generation_config: ids that end its turn, and the sampling its makers recommend."""

    eos_ids: tuple[int, ...]
    sampling: dict[str, float]


def generation_of(model: str) -> Generation:
    """Empty for a model without one."""
    path = side_file(model, GENERATION_FILE)
    if path is None:
        return Generation((), {})
    raw = _read_json(path)
    eos = raw.get("eos_token_id")
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(cast("Sequence[int]", eos))
    names = ("temperature", "top_p", "top_k", "min_p") if raw.get("do_sample") else ()
    return Generation(ids, {name: value for name in names if isinstance(value := raw.get(name), int | float)})


def _read_json(path: Path) -> dict[str, object]:
    return read_object(path, "a file of a model", "copy the model's files again")


def check_model(model: str) -> None:
    """Refuse a model whose folder is missing or has broken files, before anything heavy is imported."""
    source = locate(model)
    if Path(source).is_dir():
        check_weights(source)
        defaults_of(source, generation_of(source))


def check_weights(model: str) -> None:
    """Refuse weights that a broken download left behind, before an engine takes a minute to stumble over them."""
    for file in weight_files(model):
        try:
            with file.open("rb") as content:
                size = int.from_bytes(content.read(8), "little")
                header = json.loads(content.read(min(size, file.stat().st_size)))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file} is not a readable safetensors file: copy it again") from error
        if (found := file.stat().st_size) != 8 + size + end:
            raise UserError(f"{file} has {found:,} bytes where its header promises {8 + size + end:,}: copy it again")


def defaults_of(model: str, generation: Generation) -> ModelDefaults:
    """What the model itself says about how to search with it."""
    path = side_file(model, PRESET_FILE)
    return ModelDefaults(preset_for(model, path.parent if path else None), generation.sampling)


def name_of(model: str) -> str:
    """What to call a model in a checkpoint: a hub name as it is, of a folder only its own name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def hidden_size_on_disk(model: str) -> int | None:
    """From a model's config, without loading it; None where it is not on this disk."""
    path = _on_disk(model, "config.json")
    if path is None:
        return None
    raw = _read_json(path)
    nested = raw.get("text_config")
    size = raw.get("hidden_size") or (nested.get("hidden_size") if isinstance(nested, dict) else None)
    return size if isinstance(size, int) else None


def weight_hash(model: str) -> str | None:
    """A hash of a model's weights, or None where they are not on this disk as safetensors."""
    files = weight_files(model)
    return files_hash(files) if files else None


def identity_hash(model: str) -> str | None:
    """A hash of a model's weights, configuration and tokenizer; None where the weights are not on this disk."""
    weights = weight_files(model) or _other_weights(model)
    if not weights:
        return None
    digest = hashlib.sha256(files_hash(weights).encode())
    for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES):
        if (path := _on_disk(model, name)) is not None:
            digest.update(f"{name} {files_hash([path])}".encode())
    return digest.hexdigest()[:16]


def folder_on_disk(model: str) -> Path | None:
    """Where a model's files are; None for one that only the hub has."""
    config = _on_disk(model, "config.json")
    return config.parent if config else None


def scorer_file(model: str, scorer: str) -> Path | None:
    """The checkpoint that a scorer's name stands for, where it stands for one that is on this disk."""
    if Path(scorer).is_file():
        return Path(scorer)
    if scorer == "auto":
        return _on_disk(model, SCORER_FILE)
    return _on_disk(model, f"{SCORERS_FOLDER}/{scorer}.safetensors") if re.fullmatch(r"[\w-]+", scorer) else None


def _other_weights(model: str) -> list[Path]:
    folder = folder_on_disk(model)
    return sorted(path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)) if folder else []


def weight_files(model: str) -> list[Path]:
    """A model's safetensors on this disk, none where one of them is missing."""
    index = _on_disk(model, WEIGHTS_INDEX)
    if index is None:
        single = _on_disk(model, WEIGHTS_FILE)
        return [single] if single else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError):
        return []
    found = [_on_disk(model, name) for name in names]
    return [path for path in found if path is not None] if all(found) else []


def _on_disk(model: str, filename: str) -> Path | None:
    """Without asking any network: a hash is worth no wait."""
    if Path(model).is_dir():
        path = Path(model) / filename
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    if not HUB_NAME.fullmatch(model):
        return None
    cached = try_to_load_from_cache(model, filename)
    return Path(cached) if isinstance(cached, str) else None

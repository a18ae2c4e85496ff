"""The files of a model: their places, on this disk or on the hub, their hashes, and the files beside the weights."""

import difflib
import hashlib
import json
import os
import re
import ssl
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from safetensors import SafetensorError, safe_open

from gambit.config import registry
from gambit.config.effort import Effort
from gambit.config.presets import PRESET_FILE, ModelDefaults, preset_for
from gambit.errors import GambitWarning, UserError, first_line
from gambit.storage.files import files_hash, read_object
from gambit.text.boundary import THINK_END
from gambit.types import NamedModel

SCORER_FILE = "scorer.safetensors"
SCORERS_FOLDER = "scorers"  # further ones; in a folder of their own, since vLLM takes every safetensors for weights
MODELS = "gambit.models"
BUNDLED = "pawn"  # the model of those who name none
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
GENERATION_FILE = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth")  # where there is no safetensors
# Beside the weights, configuration and tokenizer decide about a model's tokens. A README does not.
CONFIGURATION_FILES = ("config.json", "generation_config.json", PRESET_FILE)
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
OFFLINE = "HF_HUB_OFFLINE"
HUB_SECONDS = 5.0  # a hub that can be reached at all answers in this time
SCORER_NAME = re.compile(r"[\w-]+")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def named_model(model: str) -> NamedModel | None:
    """Returns the model that a package brings along under this name, or None."""
    return cast("NamedModel", registry.load(MODELS, model)) if registry.knows(MODELS, model) else None


def locate(model: str) -> str:
    """Returns the name for transformers: a named model's folder, any other name or folder as it is.

    Raises for a model that cannot be found, without a long wait for a hub that does not answer.
    """
    named = named_model(model)
    if named is not None and not named.folder.is_dir():
        raise UserError(f"the model {model!r} is missing from this installation ({named.folder}): name another one "
                        "with --model")  # fmt: skip
    if named is not None or Path(model).is_dir():
        return str(named.folder) if named is not None else model
    if folder_on_disk(model) is not None:
        _work_offline_if_silent(model)
    elif (mistake := _mistake_in(model)) is not None:
        raise UserError(f"cannot load model {model!r}: {mistake}")
    else:
        _fetch_config(model)
    return model


def _mistake_in(model: str) -> str | None:
    """Explains why a name that is no folder cannot be a hub name either; None where it can."""
    if not HUB_NAME.fullmatch(model):
        return "there is no such folder, and names on the hub have the form owner/model"
    if Path(model).exists():
        return "it is a file; give the folder that holds it and config.json"
    return None


def must_be_fetched(model: str) -> bool:
    """Returns True if all of the model has to come from the hub."""
    is_here = named_model(model) is not None or Path(model).is_dir() or folder_on_disk(model) is not None
    return not is_here and _mistake_in(model) is None and not is_offline()


def side_file(model: str, filename: str) -> Path | None:
    """Returns a file beside a model's weights, from its folder or the hub; None without such a file or a network."""
    if Path(model).is_dir():
        return _on_disk(model, filename)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, filename))
    except (OSError, ValueError):
        return None


def own_scorer(model: str, name: str) -> Path | None:
    """Returns the further scorer of this name that travels with a model, or None."""
    return side_file(model, _scorer_path(name)) if SCORER_NAME.fullmatch(name) else None


def scorer_file(model: str, scorer: str) -> Path | None:
    """Returns the checkpoint that a scorer's name stands for; None where it stands for none that is on this disk."""
    if Path(scorer).is_file():
        return Path(scorer)
    if scorer == "auto":
        return _on_disk(model, SCORER_FILE)
    return _on_disk(model, _scorer_path(scorer)) if SCORER_NAME.fullmatch(scorer) else None


def _scorer_path(name: str) -> str:
    return f"{SCORERS_FOLDER}/{name}.safetensors"


def end_ids(model: str) -> tuple[int, ...]:
    """Returns the ids that end a turn according to a model's generation_config."""
    ids = _generation(model).get("eos_token_id")
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(cast("Sequence[int]", ids))


def defaults_of(model: str) -> ModelDefaults:
    """Returns the defaults of searches with a model, from its own files: a preset, and its makers' sampling."""
    path, generation = side_file(model, PRESET_FILE), _generation(model)
    names = ("temperature", "top_p", "top_k", "min_p") if generation.get("do_sample") else ()
    sampling = {name: value for name in names if isinstance(value := generation.get(name), int | float)}
    return ModelDefaults(preset_for(model, path.parent if path else None), sampling)


def usual_effort(model: str) -> Effort:
    """Returns the effort of a search that names none: medium for a model that thinks, since its traces are long.

    A bundled model is small enough for its full pool.
    """
    path = None if named_model(model) is not None else side_file(model, "tokenizer.json")
    thinks = path is not None and f'"{THINK_END}"' in path.read_text(encoding="utf-8", errors="replace")
    return Effort.MEDIUM if thinks else Effort.HIGH


def _generation(model: str) -> dict[str, object]:
    """Reads a model's generation_config; empty for a model without one."""
    path = side_file(model, GENERATION_FILE)
    return {} if path is None else _read_json(path)


def _read_json(path: Path) -> dict[str, object]:
    return read_object(path, "a file of a model", "copy the model's files again")


def check_model(model: str) -> None:
    """Raises for a model whose folder is missing or has broken files. Imports no heavy library."""
    source = locate(model)
    if Path(source).is_dir():
        check_weights(source)
        defaults_of(source)


def check_weights(model: str) -> None:
    """Raises for weights that a broken download left behind, before an engine takes a minute to stumble over them."""
    for file in weight_files(model):
        try:
            with safe_open(file, framework="np"):
                continue
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is not a whole safetensors file ({first_line(error)}): copy it again") from error


def name_of(model: str) -> str:
    """Returns the name of a model in checkpoints: a hub name as it is, of a folder only its own name."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def number_on_disk(model: str, name: str) -> int | None:
    """Reads a number from a model's config, without loading it; None if it has none, or is not on this disk."""
    path = _on_disk(model, "config.json")
    if path is None:
        return None
    raw = _read_json(path)
    nested = raw.get("text_config")
    found = raw.get(name) or (nested.get(name) if isinstance(nested, dict) else None)
    return found if isinstance(found, int) else None


def weight_hash(model: str, adapter: str | None = None) -> str | None:
    """Returns a hash of a model's safetensors on this disk, and of an adapter's after a "+"; None without them."""
    files = weight_files(model)
    return files_hash(files) + (f"+{adapter_hash(adapter)}" if adapter else "") if files else None


def adapter_rank(folder: str) -> int:
    """Returns the rank of a LoRA adapter; raises for a folder that holds none."""
    path = Path(folder) / ADAPTER_FILES[0]
    rank = _read_json(path).get("r") if path.is_file() else None
    if not isinstance(rank, int) or not (Path(folder) / ADAPTER_FILES[1]).is_file():
        raise UserError(
            f"no LoRA adapter in {folder}: give a folder with {' and '.join(ADAPTER_FILES)}, as peft writes it"
        )
    return rank


def adapter_hash(folder: str) -> str:
    return files_hash([Path(folder) / name for name in ADAPTER_FILES])


def identity_hash(model: str) -> str | None:
    """Returns a hash of a model's weights, configuration and tokenizer; None without weights on this disk."""
    weights, folder = weight_files(model), folder_on_disk(model)
    if not weights and folder is not None:
        weights = sorted(path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    if not weights:
        return None
    digest = hashlib.sha256(files_hash(weights).encode())
    for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES):
        if (path := _on_disk(model, name)) is not None:
            digest.update(f"{name} {files_hash([path])}".encode())
    return digest.hexdigest()[:16]


def folder_on_disk(model: str) -> Path | None:
    """Returns the folder of a model's files; None for one that only the hub has."""
    config = _on_disk(model, "config.json")
    return config.parent if config else None


def weight_files(model: str) -> list[Path]:
    """Returns a model's safetensors on this disk; none where one of them is missing."""
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
    """Finds a file in the model's folder or in the hub's cache, without a network: a hash is worth no wait."""
    if Path(model).is_dir():
        path = Path(model) / filename
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    if not HUB_NAME.fullmatch(model):
        return None
    cached = try_to_load_from_cache(model, filename)
    return Path(cached) if isinstance(cached, str) else None


# -- the hub -----------------------------------------------------------------------------------------------------
# Libraries try again for half a minute for every file that they miss. One short probe finds out if the hub answers.


def hub_address() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_offline() -> bool:
    """Returns True if the user set it so, or if the hub was silent."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _fetch_config(model: str) -> None:
    """Fetches config.json of a model that is not on this disk; raises if the hub does not send it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if is_offline():
        raise _refused(model, f"the hub is not asked: {OFFLINE} is set")
    if (reason := hub_silence()) is not None:
        raise _refused(model, f"the hub cannot be reached: {hub_address()} does not answer ({reason}); "
                              "name a folder with the model, or set HF_ENDPOINT to a mirror")  # fmt: skip
    try:
        hf_hub_download(model, "config.json")
    except LocalEntryNotFoundError as error:
        raise _refused(model, f"the hub cannot be reached: {hub_address()} has stopped answering") from error
    except (OSError, ValueError) as error:
        raise _refused(model, f"the hub says: {first_line(error)}") from error


def go_offline() -> None:
    """Makes this process, and those that it starts, request nothing from a hub."""
    from huggingface_hub import constants

    os.environ[OFFLINE] = "1"
    constants.HF_HUB_OFFLINE = True


def _work_offline_if_silent(model: str) -> None:
    """Keeps libraries from requesting optional files of a cached model from a hub that does not answer."""
    if is_offline() or (reason := hub_silence()) is None:
        return
    go_offline()
    warnings.warn(f"{hub_address()} does not answer ({reason}): {model} is used as it lies in this machine's cache",
                  GambitWarning, stacklevel=2)  # fmt: skip


def _refused(model: str, reason: str) -> UserError:
    near = difflib.get_close_matches(model, registry.names(MODELS), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"cannot load model {model!r}{hint}: there is no such folder, and {reason}")


def hub_silence() -> str | None:
    """Returns the reason why nothing answers; None if something does, even with an error."""
    try:
        with urlopen(Request(hub_address(), method="HEAD"), timeout=HUB_SECONDS):
            return None
    except HTTPError:
        return None
    except URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return first_line(error)


# -- files named by an address: hf:ORG/REPO ----------------------------------------------------------------------


SCHEME = "hf:"
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def repository_of(address: str) -> tuple[str, str | None]:
    """Returns the repository and the revision of an address with or without its scheme."""
    repository, _, revision = address.removeprefix(SCHEME).partition("@")
    if not REPOSITORY.fullmatch(repository):
        raise UserError(f"{address!r}: give {SCHEME}ORG/REPO, or {SCHEME}ORG/REPO@REVISION")
    return repository, revision or None


def cached_file(address: str, filename: str) -> Path | None:
    """Returns a file in this machine's cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = repository_of(address)
    found = try_to_load_from_cache(repository, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


def fetched_file(address: str, filename: str) -> Path:
    """Returns a file, fetched if the hub has a newer one than the cache."""
    from huggingface_hub import hf_hub_download

    repository, revision = repository_of(address)
    cached = cached_file(address, filename)
    reason = f"{OFFLINE} is set" if is_offline() else hub_silence()
    if reason is not None and cached is None:
        raise UserError(
            f"{address}: {filename} is not in this machine's cache, and {hub_address()} gives none ({reason})"
        )
    if reason is not None and cached is not None:
        return cached
    try:
        return Path(hf_hub_download(repository, filename, revision=revision))
    except (OSError, ValueError) as error:
        raise UserError(f"{address}: {filename} cannot be fetched: {first_line(error)}") from error

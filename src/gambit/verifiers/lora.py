"""Verifiers that Gambit trains: the generator's weights with a LoRA adapter, and a head with one logit a token."""

import copy
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gambit.errors import GambitWarning, UserError, first_line, install_line
from gambit.models import files as models
from gambit.scorers.base import MadeFor, check_fit
from gambit.storage.folders import cache_folder
from gambit.verifiers.families import Head
from gambit.verifiers.lora_folder import (
    ALL_LINEAR,
    HEAD,
    INFO_FILE,
    LoraInfo,
    Platt,
    identity,
    is_verifier,
    read_info,
    read_weights,
    write_info,
    write_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
Logits = npt.NDArray[np.float32]
READ_TOKENS = {"cuda": 65_536, "mps": 16_384, "cpu": 4_096}  # of one padded pass that only reads
KEPT = (*models.TOKENIZER_FILES, models.GENERATION_FILE)  # copied beside exported weights
SHARD = "4GB"
MERGED = "verifiers"  # in the cache folder


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[list[int]]:
    """Yields indices in batches whose padded size stays within the budget; a longer sequence goes alone."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > most_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Passage:
    """Token ids to read (the prompt's and a trace's) and the places among them that need a logit."""

    tokens: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class LoraVerifier:
    """A network that reads the generator's token ids and computes, at some of them, the logit of ending right.

    Attention is causal: a logit depends on the tokens up to its own alone, so one pass serves every thought of a trace.
    """

    def __init__(self, network: nn.Module, head: nn.Linear, info: LoraInfo) -> None:
        self.network, self.head, self.info = network, head, info
        self.input_scale = 1.0  # of what enters the head while it is trained; 1 in a loaded one

    # -- making ------------------------------------------------------------------------------------------------

    @classmethod
    def fresh(cls, model: str, info: LoraInfo, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Makes an adapter that changes nothing yet and a head of zeros on a model's weights."""
        check_installed()
        from peft import LoraConfig, TaskType, get_peft_model

        base = read_base(model, dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32))
        targets = info.targets if info.targets == ALL_LINEAR else info.targets.split(",")
        config = LoraConfig(r=info.rank, lora_alpha=info.alpha, target_modules=targets, lora_dropout=0.0,
                            task_type=TaskType.FEATURE_EXTRACTION)  # fmt: skip
        try:
            network = get_peft_model(base, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise UserError(f"no layers of {model} are called {info.targets!r}: use {ALL_LINEAR}, or names such as "
                            "q_proj,v_proj") from error  # fmt: skip
        head = nn.Linear(info.hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
        return cls(network.to(device), head.to(device), info)

    @classmethod
    def load(
        cls, folder: Path, device: torch.device, model: str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Loads a checkpoint folder and the model it was trained on, and merges the adapter into the weights."""
        info = read_info(folder)
        tensors = read_weights(folder)
        found = cls.fresh(base_of(info, model), info, device, dtype)
        found.head.weight.data.copy_(tensors.pop(HEAD))
        found.set_adapter(tensors)
        merged: PreTrainedModel = found.network.merge_and_unload()  # type: ignore[operator]
        return cls(merged.eval(), found.head, info)

    # -- weights -----------------------------------------------------------------------------------------------

    def adapter(self) -> dict[str, Tensor]:
        """Returns the adapter's tensors by name."""
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(self.network))

    def set_adapter(self, tensors: dict[str, Tensor]) -> None:
        """Loads an adapter; raises if it does not fit the model."""
        from peft import set_peft_model_state_dict

        mine, theirs = ({name: each.shape for name, each in group.items()} for group in (self.adapter(), tensors))
        if wrong := {name for name, _ in mine.items() ^ theirs.items()}:
            raise UserError(f"the adapter does not fit the model: {len(wrong)} tensors are missing or of another "
                            f"shape, such as {min(wrong)}; name {self.info.base_model} with --model")  # fmt: skip
        set_peft_model_state_dict(self.network, tensors)

    def save(self, folder: Path) -> Path:
        """Writes the adapter in the precision it runs in, the head in float32; returns the file."""
        head = self.head.weight.detach() * self.input_scale
        write_info(folder, self.info)
        return write_weights(folder, {**self.adapter(), HEAD: head})

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def picked_states(self, passages: Sequence[Passage]) -> Tensor:
        """Returns states [place, hidden] in float32, passage after passage, of one padded pass."""
        padded = np.zeros((len(passages), max(len(each.tokens) for each in passages)), np.int64)
        for row, each in zip(padded, passages, strict=True):
            row[: len(each.tokens)] = each.tokens
        rows = np.repeat(np.arange(len(passages)), [len(each.places) for each in passages])
        places = np.concatenate([each.places for each in passages])
        # Padding stands on the right, where causal attention keeps it away from everything that is read: no mask.
        states = self.network(input_ids=torch.from_numpy(padded).to(self.device), use_cache=False).last_hidden_state
        picked: Tensor = states[torch.from_numpy(rows).to(self.device), torch.from_numpy(places).to(self.device)]
        return picked.float()

    def picked_logits(self, passages: Sequence[Passage]) -> Tensor:
        """Returns logits [place] of one padded pass."""
        logits: Tensor = self.head(self.picked_states(passages) * self.input_scale)[:, 0]
        return logits

    @torch.inference_mode()
    def logits(self, passages: Sequence[Passage]) -> list[Logits]:
        """Returns logits at the places of each passage; a pass holds passages of similar length."""
        found: list[Logits] = [np.zeros(0, np.float32) for _ in passages]
        wanted = [i for i, each in enumerate(passages) if len(each.places)]
        for batch in by_length([len(passages[i].tokens) for i in wanted], READ_TOKENS[self.device.type]):
            mine = [passages[wanted[i]] for i in batch]
            logits = self.picked_logits(mine).cpu()
            for i, part in zip(batch, torch.split(logits, [len(each.places) for each in mine]), strict=True):
                found[wanted[i]] = part.numpy()
        return found


def check_installed() -> None:
    """Raises if peft is missing."""
    if find_spec("peft") is None:
        raise UserError(f"an adapter needs the package peft: {install_line('train')}")


def base_of(info: LoraInfo, model: str | None) -> str:
    """Returns where the weights under a verifier are, and warns where it was trained on others."""
    try:
        source = models.locate(model or info.base_model)
    except UserError as error:
        hint = "" if model else f"; the verifier was trained on {info.base_model}: name its folder with --model"
        raise UserError(f"{error}{hint}") from error
    size = models.number_on_disk(source, "hidden_size")
    found = MadeFor(models.name_of(source), size, weights=models.weight_hash(source))
    warning = check_fit(info.made_for(), found, f"name {info.base_model} with --model")
    if warning is not None:
        warnings.warn(warning, GambitWarning, stacklevel=2)
    return source


def read_base(model: str, dtype: torch.dtype | str) -> "PreTrainedModel":
    """Loads a network without its output layer or head."""
    from transformers import AutoModel

    try:
        with quiet_transformers():
            base: PreTrainedModel = AutoModel.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load model {model!r}: {first_line(error)}") from error
    return base


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides the progress bar of transformers, and its notes that the output layer is not used."""
    from transformers.utils import logging

    level, was_shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_shown:
            logging.enable_progress_bar()


def info_for(model: str, **values: object) -> LoraInfo:
    """Returns the description of a new verifier on a model."""
    source = models.locate(model)
    size = models.number_on_disk(source, "hidden_size")
    if size is None:
        raise UserError(f"{model} is not on this disk: download it first, or name its folder with --model")
    known = {"base_model": models.name_of(model), "base_model_hash": models.weight_hash(source), "hidden_size": size}
    return LoraInfo.model_validate({**known, **values})


def export(verifier: LoraVerifier, out: Path, model: str | None = None) -> Path:
    """Writes the model with the adapter merged, and the head scaled to give the calibrated logit less an offset.

    A sequence classifier's last layer has no bias, so that the offset stays outside, in `verifier.json`.
    """
    from transformers import AutoModelForSequenceClassification

    source = base_of(verifier.info, model)
    network = cast("PreTrainedModel", verifier.network)
    config = copy.deepcopy(network.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos or 0
    try:
        with torch.device("meta"), quiet_transformers():
            whole = AutoModelForSequenceClassification.from_config(config, dtype=network.dtype)
    except ValueError as error:
        raise UserError(f"{verifier.info.base_model}: transformers has no sequence classifier of this kind "
                        f"({config.model_type})") from error  # fmt: skip
    calibration = verifier.info.calibration
    head = verifier.head.weight.detach() * verifier.input_scale * calibration.slope
    weights = {f"{whole.base_model_prefix}.{name}": tensor for name, tensor in network.state_dict().items()}
    whole.load_state_dict({**weights, "score.weight": head.to(network.dtype)}, assign=True)
    with quiet_transformers():
        whole.save_pretrained(out, max_shard_size=SHARD)
    write_info(out, verifier.info.model_copy(update={"calibration": Platt(slope=1.0, offset=calibration.offset)}))
    folder = models.folder_on_disk(source)
    for name in KEPT:
        if folder is not None and (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    return out


def is_exported(folder: Path) -> bool:
    """Returns whether a folder holds what `export` writes; one with an adapter is still to be exported."""
    return all((folder / name).is_file() for name in ("config.json", INFO_FILE)) and not is_verifier(folder)


def load_adapter(folder: Path, model: str, device: str) -> tuple[torch.nn.Module, Head]:
    """Returns the model with the adapter in its weights, and its calibrated head."""
    verifier = LoraVerifier.load(folder, torch.device(device), model)
    calibration = verifier.info.calibration
    weight = verifier.head.weight.detach().float() * calibration.slope
    return verifier.network, Head(((weight, weight.new_tensor([calibration.offset])),))


def merged_folder(folder: Path, model: str) -> Path:
    """Returns a folder with both as one sequence classifier, for engines that load whole models; made once."""
    from transformers import AutoConfig

    out = cache_folder(MERGED, f"{folder.resolve().name}-{identity(folder)}")
    if (out / "config.json").is_file():
        return out
    unfinished = out.with_name(f"{out.name}.{os.getpid()}.part")  # several processes may be at it
    shutil.rmtree(unfinished, ignore_errors=True)
    # In the precision of the weights: a copy in float32 would be twice as large, and engines would round it their way.
    dtype: torch.dtype | None = AutoConfig.from_pretrained(models.locate(model)).dtype
    export(LoraVerifier.load(folder, torch.device("cpu"), model, dtype), unfinished, model)
    try:
        unfinished.rename(out)
    except OSError:
        if not (out / "config.json").is_file():
            raise
        shutil.rmtree(unfinished, ignore_errors=True)
    return out

"""Writes a verifier as a plain sequence classifier with one label, which transformers and vLLM load as they are."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from gambit.errors import UserError
from gambit.models import files as models
from gambit.scorers.verifier.folder import INFO_FILE, Platt, is_verifier, write_info
from gambit.scorers.verifier.model import Verifier, base_of, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT = (*models.TOKENIZER_FILES, models.GENERATION_FILE)
SHARD = "4GB"


def export(verifier: Verifier, out: Path, model: str | None = None) -> Path:
    """The model with the adapter merged, and the head scaled so that its logit is the calibrated one less an offset.

    A sequence classifier's last layer has no bias, so that the offset stays outside: `verifier.json` tells it.
    """
    from transformers import AutoModelForSequenceClassification

    source = base_of(verifier.info, model)
    network = cast("PreTrainedModel", verifier.network)
    config = copy.deepcopy(network.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        config.pad_token_id = _an_eos(config.eos_token_id)
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
    _copy_side_files(source, out)
    return out


def is_exported(folder: Path) -> bool:
    """Whether it holds what `export` writes, and no adapter, which would be a verifier that is still to be exported."""
    return all((folder / name).is_file() for name in ("config.json", INFO_FILE)) and not is_verifier(folder)


def _an_eos(eos: int | list[int] | None) -> int:
    return eos[0] if isinstance(eos, list) else eos or 0


def _copy_side_files(source: str, out: Path) -> None:
    folder = models.folder_on_disk(source)
    for name in KEPT:
        if folder is not None and (folder / name).is_file():
            shutil.copy(folder / name, out / name)

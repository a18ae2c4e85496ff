"""Loads a verifier with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gambit.config.options import EngineConfig
from gambit.errors import UserError
from gambit.scorers.readers.adapters import load_adapter
from gambit.scorers.readers.families import FAMILIES, own_settings, reader_info
from gambit.scorers.readers.names import ReaderName, family_named, model_folder
from gambit.scorers.readers.transformers_reader import TransformersReader
from gambit.scorers.verifier.folder import is_verifier

if TYPE_CHECKING:
    import torch

CPU_CACHE_BYTES = 2 << 30  # where memory is shared with everything else


def start_local_reader(name: ReaderName, config: EngineConfig, device: str) -> TransformersReader:
    """`device`: what torch calls it."""
    import torch

    folder = model_folder(name)
    is_adapter = is_verifier(folder)
    family = FAMILIES["gambit"] if is_adapter else family_named(name, folder)
    try:
        backbone, head = (
            load_adapter(folder, config.model, device)
            if is_adapter
            else (_load(folder, device), family.read_head(folder))
        )
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the verifier {name.model} does not fit on {device}: lower --memory-ratio, or put it "
                        "elsewhere with --verifier-device") from error  # fmt: skip
    context = getattr(backbone.config, "max_position_embeddings", None)
    where = {"runs_on": "local", "device": device, "context_tokens": context}
    info = reader_info(name.model, family, own_settings(folder), config, **where)
    return TransformersReader(info, backbone, head, family.make_format(folder), _cache_bytes(config, backbone, device))


def _load(folder: Path, device: str) -> torch.nn.Module:
    """Without a head: those of verifiers are read by themselves."""
    import torch
    from transformers import AutoModel

    from gambit.scorers.verifier.model import quiet_transformers

    dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
    with quiet_transformers():
        backbone: torch.nn.Module = AutoModel.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return backbone.to(device)


def _cache_bytes(config: EngineConfig, backbone: torch.nn.Module, device: str) -> int:
    """What the verifier's part of the memory leaves for keys and values."""
    import torch

    if torch.device(device).type != "cuda":
        return config.verifier_part.num_bytes or CPU_CACHE_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    weights = sum(each.numel() * each.element_size() for each in backbone.parameters())
    left = config.verifier_part.bytes_of(total) - weights
    if left <= 0:
        raise UserError(f"--verifier-memory {config.verifier_memory} is {(left + weights) >> 20:,} MiB on {device}; "
                        f"the verifier's weights alone take {weights >> 20:,}: raise it")  # fmt: skip
    return left

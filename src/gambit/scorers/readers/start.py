"""Loads a verifier with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gambit.config.options import EngineConfig
from gambit.core.errors import UserError
from gambit.scorers.readers.base import ReaderInfo
from gambit.scorers.readers.families import aggregation_of
from gambit.scorers.readers.names import ReaderName, family_named, model_folder
from gambit.scorers.readers.transformers_reader import TransformersReader

if TYPE_CHECKING:
    import torch

CPU_CACHE_BYTES = 2 << 30  # where memory is shared with everything else


def start_local_reader(name: ReaderName, config: EngineConfig, device: str) -> TransformersReader:
    """`device`: what torch calls it."""
    import torch
    from transformers import AutoModel

    folder = model_folder(name)
    family = family_named(name, folder)
    head = family.read_head(folder)
    prompt_format = family.make_format(folder)
    is_cpu = torch.device(device).type == "cpu"
    try:
        with _quiet_transformers():
            backbone = AutoModel.from_pretrained(
                folder, dtype=torch.float32 if is_cpu else "auto", trust_remote_code=False
            ).to(device)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the verifier {name.model} does not fit on {device}: lower --memory-ratio, or put it "
                        "elsewhere with --verifier-device") from error  # fmt: skip
    info = ReaderInfo(
        name.model,
        family.name,
        "local",
        device,
        aggregation=aggregation_of(folder, config.verifier_aggregation),
        context_tokens=getattr(backbone.config, "max_position_embeddings", None),
    )
    return TransformersReader(info, backbone, head, prompt_format, _cache_bytes(config, backbone, device))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """It draws a bar, and lists the head's weights, which are read by themselves, as unused."""
    from transformers.utils import logging

    verbosity, was_shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


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

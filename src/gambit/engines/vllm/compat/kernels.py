"""Triton as vLLM finds it, and pinned memory as the device sees it."""

from __future__ import annotations

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

__all__ = ["HAS_TRITON", "device_view", "tl", "triton"]


def device_view(pinned: torch.Tensor) -> torch.Tensor:
    """Pinned memory of the host as the device sees it: what a kernel writes there needs no copy."""
    return get_accelerator_view_from_cpu_tensor(pinned)

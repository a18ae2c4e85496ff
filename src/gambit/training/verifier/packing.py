"""Attention over packed rows: sequences of any length one after the other, each attending to itself alone.

A pass of many small kernels waits for the host that launches them, so that it should hold as many tokens as memory
allows. Sorted by length and padded, such passes are either small or a third padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gambit.errors import UserError
from gambit.verifiers.lora import LoraVerifier

ATTENTION = "gambit-packed"
LENGTH_ROUNDING = 512  # kernels are told a round number above the longest length: few shapes, little to compile
TOLERANCE = 2e-2  # of half precision, where both ways to compute attention are compared


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed row lie."""

    starts: Tensor  # [sequence + 1] int32: where each begins, and the end of the last
    places: Tensor  # [token] among `count` × `longest`, when the sequences are set side by side
    count: int
    longest: int
    uses_flash: bool = False  # one kernel for sequences of all lengths, instead of setting them side by side

    @classmethod
    def of(cls, lengths: Sequence[int], uses_flash: bool = False) -> Packing:
        """On the CPU."""
        longest = max(lengths)
        places = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(torch.from_numpy(starts), torch.from_numpy(places), len(lengths), longest, uses_flash)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Packing:
        """With every tensor moved to other memory."""
        return Packing(move(self.starts), move(self.places), self.count, self.longest, self.uses_flash)

    def apart(self, packed: Tensor) -> Tensor:
        """[sequence, head, token, feature] of [1, head, token, feature], zeros after each sequence."""
        empty = packed.new_zeros(self.count * self.longest, packed.shape[1], packed.shape[3])
        filled = empty.index_copy(0, self.places, packed[0].transpose(0, 1))
        return filled.view(self.count, self.longest, *filled.shape[1:]).transpose(1, 2)

    def together(self, apart: Tensor) -> Tensor:
        """[1, token, head, feature] of what `apart` gives."""
        return apart.transpose(1, 2).flatten(0, 1)[self.places][None]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence; without a packing the sequences are rows, padded on the right."""
    longest = query.shape[2] if packing is None else packing.longest
    if softcap is not None or (sliding_window is not None and longest > sliding_window):
        raise UserError(f"a verifier cannot be trained on {type(module).__name__} with a capped softmax, or with a "
                        f"sliding window of {sliding_window} and traces of {longest} tokens")  # fmt: skip
    if packing is None:
        return _side_by_side(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if packing.uses_flash:
        return _flash(query, key, value, packing, scaling), None
    found = _side_by_side(packing.apart(query), packing.apart(key), packing.apart(value), scaling)
    return packing.together(found).contiguous(), None


def _side_by_side(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)


def _flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """[1, token, head, feature]: torch's flash kernel for sequences of different lengths."""
    rows = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    most = -(-packing.longest // LENGTH_ROUNDING) * LENGTH_ROUNDING
    found: Tensor = torch.ops.aten._flash_attention_forward(
        *rows, packing.starts, packing.starts, most, most, 0.0, True, False, scale=scaling
    )[0]
    return found[None]


def flash_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether that kernel is here and gives what the plain computation gives, forwards and backwards."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    generator = torch.Generator(device).manual_seed(0)
    parts = [
        torch.randn(1, heads, 230, 64, device=device, dtype=dtype, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    try:
        flash, plain = (attention_and_gradients(parts, uses_flash) for uses_flash in (True, False))
    except (RuntimeError, AttributeError):  # the kernel is not for this GPU; another torch has none of that name
        return False
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(flash, plain, strict=True))


def attention_and_gradients(parts: Sequence[Tensor], uses_flash: bool) -> list[Tensor]:
    """Of three sequences, 230 tokens in all."""
    packing = Packing.of([100, 1, 129], uses_flash).moved(lambda tensor: tensor.to(parts[0].device))
    query, key, value = parts
    found = packed_attention(nn.Identity(), query, key, value, None, packing=packing)[0]
    return [each.float() for each in (found, *torch.autograd.grad(found.float().square().sum(), parts))]


def use_packing(verifier: LoraVerifier) -> None:
    """From now on its network takes packed rows too."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    base = verifier.network.get_base_model()  # type: ignore[operator]
    if not base._can_set_attn_implementation():
        raise UserError(f"{verifier.info.base_model}: {type(base).__name__} has no exchangeable attention, which "
                        "training a verifier needs")  # fmt: skip
    base.set_attn_implementation(ATTENTION)

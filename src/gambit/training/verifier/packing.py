"""Passes without padding: sequences of any length one after the other, set side by side for attention alone.

A pass of many small kernels waits for the host that launches them, so that it should hold as many tokens as memory
allows. Sorted by length and padded, such passes are either small or a third padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gambit.core.errors import UserError
from gambit.scorers.verifier.model import Passage, Verifier

ATTENTION = "gambit-packed"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the tokens of a packed row lie when its sequences are set side by side."""

    places: Tensor  # [token] among `count` × `longest`
    count: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        longest = max(lengths)
        places = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
        return cls(torch.from_numpy(places).to(device), len(lengths), longest)

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
    if packing is not None:
        query, key, value = (packing.apart(part) for part in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=is_grouped)
    return (found.transpose(1, 2) if packing is None else packing.together(found)).contiguous(), None


def use_packing(verifier: Verifier) -> None:
    """From now on its network takes packed rows too."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    base = verifier.network.get_base_model()  # type: ignore[operator]
    if not base._can_set_attn_implementation():
        raise UserError(f"{verifier.info.base_model}: {type(base).__name__} has no exchangeable attention, which "
                        "training a verifier needs")  # fmt: skip
    base.set_attn_implementation(ATTENTION)


def packed_logits(verifier: Verifier, passages: Sequence[Passage]) -> list[Tensor]:
    """At the places of each passage, of one pass over all of them."""
    lengths = [len(each.tokens) for each in passages]
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([each.tokens for each in passages])
    positions = np.concatenate([np.arange(length) for length in lengths])
    places = np.concatenate([each.places + start for each, start in zip(passages, starts, strict=True)])
    device = verifier.device
    ids, position_ids, picked = (torch.from_numpy(each).to(device) for each in (tokens, positions, places))
    states = verifier.network(
        input_ids=ids[None], position_ids=position_ids[None], use_cache=False, packing=Packing.of(lengths, device)
    ).last_hidden_state[0]
    logits = verifier.head(states[picked].float() * verifier.input_scale)[:, 0]
    return list(torch.split(logits, [len(each.places) for each in passages]))

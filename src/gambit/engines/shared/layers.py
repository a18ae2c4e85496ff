"""Which layers' states a scorer reads, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gambit.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Layers counted as transformers counts hidden states: 0 is the embedding, the last one stands after its norm."""

    numbers: tuple[int, ...]
    last: int

    @classmethod
    def of(cls, layers: Sequence[int], num_layers: int) -> LayerChoice:
        """Negative numbers count from the end."""
        for layer in layers:
            if not -num_layers - 1 <= layer <= num_layers:
                raise UserError(f"layer {layer}: the model has {num_layers}; 0 is the embedding, -1 the last one")
        return cls(tuple(layer % (num_layers + 1) for layer in layers), num_layers)

    @property
    def inner(self) -> tuple[int, ...]:
        """Those that a model does not give unasked, each once, lowest first."""
        return tuple(sorted({*self.numbers} - {self.last}))

    def join(self, last: torch.Tensor, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, hidden × layers] of the last layer's states [n, hidden] and those of `inner`, in that order."""
        if self.numbers == (self.last,):
            return last
        states = dict(zip(self.inner, inner, strict=True)) | {self.last: last}
        return torch.cat([states[number] for number in self.numbers], dim=-1)

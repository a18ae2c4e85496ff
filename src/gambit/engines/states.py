"""Hidden states: the layers that a scorer reads, and short vectors of thoughts by one fixed random projection."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from gambit.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The layers a scorer reads, counted as transformers does: 0 is the embedding, the last stands after its norm."""

    numbers: tuple[int, ...]
    last: int

    @classmethod
    def of(cls, layers: Sequence[int], num_layers: int) -> Self:
        """Checks the layers of a scorer. Negative numbers count from the end."""
        for layer in layers:
            if not -num_layers - 1 <= layer <= num_layers:
                raise UserError(f"layer {layer}: the model has {num_layers}; 0 is the embedding, -1 the last one")
        return cls(tuple(layer % (num_layers + 1) for layer in layers), num_layers)

    @property
    def inner(self) -> tuple[int, ...]:
        """Inner layers to request, sorted, without duplicates."""
        return tuple(sorted({*self.numbers} - {self.last}))

    def join(self, last: torch.Tensor, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins the last layer's states [n, hidden] and those of `inner` into [n, hidden × layers]."""
        if self.numbers == (self.last,):
            return last
        states = dict(zip(self.inner, inner, strict=True)) | {self.last: last}
        return torch.cat([states[number] for number in self.numbers], dim=-1)


SEED = 20_240_229
MAX_SIZE = 256  # a vector per finished thought leaves the device: it must stay small


def embed(states: torch.Tensor, size: int) -> torch.Tensor:
    """Projects states on random directions, which keeps angles nearly as they are (Johnson and Lindenstrauss).

    Returns [n, size], rows of length 1. A smaller size has the first numbers of a larger one, scaled.
    """
    assert 0 < size <= MAX_SIZE, f"embedding size {size}"
    directions = _directions(states.shape[-1], states.device)[:, :size]
    return torch.nn.functional.normalize(states.float() @ directions, dim=-1)


@functools.cache
def _directions(features: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)  # on the CPU: the same numbers for every device
    return torch.randn(features, MAX_SIZE, generator=generator).to(device)

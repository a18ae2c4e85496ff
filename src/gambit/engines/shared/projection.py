"""Hidden states -> short vectors of length 1 by one fixed random projection, the same everywhere and in every run."""

from __future__ import annotations

import torch

SEED = 20_240_229
MAX_SIZE = 256  # a vector per finished thought leaves the device: it must stay small


class Projection:
    """Random directions keep angles between states nearly as they are (Johnson and Lindenstrauss)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix: torch.Tensor | None = None

    def embed(self, states: torch.Tensor, size: int) -> torch.Tensor:
        """[n, size], each row of length 1; a smaller size gives the first numbers of a larger one, but for length."""
        assert 0 < size <= MAX_SIZE, f"embedding size {size}"
        if self._matrix is None:
            generator = torch.Generator().manual_seed(SEED)  # on the CPU: the same numbers for every device
            self._matrix = torch.randn(states.shape[-1], MAX_SIZE, generator=generator).to(self._device)
        return torch.nn.functional.normalize(states.float() @ self._matrix[:, :size], dim=-1)

"""Steps of a verifier's weights: AdamW on float32 copies, a rate that follows the progress of the training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gambit.training.verifier.recipe import VerifierRecipe
from gambit.verifiers.lora import LoraVerifier


class MasterWeights:
    """The trained weights run in the model's precision and are stepped in float32, in which small steps count."""

    def __init__(self, verifier: LoraVerifier, recipe: VerifierRecipe) -> None:
        self._recipe = recipe
        adapter = [each for each in verifier.network.parameters() if each.requires_grad]
        self._live: list[Tensor] = [*adapter, verifier.head.weight]
        self._masters = [each.detach().float().clone() for each in self._live]
        groups = [
            {"params": self._masters[:-1], "top": recipe.rate},
            {"params": self._masters[-1:], "top": recipe.head_rate},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=0.0, weight_decay=recipe.weight_decay, betas=(0.9, 0.98))

    @torch.no_grad()
    def step(self, progress: float) -> None:
        """With the gradients that passes have gathered; takes them away."""
        for master, live in zip(self._masters, self._live, strict=True):
            master.grad = torch.zeros_like(master) if live.grad is None else live.grad.float()
            live.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._recipe.most_gradient)
        is_sound = torch.isfinite(norm)  # stays on the device: the host prepares the next pass meanwhile
        for master in self._masters:  # one overflow would leave nothing but NaN
            assert master.grad is not None
            master.grad = torch.where(is_sound, master.grad, 0.0)
        for group in self._optimiser.param_groups:
            group["lr"] = group["top"] * share_of_rate(progress, self._recipe.warmup)
        self._optimiser.step()
        self.put_back(self._masters)

    def forget(self) -> None:
        """Gradients of passes that did not come to an end."""
        for live in self._live:
            live.grad = None

    def copied(self) -> list[Tensor]:
        return [each.clone() for each in self._masters]

    @torch.no_grad()
    def put_back(self, values: Sequence[Tensor]) -> None:
        for master, live, value in zip(self._masters, self._live, values, strict=True):
            master.copy_(value)
            live.copy_(value)


def share_of_rate(progress: float, warmup: float) -> float:
    """Rises to 1 over the warm-up, then falls to 0 at the end."""
    rising = progress / warmup if warmup > 0 else 1.0
    return max(0.0, min(rising, (1 - progress) / max(1e-9, 1 - warmup)))

"""The verifier's loss: it ranks the traces of a problem and is right on average."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gambit.training.objectives import Batch, pairs_at
from gambit.training.ranking import QUARTERS


def ranking_loss(batch: Batch) -> Tensor:
    """Pairs of right and wrong traces of a problem after the same share of their thoughts, once in each quarter."""
    shares = [share - torch.rand((), device=batch.logits.device) / len(QUARTERS) for share in QUARTERS]
    lasts = [(torch.ceil(batch.num_thoughts * share).long() - 1).clamp(min=0) for share in shares]
    return torch.stack([pairs_at(batch, last) for last in (*lasts[:-1], batch.num_thoughts - 1)]).mean()


def chance_loss(batch: Batch) -> Tensor:
    """Cross-entropy at every thought; later ones, which can know more, weigh up to three times as much."""
    count = batch.num_thoughts[:, None]
    rising = 0.5 + torch.arange(1, batch.logits.shape[1] + 1, device=batch.logits.device) / count
    weights = rising * batch.is_real
    losses = F.binary_cross_entropy_with_logits(batch.logits, batch.labels, reduction="none")
    return ((losses * weights).sum(-1) / weights.sum(-1)).mean()

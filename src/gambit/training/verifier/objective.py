"""The verifier's loss: it ranks the traces of a problem and is right on average."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from gambit.training.objectives import Batch, pairs_at
from gambit.training.ranking import QUARTERS


class Objective(StrEnum):
    """How traces of one problem are set apart."""

    PAIRS = "pairs"  # a right one above a wrong one
    VOTE = "vote"  # the right ones outweigh the wrong ones


def ranking_loss(batch: Batch, objective: Objective = Objective.PAIRS) -> Tensor:
    """Traces of a problem compared after the same share of their thoughts, once in each quarter."""
    shares = [share - torch.rand((), device=batch.logits.device) / len(QUARTERS) for share in QUARTERS]
    lasts = [(torch.ceil(batch.num_steps * share).long() - 1).clamp(min=0) for share in shares]
    compared = pairs_at if objective is Objective.PAIRS else votes_at
    return torch.stack([compared(batch, last) for last in (*lasts[:-1], batch.num_steps - 1)]).mean()


def votes_at(batch: Batch, last: Tensor) -> Tensor:
    """Minus the log of what right traces have of a problem's vote in which each is weighed by its odds.

    Each trace is seen up to a step of its own. What the number of right traces decides already gives little gradient;
    most comes from problems whose common answer is wrong, which is where a plain vote fails. Problems without a right
    trace, and those without a wrong one, say nothing.
    """
    reached = batch.logits.gather(1, last[:, None])[:, 0]
    labels = batch.labels.gather(1, last[:, None])[:, 0]
    is_same = batch.problem[:, None] == batch.problem
    everyone = reached.masked_fill(~is_same, -torch.inf).logsumexp(1)
    right = (reached + labels.clamp(min=1e-9).log()).masked_fill(~is_same, -torch.inf).logsumexp(1)
    share = (is_same * labels).sum(1) / is_same.sum(1)
    # Every trace of a problem stands for it; counted by their number, each problem weighs the same.
    weights = ((share > 0) & (share < 1)) / is_same.sum(1)
    loss: Tensor = ((everyone - right) * weights).sum() / weights.sum().clamp(min=1e-9)
    return loss


def chance_loss(batch: Batch) -> Tensor:
    """Cross-entropy at every thought; later ones, which can know more, weigh up to three times as much."""
    count = batch.num_steps[:, None]
    rising = 0.5 + torch.arange(1, batch.logits.shape[1] + 1, device=batch.logits.device) / count
    weights = rising * batch.is_real
    losses = F.binary_cross_entropy_with_logits(batch.logits, batch.labels, reduction="none")
    return ((losses * weights).sum(-1) / weights.sum(-1)).mean()

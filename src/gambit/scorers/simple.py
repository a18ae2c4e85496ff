"""Scorers without weights: a constant, and the model's own token confidence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from gambit.scorers.base import ScorerInfo, ThoughtBatch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ConstantScorer:
    """The same score for every thought: tournaments then change nothing, which isolates what scoring adds."""

    info: ClassVar[ScorerInfo] = ScorerInfo("constant")
    value: float = 0.5

    def to(self, device: torch.device) -> ConstantScorer:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.new_full((len(thoughts.confidences),), self.value)


@dataclass(frozen=True, slots=True)
class ConfidenceScorer:
    """Mean token confidence of the thought (DeepConf's measure): what is left when a model has no trained scorer.

    Its scale differs between models and problems, so engines replace each value by its quantile within the run.
    """

    info: ClassVar[ScorerInfo] = ScorerInfo(
        "confidence", is_probability=False, needs_confidence=True, ranks_within_run=True
    )

    def to(self, device: torch.device) -> ConfidenceScorer:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.float()


@dataclass(slots=True)
class RunQuantiles:
    """Squashes raw scores of one search to (0, 1) by their rank among all seen so far in that search."""

    seen: list[float] = field(default_factory=list)

    def squash(self, raw: float) -> float:
        """The mid-rank quantile of `raw`, which is then remembered itself."""
        below, upto = bisect_left(self.seen, raw), bisect_right(self.seen, raw)
        insort(self.seen, raw)
        return ((below + upto) / 2 + 0.5) / len(self.seen)

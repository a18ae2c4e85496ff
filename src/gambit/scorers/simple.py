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
    """Gives every thought the same score: tournaments then change nothing, which isolates what scoring adds."""

    info: ClassVar[ScorerInfo] = ScorerInfo("constant")
    value: float = 0.5

    def to(self, device: torch.device) -> ConstantScorer:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.new_full((len(thoughts.confidences),), self.value)


@dataclass(frozen=True, slots=True)
class ConfidenceScorer:
    """Mean token confidence of the thought (DeepConf's measure), for a model that has no trained scorer.

    Its scale differs between models and problems, so engines replace each value by its quantile within the run.
    """

    info: ClassVar[ScorerInfo] = ScorerInfo(
        "confidence", is_probability=False, needs_confidence=True, ranks_within_run=True
    )

    def to(self, device: torch.device) -> ConfidenceScorer:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.float()


ROUNDING = 1e-5  # relative, or absolute below 1: states in float32 differ by less between batches


@dataclass(slots=True)
class RunScores:
    """Raw scores of one search as it uses them.

    Scores that differ by rounding alone are made equal, so that a tie is broken by trace id however the batch was
    composed. Rounding to so many digits would part equal scores on either side of a rounding boundary. So a score takes
    the value of the nearest one seen before in its search, if that is near enough.
    """

    _seen: list[float] = field(default_factory=list)
    _distinct: list[float] = field(default_factory=list)

    def add(self, raw: float, *, as_quantile: bool = False) -> float:
        """Returns the score that `raw` stands for, which is then remembered.

        `as_quantile`, for a scorer without a scale of its own: its mid-rank among all seen so far, in (0, 1).
        """
        place, score = bisect_left(self._distinct, raw), raw
        nearest = min(self._distinct[max(0, place - 1) : place + 1], key=lambda seen: abs(seen - raw), default=None)
        if nearest is not None and abs(nearest - raw) <= ROUNDING * max(1.0, abs(raw)):
            score = nearest
        else:
            self._distinct.insert(place, raw)
        if not as_quantile:
            return score
        below, upto = bisect_left(self._seen, score), bisect_right(self._seen, score)
        insort(self._seen, score)
        return ((below + upto) / 2 + 0.5) / len(self._seen)

"""Traces that end before tournaments begin: a search that cannot search."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

MOST_EARLY = 0.5  # share of traces that may end within the warm-up: a search is meant to judge most of them


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """Completed traces that no tournament could judge, because they ended within the warm-up."""

    warmup_tokens: float
    median_length: float  # of a completed trace, in tokens
    share: float

    @classmethod
    def of(cls, ended: Iterable[tuple[int, int]]) -> EarlyEnds | None:
        """From the tokens of each completed trace and of its search's warm-up; None where none has completed."""
        pairs = list(ended)
        if not pairs:
            return None
        lengths, warmups = zip(*pairs, strict=True)
        share = statistics.fmean(length <= warmup for length, warmup in pairs)
        return cls(statistics.median(warmups), statistics.median(lengths), share)

    @property
    def are_most(self) -> bool:
        return self.share > MOST_EARLY

    def sentence(self, whose: str) -> str:
        return (
            f"{self.share:.0%} of {whose} ended within the warm-up of {self.warmup_tokens:,.0f} tokens, before a "
            f"tournament could judge them: give --warmup-tokens {max(1, self.median_length // 2):.0f}, half a trace"
        )

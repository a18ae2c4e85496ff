"""Which trace is evicted when a KV allocation fails: the one rule of every engine."""

from __future__ import annotations

from collections.abc import Mapping

from gambit.core.types import OnPressure, PressureAction


def most_over_quota(used_tokens: Mapping[int, float], quota_tokens: Mapping[int, float]) -> int:
    """The search furthest above its quota, among those that run.

    Scores of different problems cannot be compared, so blocks are settled between searches before scores count.
    """
    return max(used_tokens, key=lambda search: (used_tokens[search] - quota_tokens[search], search))


def eviction_key(rule: OnPressure, score: float | None, trace: int, admission: int) -> tuple[float, ...]:
    """The trace with the largest key is evicted: the last admitted, or the lowest score (the youngest on a tie)."""
    if rule.action is PressureAction.QUEUE:
        return (admission,)
    goes_first = (score is None) == rule.unscored_first
    return (goes_first, 0.0 if score is None else -score, trace)

"""Who gives way when a KV allocation fails: the one rule of every engine, by the numbers of that moment."""

from __future__ import annotations

from collections.abc import Mapping

from gambit.core.types import OnPressure, PressureAction


def search_to_tax(used_tokens: Mapping[int, float], quota_tokens: Mapping[int, float]) -> int:
    """The search furthest above its quota, among those that run.

    Scores of different problems cannot be compared, so room is settled between searches before scores count.
    """
    return max(used_tokens, key=lambda search: (used_tokens[search] - quota_tokens[search], search))


def expendability(rule: OnPressure, score: float | None, trace: int, admission: int) -> tuple[float, ...]:
    """The larger, the sooner a trace of that search goes: the last come, or the lowest score (youngest on a tie)."""
    if rule.action is PressureAction.QUEUE:
        return (admission,)
    goes_first = (score is None) == rule.unscored_first
    return (goes_first, 0.0 if score is None else -score, trace)

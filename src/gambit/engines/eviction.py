"""The rule by which every engine chooses the trace that loses its KV blocks when an allocation fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

from gambit.types import OnPressure, PressureAction

T = TypeVar("T")


def most_over_quota(used_tokens: Mapping[int, float], quota_tokens: Mapping[int, float]) -> int:
    """Returns the search furthest above its quota, among those that run.

    Scores of different problems cannot be compared, so memory is settled between searches before scores count.
    """
    return max(used_tokens, key=lambda search: (used_tokens[search] - quota_tokens[search], search))


class Standing(NamedTuple):
    """A running trace's place in the order of eviction; changes with its score and its admission."""

    eviction_key: tuple[float, ...]  # the larger, the sooner
    admission: int  # ordinal
    island: int
    spares_islands: bool


def standing(rule: OnPressure, island: int, score: float | None, trace: int, admission: int) -> Standing:
    """Ranks a trace: the last admitted goes first, or the lowest score (the youngest on a tie)."""
    if rule.action is PressureAction.QUEUE:
        return Standing((admission,), admission, island, rule.spares_islands)
    goes_first = (score is None) == rule.unscored_first
    key = (goes_first, 0.0 if score is None else -score, trace)
    return Standing(key, admission, island, rule.spares_islands)


def action_on(rule: OnPressure, num_live: int) -> PressureAction:
    """Returns the fate of a trace whose island has `num_live` live ones. The last one waits and is recomputed."""
    return PressureAction.QUEUE if rule.spares_islands and num_live == 1 else rule.action


def eviction_order(running: Iterable[T], standing_of: Callable[[T], Standing], num_live: Mapping[int, int]) -> list[T]:
    """Sorts running traces of one search, the next victim first. `num_live`: live traces by island."""
    standings = sorted(((standing_of(trace), trace) for trace in running), key=lambda entry: entry[0].eviction_key)
    if not any(each.spares_islands for each, _ in standings):
        return [trace for _, trace in reversed(standings)]
    islands: defaultdict[int, list[tuple[Standing, T]]] = defaultdict(list)
    for each, trace in standings:
        islands[each.island].append((each, trace))
    crowded = _from_the_largest(islands, dict(num_live))
    # Each is the last of its island now: they wait for their turn as in plain sampling, the last admitted first.
    left = sorted((entry for rest in islands.values() for entry in rest), key=lambda entry: -entry[0].admission)
    return [*crowded, *(trace for _, trace in left)]


def _from_the_largest(islands: Mapping[int, list[tuple[Standing, T]]], num_live: dict[int, int]) -> list[T]:
    """Takes traces out of `islands`, one at a time from the island with most live ones, until each has one."""
    victims: list[T] = []

    def entry(island: int) -> tuple[int, tuple[float, ...], int]:
        return -num_live[island], tuple(-number for number in islands[island][-1][0].eviction_key), island

    heap = [entry(island) for island in islands]
    heapify(heap)
    while heap:
        *_, island = heappop(heap)
        if num_live[island] < 2:
            break
        victims.append(islands[island].pop()[1])
        num_live[island] -= 1
        if islands[island]:
            heappush(heap, entry(island))
    return victims

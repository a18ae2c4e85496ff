"""The rule by which every engine chooses the trace that loses its KV blocks when an allocation fails."""

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
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
    """Sorts running traces of one search, the next victim first. `num_live`: live traces by island.

    A rule that spares islands evicts from the island with most live traces, until each has one.
    """
    standings = [(standing_of(trace), trace) for trace in running]
    standings.sort(key=lambda entry: entry[0].eviction_key, reverse=True)
    if not any(each.spares_islands for each, _ in standings):
        return [trace for _, trace in standings]
    crowded: list[tuple[int, T]] = []  # with the live traces of the island when the trace's turn comes
    last: list[tuple[int, T]] = []  # those that are then the last of their island, with their admission
    left = dict(num_live)
    for each, trace in standings:
        live = left[each.island]
        if live > 1:
            crowded.append((live, trace))
        else:
            last.append((each.admission, trace))
        left[each.island] -= 1
    # The last ones wait for their turn as in plain sampling, the last admitted first.
    by_number = itemgetter(0)
    order = [*sorted(crowded, key=by_number, reverse=True), *sorted(last, key=by_number, reverse=True)]
    return [trace for _, trace in order]

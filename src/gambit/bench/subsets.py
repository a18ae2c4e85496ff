"""pass@k and majority@k: what k of a search's completed traces would have come to, exactly and not by drawing."""

from collections.abc import Sequence
from math import comb

import numpy as np

from gambit.stats import Floats


def pass_at(k: int, completed: int, right: int) -> float:
    """Returns the chance that at least one of k traces, drawn from those completed, is right."""
    return 1 - comb(completed - right, k) / comb(completed, k)


def majority_at(k: int, completed: int, right: int, wrong: Sequence[int]) -> float:
    """Returns the chance that the right answer has most votes among k drawn traces; a tie is shared evenly.

    `wrong` are the traces of each wrong answer. Those that are left have no answer, and do not vote.
    """
    silent = completed - right - sum(wrong)
    assert silent >= 0, "more answers than traces"
    chance = 0.0
    for votes in range(1, min(k, right) + 1):
        # ways[t][n]: ways to draw n traces with t wrong answers that have as many votes as the right one, none more
        ways = [_ways(silent, k - votes)]
        for count in wrong:
            lower, equal = _ways(count, min(votes - 1, k - votes)), np.zeros(votes + 1)
            equal[votes] = comb(count, votes)
            ways = [
                _product(ways[tied] if tied < len(ways) else None, lower, k - votes)
                + _product(ways[tied - 1] if tied else None, equal, k - votes)
                for tied in range(min(len(ways) + 1, k // votes))
            ]
        shared = sum(found[k - votes] / (tied + 1) for tied, found in enumerate(ways))
        chance += comb(right, votes) * float(shared) / comb(completed, k)
    return chance


def sizes_up_to(most: int) -> list[int]:
    """Returns 1, 2, 4 and so on, and the last size itself."""
    return sorted({*(1 << power for power in range(most.bit_length())), most}) if most else []


def _ways(count: int, most: int) -> Floats:
    """Returns the ways to draw 0, 1, … of so many traces; 0 above `most`."""
    return np.array([float(comb(count, drawn)) for drawn in range(most + 1)])


def _product(ways: Floats | None, more: Floats, most: int) -> Floats:
    """Returns the ways to draw from both, up to `most` traces."""
    found = np.zeros(most + 1)
    if ways is not None:
        joined = np.convolve(ways, more)[: most + 1]
        found[: len(joined)] = joined
    return found

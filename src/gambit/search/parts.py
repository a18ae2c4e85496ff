"""A search in parts that run on different engines: what each part plays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from gambit.config.presets import SearchPart, SearchSettings
from gambit.errors import UserError
from gambit.policies.base import SplitBy


def split(settings: SearchSettings, split_by: SplitBy, num_engines: int) -> tuple[SearchSettings, ...]:
    """The settings of each part; one part, the whole search, where there is nothing to split."""
    if settings.first_traces is not None:  # whether there are more is for the vote, which no part has
        raise UserError("first_traces: a search that is spread over engines begins with all its traces; leave it out, "
                        "or search on one engine")  # fmt: skip
    pieces = {SplitBy.ISLANDS: settings.islands, SplitBy.TRACES: min(settings.capacity, settings.num_traces)}
    count = min(num_engines, pieces.get(split_by, 1))
    if count <= 1:
        return (dataclasses.replace(settings, part=SearchPart()),)
    if split_by is SplitBy.ISLANDS:
        # A search on one engine may divide its islands, by the scores of all; those of a part are not all.
        steady = dataclasses.replace(settings, doubt=None)
        return tuple(
            dataclasses.replace(steady, part=SearchPart(islands)) for islands in ranges(settings.islands, count)
        )
    return tuple(_some_traces(settings, count))


def _some_traces(settings: SearchSettings, count: int) -> Iterator[SearchSettings]:
    """Independent traces: each part has its own numbers of them and its own places."""
    shares = zip(ranges(settings.num_traces, count), ranges(settings.capacity, count), strict=True)
    for traces, places in shares:
        part = SearchPart(first_trace=traces.start)
        swap_size = min(settings.swap_size, len(places))
        yield dataclasses.replace(
            settings, capacity=len(places), num_traces=len(traces), swap_size=swap_size, part=part
        )


def ranges(total: int, count: int) -> list[range]:
    """Neighbours together, in parts that differ by at most one."""
    starts = [total * index // count for index in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(starts)]

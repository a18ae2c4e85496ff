"""How long a solver's traces and thoughts have been so far."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque

from gambit.config.presets import ModelDefaults
from gambit.errors import ToldOnce
from gambit.results.record import SearchRecord
from gambit.tree import TraceState


class LengthHistory:
    """Lengths of completed traces and of thoughts in this solver's runs so far, for `preset="auto"`."""

    def __init__(self) -> None:
        self._has_told = False
        self._lengths: deque[int] = deque(maxlen=4096)
        self._thoughts: deque[float] = deque(maxlen=4096)

    def remember(self, record: SearchRecord) -> tuple[str, ...]:
        """Gives what there is to tell about them, once: that they are too short for the search's warm-up."""
        for trace in record.tree.in_state(TraceState.FINISHED):
            self._lengths.append(trace.num_tokens)
            if trace.score.count:
                self._thoughts.append(trace.boundary_tokens / trace.score.count)
        ended = record.early_ends
        if self._has_told or ended is None or not ended.are_most:
            return ()
        self._has_told = True
        return ToldOnce().tell([ended.sentence("the traces")])

    def added_to(self, defaults: ModelDefaults) -> ModelDefaults:
        if not self._lengths:
            return defaults
        thought = statistics.fmean(self._thoughts) if self._thoughts else None
        return dataclasses.replace(
            defaults, median_length=statistics.median(self._lengths), mean_thought_length=thought
        )

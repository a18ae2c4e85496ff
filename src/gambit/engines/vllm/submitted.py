"""Traces that the front has submitted and their tokens.

The same traces get a token in step after step, so tokens are kept by step, as they arrive. They are sorted into traces
when somebody reads them or the batch changes: a step in which nothing else happens costs no work per trace.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from gambit.types import TraceSpec

_MOST_STEPS = 64  # kept at most: lists of tokens take more memory than the traces' arrays


class TokenColumns:
    """Tokens that have arrived and are not yet sorted into traces."""

    def __init__(self) -> None:
        self._rows: list[str] = []  # requests, as the reports name them
        self._places: list[int] = []  # of those that live
        self._said: list[array[int]] = []
        self._counts: Counter[int] = Counter()  # of rows, by search
        self._steps: list[list[int]] = []

    def add(self, rows: list[str], tokens: list[int], live: Mapping[str, SubmittedTrace]) -> Mapping[int, int]:
        """Add one token for each row whose trace is live; returns how many there are of each search."""
        if rows != self._rows:
            self.forget_rows()
            self._places = [place for place, request in enumerate(rows) if request in live]
            traces = [live[rows[place]] for place in self._places]
            self._rows, self._said = rows, [trace.said for trace in traces]
            self._counts = Counter(trace.spec.key.search for trace in traces)
        self._steps.append(tokens)
        if len(self._steps) >= _MOST_STEPS:
            self.settle()
        return self._counts

    def settle(self) -> None:
        """Sort what has arrived into traces."""
        if not self._steps:
            return
        columns = np.ascontiguousarray(np.array(self._steps, np.int32)[:, self._places].T)
        self._steps = []
        for said, column in zip(self._said, columns, strict=True):
            said.frombytes(column.tobytes())

    def forget_rows(self) -> None:
        """Before a trace of the batch goes: the next report's rows are looked up again."""
        self.settle()
        self._rows = []


@dataclass(slots=True, eq=False)
class SubmittedTrace:
    """A trace that runs or waits, as the front knows it."""

    spec: TraceSpec
    request: str
    said: array[int]  # without what lies in `columns`: read `tokens`
    columns: TokenColumns
    scored_length: int  # at the boundary of its last scored thought
    thinking_length: int | None = None  # at the token that closed its think block

    @property
    def tokens(self) -> array[int]:
        """All it generated or inherited."""
        self.columns.settle()
        return self.said

    def is_thinking_at(self, length: int) -> bool:
        return self.thinking_length is None or length < self.thinking_length


def packed(tokens: Iterable[int]) -> array[int]:
    """A trace's tokens take four bytes each instead of forty."""
    return array("i", tokens)

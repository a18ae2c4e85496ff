"""The running rows of the pool: numbers in one table, objects beside it. Rows stay dense, the last fills a gap."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gambit.engines.local.attention import Snapshot
from gambit.scorers.memory import grown
from gambit.text.boundary import THINKING
from gambit.types import Progress, RunningScore, TraceKey, TraceSpec

ROW = np.dtype([
    ("num_tokens", np.int64),  # generated or inherited; also the own position of the token to be fed
    ("max_new_tokens", np.int64),
    ("prompt_length", np.int64),  # positions in the shared prompt segment
    ("slot", np.int64),  # of that segment
    ("noise_key", np.uint64),
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("min_p", np.float32),
    ("flags", np.uint8),  # the thought detector's
    ("is_pending", np.bool_),  # the token to be fed is a boundary whose thought has not been scored
    ("confidence_total", np.float64),  # over the thought so far
    ("confidence_count", np.int64),
    ("thought_confidence", np.float64),  # of the last finished thought
])  # fmt: skip


@dataclass(slots=True, eq=False)
class LiveTrace:
    """A trace that runs or waits, without the numbers in the table."""

    spec: TraceSpec
    record: npt.NDArray[np.void]  # its row of the table, kept here while it waits
    tokens: npt.NDArray[np.int32]  # all tokens while it waits
    score: RunningScore
    eviction_score: float | None  # the verifier's score, in a search that has one
    blocks: list[int] = field(default_factory=list)
    source: LiveTrace | Snapshot | None = None  # of a waiting child: the keys and values that it will share
    row: int | None = None  # None while it waits
    admission: int = 0  # ordinal: the last admitted is evicted first when plain sampling has to queue
    waiting_since: int = 0

    @property
    def key(self) -> TraceKey:
        return self.spec.key


class Rows:
    """The running traces, in rows 0 … n-1."""

    def __init__(self) -> None:
        self._table = np.zeros(0, ROW)
        self.table = self._table  # of the running traces alone
        self._tokens = np.zeros((0, 0), np.int32)
        self.traces: list[LiveTrace] = []
        self.version = 0  # changes whenever a row appears, moves or goes

    def last_tokens(self, first: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the token each row feeds next: its last one, or `first` (the prompt's last) if it has none yet."""
        n, lengths = len(self.traces), self.table["num_tokens"]
        last = self._tokens[np.arange(n), np.maximum(lengths - 1, 0)]
        return np.where(lengths > 0, last, first)

    def append_tokens(self, tokens: npt.NDArray[np.int64]) -> None:
        n, lengths = len(self.traces), self.table["num_tokens"]
        self._tokens = grown(self._tokens, len(self._tokens), int(lengths.max()) + 1)
        self._tokens[np.arange(n), lengths] = tokens
        lengths += 1

    def tokens(self, trace: LiveTrace) -> npt.NDArray[np.int32]:
        return trace.tokens if trace.row is None else self._tokens[trace.row, : self._table["num_tokens"][trace.row]]

    def tokens_of(self, trace: LiveTrace, start: int = 0) -> tuple[int, ...]:
        return tuple(self.tokens(trace)[start:].tolist())

    def record_of(self, trace: LiveTrace) -> npt.NDArray[np.void]:
        return trace.record if trace.row is None else self._table[trace.row : trace.row + 1]

    def progress_of(self, trace: LiveTrace) -> Progress:
        record = self.record_of(trace)
        return Progress(int(record["num_tokens"][0]), bool(record["flags"][0] & THINKING))

    def add(self, trace: LiveTrace) -> int:
        row = len(self.traces)
        self._table = grown(self._table, row + 1)
        self._tokens = grown(self._tokens, len(self._table), len(trace.tokens) + 1)
        self._table[row] = trace.record[0]
        self._tokens[row, : len(trace.tokens)] = trace.tokens
        self.traces.append(trace)
        trace.row = row
        self._has_changed()
        return row

    def remove(self, trace: LiveTrace) -> int:
        """Takes a trace out with its numbers; returns the row that has moved into its place (its own if none has)."""
        row, last = trace.row, len(self.traces) - 1
        assert row is not None
        trace.record, trace.tokens, trace.row = self._table[row : row + 1].copy(), self.tokens(trace).copy(), None
        self._table[row], self._tokens[row] = self._table[last], self._tokens[last]
        moved = self.traces.pop()
        if moved is not trace:
            self.traces[row], moved.row = moved, row
        self._has_changed()
        return last

    def _has_changed(self) -> None:
        self.table = self._table[: len(self.traces)]
        self.version += 1

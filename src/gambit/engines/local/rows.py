"""The running rows of the pool: numbers in one table, objects beside it. Rows stay dense, the last fills a gap."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import SearchSpec
from gambit.engines.local.attention import group_by_slot
from gambit.engines.sampling import Filters, filters_of
from gambit.text.boundary import BoundaryRule, ThoughtTables
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
    """A trace that runs or waits, without the numbers that stand in the table."""

    spec: TraceSpec
    record: npt.NDArray[np.void]  # its line of the table, kept here while it waits
    tokens: npt.NDArray[np.int32]  # all tokens while it waits
    score: RunningScore
    blocks: list[int] = field(default_factory=list)
    row: int | None = None  # None while it waits
    admission: int = 0  # ordinal: who came last goes first when plain sampling has to queue
    waiting_since: int = 0
    eviction_score: float | None = None  # the verifier's score, in a search that has one

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
        """Returns the token each row feeds next: its last one, or `first` (the prompt's last) where it has none yet."""
        n, lengths = len(self.traces), self.table["num_tokens"]
        last = self._tokens[np.arange(n), np.maximum(lengths - 1, 0)]
        return np.where(lengths > 0, last, first)

    def append_tokens(self, tokens: npt.NDArray[np.int64]) -> None:
        n, lengths = len(self.traces), self.table["num_tokens"]
        longest = int(lengths.max()) + 1
        if longest > self._tokens.shape[1]:
            self._reserve(n, longest)
        self._tokens[np.arange(n), lengths] = tokens
        lengths += 1

    def tokens(self, row: int) -> npt.NDArray[np.int32]:
        return self._tokens[row, : self._table["num_tokens"][row]]

    def tokens_of(self, trace: LiveTrace, start: int = 0) -> tuple[int, ...]:
        source = trace.tokens if trace.row is None else self.tokens(trace.row)
        return tuple(source[start:].tolist())

    def record_of(self, trace: LiveTrace) -> npt.NDArray[np.void]:
        return trace.record if trace.row is None else self._table[trace.row : trace.row + 1]

    def progress_of(self, trace: LiveTrace, thinking_bit: int) -> Progress:
        record = self.record_of(trace)
        return Progress(int(record["num_tokens"][0]), bool(record["flags"][0] & thinking_bit))

    def add(self, trace: LiveTrace) -> int:
        row = len(self.traces)
        self._reserve(row + 1, len(trace.tokens) + 1)
        self._table[row] = trace.record[0]
        self._tokens[row, : len(trace.tokens)] = trace.tokens
        self.traces.append(trace)
        trace.row = row
        self._has_changed()
        return row

    def remove(self, trace: LiveTrace) -> int:
        """Takes a trace out with its numbers; returns the row that must move into its place (or its own)."""
        row, last = trace.row, len(self.traces) - 1
        assert row is not None
        trace.record, trace.tokens, trace.row = self._table[row : row + 1].copy(), self.tokens(row).copy(), None
        self._table[row], self._tokens[row] = self._table[last], self._tokens[last]
        moved = self.traces.pop()
        if moved is not trace:
            self.traces[row], moved.row = moved, row
        self._has_changed()
        return last

    def _has_changed(self) -> None:
        self.table = self._table[: len(self.traces)]
        self.version += 1

    def _reserve(self, rows: int, length: int) -> None:
        have_rows, have_length = self._tokens.shape
        if rows > have_rows:
            more = max(rows, 2 * have_rows) - have_rows
            self._table = np.concatenate((self._table, np.zeros(more, ROW)))
            self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        if length > have_length:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, max(length, 2 * have_length) - have_length)))


@dataclass(slots=True)
class Layout:
    """Facts about the running rows that hold until one comes, moves or goes; made anew when `Rows.version` changes."""

    version: int
    filters: Filters
    rows: torch.Tensor  # their numbers
    row_slots: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_length: int
    has_even_prompts: bool
    members: torch.Tensor | None
    places: torch.Tensor | None
    first_tokens: npt.NDArray[np.int32]
    rows_per_search: dict[int, int]
    detectors: list[tuple[npt.NDArray[np.int64], ThoughtTables]]
    stops: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
    tracked: npt.NDArray[np.int64]  # rows whose confidence is measured
    limits: npt.NDArray[np.int64]  # tokens that end a trace

    @classmethod
    def of(
        cls,
        rows: Rows,
        slots: list[SearchSpec],
        tables: dict[BoundaryRule, ThoughtTables],
        tracked: npt.NDArray[np.int64],
        context_tokens: int,
        device: torch.device,
    ) -> Layout:
        row_slots = rows.table["slot"].copy()
        lengths = [len(spec.prompt) - 1 for spec in slots]
        members, places = group_by_slot(row_slots, len(slots)) if len(slots) > 1 else (None, None)
        counts = np.bincount(row_slots, minlength=len(slots)).tolist()
        for spec in slots:
            if spec.rule not in tables:  # one has an entry for each token of the vocabulary
                tables[spec.rule] = ThoughtTables(spec.rule)
        return cls(
            version=rows.version,
            filters=filters_of(rows.table, device),
            rows=torch.arange(len(row_slots), device=device),
            row_slots=torch.from_numpy(row_slots).to(device),
            prompt_lengths=torch.tensor(lengths, device=device),
            prompt_length=max(lengths),
            has_even_prompts=min(lengths) == max(lengths),
            members=None if members is None else torch.from_numpy(members).to(device),
            places=None if places is None else torch.from_numpy(places).to(device),
            first_tokens=np.array([spec.prompt[-1] for spec in slots], np.int32)[row_slots],
            rows_per_search={spec.search: count for spec, count in zip(slots, counts, strict=True) if count},
            detectors=[(at, tables[rule]) for rule, at in _rows_by(row_slots, [spec.rule for spec in slots])],
            stops=[
                (at, np.array(sorted(ids), np.int64))
                for ids, at in _rows_by(row_slots, [spec.stop_ids for spec in slots])
            ],
            tracked=tracked,
            limits=np.minimum(rows.table["max_new_tokens"], context_tokens - 1 - rows.table["prompt_length"]),
        )

    def advance(self, table: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Feeds the thought detectors; returns which rows ended a thought."""
        is_boundary = np.zeros(len(tokens), np.bool_)
        for at, detector in self.detectors:
            table["flags"][at], is_boundary[at] = detector.advance_rows(table["flags"][at], tokens[at])
        return is_boundary

    def has_stopped(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns which rows ended with a stop token."""
        found = np.zeros(len(tokens), np.bool_)
        for at, ids in self.stops:
            found[at] = np.isin(tokens[at], ids)
        return found


Key = TypeVar("Key", bound=Hashable)


def _rows_by(row_slots: npt.NDArray[np.int64], key_of_slot: list[Key]) -> list[tuple[Key, npt.NDArray[np.int64]]]:
    """Groups rows by a key of their searches; nearly always all share one."""
    keys = list(dict.fromkeys(key_of_slot))
    number = np.array([keys.index(key) for key in key_of_slot])[row_slots]
    return [(key, np.flatnonzero(number == i)) for i, key in enumerate(keys)]

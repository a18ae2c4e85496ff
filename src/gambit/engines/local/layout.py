"""What is the same for the running rows from step to step until one comes, moves or goes; derived, never a source."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import SearchSpec
from gambit.engines.local.attention import group_by_slot
from gambit.engines.local.rows import Rows
from gambit.engines.sampling import Filters, filters_of
from gambit.prompts import BoundaryRule, ThoughtTables


@dataclass(slots=True)
class Layout:
    """Made anew whenever `Rows.version` has changed."""

    version: int
    filters: Filters
    row_slots: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_length: int
    members: torch.Tensor | None
    places: torch.Tensor | None
    first_tokens: npt.NDArray[np.int32]
    rows_per_search: dict[int, int]
    detectors: list[tuple[npt.NDArray[np.int64], ThoughtTables]]
    stops: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @classmethod
    def of(
        cls, rows: Rows, slots: list[SearchSpec], tables: dict[BoundaryRule, ThoughtTables], device: torch.device
    ) -> Layout:
        row_slots = rows.table["slot"].tolist()
        lengths = [len(spec.prompt) - 1 for spec in slots]
        members, places = group_by_slot(row_slots, len(slots)) if len(slots) > 1 else (None, None)
        by_rule: dict[BoundaryRule, list[int]] = defaultdict(list)
        by_stops: dict[frozenset[int], list[int]] = defaultdict(list)
        per_search: dict[int, int] = defaultdict(int)
        for row, slot in enumerate(row_slots):
            spec = slots[slot]
            by_rule[spec.rule].append(row)
            by_stops[spec.stop_ids].append(row)
            per_search[spec.search] += 1
        for rule in by_rule:
            tables.setdefault(rule, ThoughtTables(rule))
        return cls(
            version=rows.version,
            filters=filters_of(rows.table, device),
            row_slots=torch.tensor(row_slots, device=device),
            prompt_lengths=torch.tensor(lengths, device=device),
            prompt_length=max(lengths),
            members=None if members is None else torch.tensor(members, device=device),
            places=None if places is None else torch.tensor(places, device=device),
            first_tokens=np.array([slots[slot].prompt[-1] for slot in row_slots], np.int32),
            rows_per_search=dict(per_search),
            detectors=[(np.array(at), tables[rule]) for rule, at in by_rule.items()],
            stops=[(np.array(at), np.array(sorted(ids))) for ids, at in by_stops.items()],
        )

    def advance(self, table: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Feed the thought detectors; says which rows ended a thought."""
        is_boundary = np.zeros(len(tokens), np.bool_)
        for at, detector in self.detectors:
            table["flags"][at], is_boundary[at] = detector.advance_rows(table["flags"][at], tokens[at])
        return is_boundary

    def is_stop(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        said_stop = np.zeros(len(tokens), np.bool_)
        for at, ids in self.stops:
            said_stop[at] = np.isin(tokens[at], ids)
        return said_stop

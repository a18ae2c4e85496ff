"""What stays the same for the running rows from step to step, until one comes, moves or goes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import SearchSpec
from gambit.engines.local.attention import group_by_slot
from gambit.engines.local.rows import Rows
from gambit.engines.shared.sampling import Filters, filters_of
from gambit.text.boundary import BoundaryRule, ThoughtTables


@dataclass(slots=True)
class Layout:
    """Made anew whenever `Rows.version` has changed."""

    version: int
    filters: Filters
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

    @classmethod
    def of(
        cls, rows: Rows, slots: list[SearchSpec], tables: dict[BoundaryRule, ThoughtTables], device: torch.device
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


Key = TypeVar("Key", bound=Hashable)


def _rows_by(row_slots: npt.NDArray[np.int64], key_of_slot: list[Key]) -> list[tuple[Key, npt.NDArray[np.int64]]]:
    """Rows whose searches share a key; nearly always all of them share one."""
    keys = list(dict.fromkeys(key_of_slot))
    number = np.array([keys.index(key) for key in key_of_slot])[row_slots]
    return [(key, np.flatnonzero(number == i)) for i, key in enumerate(keys)]

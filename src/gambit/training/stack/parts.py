"""The parts of a stack: from names and files, or from a stack's own folder, to features of traces."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gambit.core.errors import UserError
from gambit.core.types import StatePosition
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.stack import (
    AGREEMENT,
    BY_NAME,
    CLOSENESS,
    CONFIDENCE,
    PARTS,
    SPREAD_FILE,
    STATE,
    STATE_FILE,
    SUPPORT,
    VERIFIER,
    StackInfo,
)
from gambit.scorers.verifier.folder import copy_verifier, is_verifier
from gambit.scorers.verifier.model import Verifier
from gambit.training.dataset import Dataset
from gambit.training.loading import CollectionReader
from gambit.training.networks import Spread
from gambit.training.ranking import Ints
from gambit.training.stack import features as ft
from gambit.training.stack.fit import StackData
from gambit.training.storage import Header
from gambit.training.verifier.reading import read_traces


@dataclass(frozen=True, slots=True)
class ClosenessPlace:
    """Which states are compared, and how they are standardised."""

    layer: int
    position: StatePosition
    spread: Spread


@dataclass(frozen=True, slots=True)
class StackParts:
    """Judges by name; state scorer and verifier are files."""

    names: tuple[str, ...]  # in the order of PARTS
    state: Path | None = None
    verifier: Path | None = None

    @classmethod
    def parse(cls, given: Sequence[str]) -> StackParts:
        """`confidence`, `closeness`, `support`, `agreement`, a state scorer's file, a verifier's folder."""
        files: dict[str, Path] = {}
        names = set()
        for each in given:
            kind = VERIFIER if is_verifier(each) else STATE if Path(each).is_file() else each
            if kind in (STATE, VERIFIER) and Path(each).exists():
                files[kind] = Path(each)
            elif kind not in BY_NAME:
                known = ", ".join(BY_NAME)
                raise UserError(f"{each!r} is no part of a stack: give {known}, the file of a state scorer "
                                "or the folder of a verifier")  # fmt: skip
            if kind in names:
                raise UserError(f"a stack has one {kind} at most: leave {each!r} or the other out")
            names.add(kind)
        return cls(tuple(part for part in PARTS if part in names), files.get(STATE), files.get(VERIFIER))

    @classmethod
    def of_folder(cls, folder: Path, info: StackInfo) -> StackParts:
        state = folder / STATE_FILE if STATE in info.parts else None
        return cls(info.parts, state, folder if VERIFIER in info.parts else None)

    @property
    def files(self) -> list[str]:
        return [str(path) for path in (self.state, self.verifier) if path is not None]

    def copy_to(self, folder: Path) -> None:
        """So that a stack is one folder."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.state is not None and self.state != folder / STATE_FILE:
            shutil.copy(self.state, folder / STATE_FILE)
        if self.verifier is not None and self.verifier != folder:
            copy_verifier(self.verifier, folder)

    def stack_data(self, asked: Asked) -> StackData:
        """What every part says about some traces of a collection."""
        return StackData(
            asked.reader.without_states, asked.traces, {name: self._said(name, asked) for name in self.names}
        )

    def _said(self, name: str, asked: Asked) -> ft.ByShare:
        reader, traces, shares = asked.reader, asked.traces, asked.shares
        if name == STATE:
            assert self.state is not None
            scorer = load_checkpoint(self.state)
            states = reader.at(scorer.info.state_position, scorer.info.layers)
            return ft.state_feature(scorer, states, traces, shares, asked.device)
        if name == VERIFIER:
            assert self.verifier is not None
            verifier = Verifier.load(self.verifier, asked.device, asked.model)
            return ft.verifier_feature(read_traces(verifier, reader.passages, traces), verifier.info, traces, shares)
        if name == CONFIDENCE:
            return ft.confidence_feature(_with_confidences(reader), traces, shares)
        if name == AGREEMENT:
            return ft.agreement_feature(reader.without_states, traces, shares, asked.answers)
        assert asked.place is not None
        states = reader.at(asked.place.position, (asked.place.layer,))
        if name == CLOSENESS:
            return ft.closeness_feature(states, traces, shares, asked.place.spread)
        return ft.support_feature(states, traces, shares, asked.place.spread, asked.answers)


class Asked:
    """The traces that a stack is asked about, and by what means."""

    def __init__(
        self,
        reader: CollectionReader,
        traces: Ints,
        shares: Sequence[float],
        place: ClosenessPlace | None,
        device: torch.device,
        model: str | None,
    ) -> None:
        self.reader, self.traces, self.shares = reader, traces, shares
        self.place, self.device, self.model = place, device, model

    @cached_property
    def answers(self) -> Ints:
        return ft.answer_classes(self.reader.without_states, self.traces)


def _with_confidences(reader: CollectionReader) -> Dataset:
    if not reader.header.has_confidence:
        raise UserError(f"{reader.folder} holds no confidences: collect without --no-confidence, or leave that "
                        "part out")  # fmt: skip
    return reader.without_states


def uses_states_of_others(names: Sequence[str]) -> bool:
    return CLOSENESS in names or SUPPORT in names


def closeness_in(reader: CollectionReader) -> ClosenessPlace:
    """At the uppermost inner layer that the collection holds, or else at the last one."""
    layer, position = closeness_place(reader.header)
    states = reader.at(position, (layer,)).states
    return ClosenessPlace(layer, position, Spread.of(states))


def closeness_place(header: Header) -> tuple[int, StatePosition]:
    """States of inner layers, about two thirds up, tell more than those of the last one."""
    inner = [layer for layer in header.layers if layer != -1]
    is_there = StatePosition.BOUNDARY in header.positions
    position = StatePosition.BOUNDARY if is_there else StatePosition(header.positions[0])
    return (inner[-1] if inner else -1), position


def save_spread(folder: Path, spread: Spread) -> None:
    from safetensors.torch import save_file

    save_file({"mean": spread.mean.contiguous(), "deviation": spread.deviation.contiguous()}, folder / SPREAD_FILE)


def load_place(folder: Path, info: StackInfo) -> ClosenessPlace | None:
    from safetensors.torch import load_file

    if not uses_states_of_others(info.parts):
        return None
    tensors = load_file(folder / SPREAD_FILE)
    spread = Spread(tensors["mean"], tensors["deviation"])
    return ClosenessPlace(info.closeness_layer, StatePosition(info.closeness_position), spread)

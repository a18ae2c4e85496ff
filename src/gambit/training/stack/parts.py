"""The parts of a stack: from names and files, or from a stack's own folder, to features of traces."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gambit.errors import UserError
from gambit.scorers.checkpoint import load_checkpoint
from gambit.scorers.names import ScorerKind, parse_scorer, trained_scorer
from gambit.scorers.stack import (
    AGREEMENT,
    BY_NAME,
    CLOSENESS,
    CONFIDENCE,
    PARTS,
    STATE,
    STATE_FILE,
    SUPPORT,
    VERIFIER,
    StackInfo,
)
from gambit.scorers.stack_states import MAX_SIZE, StateVectors
from gambit.scorers.verifier.folder import copy_verifier
from gambit.scorers.verifier.model import Verifier
from gambit.training.dataset import Dataset
from gambit.training.loading import CollectionReader
from gambit.training.networks import Spread
from gambit.training.ranking import Ints
from gambit.training.stack import features as ft
from gambit.training.stack.fit import StackData
from gambit.training.storage import Header
from gambit.training.verifier.reading import read_traces
from gambit.types import StatePosition

OF_OTHERS = (CLOSENESS, SUPPORT, AGREEMENT)  # what the other traces of a problem tell
BASIS_STATES = 20_000  # by which the directions are found in which states differ


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
            kind, file = _part_of(each)
            if file is not None:
                files[kind] = file
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
        pool = self._pool_features(asked)
        said = {name: pool[name] if name in pool else self._said(name, asked) for name in self.names}
        return StackData(asked.reader.without_states, asked.traces, said)

    def _pool_features(self, asked: Asked) -> Mapping[str, ft.ByShare]:
        names = [name for name in self.names if name in OF_OTHERS]
        vectors, reader = asked.vectors, asked.reader
        data = reader.without_states if vectors is None else reader.at(vectors.position, (vectors.layer,))
        return ft.pool_features(names, data, asked.traces, asked.shares, vectors) if names else {}

    def _said(self, name: str, asked: Asked) -> ft.ByShare:
        reader, traces, shares = asked.reader, asked.traces, asked.shares
        if name == STATE:
            assert self.state is not None
            scorer = load_checkpoint(self.state)
            if scorer.info.hidden_size not in (None, reader.header.hidden_size):
                raise UserError(f"{self.state} expects hidden size {scorer.info.hidden_size}, the collection has "
                                f"{reader.header.hidden_size}: give a state scorer of the same model")  # fmt: skip
            states = reader.at(scorer.info.state_position, scorer.info.layers)
            return ft.state_feature(scorer, states, traces, shares, asked.device)
        if name == VERIFIER:
            assert self.verifier is not None
            verifier = Verifier.load(self.verifier, asked.device, asked.model)
            return ft.verifier_feature(read_traces(verifier, reader.passages, traces), verifier.info, traces, shares)
        assert name == CONFIDENCE
        return ft.confidence_feature(_with_confidences(reader), traces, shares)


def _part_of(text: str) -> tuple[str, Path | None]:
    """Which part a file or folder is; a name as it is."""
    kinds = {ScorerKind.FILE: STATE, ScorerKind.VERIFIER: VERIFIER}
    kind = kinds.get(parse_scorer(text).kind)
    path = Path(trained_scorer(text))
    return (kind, path) if kind is not None and path.exists() else (text, None)


@dataclass(frozen=True, slots=True)
class Asked:
    """The traces that a stack is asked about, and by what means."""

    reader: CollectionReader
    traces: Ints
    shares: Sequence[float]
    vectors: StateVectors | None  # by which states are compared
    device: torch.device
    model: str | None


def _with_confidences(reader: CollectionReader) -> Dataset:
    if not reader.header.has_confidence:
        raise UserError(f"{reader.folder} holds no confidences: collect without --no-confidence, or leave that "
                        "part out")  # fmt: skip
    return reader.without_states


def vectors_in(reader: CollectionReader, parts: StackParts) -> StateVectors:
    """Of the uppermost inner layer that the collection holds, or else of the last one."""
    layer, position = vectors_place(reader.header, parts)
    states = reader.at(position, (layer,)).states
    spread = Spread.of(states)
    some = states[:: max(1, len(states) // BASIS_STATES)][:BASIS_STATES].float()
    return StateVectors(layer, position, spread.mean, spread.deviation, _basis(spread.normalised(some)))


def vectors_place(header: Header, parts: StackParts) -> tuple[int, StatePosition]:
    """States of inner layers, about two thirds up, tell more than those of the last one.

    A search gives states at one position: at the state scorer's, where there is one.
    """
    inner = [layer for layer in header.layers if layer != -1]
    is_there = StatePosition.BOUNDARY in header.positions
    position = StatePosition.BOUNDARY if is_there else StatePosition(header.positions[0])
    if parts.state is not None:
        position = load_checkpoint(parts.state).info.state_position
    return (inner[-1] if inner else -1), position


def _basis(states: torch.Tensor) -> torch.Tensor:
    """[feature, size]: the directions in which states differ most."""
    covariance = (states.T @ states).double() / len(states)
    directions: torch.Tensor = torch.linalg.eigh(covariance).eigenvectors
    return directions.flip(1)[:, :MAX_SIZE].float().contiguous()

"""A collection as several judges need it: states at their positions and layers, or tokens, each read once."""

from __future__ import annotations

from pathlib import Path

from gambit.training.dataset import Dataset, load_dataset
from gambit.training.storage import read_header
from gambit.training.verifier.passages import Passages
from gambit.types import StatePosition


class CollectionReader:
    """Datasets of one collection; `skipped` gathers what was left out and why."""

    def __init__(self, folder: Path, *, skip_corrupted: bool = False) -> None:
        self.header = read_header(folder)
        self.skipped: list[str] = []
        self.folder, self._skips = folder, skip_corrupted
        self._found: dict[tuple[StatePosition, tuple[int, ...], bool], Dataset] = {}

    def at(self, position: StatePosition, layers: tuple[int, ...], *, with_tokens: bool = False) -> Dataset:
        key = position, layers, with_tokens
        if key not in self._found:
            self._found[key] = load_dataset(
                self.folder, position, layers, skip_corrupted=self._skips, with_tokens=with_tokens, on_skip=self.skipped
            )
        return self._found[key]

    @property
    def without_states(self) -> Dataset:
        return self.at(StatePosition.BOUNDARY, ())

    @property
    def passages(self) -> Passages:
        return Passages.of(self.at(StatePosition.BOUNDARY, (), with_tokens=True))

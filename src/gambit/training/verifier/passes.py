"""Passes of a verifier's training: packed traces with their labels, made ready while the pass before is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gambit.stats import Ints
from gambit.training.objectives import Batch
from gambit.training.verifier.packing import Packing
from gambit.training.verifier.passages import Passages
from gambit.types import Aggregation
from gambit.verifiers.lora import LoraVerifier, Passage

AHEAD = 3  # steps that are made ready


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Sequences one after the other, and the places among them where a logit is wanted."""

    tokens: Tensor
    positions: Tensor  # of each token in its sequence
    places: Tensor
    packing: Packing

    @classmethod
    def of(cls, passages: Sequence[Passage], uses_flash: bool = False) -> PackedRow:
        lengths = [len(each.tokens) for each in passages]
        starts = np.cumsum(lengths) - lengths
        tokens = np.concatenate([each.tokens for each in passages])
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = np.concatenate([each.places + start for each, start in zip(passages, starts, strict=True)])
        return cls(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(places),
                   Packing.of(lengths, uses_flash))  # fmt: skip

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedRow:
        """With every tensor moved to other memory."""
        return PackedRow(move(self.tokens), move(self.positions), move(self.places), self.packing.moved(move))

    def logits(self, verifier: LoraVerifier) -> Tensor:
        """[place], passage after passage; the row is on the verifier's device."""
        states = verifier.network(
            input_ids=self.tokens[None], position_ids=self.positions[None], use_cache=False, packing=self.packing
        ).last_hidden_state[0]
        found: Tensor = verifier.head(states[self.places].float() * verifier.input_scale)[:, 0]
        return found


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Whole problems, read and judged at once."""

    problems: tuple[Ints, ...]  # traces of each
    num_tokens: int
    row: PackedRow
    cells: Tensor  # [place] among trace × thought, where its logit belongs
    counts: Tensor  # [trace]: places
    is_correct: Tensor  # [trace]
    problem: Tensor  # [trace]
    labels: Tensor  # [trace, place], zeros after the last one

    @classmethod
    def of(cls, problems: Sequence[Ints], passages: Passages, uses_flash: bool = False) -> TrainingPass:
        """On the CPU."""
        traces = np.concatenate(problems)
        known = passages.data.traces
        read = [passages.passage(trace) for trace in traces.tolist()]
        counts = known.num_thoughts[traces] + 1
        cells = np.concatenate([row * counts.max() + np.arange(count) for row, count in enumerate(counts)])
        labels = np.zeros((len(traces), counts.max()), np.float32)
        labels.flat[cells] = np.concatenate([passages.labels_of(trace) for trace in traces.tolist()])
        columns = (cells, counts, known.is_correct[traces], known.problem_of[traces], labels)
        row = PackedRow.of(read, uses_flash)
        return cls(tuple(problems), len(row.tokens), row, *map(torch.from_numpy, columns))

    def pinned(self) -> TrainingPass:
        """In memory that a GPU can read while the host goes on."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> TrainingPass:
        return TrainingPass(self.problems, self.num_tokens, self.row.moved(move), move(self.cells), move(self.counts),
                            move(self.is_correct), move(self.problem), move(self.labels))  # fmt: skip

    def batch(self, verifier: LoraVerifier) -> Batch:
        """Logits of the whole pass."""
        there = self._moved(lambda tensor: tensor.to(verifier.device, non_blocking=True))
        logits = there.row.logits(verifier)
        cells = logits.new_zeros(there.labels.numel()).index_copy(0, there.cells, logits)
        return Batch(cells.view_as(there.labels), there.counts, there.is_correct, there.problem, Aggregation.LAST, None,
                     there.labels)  # fmt: skip


Item = TypeVar("Item")


def made_ahead(items: Iterator[Item], depth: int = AHEAD) -> Iterator[Item]:
    """The same, computed on a thread before they are asked for; the thread ends with this generator."""
    ready: queue.Queue[tuple[Item] | BaseException | None] = queue.Queue(depth)
    is_over = threading.Event()

    def put(item: tuple[Item] | BaseException | None) -> None:
        while not is_over.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def run() -> None:
        try:
            for item in items:
                put((item,))
                if is_over.is_set():
                    return
        except BaseException as error:
            put(error)
        put(None)

    thread = threading.Thread(target=run, name="gambit-passes", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]
    finally:
        is_over.set()
        thread.join()

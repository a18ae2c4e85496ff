"""The traces of a collection as a verifier reads them, and batches of its training, packed and made ahead on a thread.

A batch has problems drawn with right and wrong traces.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset, in_groups, load_dataset
from gambit.training.networks import Batch
from gambit.training.scoring import QUARTERS, last_thoughts, pairs_in, scores_after
from gambit.training.verifier.kernels import Packing, moved
from gambit.types import Aggregation, EndReason, StatePosition
from gambit.verifiers.lora import LoraVerifier, Passage
from gambit.verifiers.lora_folder import Platt


def load_passages(folder: Path, skipped: list[str] | None = None) -> Dataset:
    """Loads what a verifier reads of a collection: tokens, without states."""
    return load_dataset(folder, StatePosition.BOUNDARY, (), with_tokens=True, skipped=skipped)


def lengths_of(data: Dataset) -> Ints:
    """Returns [trace], the number of tokens to read."""
    prompts = np.array([len(prompt) for prompt in data.prompts], np.int64)
    lengths: Ints = prompts[data.traces.problem_of] + data.traces.num_tokens
    return lengths


def passage_of(data: Dataset, trace: int) -> Passage:
    """Returns prompt and trace with the places to read: the end of every thought, and the trace's own end.

    That is the trace's last token before its stop token, which a search does not send to a verifier, also where a
    thought ends there.
    """
    known = data.traces
    problem = known.problem_of[trace]
    prompt, number = data.prompts[problem], trace - np.searchsorted(known.problem_of, problem)
    has_stop = data.problems[problem].traces[number].end == EndReason.STOP
    ends = np.append(known.thought_ends[known.thoughts_of(trace)], known.num_tokens[trace] - has_stop)
    return Passage(np.concatenate((prompt, data.tokens[trace])).astype(np.int64), ends + len(prompt) - 1)


def labels_of(data: Dataset, trace: int) -> npt.NDArray[np.float32]:
    """Returns [place], the label at each place of a trace's passage."""
    known = data.traces
    outcome = np.float32(known.is_correct[trace])
    if data.labels is None:
        return np.full(known.num_thoughts[trace] + 1, outcome)
    return np.append(data.labels[known.thoughts_of(trace)], outcome)


@dataclass(frozen=True, slots=True)
class ReadTraces:
    """The logits of a collection's traces; those of traces that were not read stay 0."""

    data: Dataset
    thoughts: Floats  # [thought]
    ends: Floats  # [trace], with the whole trace read

    def logits(self, chosen: Ints, share: float, aggregation: Aggregation) -> Floats:
        """Returns [chosen trace] after a share of its thoughts; all of them means the whole trace with its answer."""
        found = scores_after(share, self.data.traces, chosen, self.thoughts, aggregation)
        if share < 1:
            return found
        ends, counts = self.ends[chosen], self.data.traces.num_thoughts[chosen]
        return ends if aggregation is Aggregation.LAST else (found * counts + ends) / (counts + 1)

    def chances(self, chosen: Ints, share: float, aggregation: Aggregation, calibration: Platt) -> Floats:
        """Returns the same as probabilities; 0 for a trace without a thought, as in a search."""
        chances = calibration.chances(self.logits(chosen, share, aggregation))
        is_known = (last_thoughts(self.data.traces.num_thoughts[chosen], share) >= 0) | (share >= 1)
        return np.where(is_known, chances, 0.0)

    def quarter_aucs(self, chosen: Ints, aggregation: Aggregation) -> Floats:
        """Returns [quarter, problem]; not a number where there is nothing to rank."""
        scores = [self.chances(chosen, share, aggregation, Platt()) for share in QUARTERS]
        return np.stack([pairs_in(self.data, chosen, each).auc for each in scores])


def read_traces(verifier: LoraVerifier, data: Dataset, chosen: Ints) -> ReadTraces:
    """Reads some traces with a verifier."""
    known = data.traces
    thoughts, ends = np.zeros(int(known.num_thoughts.sum())), np.zeros(len(known.num_thoughts))
    logits = verifier.logits([passage_of(data, trace) for trace in chosen.tolist()])
    for trace, found in zip(chosen.tolist(), logits, strict=True):
        thoughts[known.thoughts_of(trace)], ends[trace] = found[:-1], found[-1]
    return ReadTraces(data, thoughts, ends)


AHEAD = 3  # updates that are made ready


class ProblemOrder:
    """Draws traces of problems, anew in each epoch."""

    def __init__(
        self,
        data: Dataset,
        chosen: Ints,
        rng: np.random.Generator,
        *,
        update_tokens: int,
        pass_tokens: int,
        traces_per_problem: int = 8,
        uniform_traces: int = 2,
    ) -> None:
        """Groups the chosen traces by problem.

        An update of the weights reads at least `update_tokens`, in passes forward and backward of at most
        `pass_tokens`; a problem is not divided. `traces_per_problem` is of a problem with right and wrong traces, half
        of each where there are enough. One whose traces are all right or all wrong has nothing to rank and serves
        calibration alone: it has `uniform_traces`.
        """
        self._lengths, self._is_correct, self._rng = lengths_of(data), data.traces.is_correct, rng
        self._update_tokens, self._pass_tokens = update_tokens, pass_tokens
        self._traces_per_problem, self._uniform_traces = traces_per_problem, uniform_traces
        problems, first = np.unique(data.traces.problem_of[chosen], return_index=True)
        self._members = [members for members in np.split(chosen, first[1:]) if len(members)]
        assert len(problems) == len(self._members), "the traces of a problem lie together"

    @property
    def num_problems(self) -> int:
        return len(self._members)

    def epoch(self) -> Iterator[list[list[Ints]]]:
        """Yields updates, each a list of passes of problems, each of these an array of traces."""
        return in_groups(self._passes(), self._tokens, self._update_tokens)

    def _passes(self) -> Iterator[list[Ints]]:
        batch: list[Ints] = []
        for number in self._rng.permutation(len(self._members)):
            drawn = self._drawn(self._members[number])
            if batch and self._tokens([*batch, drawn]) > self._pass_tokens:
                yield batch
                batch = []
            batch.append(drawn)
        if batch:
            yield batch

    def _drawn(self, members: Ints) -> Ints:
        """Takes right and wrong traces in turn, so that what is cut off for its length leaves both."""
        shuffled = self._rng.permutation(members)
        right, wrong = shuffled[self._is_correct[shuffled]], shuffled[~self._is_correct[shuffled]]
        count = self._traces_per_problem if len(right) and len(wrong) else self._uniform_traces
        turns = sorted([*enumerate(right.tolist()), *enumerate(wrong.tolist())])
        order = np.array([trace for _, trace in turns], np.int64)[:count]
        fits = np.cumsum(self._lengths[order]) <= self._pass_tokens
        return order[: max(2, int(fits.sum()))]

    def _tokens(self, problems: Sequence[Ints]) -> int:
        return int(sum(self._lengths[each].sum() for each in problems))


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Sequences one after the other, and the places among them that need a logit."""

    tokens: Tensor
    positions: Tensor  # of each token in its sequence
    places: Tensor
    packing: Packing

    @classmethod
    def of(cls, passages: Sequence[Passage], uses_flash: bool = False) -> Self:
        """Packs passages, on the CPU."""
        lengths = [len(each.tokens) for each in passages]
        starts = np.cumsum(lengths) - lengths
        tokens = np.concatenate([each.tokens for each in passages])
        positions = np.concatenate([np.arange(length) for length in lengths])
        places = np.concatenate([each.places + start for each, start in zip(passages, starts, strict=True)])
        return cls(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(places),
                   Packing.of(lengths, uses_flash))  # fmt: skip

    def logits(self, verifier: LoraVerifier) -> Tensor:
        """Returns [place], passage after passage; the row is on the verifier's device."""
        states = verifier.network(
            input_ids=self.tokens[None], position_ids=self.positions[None], use_cache=False, packing=self.packing
        ).last_hidden_state[0]
        found: Tensor = verifier.head(states[self.places].float() * verifier.input_scale)[:, 0]
        return found


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Whole problems, read and scored at once."""

    problems: tuple[Ints, ...]  # traces of each
    row: PackedRow
    cells: Tensor  # [place] among trace × thought, where its logit belongs
    counts: Tensor  # [trace]: places
    problem: Tensor  # [trace]
    labels: Tensor  # [trace, place], zeros after the last one

    @classmethod
    def of(cls, problems: Sequence[Ints], data: Dataset, uses_flash: bool = False) -> Self:
        """Packs the traces of problems with their labels, on the CPU."""
        traces = np.concatenate(problems)
        known = data.traces
        counts = known.num_thoughts[traces] + 1
        cells = np.concatenate([row * counts.max() + np.arange(count) for row, count in enumerate(counts)])
        labels = np.zeros((len(traces), counts.max()), np.float32)
        labels.flat[cells] = np.concatenate([labels_of(data, trace) for trace in traces.tolist()])
        row = PackedRow.of([passage_of(data, trace) for trace in traces.tolist()], uses_flash)
        columns = (cells, counts, known.problem_of[traces], labels)
        return cls(tuple(problems), row, *map(torch.from_numpy, columns))

    @property
    def num_tokens(self) -> int:
        return len(self.row.tokens)

    def pinned(self) -> Self:
        """Returns the pass in memory that a GPU can read while the host goes on."""
        return moved(self, Tensor.pin_memory)

    def batch(self, verifier: LoraVerifier) -> Batch:
        """Computes the logits of the whole pass."""
        there = moved(self, lambda tensor: tensor.to(verifier.device, non_blocking=True))
        logits = there.row.logits(verifier)
        cells = logits.new_zeros(there.labels.numel()).index_copy(0, there.cells, logits)
        return Batch(cells.view_as(there.labels), there.counts, there.labels, there.problem)


Item = TypeVar("Item")


def made_ahead(items: Iterator[Item], depth: int = AHEAD) -> Iterator[Item]:
    """Yields the same items, computed on a thread before they are needed; the thread ends with this generator."""
    is_over = object()
    thread = ThreadPoolExecutor(1, thread_name_prefix="gambit-passes")
    try:
        ready = deque(thread.submit(next, items, is_over) for _ in range(depth))
        while (item := ready.popleft().result()) is not is_over:
            ready.append(thread.submit(next, items, is_over))
            yield item  # type: ignore[misc]
    finally:
        thread.shutdown(cancel_futures=True)

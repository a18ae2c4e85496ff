"""What a verifier is trained on, step by step: whole problems with some right and some wrong traces of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.stats import Ints
from gambit.training.dataset import Traces


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How much is read at a time."""

    update_tokens: int  # of one step of the optimiser, at least
    pass_tokens: int  # of one forward and backward pass, at most; a problem is not divided
    traces_per_problem: int = 8  # of a problem with right and wrong ones, half of each where there are enough
    uniform_traces: int = 2  # of a problem whose traces are all right or all wrong: nothing to rank, only to calibrate


class ProblemOrder:
    """Draws traces of problems, anew in each epoch."""

    def __init__(self, traces: Traces, lengths: Ints, chosen: Ints, rng: np.random.Generator) -> None:
        self._lengths, self._is_correct, self._rng = lengths, traces.is_correct, rng
        problems, first = np.unique(traces.problem_of[chosen], return_index=True)
        self._members = [part for part in np.split(chosen, first[1:]) if len(part)]
        assert len(problems) == len(self._members), "the traces of a problem lie together"

    @property
    def num_problems(self) -> int:
        return len(self._members)

    def epoch(self, sizes: BatchSizes) -> Iterator[list[list[Ints]]]:
        """Steps of passes of problems, each an array of traces."""
        update: list[list[Ints]] = []
        for one in self._passes(sizes):
            update.append(one)
            if sum(self._tokens(each) for each in update) >= sizes.update_tokens:
                yield update
                update = []
        if update:
            yield update

    def _passes(self, sizes: BatchSizes) -> Iterator[list[Ints]]:
        batch: list[Ints] = []
        for number in self._rng.permutation(len(self._members)):
            drawn = self._drawn(self._members[number], sizes)
            if batch and self._tokens([*batch, drawn]) > sizes.pass_tokens:
                yield batch
                batch = []
            batch.append(drawn)
        if batch:
            yield batch

    def _drawn(self, members: Ints, sizes: BatchSizes) -> Ints:
        """Right and wrong in turn, so that what is cut off for its length leaves both."""
        shuffled = self._rng.permutation(members)
        right, wrong = shuffled[self._is_correct[shuffled]], shuffled[~self._is_correct[shuffled]]
        is_mixed = len(right) > 0 and len(wrong) > 0
        count = sizes.traces_per_problem if is_mixed else sizes.uniform_traces
        turns = sorted([*enumerate(right.tolist()), *enumerate(wrong.tolist())])
        order = np.array([trace for _, trace in turns], np.int64)[:count]
        fits = np.cumsum(self._lengths[order]) <= sizes.pass_tokens
        return order[: max(2, int(fits.sum()))]

    def _tokens(self, problems: Sequence[Ints]) -> int:
        return int(sum(self._lengths[each].sum() for each in problems))

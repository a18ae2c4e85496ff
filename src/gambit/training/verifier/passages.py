"""The traces of a collection as a verifier reads them: tokens, the ends of thoughts, labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gambit.errors import UserError
from gambit.training.dataset import Dataset, load_dataset
from gambit.types import EndReason, StatePosition
from gambit.verifiers.lora import Passage


@dataclass(frozen=True, slots=True)
class Passages:
    """A collection's traces, each read at the end of every thought and at its own end."""

    data: Dataset
    prompts: tuple[npt.NDArray[np.int64], ...]  # of each problem
    tokens: tuple[npt.NDArray[np.int64], ...]  # of each trace
    labels: npt.NDArray[np.float32]  # [thought]

    @classmethod
    def of(cls, data: Dataset) -> Passages:
        if not data.prompts:
            raise UserError("the collection does not hold the tokens of its prompts, which a verifier reads: it was "
                            "made by an earlier version, collect it anew")  # fmt: skip
        prompts, tokens = (tuple(np.array(ids, np.int64) for ids in each) for each in (data.prompts, data.tokens))
        return cls(data, prompts, tokens, data.thought_labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[trace]: tokens to read."""
        prompts = np.array([len(prompt) for prompt in self.prompts], np.int64)
        found: npt.NDArray[np.int64] = prompts[self.data.traces.problem_of] + self.data.traces.num_tokens
        return found

    def passage(self, trace: int) -> Passage:
        """Its last place is the trace's last token before its stop token, also where a thought ends there."""
        known = self.data.traces
        prompt = self.prompts[known.problem_of[trace]]
        start = known.starts[trace]
        ends = known.thought_ends[start : start + known.num_thoughts[trace]]
        tokens = np.concatenate((prompt, self.tokens[trace]))
        return Passage(tokens, np.append(ends, known.num_tokens[trace] - self._stops(trace)) + len(prompt) - 1)

    def _stops(self, trace: int) -> int:
        """1 for a trace that ends with a stop token: a search's readers do not get that."""
        problem = self.data.traces.problem_of[trace]
        first = np.searchsorted(self.data.traces.problem_of, problem)
        return int(self.data.problems[problem].traces[trace - first].end == EndReason.STOP)

    def labels_of(self, trace: int) -> npt.NDArray[np.float32]:
        """[place] of the passage."""
        start = self.data.traces.starts[trace]
        thoughts = self.labels[start : start + self.data.traces.num_thoughts[trace]]
        found: npt.NDArray[np.float32] = np.append(thoughts, np.float32(self.data.traces.is_correct[trace]))
        return found


def load_passages(folder: Path, *, skip_corrupted: bool = False, on_skip: list[str] | None = None) -> Passages:
    return Passages.of(
        load_dataset(
            folder, StatePosition.BOUNDARY, (), skip_corrupted=skip_corrupted, with_tokens=True, on_skip=on_skip
        )
    )

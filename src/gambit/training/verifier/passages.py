"""The traces of a collection as a verifier reads them, and the logits that it gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gambit.errors import UserError
from gambit.stats import Floats, Ints, all_sigmoids
from gambit.training.dataset import Dataset, load_dataset
from gambit.training.ranking import QUARTERS, last_thoughts, pairs_in, scores_after
from gambit.types import Aggregation, EndReason, StatePosition
from gambit.verifiers.lora import LoraVerifier, Passage
from gambit.verifiers.lora_folder import Platt


@dataclass(frozen=True, slots=True)
class Passages:
    """A collection's traces, each read at the end of every thought and at its own end."""

    data: Dataset
    prompts: tuple[Ints, ...]  # of each problem
    tokens: tuple[Ints, ...]  # of each trace
    labels: npt.NDArray[np.float32]  # [thought]

    @classmethod
    def of(cls, data: Dataset) -> Passages:
        """Takes the passages out of a dataset that was loaded with its tokens."""
        if not data.prompts:
            raise UserError("the collection does not hold the tokens of its prompts, which a verifier reads: it was "
                            "made by an earlier version, collect it anew")  # fmt: skip
        prompts, tokens = (tuple(np.array(ids, np.int64) for ids in each) for each in (data.prompts, data.tokens))
        return cls(data, prompts, tokens, data.thought_labels)

    @property
    def lengths(self) -> Ints:
        """Returns [trace], the number of tokens to read."""
        prompts = np.array([len(prompt) for prompt in self.prompts], np.int64)
        found: Ints = prompts[self.data.traces.problem_of] + self.data.traces.num_tokens
        return found

    def passage(self, trace: int) -> Passage:
        """Returns prompt and trace with the places to read.

        The last place is the trace's last token before its stop token, also where a thought ends there.
        """
        known = self.data.traces
        prompt, ends = self.prompts[known.problem_of[trace]], known.thought_ends[known.thoughts_of(trace)]
        tokens = np.concatenate((prompt, self.tokens[trace]))
        return Passage(tokens, np.append(ends, known.num_tokens[trace] - self._ends_with_stop(trace)) + len(prompt) - 1)

    def _ends_with_stop(self, trace: int) -> bool:
        """Returns whether a trace ends with a stop token, which a search does not send to a verifier."""
        problem = self.data.traces.problem_of[trace]
        first = np.searchsorted(self.data.traces.problem_of, problem)
        return bool(self.data.problems[problem].traces[trace - first].end == EndReason.STOP)

    def labels_of(self, trace: int) -> npt.NDArray[np.float32]:
        """Returns [place], the label at each place of the passage."""
        known = self.data.traces
        return np.append(self.labels[known.thoughts_of(trace)], np.float32(known.is_correct[trace]))


def load_passages(folder: Path, *, skip_corrupted: bool = False, on_skip: list[str] | None = None) -> Passages:
    """Loads a collection's traces without their states."""
    data = load_dataset(
        folder, StatePosition.BOUNDARY, (), skip_corrupted=skip_corrupted, with_tokens=True, on_skip=on_skip
    )
    return Passages.of(data)


# -- reading ---------------------------------------------------------------------------------------------------


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
        logits = calibration.slope * self.logits(chosen, share, aggregation) + calibration.offset
        is_known = (last_thoughts(self.data.traces.num_thoughts[chosen], share) >= 0) | (share >= 1)
        found: Floats = np.where(is_known, all_sigmoids(logits), 0.0)
        return found

    def quarter_aucs(self, chosen: Ints, aggregation: Aggregation) -> Floats:
        """Returns [quarter, problem]; not a number where there is nothing to rank."""
        scores = [self.chances(chosen, share, aggregation, Platt()) for share in QUARTERS]
        return np.stack([pairs_in(self.data, chosen, each).auc for each in scores])


def read_traces(verifier: LoraVerifier, passages: Passages, chosen: Ints) -> ReadTraces:
    """Reads some traces with a verifier."""
    known = passages.data.traces
    thoughts, ends = np.zeros(int(known.num_thoughts.sum())), np.zeros(len(known.num_thoughts))
    logits = verifier.logits([passages.passage(trace) for trace in chosen.tolist()])
    for trace, found in zip(chosen.tolist(), logits, strict=True):
        thoughts[known.thoughts_of(trace)], ends[trace] = found[:-1], found[-1]
    return ReadTraces(passages.data, thoughts, ends)

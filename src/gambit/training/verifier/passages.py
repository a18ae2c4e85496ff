"""The traces of a collection as a verifier reads them, and the logits that it computes for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gambit.errors import UserError
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset, load_dataset
from gambit.training.ranking import QUARTERS, last_thoughts, pairs_in, scores_after
from gambit.types import Aggregation, EndReason, StatePosition
from gambit.verifiers.lora import LoraVerifier, Passage
from gambit.verifiers.lora_folder import Platt


def load_passages(folder: Path, *, skip_corrupted: bool = False, on_skip: list[str] | None = None) -> Dataset:
    """Loads what a verifier reads of a collection: tokens, without states."""
    return with_prompts(load_dataset(
        folder, StatePosition.BOUNDARY, (), skip_corrupted=skip_corrupted, with_tokens=True, on_skip=on_skip
    ))  # fmt: skip


def with_prompts(data: Dataset) -> Dataset:
    """Returns a dataset that was loaded with its tokens; raises if it lacks those of its prompts."""
    if not data.prompts:
        raise UserError("the collection does not hold the tokens of its prompts, which a verifier reads: it was "
                        "made by an earlier version, collect it anew")  # fmt: skip
    return data


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

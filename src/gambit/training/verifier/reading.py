"""A collection read by a verifier: its logits, and the scores of traces by share of their thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.stats import Floats, Ints, all_sigmoids
from gambit.training.dataset import Traces
from gambit.training.ranking import QUARTERS, last_thoughts, pairs, trace_scores
from gambit.training.verifier.passages import Passages
from gambit.types import Aggregation
from gambit.verifiers.lora import LoraVerifier
from gambit.verifiers.lora_folder import Platt


@dataclass(frozen=True, slots=True)
class ReadTraces:
    """Logits of a collection's traces; those of traces that were not read stay 0."""

    traces: Traces
    thoughts: Floats  # [thought]
    ends: Floats  # [trace], with the whole trace read

    def logits(self, chosen: Ints, share: float, aggregation: Aggregation) -> Floats:
        """[chosen trace] after a share of its thoughts; all of them means the whole trace with its answer."""
        known = self.traces
        starts, counts = known.starts[chosen], known.num_thoughts[chosen]
        found = trace_scores(self.thoughts, starts, counts, share, aggregation)
        if share < 1:
            return found
        ends = self.ends[chosen]
        return ends if aggregation is Aggregation.LAST else (found * counts + ends) / (counts + 1)

    def chances(self, chosen: Ints, share: float, aggregation: Aggregation, calibration: Platt) -> Floats:
        """The same as probabilities; 0 for a trace without a thought, as in a search."""
        logits = calibration.slope * self.logits(chosen, share, aggregation) + calibration.offset
        is_known = (last_thoughts(self.traces.num_thoughts[chosen], share) >= 0) | (share >= 1)
        found: Floats = np.where(is_known, all_sigmoids(logits), 0.0)
        return found

    def by_share(
        self, chosen: Ints, shares: Sequence[float], aggregation: Aggregation, calibration: Platt
    ) -> Mapping[float, Floats]:
        return {share: self.chances(chosen, share, aggregation, calibration) for share in shares}


def read_traces(verifier: LoraVerifier, passages: Passages, chosen: Ints) -> ReadTraces:
    known = passages.data.traces
    thoughts, ends = np.zeros(int(known.num_thoughts.sum())), np.zeros(len(known.num_thoughts))
    logits = verifier.logits([passages.passage(trace) for trace in chosen.tolist()])
    for trace, found in zip(chosen.tolist(), logits, strict=True):
        start = known.starts[trace]
        thoughts[start : start + known.num_thoughts[trace]] = found[:-1]
        ends[trace] = found[-1]
    return ReadTraces(known, thoughts, ends)


def quarter_aucs(read: ReadTraces, passages: Passages, chosen: Ints, aggregation: Aggregation) -> list[Floats]:
    """[quarter][problem]; not a number where there is nothing to rank."""
    known, count = passages.data.traces, len(passages.data.problems)
    scores = {share: read.chances(chosen, share, aggregation, Platt()) for share in QUARTERS}
    return [pairs(scores[s], known.is_correct[chosen], known.problem_of[chosen], count).auc for s in QUARTERS]


def problem_aucs_read(read: ReadTraces, passages: Passages, chosen: Ints, aggregation: Aggregation) -> Floats:
    """[problem], mean over the quarters."""
    found: Floats = np.mean(quarter_aucs(read, passages, chosen, aggregation), axis=0)
    return found

"""Who may judge prefixes: scorers of states, and verifiers that read the traces again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from gambit.bench.prefix_rollouts import TraceText
from gambit.scorers.base import Scorer
from gambit.scorers.verifier.folder import VerifierInfo
from gambit.scorers.verifier.model import Verifier
from gambit.training.dataset import Traces, load_dataset
from gambit.training.loading import CollectionReader
from gambit.training.ranking import Floats
from gambit.training.scoring import step_scores
from gambit.training.verifier.reading import read_traces
from gambit.types import Aggregation, StatePosition

StepScores = Callable[[TraceText, int], float]  # a judgement of a trace after so many thoughts


class PrefixJudge(Protocol):
    """Ranks the prefixes of a problem."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose states it wants."""

    def judgements(self, folder: Path, texts: Sequence[TraceText], device: torch.device) -> StepScores:
        """What it says of a collection's traces, as in a search; `texts`: all of them, in the collection's order."""


@dataclass(frozen=True, slots=True)
class StateJudge:
    """A scorer looks at the states that the collection holds."""

    scorer: Scorer

    @property
    def layers(self) -> tuple[int, ...]:
        return self.scorer.info.layers

    def judgements(self, folder: Path, texts: Sequence[TraceText], device: torch.device) -> StepScores:
        info = self.scorer.info
        data = load_dataset(folder, StatePosition(info.state_position), info.layers)
        found = step_scores(self.scorer, data, data.all_traces(), device)
        return _by_step(found, data.traces, texts, info.aggregation)


@dataclass(frozen=True, slots=True)
class VerifierJudge:
    """A verifier of `gambit scorer train` reads the tokens, on the model that wrote them."""

    folder: Path
    info: VerifierInfo
    model: str

    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    def judgements(self, folder: Path, texts: Sequence[TraceText], device: torch.device) -> StepScores:
        passages = CollectionReader(folder).passages
        verifier = Verifier.load(self.folder, device, self.model)
        read = read_traces(verifier, passages, passages.data.all_traces())
        chances = np.array([self.info.calibration.probability(logit) for logit in read.steps.tolist()])
        return _by_step(chances, read.traces, texts, self.info.aggregation)


def _by_step(found: Floats, traces: Traces, texts: Sequence[TraceText], aggregation: Aggregation) -> StepScores:
    """`found`: of every thought of every trace, one after the other."""
    sums = np.concatenate([[0.0], np.cumsum(found)])
    starts = {text.key(0): int(start) for text, start in zip(texts, traces.starts, strict=True)}

    def after(text: TraceText, step: int) -> float:
        start = starts[text.key(0)]
        if aggregation is Aggregation.LAST:
            return float(found[start + step - 1])
        return float(sums[start + step] - sums[start]) / step

    return after

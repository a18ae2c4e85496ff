"""Scores and embeddings of a step's rows, computed on the device from their hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gambit.engines.states import LayerChoice, Projection
from gambit.engines.vllm.histories import ThoughtRows
from gambit.engines.vllm.scoring.cuda_graph import RecordedScorer, cuda_recorder
from gambit.engines.vllm.scoring.host_copy import DeviceRows, SideStream
from gambit.errors import GambitWarning
from gambit.scorers.base import HistoryScorer, Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.memory import ThoughtMemory, on_device

if TYPE_CHECKING:
    from gambit.engines.vllm.scoring.fused_kernel import FusedScorer

USUAL_THOUGHTS = 256  # of a trace: memory for so many is allocated at the start, for more it grows


@dataclass(frozen=True, slots=True)
class StepRows:
    """What is asked for in one step."""

    thoughts: ThoughtRows | None  # for a scorer with histories: the rows that may end a thought
    row_ids: Callable[[], list[str]]  # requests in row order
    embedding_size: int
    is_reported: bool  # by this rank; others need not score with the fused kernel


class RowScoring:
    """Scores every row of every step: which rows end a thought is known on the host only, one step later."""

    def __init__(self, scorer: Scorer, num_layers: int, device: torch.device, most_rows: int) -> None:
        self.scorer = scorer.to(device)
        self.layers = LayerChoice.of(self.scorer.info.layers, num_layers)
        self.side = SideStream(device)
        self.fused: FusedScorer | None = None
        self.recorded: RecordedScorer | None = None
        # Once: whether an object has a protocol takes Python long to find out.
        self._split = self.scorer if isinstance(self.scorer, SplitScorer) else None
        self._reads_states = self._split is not None or not self.scorer.info.needs_confidence
        self._most_rows = most_rows
        self._memory = self._allocate_memory(self.scorer) if isinstance(self.scorer, HistoryScorer) else None
        self._no_confidence = torch.zeros(1, device=device)
        self._projection = Projection(device)

    def _allocate_memory(self, scorer: HistoryScorer) -> ThoughtMemory:
        return ThoughtMemory(scorer, self._most_rows * min(scorer.max_past + 1, USUAL_THOUGHTS))

    # -- faster ways to launch a scorer ------------------------------------------------------------------------

    def fuse(self, like: torch.Tensor) -> None:
        """Make a scorer of two layers one kernel. `like`: [1, hidden], as the states to come."""
        layers = getattr(self.scorer, "two_layers", None)
        if layers is not None:
            from gambit.engines.vllm.scoring.fused_kernel import fused  # needs vLLM's Triton

            self.fused = fused(layers, self._most_rows, like, self._plain_scores)

    def record(self, like: torch.Tensor) -> None:
        """Make all its kernels one launch."""
        if self.fused is not None or not self.side.is_apart or not getattr(self.scorer, "is_recordable", False):
            return
        try:
            recorder = cuda_recorder(self.side.stream)
            self.recorded = RecordedScorer(self._plain_scores, like, self._most_rows, recorder)
        except RuntimeError as error:
            warnings.warn(
                f"the scorer is run kernel by kernel: it cannot be recorded ({error})", GambitWarning, stacklevel=2
            )

    # -- one step ----------------------------------------------------------------------------------------------

    def read(self, states: torch.Tensor, inner: list[torch.Tensor], rows: DeviceRows, asked: StepRows) -> None:
        """On the model's own stream where one kernel makes the scores, else on a stream beside it."""
        scored = self.layers.join(states, inner)
        if self.fused is not None and asked.is_reported:
            rows.expect(self.fused.score(scored))
        if self.fused is None or asked.embedding_size:
            with rows.computed(states, scored):
                rows.send(self._columns(states, scored, asked))

    def _columns(self, states: torch.Tensor, scored: torch.Tensor, asked: StepRows) -> dict[str, torch.Tensor]:
        """`scored` is what the scorer reads: states of its layers."""
        columns = {}
        if self.fused is None and self._reads_states:
            columns["scores"] = self._scores(scored, asked)
        if asked.embedding_size:
            columns["embeddings"] = self._projection.embed(states, asked.embedding_size)
        return columns

    def _scores(self, states: torch.Tensor, asked: StepRows) -> torch.Tensor:
        """Of every row; a scorer that remembers thoughts looks only at rows that may end one."""
        if self.recorded is not None:
            return self.recorded.score(states)
        if self._memory is None:
            return self._plain_scores(states)
        scores = torch.zeros(len(states), device=states.device)
        if (wanted := asked.thoughts) is not None and wanted.requests:
            row_of = {request: row for row, request in enumerate(asked.row_ids())}
            rows = on_device(np.array([row_of[request] for request in wanted.requests]), states.device)
            thoughts = ThoughtBatch(states[rows], self._no_confidence.expand(len(rows)))
            scores[rows] = self._memory.score(thoughts, wanted.past)
        return scores

    def _plain_scores(self, states: torch.Tensor) -> torch.Tensor:
        """Of a scorer that also needs confidences, the part of the states: the scheduler does the rest."""
        if self._split is not None:
            return self._split.part(states)
        return self.scorer.score(ThoughtBatch(states, self._no_confidence.expand(len(states))))

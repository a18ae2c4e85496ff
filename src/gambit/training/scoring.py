"""Scores every thought of stored traces as a search would have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gambit.scorers.base import HistoryScorer, PastThoughts, Scorer, ThoughtBatch
from gambit.scorers.sequence import SequenceScorer
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset

SCORING_THOUGHTS = 65_536  # padded thoughts scored at once
HISTORY_TRACES = 256  # traces whose histories are held at once
DEVICE_SHARE = 0.6  # of a GPU's free memory that the data may take


@dataclass(frozen=True, slots=True)
class Thoughts:
    """All thoughts on the device where the fit runs, or beside it when they do not fit."""

    states: Tensor  # [thought, feature]
    starts: Tensor  # [trace]
    num_thoughts: Tensor
    is_correct: Tensor
    labels: Tensor  # [thought]: the outcome of its trace, or a value
    problem_of: Tensor
    device: torch.device

    @classmethod
    def of(cls, data: Dataset, device: torch.device) -> Thoughts:
        free = DEVICE_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
        states = data.states.to(device) if data.states.nbytes < free else data.states
        columns = (data.traces.starts, data.traces.num_thoughts, data.traces.is_correct, data.traces.problem_of)
        starts, num_thoughts, is_correct, problem_of = (torch.from_numpy(column).to(device) for column in columns)
        labels = torch.from_numpy(data.thought_labels).to(device)
        return cls(states, starts, num_thoughts, is_correct, labels, problem_of, device)

    def take(self, traces: Tensor) -> Tensor:
        """[trace, thought, feature] of some traces, zeros after their last thought."""
        places, is_real = self._places(traces)
        return self._rows(places) * is_real[..., None]

    def take_labels(self, traces: Tensor) -> Tensor:
        """[trace, thought], zeros after their last thought."""
        places, is_real = self._places(traces)
        return self.labels[places] * is_real

    def _places(self, traces: Tensor) -> tuple[Tensor, Tensor]:
        """[trace, thought] among all thoughts, and which of them exist."""
        longest = int(self.num_thoughts[traces].max())
        offsets = torch.arange(longest, device=self.device)
        is_real = offsets < self.num_thoughts[traces, None]
        return torch.where(is_real, self.starts[traces, None] + offsets, 0), is_real

    def thought_rows(self, traces: Tensor) -> Tensor:
        """[thought, 2]: the trace of each thought of some traces and its place among all thoughts."""
        counts = self.num_thoughts[traces]
        owners = traces.repeat_interleave(counts)
        within = torch.arange(len(owners), device=self.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return torch.stack([owners, self.starts[owners] + within], dim=1)

    def take_thoughts(self, thoughts: Tensor) -> Tensor:
        """[thought, 1, feature]: each thought as a trace of its own."""
        return self._rows(thoughts)[:, None]

    def _rows(self, places: Tensor) -> Tensor:
        return self.states[places.to(self.states.device)].to(self.device).float()


def thought_scores(scorer: Scorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """[thought] scores; thoughts of other traces stay 0."""
    own = scorer.to(device)
    if isinstance(own, SequenceScorer):  # one pass over whole traces gives what thought after thought would
        return network_scores(own.network, Thoughts.of(data, device), traces)
    if isinstance(own, HistoryScorer):
        return _history_scores(own, data, traces, device)
    found = np.zeros(len(data.states))
    for chunk in torch.split(torch.from_numpy(_all_places(data, traces)), SCORING_THOUGHTS):
        with torch.inference_mode():
            found[chunk.numpy()] = own.score(_thoughts(data, chunk, device)).double().cpu().numpy()
    return found


def _all_places(data: Dataset, traces: Ints) -> Ints:
    starts, counts = data.traces.starts, data.traces.num_thoughts
    ranges = [np.arange(starts[trace], starts[trace] + counts[trace]) for trace in traces.tolist()]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def _thoughts(data: Dataset, places: Tensor, device: torch.device) -> ThoughtBatch:
    confidences = torch.from_numpy(data.traces.confidences[places.numpy()])
    return ThoughtBatch(data.states[places].to(device).float(), confidences.to(device))


def _history_scores(scorer: HistoryScorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """Thought after thought, with a slot for each thought of each trace."""
    found = np.zeros(len(data.states))
    for first in range(0, len(traces), HISTORY_TRACES):
        batch = traces[first : first + HISTORY_TRACES]
        starts, counts = data.traces.starts[batch], data.traces.num_thoughts[batch]
        slots = np.cumsum(counts) - counts
        memory = scorer.memory(max(1, int(counts.sum())))
        for thought in range(int(counts.max(initial=0))):
            mine = np.flatnonzero(counts > thought)
            places = torch.from_numpy(starts[mine] + thought)
            past = _past(slots[mine], thought, scorer.max_past, device)
            with torch.inference_mode():
                scores = scorer.score_next(_thoughts(data, places, device), memory, past)
            found[places.numpy()] = scores.double().cpu().numpy()
    return found


def _past(first_slots: Ints, thought: int, max_past: int, device: torch.device) -> PastThoughts:
    first = torch.from_numpy(first_slots).to(device)
    before = torch.arange(max(0, thought - max_past), thought, device=device)
    slots = first[:, None] + before
    is_there = torch.ones(slots.shape, dtype=torch.bool, device=device)
    return PastThoughts(slots, is_there, torch.full_like(first, thought), first + thought)


@torch.inference_mode()
def network_scores(network: nn.Module, thoughts: Thoughts, traces: Ints) -> Floats:
    """[thought] probabilities at the thoughts of some traces, zeros elsewhere."""
    network.eval()
    found = torch.zeros(len(thoughts.states), dtype=torch.float32, device=thoughts.device)
    for batch in _by_length(thoughts, traces):
        probabilities = network(thoughts.take(batch)).sigmoid()
        offsets = torch.arange(probabilities.shape[1], device=thoughts.device)
        is_real = offsets < thoughts.num_thoughts[batch, None]
        found[(thoughts.starts[batch, None] + offsets)[is_real]] = probabilities[is_real]
    return found.double().cpu().numpy()


def _by_length(thoughts: Thoughts, traces: Ints) -> Iterator[Tensor]:
    lengths = thoughts.num_thoughts.cpu().numpy()
    order = sorted((trace for trace in traces.tolist() if lengths[trace] > 0), key=lambda trace: int(lengths[trace]))
    batch: list[int] = []
    for trace in order:
        if batch and (len(batch) + 1) * lengths[trace] > SCORING_THOUGHTS:
            yield torch.tensor(batch, device=thoughts.device)
            batch = []
        batch.append(trace)
    if batch:
        yield torch.tensor(batch, device=thoughts.device)

"""Scores every step of stored traces as a search would have."""

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

SCORING_STEPS = 65_536  # padded steps scored at once
HISTORY_TRACES = 256  # traces whose histories are held at once
DEVICE_SHARE = 0.6  # of a GPU's free memory that the data may take


@dataclass(frozen=True, slots=True)
class Steps:
    """All steps on the device where the fit runs, or beside it when they do not fit."""

    states: Tensor  # [step, feature]
    starts: Tensor  # [trace]
    num_steps: Tensor
    is_correct: Tensor
    labels: Tensor  # [step]: the outcome of its trace, or a value
    problem_of: Tensor
    device: torch.device

    @classmethod
    def of(cls, data: Dataset, device: torch.device) -> Steps:
        free = DEVICE_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
        states = data.states.to(device) if data.states.nbytes < free else data.states
        columns = (data.traces.starts, data.traces.num_steps, data.traces.is_correct, data.traces.problem_of)
        starts, num_steps, is_correct, problem_of = (torch.from_numpy(column).to(device) for column in columns)
        labels = torch.from_numpy(data.step_labels).to(device)
        return cls(states, starts, num_steps, is_correct, labels, problem_of, device)

    def take(self, traces: Tensor) -> Tensor:
        """[trace, step, feature] of some traces, zeros after their last step."""
        places, is_real = self._places(traces)
        return self._rows(places) * is_real[..., None]

    def take_labels(self, traces: Tensor) -> Tensor:
        """[trace, step], zeros after their last step."""
        places, is_real = self._places(traces)
        return self.labels[places] * is_real

    def _places(self, traces: Tensor) -> tuple[Tensor, Tensor]:
        """[trace, step] among all steps, and which of them exist."""
        longest = int(self.num_steps[traces].max())
        offsets = torch.arange(longest, device=self.device)
        is_real = offsets < self.num_steps[traces, None]
        return torch.where(is_real, self.starts[traces, None] + offsets, 0), is_real

    def step_rows(self, traces: Tensor) -> Tensor:
        """[step, 2]: the trace of each step of some traces and its place among all steps."""
        counts = self.num_steps[traces]
        owners = traces.repeat_interleave(counts)
        within = torch.arange(len(owners), device=self.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return torch.stack([owners, self.starts[owners] + within], dim=1)

    def take_steps(self, steps: Tensor) -> Tensor:
        """[step, 1, feature]: each step as a trace of its own."""
        return self._rows(steps)[:, None]

    def _rows(self, places: Tensor) -> Tensor:
        return self.states[places.to(self.states.device)].to(self.device).float()


def step_scores(scorer: Scorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """[step] scores; steps of other traces stay 0."""
    own = scorer.to(device)
    if isinstance(own, SequenceScorer):  # one pass over whole traces gives what step after step would
        return network_scores(own.network, Steps.of(data, device), traces)
    if isinstance(own, HistoryScorer):
        return _history_scores(own, data, traces, device)
    found = np.zeros(len(data.states))
    for chunk in torch.split(torch.from_numpy(_all_places(data, traces)), SCORING_STEPS):
        with torch.inference_mode():
            found[chunk.numpy()] = own.score(_thoughts(data, chunk, device)).double().cpu().numpy()
    return found


def _all_places(data: Dataset, traces: Ints) -> Ints:
    starts, counts = data.traces.starts, data.traces.num_steps
    ranges = [np.arange(starts[trace], starts[trace] + counts[trace]) for trace in traces.tolist()]
    return np.concatenate(ranges) if ranges else np.zeros(0, np.int64)


def _thoughts(data: Dataset, places: Tensor, device: torch.device) -> ThoughtBatch:
    confidences = torch.from_numpy(data.traces.confidences[places.numpy()])
    return ThoughtBatch(data.states[places].to(device).float(), confidences.to(device))


def _history_scores(scorer: HistoryScorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """Step after step, with a slot for each step of each trace."""
    found = np.zeros(len(data.states))
    for first in range(0, len(traces), HISTORY_TRACES):
        batch = traces[first : first + HISTORY_TRACES]
        starts, counts = data.traces.starts[batch], data.traces.num_steps[batch]
        slots = np.cumsum(counts) - counts
        memory = scorer.memory(max(1, int(counts.sum())))
        for step in range(int(counts.max(initial=0))):
            mine = np.flatnonzero(counts > step)
            places = torch.from_numpy(starts[mine] + step)
            past = _past(slots[mine], step, scorer.max_past, device)
            with torch.inference_mode():
                scores = scorer.score_next(_thoughts(data, places, device), memory, past)
            found[places.numpy()] = scores.double().cpu().numpy()
    return found


def _past(first_slots: Ints, step: int, max_past: int, device: torch.device) -> PastThoughts:
    first = torch.from_numpy(first_slots).to(device)
    before = torch.arange(max(0, step - max_past), step, device=device)
    slots = first[:, None] + before
    is_there = torch.ones(slots.shape, dtype=torch.bool, device=device)
    return PastThoughts(slots, is_there, torch.full_like(first, step), first + step)


@torch.inference_mode()
def network_scores(network: nn.Module, steps: Steps, traces: Ints) -> Floats:
    """[step] probabilities at the steps of some traces, zeros elsewhere."""
    network.eval()
    found = torch.zeros(len(steps.states), dtype=torch.float32, device=steps.device)
    for batch in _by_length(steps, traces):
        probabilities = network(steps.take(batch)).sigmoid()
        offsets = torch.arange(probabilities.shape[1], device=steps.device)
        is_real = offsets < steps.num_steps[batch, None]
        found[(steps.starts[batch, None] + offsets)[is_real]] = probabilities[is_real]
    return found.double().cpu().numpy()


def _by_length(steps: Steps, traces: Ints) -> Iterator[Tensor]:
    lengths = steps.num_steps.cpu().numpy()
    order = sorted((trace for trace in traces.tolist() if lengths[trace] > 0), key=lambda trace: int(lengths[trace]))
    batch: list[int] = []
    for trace in order:
        if batch and (len(batch) + 1) * lengths[trace] > SCORING_STEPS:
            yield torch.tensor(batch, device=steps.device)
            batch = []
        batch.append(trace)
    if batch:
        yield torch.tensor(batch, device=steps.device)

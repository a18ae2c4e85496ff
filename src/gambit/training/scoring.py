"""Scores every thought of stored traces as a search would have, calibrates scores, and measures how well they rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from gambit.scorers.base import HistoryScorer, PastThoughts, Scorer, ThoughtBatch
from gambit.scorers.sequence import SequenceScorer
from gambit.stats import Bools, Floats, Interval, Ints, mean_interval, pairs_won, ratio_interval, resamples
from gambit.training.dataset import Dataset, Traces
from gambit.types import Aggregation
from gambit.verifiers.lora import by_length

SCORING_THOUGHTS = 65_536  # padded thoughts scored at once
HISTORY_TRACES = 256  # traces whose histories are held at once
DEVICE_SHARE = 0.6  # of a GPU's free memory that the data may take
NEWTON_STEPS = 25
LONGEST_MOVE = 4.0  # a longer one would land where every chance is 0 or 1 and nothing leads back
SMALLEST_CURVATURE = 1e-9  # added, so that it can be inverted
FLATTEST = 0.05  # logits per deviation of the scores: a flat calibration must not erase the ranking


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
    def of(cls, data: Dataset, device: torch.device) -> Self:
        """Takes the thoughts of a dataset to a device."""
        free = DEVICE_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
        states = data.states.to(device) if data.states.nbytes < free else data.states
        columns = (data.traces.starts, data.traces.num_thoughts, data.traces.is_correct, data.traces.problem_of)
        starts, num_thoughts, is_correct, problem_of = (torch.from_numpy(column).to(device) for column in columns)
        labels = torch.from_numpy(data.thought_labels).to(device)
        return cls(states, starts, num_thoughts, is_correct, labels, problem_of, device)

    def take(self, traces: Tensor) -> Tensor:
        """Returns [trace, thought, feature] of some traces, zeros after their last thought."""
        places, is_real = self._places(traces)
        return self._rows(places) * is_real[..., None]

    def take_labels(self, traces: Tensor) -> Tensor:
        """Returns [trace, thought], the labels of some traces, zeros after their last thought."""
        places, is_real = self._places(traces)
        return self.labels[places] * is_real

    def _places(self, traces: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [trace, thought], the places among all thoughts, and which of them exist."""
        longest = int(self.num_thoughts[traces].max())
        offsets = torch.arange(longest, device=self.device)
        is_real = offsets < self.num_thoughts[traces, None]
        return torch.where(is_real, self.starts[traces, None] + offsets, 0), is_real

    def thought_rows(self, traces: Tensor) -> Tensor:
        """Returns [thought, 2]: the trace of each thought of some traces and its place among all thoughts."""
        counts = self.num_thoughts[traces]
        owners = traces.repeat_interleave(counts)
        within = torch.arange(len(owners), device=self.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return torch.stack([owners, self.starts[owners] + within], dim=1)

    def take_thoughts(self, thoughts: Tensor) -> Tensor:
        """Returns [thought, 1, feature], each thought as a trace of its own."""
        return self._rows(thoughts)[:, None]

    def _rows(self, places: Tensor) -> Tensor:
        return self.states[places.to(self.states.device)].to(self.device).float()


def thought_scores(scorer: Scorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """Returns [thought] scores; thoughts of other traces stay 0."""
    own = scorer.to(device)
    if isinstance(own, SequenceScorer):  # one pass over whole traces has the same result as thought after thought
        return network_scores(own.network, Thoughts.of(data, device), traces)
    if isinstance(own, HistoryScorer):
        return _history_scores(own, data, traces, device)
    found = np.zeros(len(data.states))
    for chunk in torch.split(torch.from_numpy(data.traces.places(traces)), SCORING_THOUGHTS):
        with torch.inference_mode():
            found[chunk.numpy()] = own.score(_thoughts(data, chunk, device)).double().cpu().numpy()
    return found


def _thoughts(data: Dataset, places: Tensor, device: torch.device) -> ThoughtBatch:
    confidences = torch.from_numpy(data.traces.confidences[places.numpy()])
    return ThoughtBatch(data.states[places].to(device).float(), confidences.to(device))


def _history_scores(scorer: HistoryScorer, data: Dataset, traces: Ints, device: torch.device) -> Floats:
    """Scores thought after thought, with a slot for each thought of each trace."""
    found = np.zeros(len(data.states))
    for first in range(0, len(traces), HISTORY_TRACES):
        batch = traces[first : first + HISTORY_TRACES]
        starts, counts = data.traces.starts[batch], data.traces.num_thoughts[batch]
        slots = np.cumsum(counts) - counts
        memory = scorer.memory(max(1, int(counts.sum())))
        for thought in range(int(counts.max(initial=0))):
            mine = np.flatnonzero(counts > thought)
            places = torch.from_numpy(starts[mine] + thought)
            start = torch.from_numpy(slots[mine]).to(device)
            before = start[:, None] + torch.arange(max(0, thought - scorer.max_past), thought, device=device)
            is_there = torch.ones(before.shape, dtype=torch.bool, device=device)
            past = PastThoughts(before, is_there, torch.full_like(start, thought), start + thought)
            with torch.inference_mode():
                scores = scorer.score_next(_thoughts(data, places, device), memory, past)
            found[places.numpy()] = scores.double().cpu().numpy()
    return found


@torch.inference_mode()
def network_scores(network: nn.Module, thoughts: Thoughts, traces: Ints) -> Floats:
    """Returns [thought] probabilities at the thoughts of some traces, zeros elsewhere."""
    network.eval()
    found = torch.zeros(len(thoughts.states), dtype=torch.float32, device=thoughts.device)
    counts = thoughts.num_thoughts.cpu().numpy()[traces]
    seen, lengths = traces[counts > 0], counts[counts > 0].tolist()
    for indices in by_length(lengths, SCORING_THOUGHTS):
        batch = torch.from_numpy(seen[indices]).to(thoughts.device)
        probabilities = network(thoughts.take(batch)).sigmoid()
        offsets = torch.arange(probabilities.shape[1], device=thoughts.device)
        is_real = offsets < thoughts.num_thoughts[batch, None]
        found[(thoughts.starts[batch, None] + offsets)[is_real]] = probabilities[is_real]
    return found.double().cpu().numpy()


def calibrating_line(scores: Tensor, outcomes: Tensor) -> tuple[float, float]:
    """Fits slope and offset: sigmoid(slope × score + offset) is how often a score ends right. The slope is positive.

    It is a logistic regression by Newton's method.
    """
    scores, outcomes = scores.double(), outcomes.double()
    mean, deviation = float(scores.mean()), max(float(scores.std()), 1e-12)
    inputs = torch.stack([(scores - mean) / deviation, torch.ones_like(scores)], dim=1)
    found = torch.zeros(2, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        chance = (inputs @ found).sigmoid()
        curvature = inputs.T @ (inputs * (chance * (1 - chance))[:, None]) + SMALLEST_CURVATURE * torch.eye(2).double()
        move = torch.linalg.solve(curvature, inputs.T @ (outcomes - chance))
        found = found + move * min(1.0, LONGEST_MOVE / max(SMALLEST_CURVATURE, float(move.norm())))
    steepness, middle = found.tolist()
    slope = max(steepness, FLATTEST) / deviation
    return slope, middle - slope * mean


CURVE = tuple(round(0.1 * i, 1) for i in range(1, 11))  # the paper's figure
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # their mean is the one number a scorer is chosen by


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a right and a wrong trace that each problem has, and how many of them the right one wins."""

    wins: Floats  # [problem], a tie is half a win
    num_pairs: Floats

    @property
    def auc(self) -> Floats:
        """Returns [problem]; not a number where a problem has no pair."""
        with np.errstate(invalid="ignore"):
            return self.wins / self.num_pairs


def last_thoughts(num_thoughts: Ints, fraction: float) -> Ints:
    """Returns the index of the last thought when a share of the thoughts is seen; -1 for a trace without any."""
    seen = np.ceil(num_thoughts * fraction - 1e-9).astype(np.int64)
    last: Ints = np.minimum(np.maximum(seen, 1), num_thoughts) - 1
    return last


def trace_scores(
    thought_scores: Floats, starts: Ints, num_thoughts: Ints, fraction: float, aggregation: Aggregation
) -> Floats:
    """Returns each trace's score after a share of its thoughts; a trace without any counts as 0, as in a search."""
    last = last_thoughts(num_thoughts, fraction)
    has_thought = last >= 0
    place = np.where(has_thought, starts + last, 0)
    if len(thought_scores) == 0:
        return np.zeros(len(num_thoughts))
    if aggregation is Aggregation.LAST:
        found = thought_scores[place]
    else:
        sums = np.concatenate([[0.0], np.cumsum(thought_scores, dtype=np.float64)])
        found = (sums[place + 1] - sums[np.where(has_thought, starts, 0)]) / (last + 1).clip(min=1)
    return np.where(has_thought, found, 0.0)


def scores_after(
    share: float, traces: Traces, chosen: Ints, thought_scores: Floats, aggregation: Aggregation
) -> Floats:
    """Returns the score of each chosen trace after a share of its thoughts."""
    return trace_scores(thought_scores, traces.starts[chosen], traces.num_thoughts[chosen], share, aggregation)


def pairs(scores: Floats, is_correct: Bools, problem_of: Ints, num_problems: int) -> Pairs:
    """Compares every right trace with every wrong one of the same problem."""
    found = np.zeros((2, num_problems))
    order = np.argsort(problem_of, kind="stable")
    bounds = np.searchsorted(problem_of[order], np.arange(num_problems + 1))
    for problem in range(num_problems):
        members = order[bounds[problem] : bounds[problem + 1]]
        right = is_correct[members].astype(np.float64)
        found[:, problem] = pairs_won(scores[members], right, 1 - right)
    return Pairs(*found)


def pairs_in(data: Dataset, traces: Ints, scores: Floats) -> Pairs:
    """Compares right and wrong traces of each problem of a dataset, by a score of each of these traces."""
    known = data.traces
    return pairs(scores, known.is_correct[traces], known.problem_of[traces], len(data.problems))


def mean_over_problems(values: Floats) -> Interval:
    """Returns the mean over the problems that have a value. One problem alone has no interval."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return Interval(float(known.mean()) if len(known) else math.nan, math.nan, math.nan)
    return mean_interval(known, resamples(len(known)))


def share_of_pairs(found: Pairs) -> Interval:
    """Returns the share of all pairs that the right trace wins. One problem alone has no interval."""
    has_pairs = found.num_pairs > 0
    wins, num_pairs = found.wins[has_pairs], found.num_pairs[has_pairs]
    interval = ratio_interval(wins, num_pairs, resamples(len(wins))) if len(wins) > 1 else None
    if interval is not None:
        return interval
    return Interval(float(wins[0] / num_pairs[0]) if len(wins) else math.nan, math.nan, math.nan)


def mean_auc(per_fraction: Sequence[Pairs]) -> Floats:
    """Returns [problem], the mean AUC over shares of the thoughts."""
    found: Floats = np.mean([found.auc for found in per_fraction], axis=0)
    return found


def clearly_better(aucs: Floats, others: Floats) -> bool:
    """Returns whether AUCs of the same problems are higher by more than the standard error: less is often luck."""
    gains = aucs - others
    gains = gains[np.isfinite(gains)]
    error = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return bool(gains.mean() > error)

"""A scorer made worse on purpose: noise on the logit that is a function of the state, as an ordinary checkpoint.

The same prefix always gets the same error, and every branch inherits it: what a bad scorer does to a search, and what
noise drawn anew at every call would not. The noise is a sum of triangle waves along random directions, which a
two-layer network can hold: the worse scorer is the old one with a wider hidden layer, and runs wherever that one runs.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from gambit.scorers.mlp import MlpScorer
from gambit.stats import Floats, Ints
from gambit.training.dataset import Dataset
from gambit.training.scoring import pairs, thought_scores, trace_scores

DIRECTIONS = 16
KNOTS = 24  # of each wave
REACH = 4.0  # a wave spans so many standard deviations to each side
LEAST_VARIANCE = 0.01  # of the largest direction's: below it there is rounding rather than signal
MOST_NOISE = 64.0  # standard deviations of the logit; little is left of any scorer long before
SEARCH_STEPS = 14


def with_noise(scorer: MlpScorer, states: torch.Tensor, noise: float, seed: int = 0) -> MlpScorer:
    """`noise`: its standard deviation on the logit; `states`: a sample of those that the scorer reads."""
    w1, b1, w2, b2 = (tensor.double() for tensor in scorer.weights)
    directions, centre = _directions(states.double(), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    spacing = 2 * REACH / KNOTS
    starts = -REACH - spacing * torch.rand(DIRECTIONS, 1, generator=generator).double()
    knots = starts + spacing * torch.arange(KNOTS + 1).double()  # [direction, knot]
    more_w1 = directions.repeat_interleave(KNOTS + 1, dim=0)
    more_b1 = -(knots + (directions @ centre)[:, None]).reshape(-1)
    slopes = torch.full((KNOTS + 1,), 2.0).double()
    slopes[1::2] = -2.0
    slopes[0] = 1.0
    slopes[-1] = 1.0 if KNOTS % 2 == 0 else -1.0  # flat beyond the last knot
    wave = slopes.repeat(DIRECTIONS)
    added = torch.relu(states.double() @ more_w1.T + more_b1) @ wave
    unit = noise / added.std()
    weights = (
        torch.cat([w1, more_w1]),
        torch.cat([b1, more_b1]),
        torch.cat([w2, (unit * wave)[None]], dim=1),
        b2 - unit * added.mean(),
    )
    return MlpScorer(scorer.info, tuple(tensor.float().contiguous() for tensor in weights))  # type: ignore[arg-type]


def _directions(states: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones of variance 1, in the space where all directions vary alike: [direction, feature], and the mean."""
    centre = states.mean(dim=0)
    values, vectors = torch.linalg.eigh(torch.cov((states - centre).T))
    whitening = vectors / values.clamp(min=LEAST_VARIANCE * float(values.max())).sqrt()
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(DIRECTIONS, len(values), generator=generator).double() @ whitening.T
    spread = ((states - centre) @ directions.T).std(dim=0)
    return directions / spread[:, None], centre


def auc_at(scorer: MlpScorer, data: Dataset, traces: Ints, share: float) -> float:
    """Within-problem AUC after a share of the thoughts."""
    known = data.traces
    thoughts = thought_scores(scorer, data, traces, torch.device("cpu"))
    scores = trace_scores(thoughts, known.starts[traces], known.num_thoughts[traces], share, scorer.info.aggregation)
    return _mean(pairs(scores, known.is_correct[traces], known.problem_of[traces], len(data.problems)).auc)


def _mean(auc: Floats) -> float:
    found = [value for value in auc.tolist() if not math.isnan(value)]
    return sum(found) / len(found)


def noise_for(scorer: MlpScorer, data: Dataset, target: float, share: float = 0.5) -> float:
    """Returns the noise that lowers the AUC to a target; 0 if it is no higher without."""
    traces, states = data.all_traces(), data.states.float()
    low, high = 0.0, MOST_NOISE
    if auc_at(scorer, data, traces, share) <= target:
        return 0.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        is_above = auc_at(with_noise(scorer, states, middle), data, traces, share) > target
        low, high = (middle, high) if is_above else (low, middle)
    return (low + high) / 2


def trusted_as(scorer: MlpScorer, other: MlpScorer) -> MlpScorer:
    """Returns a scorer with the other one's figures, which is trusted wrongly."""
    return MlpScorer(dataclasses.replace(scorer.info, trust=other.info.trust), scorer.weights)

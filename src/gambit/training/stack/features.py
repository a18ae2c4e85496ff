"""What each part of a stack says about traces after a share of their thoughts, from what is known by then.

The traces of a problem run in lockstep, one token each at a step of decoding. A trace that has written t tokens can be
compared with what the others had written by step t: their latest thoughts, and the answers of those that had ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gambit.core.types import Aggregation
from gambit.results.vote import pools_of
from gambit.scorers.base import Scorer
from gambit.scorers.verifier.folder import VerifierInfo
from gambit.text.answers import Grader
from gambit.training.dataset import Dataset
from gambit.training.networks import Spread
from gambit.training.ranking import Floats, Ints, last_steps, trace_scores
from gambit.training.scoring import step_scores
from gambit.training.verifier.reading import ReadTraces

NEAREST = 3
SMALLEST_CHANCE = 1e-4
ByShare = Mapping[float, Floats]  # [trace] each


def state_feature(
    scorer: Scorer, data: Dataset, traces: Ints, shares: Sequence[float], device: torch.device
) -> ByShare:
    """Its score of a trace, as a logit where it is a probability."""
    scores, known = step_scores(scorer, data, traces, device), data.traces
    starts, counts = known.starts[traces], known.num_steps[traces]
    found = {share: trace_scores(scores, starts, counts, share, scorer.info.aggregation) for share in shares}
    return {share: _logit(each) for share, each in found.items()} if scorer.info.is_probability else found


def _logit(chances: Floats) -> Floats:
    inside = np.clip(chances, SMALLEST_CHANCE, 1 - SMALLEST_CHANCE)
    found: Floats = np.log(inside / (1 - inside))
    return found


def confidence_feature(data: Dataset, traces: Ints, shares: Sequence[float]) -> ByShare:
    """The mean over the thoughts so far."""
    known = data.traces
    starts, counts = known.starts[traces], known.num_steps[traces]
    confidences = known.confidences.astype(np.float64)
    return {share: trace_scores(confidences, starts, counts, share, Aggregation.MEAN) for share in shares}


def verifier_feature(read: ReadTraces, info: VerifierInfo, traces: Ints, shares: Sequence[float]) -> ByShare:
    """Its calibrated logit."""
    scale = info.calibration
    return {share: scale.slope * read.logits(traces, share, info.aggregation) + scale.offset for share in shares}


def closeness_feature(data: Dataset, traces: Ints, shares: Sequence[float], spread: Spread) -> ByShare:
    """How near a trace's latest thought is to the latest thoughts of others: the mean cosine of the three nearest."""
    found = {share: np.zeros(len(traces)) for share in shares}
    for mine in members_by_problem(data, traces):
        cosines, first = _cosines(data, traces[mine], spread)
        for share in shares:
            found[share][mine] = _closeness(data, traces[mine], share, cosines, first)
    return found


def members_by_problem(data: Dataset, traces: Ints) -> Iterator[Ints]:
    """Places among `traces`, those of one problem together."""
    problem_of = data.traces.problem_of[traces]
    yield from (np.flatnonzero(problem_of == problem) for problem in np.unique(problem_of))


def _cosines(data: Dataset, traces: Ints, spread: Spread) -> tuple[Floats, Ints]:
    """[step, step] between all thoughts of some traces, and where the thoughts of each begin."""
    known = data.traces
    starts, counts = known.starts[traces], known.num_steps[traces]
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    states: Tensor = spread.normalised(data.states[torch.from_numpy(places)].float())
    unit = torch.nn.functional.normalize(states, dim=-1)
    return (unit @ unit.T).double().numpy(), np.cumsum(counts) - counts


def _closeness(data: Dataset, traces: Ints, share: float, cosines: Floats, first: Ints) -> Floats:
    """[trace]; 0 for a trace without a thought, or that is alone."""
    known = data.traces
    now = moments(data, traces, share)
    own = last_steps(known.num_steps[traces], share)
    found = np.zeros(len(traces))
    for i in np.flatnonzero(own >= 0):
        latest = np.array([_thoughts_by(data, trace, now[i]) for trace in traces.tolist()]) - 1
        others = np.flatnonzero((latest >= 0) & (np.arange(len(traces)) != i))
        if len(others):
            near = np.sort(cosines[first[i] + own[i], first[others] + latest[others]])
            found[i] = near[-NEAREST:].mean()
    return found


def moments(data: Dataset, traces: Ints, share: float) -> Ints:
    """[trace]: the step of decoding at which it has had a share of its thoughts; all of them: at which it ends."""
    known = data.traces
    last = last_steps(known.num_steps[traces], share)
    if share >= 1:
        return known.num_tokens[traces]
    places = np.where(last >= 0, known.starts[traces] + last, 0)
    ends = known.step_ends[places] if len(known.step_ends) else np.zeros(len(traces), np.int64)
    return np.where(last >= 0, ends, known.num_tokens[traces])


def _thoughts_by(data: Dataset, trace: int, step: int) -> int:
    """How many thoughts a trace had finished by a step of decoding."""
    known = data.traces
    ends = known.step_ends[known.starts[trace] : known.starts[trace] + known.num_steps[trace]]
    return int(np.searchsorted(ends, step, side="right"))


def agreement_feature(data: Dataset, traces: Ints, shares: Sequence[float], answers: Ints) -> ByShare:
    """Of a complete trace: log odds that another one that had ended by then gave the same answer; 0 while it runs."""
    complete = np.zeros(len(traces))
    for mine in members_by_problem(data, traces):
        complete[mine] = _agreement(data.traces.num_tokens[traces[mine]], answers[mine])
    return {share: complete if share >= 1 else np.zeros(len(traces)) for share in shares}


def _agreement(ended: Ints, answers: Ints) -> Floats:
    found = np.zeros(len(answers))
    for i in range(len(answers)):
        is_known = (ended <= ended[i]) & (np.arange(len(answers)) != i)
        same = int((is_known & (answers == answers[i]) & (answers >= 0)).sum())
        found[i] = np.log((same + 0.5) / (int(is_known.sum()) - same + 0.5))
    return found


def support_feature(data: Dataset, traces: Ints, shares: Sequence[float], spread: Spread, answers: Ints) -> ByShare:
    """Whether a trace is like those that ended with a frequent answer: how frequent the answers of the three are that
    have been nearest to where it is now, less how frequent answers are on average; 0 as long as none has ended."""
    found = {share: np.zeros(len(traces)) for share in shares}
    for mine in members_by_problem(data, traces):
        cosines, first = _cosines(data, traces[mine], spread)
        for share in shares:
            found[share][mine] = _support(data, traces[mine], share, cosines, first, answers[mine])
    return found


def _support(data: Dataset, traces: Ints, share: float, cosines: Floats, first: Ints, answers: Ints) -> Floats:
    known = data.traces
    counts, ended = known.num_steps[traces], known.num_tokens[traces]
    now, own = moments(data, traces, share), last_steps(counts, share)
    found = np.zeros(len(traces))
    for i in np.flatnonzero(own >= 0):
        others = np.flatnonzero((ended <= now[i]) & (answers >= 0) & (counts > 0) & (np.arange(len(traces)) != i))
        if not len(others):
            continue
        frequency = (answers[others][:, None] == answers[others]).mean(axis=1)
        row = cosines[first[i] + own[i]]
        nearness = np.array([row[first[j] : first[j] + counts[j]].max() for j in others.tolist()])
        found[i] = frequency[np.argsort(nearness)[-NEAREST:]].mean() - frequency.mean()
    return found


def answer_classes(data: Dataset, traces: Ints) -> Ints:
    """[trace]: equal answers of a problem have equal numbers; -1 for none."""
    found = np.full(len(traces), -1)
    with Grader(comparison_seconds=1.0, vote_seconds=5.0) as grader:  # a hostile answer must not hold up thousands
        for mine in members_by_problem(data, traces):
            found[mine] = _classes(data, traces[mine], grader)
    return found


def _classes(data: Dataset, traces: Ints, grader: Grader) -> Ints:
    problem = int(data.traces.problem_of[traces[0]])
    first = int(np.searchsorted(data.traces.problem_of, problem))
    answers = [data.problems[problem].traces[trace - first].answer for trace in traces.tolist()]
    pools = pools_of([answer for answer in answers if answer], grader.for_vote())
    number = {answer: i for i, pool in enumerate(pools) for answer in pool}
    return np.array([number[answer] if answer else -1 for answer in answers], np.int64)

"""What each part of a stack says about traces after a share of their thoughts, from what is known by then.

The traces of a problem are taken to run in lockstep, one token each at a step of decoding, as in a search without
branches: what ends in a step is told to the same code that follows a search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from gambit.answers import Grader
from gambit.scorers.base import Scorer
from gambit.scorers.stack import logit_of
from gambit.scorers.stack_pool import PoolFeatures, Vector, mean_confidences
from gambit.scorers.stack_states import StateVectors
from gambit.scorers.verifier.folder import VerifierInfo
from gambit.training.dataset import Dataset
from gambit.training.ranking import Floats, Ints, last_steps, trace_scores
from gambit.training.scoring import step_scores
from gambit.training.verifier.reading import ReadTraces
from gambit.types import StatePosition

REPORT_LAG = {StatePosition.BEFORE: 0, StatePosition.BOUNDARY: 1}  # steps until an engine has that state of a thought
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
    return np.array([logit_of(chance) for chance in chances.tolist()])


def confidence_feature(data: Dataset, traces: Ints, shares: Sequence[float]) -> ByShare:
    """The mean over the tokens of the thoughts so far: it ranks better than that over thoughts, by 0.01 to 0.02."""
    known = data.traces
    found = {share: np.zeros(len(traces)) for share in shares}
    for i, trace in enumerate(traces.tolist()):
        start, count = known.starts[trace], known.num_steps[trace]
        running = mean_confidences(known.confidences[start : start + count], known.step_ends[start : start + count])
        for share in shares:
            last = int(last_steps(np.array([count]), share)[0])
            found[share][i] = running[last] if last >= 0 else 0.0
    return found


def verifier_feature(read: ReadTraces, info: VerifierInfo, traces: Ints, shares: Sequence[float]) -> ByShare:
    """Its calibrated logit."""
    return {share: _logit(read.chances(traces, share, info.aggregation, info.calibration)) for share in shares}


def members_by_problem(data: Dataset, traces: Ints) -> Iterator[Ints]:
    """Places among `traces`, those of one problem together."""
    problem_of = data.traces.problem_of[traces]
    yield from (np.flatnonzero(problem_of == problem) for problem in np.unique(problem_of))


def pool_features(
    names: Sequence[str], data: Dataset, traces: Ints, shares: Sequence[float], vectors: StateVectors | None
) -> Mapping[str, ByShare]:
    """Closeness, support and agreement; `vectors` for the first two, of the states that `data` then holds."""
    found = {name: {share: np.zeros(len(traces)) for share in shares} for name in names}
    lag = REPORT_LAG[data.position]
    with Grader(comparison_seconds=1.0, vote_seconds=5.0) as grader:  # a hostile answer must not hold up thousands
        for mine in members_by_problem(data, traces):
            replay = _Replay(names, data, traces[mine], vectors, PoolFeatures(grader.for_vote()), lag)
            replay.run()
            for name in names:
                for share in shares:
                    found[name][share][mine] = replay.after(name, share)
    return found


class _Replay:
    """The traces of one problem, told as a search would be told of them."""

    def __init__(
        self,
        names: Sequence[str],
        data: Dataset,
        traces: Ints,
        vectors: StateVectors | None,
        pool: PoolFeatures,
        lag: int,
    ) -> None:
        known = data.traces
        self._pool, self._counts = pool, known.num_steps[traces]
        self._asked = {name: getattr(pool, name) for name in names}
        self._answers = _answers_of(data, traces)
        self._vectors = [_vectors_of(data, trace, vectors) for trace in traces.tolist()]
        self._thoughts: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # trace, number, tokens
        self._ends: defaultdict[int, list[int]] = defaultdict(list)
        for i, trace in enumerate(traces.tolist()):
            pool.join(i)
            last, start = int(known.num_tokens[trace]), known.starts[trace]
            self._ends[last].append(i)
            for number, end in enumerate(known.step_ends[start : start + known.num_steps[trace]].tolist()):
                self._thoughts[min(end + lag, last)].append((i, number, end))
        self._running = {name: [np.zeros(count) for count in self._counts] for name in names}
        self._complete = {name: np.zeros(len(traces)) for name in names}

    def run(self) -> None:
        for step in sorted(self._thoughts.keys() | self._ends.keys()):
            for trace, number, end in self._thoughts[step]:
                self._pool.thought(trace, end, self._vectors[trace][number])
            for trace, number, _ in self._thoughts[step]:
                for name, feature in self._asked.items():
                    self._running[name][trace][number] = feature(trace)
            for trace in self._ends[step]:
                self._pool.end(trace, self._answers[trace])
            for trace in self._ends[step]:
                for name, feature in self._asked.items():
                    self._complete[name][trace] = feature(trace)

    def after(self, name: str, share: float) -> Floats:
        """[trace] after a share of its thoughts, 0 without one; all of them means at its end."""
        if share >= 1:
            return self._complete[name]
        last = last_steps(self._counts, share)
        found = [0.0 if at < 0 else said[at] for said, at in zip(self._running[name], last.tolist(), strict=True)]
        return np.array(found)


def _vectors_of(data: Dataset, trace: int, vectors: StateVectors | None) -> Sequence[Vector | None]:
    start, count = int(data.traces.starts[trace]), int(data.traces.num_steps[trace])
    if vectors is None:
        return [None] * count
    return list(vectors.of(data.states[start : start + count]).numpy())


def _answers_of(data: Dataset, traces: Ints) -> list[str | None]:
    problem = int(data.traces.problem_of[traces[0]])
    first = int(np.searchsorted(data.traces.problem_of, problem))
    return [data.problems[problem].traces[trace - first].answer for trace in traces.tolist()]

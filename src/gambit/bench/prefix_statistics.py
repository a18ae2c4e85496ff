"""What prefixes are worth: variance they decide, AUC of judges, votes of their continuations, from rollouts alone.

Every figure is a mean (or a ratio of sums) over problems with a bootstrap interval over problems. A judge that ranks
prefixes by rollouts never sees the rollouts it is judged or continued by: they are split into halves, many times over,
and each half takes both parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gambit.bench import statistics as st
from gambit.bench.statistics import Floats, Interval

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

RIGHT, NO_ANSWER = 0, -1  # classes of answers; others count up from 1
NUM_SPLITS = 16  # of the rollouts into halves, each used in both directions
NUM_DRAWS = 4  # of tie-breaks, random choices and noise, per split and direction
NOISES = (0.0, 0.1, 0.2, 0.3, 0.45, 0.65, 1.0, 1.6, 3.0, 100.0)  # deviations added to a judge's share of right rollouts
JUDGE = "rollouts"


@dataclass(frozen=True, slots=True)
class CutProblem:
    """The prefixes of one problem at one cut."""

    problem: str
    shares: Floats  # [prefix]: where the cut lies, as a share of the trace's tokens
    is_right: Bools  # [prefix]: whether the trace it was cut from was right
    original: Ints  # [prefix]: class of that trace's answer
    classes: Ints  # [prefix, rollout] of answers
    scores: Mapping[str, Floats]  # of each scorer, [prefix]

    @property
    def rollouts(self) -> Bools:
        found: Bools = self.classes == RIGHT
        return found


@dataclass(frozen=True, slots=True)
class JudgeSummary:
    """A judge at one cut: the rollouts themselves, or a scorer."""

    name: str
    auc: Interval | None  # against the outcomes of (other) rollouts
    original_auc: Interval | None  # against the outcomes of the traces that were cut; rollouts judge with all they have
    one_right: Interval  # share of right continuations of its best prefixes
    vote: Interval  # of the continuations of its best prefixes
    gain: Interval  # of that vote over random prefixes


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The judge of rollouts with noise added to its ranking."""

    noise: float
    auc: Interval | None
    vote: Interval
    gain: Interval


@dataclass(frozen=True, slots=True)
class CutSummary:
    """All figures of one cut."""

    fraction: float
    mean_share: float  # where the nearest thoughts were
    num_problems: int
    num_prefixes: int
    decided: Interval | None  # share of the outcome's variance within a problem
    one_right: Interval  # of continuations of all prefixes
    original_vote: Interval  # of the traces that were cut
    random_vote: Interval  # of the continuations of random prefixes
    judges: tuple[JudgeSummary, ...]  # the rollouts first
    curve: tuple[CurvePoint, ...]
    points_per_tenth: Interval | None  # of the vote, for each 0.1 of AUC along the curve


def summarise_cut(fraction: float, problems: Sequence[CutProblem], keep: int) -> CutSummary:
    """Of problems with more than `keep` prefixes each, all with the same number of rollouts."""
    draws = st.resamples(len(problems))
    tables = [_Table.of(problem, keep) for problem in problems]
    random_votes = _column(table.random_vote for table in tables)
    parts = np.array([variance_parts(problem.rollouts) for problem in problems])
    curve = [[table.judged(table.noisy(noise)) for table in tables] for noise in NOISES]
    return CutSummary(
        fraction=fraction,
        mean_share=float(np.mean(np.concatenate([problem.shares for problem in problems]))),
        num_problems=len(problems),
        num_prefixes=sum(len(problem.shares) for problem in problems),
        decided=st.ratio_interval(parts[:, 0], parts[:, 1], draws),
        one_right=st.share_interval(_column(problem.rollouts.mean() for problem in problems), draws),
        original_vote=st.share_interval(_column(_original_vote(problem) for problem in problems), draws),
        random_vote=st.share_interval(random_votes, draws),
        judges=tuple(_judges(tables, random_votes, draws)),
        curve=tuple(_point(noise, found, random_votes, draws) for noise, found in zip(NOISES, curve, strict=True)),
        points_per_tenth=_slope(curve, draws),
    )


# -- variance ----------------------------------------------------------------------------------------------------


def variance_parts(rollouts: Bools) -> tuple[float, float]:
    """Of one problem, without bias: the variance between the values of its prefixes, and the outcome's whole variance.

    The shares of right rollouts vary more than the values they estimate, by the mean of v (1 − v) / n, which
    the rollouts themselves tell without bias.
    """
    count = rollouts.shape[1]
    shares = rollouts.mean(1)
    inside = float((shares * (1 - shares)).mean()) * count / (count - 1)
    between = float(shares.var(ddof=1)) - inside / count
    return between, between + inside


# -- ranking -----------------------------------------------------------------------------------------------------


def pairs_won(scores: Floats, right: Floats, wrong: Floats) -> tuple[float, float]:
    """Pairs of a right and a wrong outcome of two prefixes, and how many of them the scores order rightly.

    All are [ranking, prefix]: scores, and numbers of right and wrong outcomes. A tie is half a pair won. Two outcomes
    of one prefix are no pair.
    """
    ahead = np.sign(scores[:, :, None] - scores[:, None, :]) / 2 + 0.5
    pairs = right[:, :, None] * wrong[:, None, :] * ~np.eye(scores.shape[1], dtype=bool)
    return float((ahead * pairs).sum()), float(pairs.sum())


def _auc(scores: Floats, right: Floats, wrong: Floats) -> float:
    won, total = pairs_won(scores, right, wrong)
    return won / total if total else math.nan


# -- votes -------------------------------------------------------------------------------------------------------


def vote_right(counts: Floats) -> Floats:
    """[vote]: whether the right answer wins, its share of a tie, from [vote, class] numbers of votes."""
    most = counts.max(axis=1)
    tied = (counts == most[:, None]).sum(axis=1)
    return np.where((counts[:, RIGHT] == most) & (most > 0), 1.0 / tied, 0.0)


def class_counts(classes: Ints, num_classes: int) -> Floats:
    """[…, class] numbers of answers along the last axis; those without an answer do not vote."""
    counts: Floats = (classes[..., None] == np.arange(num_classes)).sum(axis=-2).astype(np.float64)
    return counts


def _original_vote(problem: CutProblem) -> float:
    counts = class_counts(problem.original, int(problem.original.max(initial=0)) + 1)
    return float(vote_right(counts[None])[0])


@dataclass(frozen=True, slots=True)
class Judged:
    """What one way to rank the prefixes of a problem comes to."""

    auc: float
    one_right: float
    vote: float


@dataclass(frozen=True, slots=True)
class _Table:
    """A problem with its rollouts split into halves; there is a ranking for each split, direction and draw."""

    problem: CutProblem
    keep: int
    judged_by: Floats  # [ranking, prefix]: share of right rollouts in the half that judges
    right: Floats  # [ranking, prefix]: right rollouts in the other half
    votes: Floats  # [ranking, prefix, class]: answers in the other half
    jitter: Floats  # [ranking, prefix]: breaks ties
    noise: Floats  # [ranking, prefix]
    half: int  # rollouts that continue

    @classmethod
    def of(cls, problem: CutProblem, keep: int) -> _Table:
        rng = np.random.default_rng(0)
        num_prefixes, count = problem.classes.shape
        judging, going_on = _halves(count, rng)
        num_classes = int(problem.classes.max(initial=0)) + 1
        votes = class_counts(problem.classes[:, going_on].swapaxes(0, 1), num_classes)
        shape = (len(judging), num_prefixes)
        return cls(
            problem=problem,
            keep=keep,
            judged_by=problem.rollouts[:, judging].mean(-1).T,
            right=votes[..., RIGHT],
            votes=votes,
            jitter=rng.random(shape),
            noise=rng.standard_normal(shape),
            half=going_on.shape[1],
        )

    def noisy(self, noise: float) -> Floats:
        """The judge's ranking with noise of this deviation."""
        return self.judged_by + noise * self.noise

    def judged(self, scores: Floats) -> Judged:
        """Continue the best prefixes by [ranking, prefix] scores."""
        order = np.lexsort((self.jitter, -scores), axis=1)[:, : self.keep]
        auc = _auc(scores, self.right, self.half - self.right)
        return Judged(auc, float(self._chosen(self.right, order).mean()) / self.half, self._vote(order))

    def scored(self, name: str) -> Judged:
        """By a scorer, which may be judged by all rollouts."""
        scores = self.problem.scores[name][None]
        right = self.problem.rollouts.sum(1)[None].astype(np.float64)
        found = self.judged(np.broadcast_to(scores, self.jitter.shape))
        return Judged(_auc(scores, right, self.problem.classes.shape[1] - right), found.one_right, found.vote)

    @property
    def random_vote(self) -> float:
        return self._vote(np.argsort(self.jitter, axis=1)[:, : self.keep])

    def original_auc(self, name: str) -> float:
        problem = self.problem
        scores = problem.rollouts.mean(1) if name == JUDGE else problem.scores[name]
        right = problem.is_right[None].astype(np.float64)
        return _auc(scores[None], right, 1 - right)

    def _vote(self, order: Ints) -> float:
        return float(vote_right(self._chosen(self.votes, order).sum(1)).mean())

    @staticmethod
    def _chosen(values: Floats, order: Ints) -> Floats:
        chosen: Floats = values[np.arange(len(order))[:, None], order]
        return chosen


def _halves(count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """[ranking, half] numbers of rollouts that judge and that go on; of an odd count one is left out, by chance."""
    half = count // 2
    orders = [rng.permutation(count) for _ in range(NUM_SPLITS)]
    both = [(order[:half], order[half : 2 * half]) for order in orders]
    both += [(second, first) for first, second in both]
    judging, going_on = (np.repeat(np.array(part), NUM_DRAWS, axis=0) for part in zip(*both, strict=True))
    return judging, going_on


# -- over problems -----------------------------------------------------------------------------------------------


def _judges(tables: Sequence[_Table], random_votes: Floats, draws: st.Indices) -> list[JudgeSummary]:
    names = [JUDGE, *tables[0].problem.scores]
    found = {name: [t.judged(t.judged_by) if name == JUDGE else t.scored(name) for t in tables] for name in names}
    return [
        JudgeSummary(
            name=name,
            auc=_known_mean([each.auc for each in found[name]]),
            original_auc=_known_mean([table.original_auc(name) for table in tables]),
            one_right=st.share_interval(_column(each.one_right for each in found[name]), draws),
            vote=st.share_interval(votes := _column(each.vote for each in found[name]), draws),
            gain=st.mean_interval(votes - random_votes, draws),
        )
        for name in names
    ]


def _point(noise: float, found: Sequence[Judged], random_votes: Floats, draws: st.Indices) -> CurvePoint:
    votes = _column(each.vote for each in found)
    auc = _known_mean([each.auc for each in found])
    return CurvePoint(noise, auc, st.share_interval(votes, draws), st.mean_interval(votes - random_votes, draws))


def _known_mean(values: Sequence[float]) -> Interval | None:
    """Over the problems that have a value: one whose outcomes are all alike has no pair to rank."""
    known = np.array([value for value in values if not math.isnan(value)])
    return st.mean_interval(known, st.resamples(len(known))) if len(known) else None


def _slope(curve: Sequence[Sequence[Judged]], draws: st.Indices) -> Interval | None:
    """Of the line through the curve's points, fitted anew to each resample of the problems; votes are shares."""
    aucs = np.array([[each.auc for each in found] for found in curve])  # [noise, problem]
    votes = np.array([[each.vote for each in found] for found in curve])
    known = ~np.isnan(aucs).any(axis=0)
    if known.sum() < 2:
        return None
    aucs, votes = aucs[:, known], votes[:, known]
    draws = draws[:1000] if known.all() else st.resamples(int(known.sum()))[:1000]
    slopes = _slopes(aucs[:, draws].mean(-1), votes[:, draws].mean(-1))
    low, high = np.quantile(slopes, [(1 - st.LEVEL) / 2, (1 + st.LEVEL) / 2])
    value = float(_slopes(aucs.mean(1)[:, None], votes.mean(1)[:, None])[0])
    return Interval(value / 10, float(low) / 10, float(high) / 10)


def _slopes(x: Floats, y: Floats) -> Floats:
    """Of [point, line] each."""
    x, y = x - x.mean(0), y - y.mean(0)
    found: Floats = (x * y).sum(0) / np.maximum((x * x).sum(0), 1e-12)
    return found


def _column(values: Iterable[float]) -> Floats:
    return np.array(list(values), dtype=np.float64)

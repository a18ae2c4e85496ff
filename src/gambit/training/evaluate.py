"""Judges scorers on a collection: ranking by share of thoughts seen, calibration, baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gambit.config.trust import (
    FEWEST_TRACES,
    THOUGHTS,
    ScorerTrust,
    spread_of,
)
from gambit.config.trust import SHARES as TRUST_SHARES
from gambit.errors import UserError
from gambit.scorers.base import Scorer
from gambit.stats import FEWEST_PROBLEMS, Floats, Interval, Ints, all_log_odds, supports_claim
from gambit.training.dataset import Dataset
from gambit.training.ranking import (
    CURVE,
    QUARTERS,
    Pairs,
    last_thoughts,
    mean_auc,
    mean_over_problems,
    pairs,
    share_of_pairs,
    trace_scores,
)
from gambit.training.scoring import thought_scores
from gambit.types import Aggregation

NUM_BINS = 10
SHARES = tuple(sorted({*CURVE, *QUARTERS}))


@dataclass(frozen=True, slots=True)
class Bin:
    """Traces whose score fell between two values."""

    low: float
    high: float
    count: int
    mean_score: float
    share_right: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether a score of 0.7 means that 70 % are right, at a share of the thoughts."""

    share: float
    error: float  # expected calibration error: the mean gap, weighted by the traces in each bin
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class ScorerRanking:
    """One scorer or baseline. AUC is averaged over problems, pairwise accuracy is pooled over all pairs."""

    name: str
    is_baseline: bool
    auc: Mapping[float, Interval]
    pairwise: Mapping[float, Interval]
    mean_auc: Interval  # over 25, 50, 75 and 100 % of the thoughts
    calibration: tuple[Calibration, ...] = ()
    spread: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ScorerComparison:
    """The difference of two mean AUCs, problem by problem."""

    scorer: str
    other: str
    gain: Interval
    num_problems: int  # with right and wrong traces

    @property
    def verdict(self) -> str:
        if not supports_claim(self.gain.low, self.gain.high, self.num_problems):
            return "is not shown to beat"
        return "beats" if self.gain.value > 0 else "is worse than"


@dataclass(frozen=True, slots=True)
class ScorerReport:
    model: str
    source: str
    num_problems: int
    num_mixed: int  # the ones that count: with right and wrong traces
    num_traces: int
    share_right: float
    median_tokens: float  # of a trace
    rankings: tuple[ScorerRanking, ...]
    comparisons: tuple[ScorerComparison, ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    ranking: ScorerRanking
    per_problem: Floats  # mean AUC of each problem


@dataclass(frozen=True, slots=True)
class Rated:
    """What a judge made of the traces, in their order, by share of their thoughts."""

    by_share: Mapping[float, Floats]
    is_probability: bool = True
    spread: tuple[float | None, ...] = ()  # as `ScorerTrust` has it


def evaluate(scorers: Mapping[str, tuple[Scorer, Dataset]], traces: Ints, device: torch.device) -> ScorerReport:
    """Compares scorers by name, each with the collection at its own state position."""
    data = next(iter(scorers.values()))[1]
    rated = {name: rated_by(scorer, own, traces, device) for name, (scorer, own) in scorers.items()}
    return compare(rated, data, traces)


def compare(rated: Mapping[str, Rated], data: Dataset, traces: Ints) -> ScorerReport:
    """Compares scorers and verifiers by name with each other and with what needs no training."""
    if not len(traces):
        raise UserError("no problem is left to judge by: collect more, or choose another --part")
    measured = {name: _judge_ranking(name, each, data, traces) for name, each in rated.items()}
    baselines = _baselines(data, traces)
    everything = [*measured.values(), *baselines]
    return ScorerReport(
        model=data.header.model,
        source=data.header.source,
        num_problems=len(set(data.traces.problem_of[traces].tolist())),
        num_mixed=int(np.isfinite(everything[0].per_problem).sum()),
        num_traces=len(traces),
        share_right=float(data.traces.is_correct[traces].mean()),
        median_tokens=float(np.median(data.traces.num_tokens[traces])),
        rankings=tuple(found.ranking for found in everything),
        comparisons=tuple(_comparisons(list(measured.values()), baselines)),
    )


def trust_of(report: ScorerReport, name: str) -> ScorerTrust | None:
    """How far a search may trust this scorer, by what the report found; None where no problem says anything."""
    if not report.num_mixed:
        return None
    ranking = next(ranking for ranking in report.rankings if ranking.name == name)
    auc = tuple(ranking.auc[share].value for share in TRUST_SHARES)
    return ScorerTrust(auc=auc, num_problems=report.num_mixed, base_model=report.model, source=report.source,
                       spread=ranking.spread, median_tokens=report.median_tokens)  # fmt: skip


# -- scores ----------------------------------------------------------------------------------------------------


def rated_by(scorer: Scorer, data: Dataset, traces: Ints, device: torch.device) -> Rated:
    """By a scorer of states."""
    scores, known = thought_scores(scorer, data, traces, device), data.traces
    by_share = {
        share: trace_scores(scores, known.starts[traces], known.num_thoughts[traces], share, scorer.info.aggregation)
        for share in SHARES
    }
    scaled = all_log_odds(scores) if scorer.info.is_probability else scores
    return Rated(by_share, scorer.info.is_probability, spreads(scaled, data, traces))


def spreads(scores: Floats, data: Dataset, traces: Ints) -> tuple[float | None, ...]:
    """Returns the deviation among a problem's traces after each of THOUGHTS; `scores` that are chances are log-odds."""
    problems = [traces[data.traces.problem_of[traces] == each] for each in np.unique(data.traces.problem_of[traces])]
    return tuple(_spread_after(count, scores, data, problems) for count in THOUGHTS)


def _spread_after(count: int, scores: Floats, data: Dataset, problems: Sequence[Ints]) -> float | None:
    """None where too few problems have enough traces as long as that: it would be a matter of luck."""
    starts, lengths = data.traces.starts, data.traces.num_thoughts
    long = [each[lengths[each] >= count] for each in problems]
    found = [
        spread_of([scores[starts[trace] : starts[trace] + count].tolist() for trace in each])
        for each in long
        if len(each) >= FEWEST_TRACES
    ]
    return float(np.mean(found)) if len(found) >= FEWEST_PROBLEMS else None


def _judge_ranking(name: str, rated: Rated, data: Dataset, traces: Ints) -> _Measured:
    found = _ranked(name, data, traces, rated.by_share, is_baseline=False)
    is_correct, shares = data.traces.is_correct[traces], (0.5, 1.0) if rated.is_probability else ()
    calibration = tuple(_calibration(share, rated.by_share[share], is_correct) for share in shares)
    ranking = dataclasses.replace(found.ranking, calibration=calibration, spread=rated.spread)
    return dataclasses.replace(found, ranking=ranking)


def _ranked(
    name: str, data: Dataset, traces: Ints, by_share: Mapping[float, Floats], *, is_baseline: bool
) -> _Measured:
    known = data.traces
    found = {
        share: pairs(scores, known.is_correct[traces], known.problem_of[traces], len(data.problems))
        for share, scores in by_share.items()
    }
    found = {share: _of_judged(data, traces, each) for share, each in found.items()}
    per_problem = mean_auc([found[share] for share in QUARTERS])
    ranking = ScorerRanking(
        name=name,
        is_baseline=is_baseline,
        auc={share: mean_over_problems(each.auc) for share, each in found.items()},
        pairwise={share: share_of_pairs(each) for share, each in found.items()},
        mean_auc=mean_over_problems(per_problem),
    )
    return _Measured(ranking, per_problem)


def _of_judged(data: Dataset, traces: Ints, found: Pairs) -> Pairs:
    """Only the problems that are judged: resampling must not draw the others."""
    judged = np.unique(data.traces.problem_of[traces])
    return Pairs(found.wins[judged], found.num_pairs[judged])


def _baselines(data: Dataset, traces: Ints) -> list[_Measured]:
    """What needs no training: fewer tokens so far, fewer thoughts so far, the model's own confidence."""
    known = data.traces
    starts, counts = known.starts[traces], known.num_thoughts[traces]
    tokens = {share: -_tokens_seen(data, traces, share).astype(np.float64) for share in SHARES}
    thoughts = {share: -(last_thoughts(counts, share) + 1).astype(np.float64) for share in SHARES}
    found = [
        _ranked("fewer tokens", data, traces, tokens, is_baseline=True),
        _ranked("fewer thoughts", data, traces, thoughts, is_baseline=True),
    ]
    if data.header.has_confidence:
        confidence = {
            share: trace_scores(known.confidences.astype(np.float64), starts, counts, share, Aggregation.MEAN)
            for share in SHARES
        }
        found.append(_ranked("token confidence", data, traces, confidence, is_baseline=True))
    return found


def _tokens_seen(data: Dataset, traces: Ints, share: float) -> Ints:
    """Generated tokens at the last thought seen; all of them for a trace without a thought."""
    known = data.traces
    last = last_thoughts(known.num_thoughts[traces], share)
    seen = known.num_tokens[traces].copy()
    has_thought = last >= 0
    seen[has_thought] = known.thought_ends[known.starts[traces][has_thought] + last[has_thought]]
    return seen


# -- what it means ---------------------------------------------------------------------------------------------


def _calibration(share: float, scores: Floats, is_correct: npt.NDArray[np.bool_]) -> Calibration:
    edges = np.linspace(0, 1, NUM_BINS + 1)
    members = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = tuple(
        Bin(float(edges[i]), float(edges[i + 1]), *_bin_means(scores[mine], is_correct[mine]))
        for i in range(NUM_BINS)
        if (mine := members == i).any()
    )
    error = sum(each.count * abs(each.mean_score - each.share_right) for each in bins) / max(1, len(scores))
    return Calibration(share, error, bins)


def _bin_means(scores: Floats, is_correct: npt.NDArray[np.bool_]) -> tuple[int, float, float]:
    return len(scores), float(scores.mean()), float(is_correct.mean())


def _comparisons(scorers: Sequence[_Measured], baselines: Sequence[_Measured]) -> list[ScorerComparison]:
    """Every scorer with every baseline, and the scorers with each other."""
    against = [(scorer, other) for scorer in scorers for other in baselines]
    against += [(first, second) for i, first in enumerate(scorers) for second in scorers[i + 1 :]]
    return [_compared(one, two) for one, two in against]


def _compared(one: _Measured, two: _Measured) -> ScorerComparison:
    gain = one.per_problem - two.per_problem
    num_problems = int(np.isfinite(gain).sum())
    return ScorerComparison(one.ranking.name, two.ranking.name, mean_over_problems(gain), num_problems)


def conclusions(report: ScorerReport) -> list[str]:
    """In plain words: does each scorer beat what needs no training?"""
    if report.num_mixed == 0:
        return ["no problem has right and wrong traces: nothing can be said about ranking"]
    weak = {ranking.name for ranking in report.rankings if ranking.is_baseline}
    lines = [*_too_few(report.num_mixed)]
    for name in dict.fromkeys(each.scorer for each in report.comparisons if each.other in weak):
        mine = [each for each in report.comparisons if each.scorer == name and each.other in weak]
        failed = [each for each in mine if each.verdict != "beats"]
        if not failed:
            lines.append(f"{name} beats every baseline")
        lines += [f"{name} {each.verdict} {each.other}: {_signed(each.gain)}" for each in failed]
    lines += [
        f"{each.scorer} {each.verdict} {each.other}: {_signed(each.gain)}"
        for each in report.comparisons
        if each.other not in weak
    ]
    return lines


def _too_few(num_mixed: int) -> list[str]:
    if num_mixed >= FEWEST_PROBLEMS:
        return []
    counted = "1 problem has" if num_mixed == 1 else f"{num_mixed} problems have"
    return [f"only {counted} right and wrong traces: no difference is claimed from fewer than {FEWEST_PROBLEMS}"]


def _signed(gain: Interval) -> str:
    interval = f" ({gain.low:+.3f} to {gain.high:+.3f})" if gain.low < gain.high else ""
    return f"mean AUC {gain.value:+.3f}{interval}"

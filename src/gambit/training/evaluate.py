"""Evaluates scorers on a collection: ranking by share of thoughts seen, calibration, baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gambit.config.trust import FEWEST_TRACES, THOUGHTS, ScorerTrust, spread_of
from gambit.config.trust import SHARES as TRUST_SHARES
from gambit.errors import UserError
from gambit.scorers.base import Scorer
from gambit.stats import FEWEST_PROBLEMS, Bools, Floats, Interval, Ints, all_log_odds, supports_claim
from gambit.training.dataset import Dataset
from gambit.training.ranking import (
    CURVE,
    QUARTERS,
    Pairs,
    last_thoughts,
    mean_auc,
    mean_over_problems,
    pairs_in,
    scores_after,
    share_of_pairs,
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
    """The calibration at a share of the thoughts: a score of 0.7 should mean that 70 % are right."""

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
    per_problem: Floats = field(repr=False, compare=False)  # whose mean that is
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
    """The figures of several scorers and baselines on the same problems."""

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
class Rated:
    """The scores of the traces, in their order, by share of their thoughts."""

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
    scorers = [_ranking(name, each, data, traces) for name, each in rated.items()]
    baselines = [
        _ranking(name, each, data, traces, is_baseline=True) for name, each in _baselines(data, traces).items()
    ]
    return ScorerReport(
        model=data.header.model,
        source=data.header.source,
        num_problems=len(set(data.traces.problem_of[traces].tolist())),
        num_mixed=int(np.isfinite(scorers[0].per_problem).sum()),
        num_traces=len(traces),
        share_right=float(data.traces.is_correct[traces].mean()),
        median_tokens=float(np.median(data.traces.num_tokens[traces])),
        rankings=(*scorers, *baselines),
        comparisons=tuple(_comparisons(scorers, baselines)),
    )


def trust_of(report: ScorerReport, name: str) -> ScorerTrust | None:
    """Returns how far a search may trust this scorer; None if no problem has right and wrong traces."""
    if not report.num_mixed:
        return None
    ranking = next(ranking for ranking in report.rankings if ranking.name == name)
    auc = tuple(ranking.auc[share].value for share in TRUST_SHARES)
    return ScorerTrust(auc=auc, num_problems=report.num_mixed, base_model=report.model, source=report.source,
                       spread=ranking.spread, median_tokens=report.median_tokens)  # fmt: skip


# -- scores ----------------------------------------------------------------------------------------------------


def rated_by(scorer: Scorer, data: Dataset, traces: Ints, device: torch.device) -> Rated:
    """Rates traces by a scorer of states."""
    scores, info = thought_scores(scorer, data, traces, device), scorer.info
    by_share = {share: scores_after(share, data.traces, traces, scores, info.aggregation) for share in SHARES}
    scaled = all_log_odds(scores) if info.is_probability else scores
    return Rated(by_share, info.is_probability, spreads(scaled, data, traces))


def spreads(scores: Floats, data: Dataset, traces: Ints) -> tuple[float | None, ...]:
    """Returns the deviation among a problem's traces after each of THOUGHTS; `scores` that are chances are log-odds.

    None stands where too few problems have enough traces as long as that: it would be a matter of luck.
    """
    starts, lengths, problem_of = data.traces.starts, data.traces.num_thoughts, data.traces.problem_of[traces]
    problems = [traces[problem_of == each] for each in np.unique(problem_of)]
    found: list[float | None] = []
    for count in THOUGHTS:
        long = [each[lengths[each] >= count] for each in problems]
        within = [
            spread_of([scores[starts[trace] : starts[trace] + count].tolist() for trace in each])
            for each in long
            if len(each) >= FEWEST_TRACES
        ]
        found.append(float(np.mean(within)) if len(within) >= FEWEST_PROBLEMS else None)
    return tuple(found)


def _ranking(name: str, rated: Rated, data: Dataset, traces: Ints, *, is_baseline: bool = False) -> ScorerRanking:
    """Measures how scores rank the traces and, if they are probabilities, how well they are calibrated."""
    judged, is_correct = np.unique(data.traces.problem_of[traces]), data.traces.is_correct[traces]
    found = {}
    for share, scores in rated.by_share.items():
        every = pairs_in(data, traces, scores)
        found[share] = Pairs(every.wins[judged], every.num_pairs[judged])  # resampling must not draw other problems
    per_problem = mean_auc([found[share] for share in QUARTERS])
    calibrated = (0.5, 1.0) if rated.is_probability else ()
    return ScorerRanking(
        name=name,
        is_baseline=is_baseline,
        auc={share: mean_over_problems(each.auc) for share, each in found.items()},
        pairwise={share: share_of_pairs(each) for share, each in found.items()},
        mean_auc=mean_over_problems(per_problem),
        per_problem=per_problem,
        calibration=tuple(_calibration(share, rated.by_share[share], is_correct) for share in calibrated),
        spread=rated.spread,
    )


def _baselines(data: Dataset, traces: Ints) -> dict[str, Rated]:
    """Rates traces by what needs no training: fewer tokens so far, fewer thoughts, the model's own confidence."""
    known = data.traces
    counts = known.num_thoughts[traces]
    by_share = {
        "fewer tokens": {share: -_tokens_seen(data, traces, share).astype(np.float64) for share in SHARES},
        "fewer thoughts": {share: -(last_thoughts(counts, share) + 1).astype(np.float64) for share in SHARES},
    }
    if data.header.has_confidence:
        confidences = known.confidences.astype(np.float64)
        by_share["token confidence"] = {
            share: scores_after(share, known, traces, confidences, Aggregation.MEAN) for share in SHARES
        }
    return {name: Rated(scores, is_probability=False) for name, scores in by_share.items()}


def _tokens_seen(data: Dataset, traces: Ints, share: float) -> Ints:
    """Returns the generated tokens at the last thought seen; all of them for a trace without a thought."""
    known = data.traces
    last = last_thoughts(known.num_thoughts[traces], share)
    seen = known.num_tokens[traces].copy()
    has_thought = last >= 0
    seen[has_thought] = known.thought_ends[known.starts[traces][has_thought] + last[has_thought]]
    return seen


# -- what it means ---------------------------------------------------------------------------------------------


def _calibration(share: float, scores: Floats, is_correct: Bools) -> Calibration:
    edges = np.linspace(0, 1, NUM_BINS + 1)
    members = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
    bins = tuple(
        Bin(float(edges[i]), float(edges[i + 1]), int(mine.sum()), float(scores[mine].mean()),
            float(is_correct[mine].mean()))
        for i in range(NUM_BINS)
        if (mine := members == i).any()
    )  # fmt: skip
    error = sum(each.count * abs(each.mean_score - each.share_right) for each in bins) / max(1, len(scores))
    return Calibration(share, error, bins)


def _comparisons(scorers: Sequence[ScorerRanking], baselines: Sequence[ScorerRanking]) -> list[ScorerComparison]:
    """Compares every scorer with every baseline, and the scorers with each other."""
    against = [(scorer, other) for scorer in scorers for other in baselines]
    against += [(first, second) for i, first in enumerate(scorers) for second in scorers[i + 1 :]]
    gains = [one.per_problem - two.per_problem for one, two in against]
    return [
        ScorerComparison(one.name, two.name, mean_over_problems(gain), int(np.isfinite(gain).sum()))
        for (one, two), gain in zip(against, gains, strict=True)
    ]


def conclusions(report: ScorerReport) -> list[str]:
    """Returns sentences: which scorers beat what needs no training, and each other."""
    if report.num_mixed == 0:
        return ["no problem has right and wrong traces: nothing can be said about ranking"]
    lines = []
    if report.num_mixed < FEWEST_PROBLEMS:
        counted = "1 problem has" if report.num_mixed == 1 else f"{report.num_mixed} problems have"
        lines = [f"only {counted} right and wrong traces: no difference is claimed from fewer than {FEWEST_PROBLEMS}"]
    baselines = {ranking.name for ranking in report.rankings if ranking.is_baseline}
    against = [each for each in report.comparisons if each.other in baselines]
    for name in dict.fromkeys(each.scorer for each in against):
        failed = [each for each in against if each.scorer == name and each.verdict != "beats"]
        lines += map(_sentence, failed) if failed else [f"{name} beats every baseline"]
    return [*lines, *(_sentence(each) for each in report.comparisons if each.other not in baselines)]


def _sentence(compared: ScorerComparison) -> str:
    gain = compared.gain
    interval = f" ({gain.low:+.3f} to {gain.high:+.3f})" if gain.low < gain.high else ""
    return f"{compared.scorer} {compared.verdict} {compared.other}: mean AUC {gain.value:+.3f}{interval}"

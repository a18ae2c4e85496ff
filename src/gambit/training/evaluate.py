"""Evaluates scorers on a collection: ranking by share of thoughts seen, calibration, baselines."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch

from gambit.config import registry
from gambit.config.trust import FEWEST_TRACES, THOUGHTS, ScorerTrust, spread_of
from gambit.config.trust import SHARES as TRUST_SHARES
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.events import Json
from gambit.models import files as models
from gambit.scorers.base import Scorer, check_fit, made_for
from gambit.scorers.checkpoint import add_metrics, read_metadata
from gambit.scorers.choice import load_scorer, scorer_file
from gambit.scorers.published import trained_on
from gambit.stats import FEWEST_PROBLEMS, Bools, Floats, Interval, Ints, all_log_odds, supports_claim
from gambit.storage.run_folder import check_writable
from gambit.training.dataset import Dataset, Division, Part, load_dataset
from gambit.training.scoring import (
    CURVE,
    QUARTERS,
    Pairs,
    last_thoughts,
    mean_auc,
    mean_over_problems,
    pairs_in,
    scores_after,
    share_of_pairs,
    thought_scores,
)
from gambit.training.storage import read_header, read_index
from gambit.training.verifier.batches import read_traces
from gambit.types import Aggregation, StatePosition
from gambit.verifiers.lora import LoraVerifier
from gambit.verifiers.lora_folder import is_verifier, read_info, write_info
from gambit.verifiers.names import parse_scorer

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


# -- checkpoints ------------------------------------------------------------------------------------------------


ALL = "all"
AUTO = "auto"


def judge_scorers(
    names: Sequence[str],
    folder: Path,
    part: str,
    *,
    device: str = AUTO,
    model: str | None = None,
    skipped: list[str] | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> ScorerReport:
    """Evaluates checkpoints, registered scorers and folders of verifiers on the same problems of a collection.

    `part` is one of the collection, or `auto`: the problems that none of these scorers was trained or chosen on.
    """
    header = read_header(folder)
    names = [_found(name, model or header.model) for name in names]
    if twice := [label for label, count in Counter(map(_label, names)).items() if count > 1]:
        raise UserError(f"two scorers are called {twice[0]!r}: rename one, or judge one at a time")
    scorers = {name: load_scorer(name, "", name) for name in names if not is_verifier(name)}
    for name in names:
        label = _label(name)
        made = made_for(scorers[name].info, label) if name in scorers else read_info(Path(name)).made_for(label)
        if (warning := check_fit(made, header.made_for("the collection"))) is not None:
            warn(warning)

    @functools.cache
    def data_at(position: StatePosition, layers: tuple[int, ...], with_tokens: bool = False) -> Dataset:
        return load_dataset(folder, position, layers, with_tokens=with_tokens, skipped=skipped)

    def data_for(name: str) -> Dataset:
        if name not in scorers:
            return data_at(StatePosition.BOUNDARY, (), with_tokens=True)
        return data_at(scorers[name].info.state_position, scorers[name].info.layers)

    def rate(name: str, traces: Ints) -> Rated:
        data = data_for(name)
        if name in scorers:
            return rated_by(scorers[name], data, traces, pick_device(device))
        verifier = LoraVerifier.load(Path(name), pick_device(device), model)
        read, info = read_traces(verifier, data, traces), verifier.info
        by_share = {share: read.chances(traces, share, info.aggregation, info.calibration) for share in SHARES}
        return Rated(by_share, spread=spreads(info.calibration.slope * read.thoughts, data, traces))

    data = data_for(names[0])  # baselines need no states, so that the data of any scorer will do
    traces = _chosen(data, part, [_division_on(name, folder) for name in names])
    rated = {_label(name): rate(name, traces) for name in names}
    return compare(rated, data, traces)


def check_writable_trust(names: Sequence[str], folder: Path, part: str) -> None:
    """Raises if a name is no checkpoint to write figures into, or if figures of this part would flatter it."""
    for name in names:
        if not name.endswith(".safetensors") and not is_verifier(name):
            raise UserError(f"--write: {name!r} is no checkpoint file that figures could be written into: leave it out")
        if part not in (AUTO, Part.TEST) and _division_on(name, folder) is not None:
            raise UserError(f"--write: {name} was fitted to this collection, and its figures on --part {part} would "
                            "flatter it: leave --part out, or judge it on another collection")  # fmt: skip
        check_writable(Path(name) if is_verifier(name) else Path(name).parent)
        if name.endswith(".safetensors"):
            check_unseen(Path(name), [problem.question for entry in read_index(folder) for problem in entry.problems])


def check_unseen(checkpoint: Path, questions: Sequence[str]) -> None:
    """Refuses figures of problems that a published scorer was trained on."""
    problem_set, known = trained_on(checkpoint, questions)
    if known:
        raise UserError(f"--write: {checkpoint} was trained on {problem_set}, and {known} of these {len(questions)} "
                        "problems are from it: judge it on others")  # fmt: skip


def write_figures(names: Sequence[str], report: ScorerReport) -> None:
    """Writes into each checkpoint its figures, and how far a search may trust it."""
    for name in names:
        metrics, trust = {"test": metrics_of(report, _label(name))}, trust_of(report, _label(name))
        if not is_verifier(name):
            add_metrics(Path(name), metrics, trust)
        else:
            info = read_info(Path(name))
            changes = {"metrics": {**info.metrics, **metrics}, "trust": trust or info.trust}
            write_info(Path(name), info.model_copy(update=changes))


def _found(name: str, model: str) -> str:
    """Returns the file of a scorer of the model's own; other names as they are."""
    if not isinstance(parse_scorer(name), str) or registry.knows("gambit.scorers", name):
        return name
    path = scorer_file(name, models.locate(model) if models.named_model(model) is not None else model)
    if path is None:
        known = ", ".join(registry.names("gambit.scorers"))
        raise UserError(f"unknown scorer {name!r}: give a file, the folder of a verifier, {known}, or a "
                        f"scorer that lies beside {model}'s weights on this disk")  # fmt: skip
    return str(path)


def _label(name: str) -> str:
    """Returns the name of a scorer in a report."""
    if is_verifier(name):
        return Path(name).resolve().name
    return Path(name).stem if name.endswith(".safetensors") else name


def _division_on(name: str, folder: Path) -> Division | None:
    """Returns how the collection's problems were divided when this scorer was trained; None if it never saw them.

    A problem's part follows from its id. Other traces of the same problems, collected anew or merged otherwise, are
    divided in the same way.
    """
    if is_verifier(name):
        training: object = read_info(Path(name)).training
    else:
        training = read_metadata(Path(name)).get("training") if name.endswith(".safetensors") else None
    if not isinstance(training, dict):
        return None
    header = read_header(folder)
    has_same_source = bool(header.source) and training.get("source") == header.source
    return Division(**training["division"]) if has_same_source or training.get("collection") == header.id else None


def _chosen(data: Dataset, part: str, divisions: Sequence[Division | None]) -> Ints:
    """Returns the traces of a part; `auto` leaves out problems that a scorer was trained or chosen on."""
    known = [division for division in divisions if division is not None]
    if len(set(known)) > 1:
        raise UserError(f"these scorers divided the collection differently ({known[0]} and {known[1]}): "
                        "judge them on another collection, or one at a time")  # fmt: skip
    if part == ALL or (part == AUTO and not known):
        return data.all_traces()
    if part != AUTO and part not in list(Part):
        raise UserError(f"unknown part {part!r}: use auto, all, {', '.join(Part)}")
    division = known[0] if known else Division()
    return data.of_part(division, Part.TEST if part == AUTO else Part(part))


def report_json(report: ScorerReport) -> dict[str, Json]:
    """Returns the whole report as plain values, with its conclusions in words."""
    rankings: list[Json] = [
        {
            "name": ranking.name,
            "is_baseline": ranking.is_baseline,
            "mean_auc": _plain(ranking.mean_auc),
            "auc": {f"{share:g}": _plain(found) for share, found in ranking.auc.items()},
            "pairwise": {f"{share:g}": _plain(found) for share, found in ranking.pairwise.items()},
            "calibration": [cast("Json", dataclasses.asdict(each)) for each in ranking.calibration],
        }
        for ranking in report.rankings
    ]
    comparisons: list[Json] = [
        {"scorer": each.scorer, "other": each.other, "gain": _plain(each.gain), "verdict": each.verdict}
        for each in report.comparisons
    ]
    counts: dict[str, Json] = {
        name: getattr(report, name)
        for name in ("model", "source", "num_problems", "num_mixed", "num_traces", "share_right", "median_tokens")
    }
    words: list[Json] = [*conclusions(report)]
    return {**counts, "rankings": rankings, "comparisons": comparisons, "conclusions": words}


def metrics_of(report: ScorerReport, name: str) -> dict[str, Json]:
    """Returns a scorer's own figures of a report, for its checkpoint's metadata."""
    mine = next(ranking for ranking in report.rankings if ranking.name == name)
    return {
        "source": report.source,
        "problems": report.num_mixed,
        "mean_auc": _plain(mine.mean_auc),
        "auc": {f"{share:g}": _plain(mine.auc[share]) for share in QUARTERS},
        "calibration_error": mine.calibration[-1].error if mine.calibration else None,
    }


def _plain(found: Interval) -> dict[str, Json]:
    values = dataclasses.asdict(found)
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

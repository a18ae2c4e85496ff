"""The figures of a bench report: rows are grouped by problem, and each figure has its interval."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from gambit import stats as st
from gambit.bench.recipe import BenchVariant, Scalar
from gambit.bench.rows import Row
from gambit.results.result import EarlyEnds
from gambit.stats import Floats, Interval, supports_claim

Turns = Sequence[st.Ints]
Measure = Callable[[Row], float]

MOST_FOR_ALL_PAIRS = 6
MOST_READ = 1.3  # tokens that a verifier computes for each that is generated; more, and its cache does not hold
FEWEST_TURNS = 6  # with fewer no paired test can reach 0.05, so that nothing is claimed about seconds
PARTS = ("engine", "scoring", "tree", "scheduling", "other")
# Fields of rows that a report gives as means.
MEANS = (
    "completed", "reused", "recomputed", "kv_peak", "queued", "waited_steps", "waited_seconds", "evicted", "pruned",
    "branched", "verifier_thoughts", "verifier_tokens", "verifier_seconds", "verifier_waited",
)  # fmt: skip


# -- rows by problem -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProblemTable:
    """The rows of one benchmark by variant and problem, for the problems and seeds that all variants have searched."""

    problems: tuple[str, ...]
    rows: Mapping[tuple[str, str], list[Row]]
    draws: Floats
    num_left_out: int

    @classmethod
    def of(cls, rows: Sequence[Row], variants: Sequence[str]) -> ProblemTable:
        """Groups rows; of a run that was cut short, each problem keeps the seeds that every variant has done."""
        searched = Counter((row.problem, row.seed) for row in rows)
        found: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.seed):
            if searched[row.problem, row.seed] == len(variants):
                found[row.variant, row.problem].append(row)
        whole = sorted({problem for _, problem in found})
        draws = st.resamples(len(whole)) if whole else np.zeros((0, 0))
        return cls(tuple(whole), found, draws, len({row.problem for row in rows}) - len(whole))

    def turns(self) -> list[st.Ints]:
        """Returns blocks of problems, by index, that ran side by side: their seconds are not independent.

        The order of methods changes from block to block, so that one method may go through two blocks without a break.
        The other methods separate them.
        """
        goes: dict[str, list[int]] = defaultdict(list)
        for number, names in enumerate(self._searched_in_one_go()):
            for name in names:
                goes[name].append(number)
        blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, name in enumerate(self.problems):
            blocks[tuple(goes[name])].append(place)
        return [np.array(block) for block in blocks.values()]

    def _searched_in_one_go(self) -> Iterator[list[str]]:
        whole = set(self.problems)
        rows = [row for (_, name), found in self.rows.items() if name in whole for row in found]
        rows.sort(key=lambda row: (row.shard, row.engine, row.began))
        for _, turn in itertools.groupby(rows, key=lambda row: (row.shard, row.engine, row.variant)):
            yield [row.problem for row in turn]

    def of_variant(self, variant: str) -> list[Row]:
        return [row for name in self.problems for row in self.rows[variant, name]]

    def means(self, variant: str, measure: Measure) -> Floats:
        """Returns a measure by problem, averaged over seeds."""
        return np.array([mean_of(measure(row) for row in self.rows[variant, name]) for name in self.problems])

    def costs(self, variant: str, measure: Measure) -> Floats:
        """Returns the same over searches that did not fail; NaN for a problem without one."""
        good = [[row for row in self.rows[variant, name] if row.error is None] for name in self.problems]
        return np.array([mean_of(map(measure, rows)) for rows in good])

    def known(self, *columns: Floats) -> tuple[list[Floats], Floats]:
        """Drops the problems that lack a number in some column; returns the columns and the resamples of the others."""
        are_known = ~np.isnan(columns).any(axis=0)
        draws = self.draws if are_known.all() else st.resamples(int(are_known.sum()))
        return [column[are_known] for column in columns], draws


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return float(np.mean(listed)) if listed else float("nan")


def union_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of spans of time: the wall clock's, for searches that ran side by side."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# -- figures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant on one benchmark. Costs are means over searches that did not fail."""

    variant: str
    benchmark: str
    num_problems: int
    num_rows: int
    num_failed: int
    num_turns: int  # how often the methods took turns on the machine
    accuracy: Interval
    trace_accuracy: Interval | None  # of a single completed trace
    trace_gain: Interval | None  # that, minus the baseline's, paired by problem
    coverage: Interval  # how often some completed trace is right
    means: Mapping[str, float]  # of MEANS
    tokens: Interval | None
    token_ratio: Interval | None  # to the baseline's, paired by problem
    seconds: Interval | None
    seconds_ratio: Interval | None
    parts: Mapping[str, float]  # mean seconds per search
    wall_seconds: float  # that engines were busy with its searches, summed over engines; those of a batch share them
    engine_seconds: float | None  # the same for one search: its cost
    completed_per_second: float | None
    tokens_per_second: float | None
    productive_share: float | None  # of generated tokens, in completed traces
    read_total: float | None  # by decode steps; rows from before do not tell
    read_unique: float | None  # each token of a shared prefix once in a step
    sharing: float | None  # the ratio of the two
    kv_capacity: int
    verifier_in_time: float | None  # share of the thoughts that a tournament needed
    winning_islands: float  # behind the answer
    pools: tuple[str, ...]  # what its searches were set to, each once, and why
    warmup: EarlyEnds | None  # of a method with tournaments
    revotes: Mapping[str, Interval]

    @property
    def read_per_generated(self) -> float | None:
        """Returns tokens that the verifier computed for each generated one: little more than 1 if its cache holds."""
        return None if not self.tokens or not self.tokens.value else self.means["verifier_tokens"] / self.tokens.value


@dataclass(frozen=True, slots=True)
class MethodComparison:
    """Two variants on the problems that both have searched; `gain` is the accuracy of the first minus the second's."""

    benchmark: str
    first: str
    second: str
    num_problems: int
    gain: Interval
    only_first: float  # problems that the first alone solved; with several seeds, a mean over them
    only_second: float
    p: float
    p_corrected: float

    @property
    def is_shown(self) -> bool:
        """Returns whether both the interval and the corrected test support the difference."""
        is_supported = supports_claim(self.gain.low, self.gain.high, self.num_problems)
        return is_supported and self.p_corrected < st.SIGNIFICANT


@dataclass(frozen=True, slots=True)
class Overall:
    """A variant over several benchmarks, each counting alike."""

    variant: str
    accuracy: Interval
    gain: Interval | None  # on the baseline's accuracy, paired, every problem of all benchmarks counting alike
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """All variants of a policy with one value of a swept option, whatever their other swept options are."""

    benchmark: str
    policy: str
    option: str
    value: Scalar
    num_variants: int
    accuracy: Interval
    tokens: Interval | None


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """All figures of a report."""

    benchmarks: tuple[str, ...]
    variants: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    comparisons: tuple[MethodComparison, ...]
    overall: tuple[Overall, ...]
    num_rows: int
    num_expected: int
    num_failed: int
    left_out: Mapping[str, int]  # problems of a benchmark that no seed has been through with every variant
    sweep: tuple[SweepPoint, ...] = ()
    swept: tuple[str, ...] = ()  # labels of variants that belong to a sweep

    def cell(self, variant: str, benchmark: str) -> Cell | None:
        return next((c for c in self.cells if (c.variant, c.benchmark) == (variant, benchmark)), None)


def summarise(
    rows: Iterable[Row],
    methods: Sequence[BenchVariant],
    benchmarks: Sequence[str],
    seeds: Sequence[int],
    num_expected: int,
) -> BenchSummary:
    """Compares like with like: only problems that every variant has searched with every seed count."""
    kept = list(rows)
    variants = [method.label for method in methods]
    baseline = "sc" if "sc" in variants else variants[0]
    tables = {name: ProblemTable.of([r for r in kept if r.benchmark == name], variants) for name in benchmarks}
    tables = {name: table for name, table in tables.items() if table.problems}
    cells = [
        _cell(table, variant, name, baseline, turns)
        for name, table in tables.items()
        for turns in [table.turns()]
        for variant in variants
    ]
    return BenchSummary(
        benchmarks=tuple(tables),
        variants=tuple(variants),
        baseline=baseline,
        seeds=tuple(seeds),
        cells=tuple(cells),
        comparisons=tuple(_corrected(_comparisons(tables, variants, baseline))),
        overall=tuple(_overall(tables, variant, baseline) for variant in variants) if len(tables) > 1 else (),
        num_rows=len(kept),
        num_expected=num_expected,
        num_failed=sum(row.error is not None for row in kept),
        left_out={name: table.num_left_out for name, table in tables.items() if table.num_left_out},
        sweep=tuple(point for name, table in tables.items() for point in _sweep(table, name, methods)),
        swept=tuple(method.label for method in methods if method.swept),
    )


# -- cells -----------------------------------------------------------------------------------------------------


def _cell(table: ProblemTable, variant: str, benchmark: str, baseline: str, turns: Turns) -> Cell:
    rows = table.of_variant(variant)
    good = [row for row in rows if row.error is None]
    wall = sum(_busy_seconds(group) * group[0].engines for group in _by_engine(good))
    generated = sum(row.generated for row in good)
    measured = [row for row in good if row.read_unique]
    answered = [row.winning_islands for row in good if row.answer is not None]
    return Cell(
        variant=variant,
        benchmark=benchmark,
        num_problems=len(table.problems),
        num_rows=len(rows),
        num_failed=len(rows) - len(good),
        num_turns=len(turns),
        accuracy=st.share_interval(table.means(variant, lambda row: row.correct), table.draws),
        trace_accuracy=_trace_accuracy(table, variant),
        trace_gain=_trace_gain(table, variant, baseline),
        coverage=st.share_interval(table.means(variant, lambda row: row.right_traces > 0), table.draws),
        means={name: mean_of(getattr(row, name) for row in good) if good else 0.0 for name in MEANS},
        tokens=_cost(table, variant, _tokens),
        token_ratio=_ratio(table, variant, baseline, _tokens),
        seconds=_mean_seconds(table, variant, turns),
        seconds_ratio=_seconds_ratio(table, variant, baseline, turns),
        parts={part: mean_of(getattr(row.seconds, part) for row in good) if good else 0.0 for part in PARTS},
        wall_seconds=wall,
        engine_seconds=wall / len(good) if good else None,
        completed_per_second=sum(row.completed for row in good) / wall if wall else None,
        tokens_per_second=generated / wall if wall else None,
        productive_share=sum(row.productive for row in good) / generated if generated else None,
        read_total=mean_of(row.read_total for row in measured) if measured else None,
        read_unique=mean_of(row.read_unique for row in measured) if measured else None,
        sharing=_share_of(sum(row.read_total for row in measured), sum(row.read_unique for row in measured)),
        kv_capacity=max((row.kv_capacity for row in good), default=0),
        verifier_in_time=_share_of(sum(row.verifier_in_time for row in good), sum(row.verifier_needed for row in good)),
        winning_islands=mean_of(answered) if answered else 0.0,
        pools=tuple(dict.fromkeys(row.pool for row in good if row.pool)),
        warmup=EarlyEnds.of(
            (length, row.warmup_tokens) for row in good if row.warmup_tokens for length in row.total_lengths
        ),
        revotes=_revotes(table, variant),
    )


def _share_of(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _tokens(row: Row) -> float:
    return row.generated


def _seconds(row: Row) -> float:
    return row.seconds.total


def _cost(table: ProblemTable, variant: str, measure: Measure) -> Interval | None:
    [values], draws = table.known(table.costs(variant, measure))
    return st.mean_interval(values, draws) if len(values) else None


def _ratio(table: ProblemTable, variant: str, baseline: str, measure: Measure) -> Interval | None:
    if variant == baseline:
        return None
    [mine, theirs], draws = table.known(table.costs(variant, measure), table.costs(baseline, measure))
    return st.ratio_interval(mine, theirs, draws) if len(mine) else None


def _by_engine(rows: Sequence[Row]) -> Iterator[list[Row]]:
    def engine(row: Row) -> tuple[str, int, int]:
        return row.shard, row.engine, row.engines

    for _, group in itertools.groupby(sorted(rows, key=engine), key=engine):
        yield list(group)


def _busy_seconds(rows: Sequence[Row]) -> float:
    return union_seconds([(row.began, row.began + row.seconds.total) for row in rows])


def _mean_seconds(table: ProblemTable, variant: str, turns: Turns) -> Interval | None:
    seconds = table.costs(variant, _seconds)
    return _by_turn(seconds, np.where(np.isnan(seconds), np.nan, 1.0), turns)


def _seconds_ratio(table: ProblemTable, variant: str, baseline: str, turns: Turns) -> Interval | None:
    if variant == baseline:
        return None
    return _by_turn(table.costs(variant, _seconds), table.costs(baseline, _seconds), turns)


def _by_turn(above: st.Floats, below: st.Floats, turns: Turns) -> Interval | None:
    """Returns the ratio of two sums over the problems that have both, with turns resampled as wholes.

    The machine's other work is the same for all problems of a turn. Too few turns cannot show it: then the unit is a
    problem, and nothing is claimed.
    """
    if len(turns) < FEWEST_TURNS:
        turns = [np.array([place]) for place in range(len(above))]
    both = ~np.isnan(above) & ~np.isnan(below)
    if not both.any():
        return None
    sums = np.array([(above[turn][both[turn]].sum(), below[turn][both[turn]].sum()) for turn in turns])
    return st.ratio_interval(sums[:, 0], sums[:, 1], st.resamples(len(turns)))


def _trace_accuracy(table: ProblemTable, variant: str) -> Interval | None:
    [shares], draws = table.known(_right_shares(table, variant))
    return st.share_interval(shares, draws) if len(shares) else None


def _trace_gain(table: ProblemTable, variant: str, baseline: str) -> Interval | None:
    if variant == baseline:
        return None
    [mine, theirs], draws = table.known(_right_shares(table, variant), _right_shares(table, baseline))
    return st.mean_interval(mine - theirs, draws) if len(mine) else None


def _right_shares(table: ProblemTable, variant: str) -> st.Floats:
    """Returns the share of completed traces that are right, by problem; NaN where none is complete."""
    rows = ([row for row in table.rows[variant, name] if row.completed] for name in table.problems)
    return np.array([mean_of(row.right_traces / row.completed for row in found) for found in rows])


def _revotes(table: ProblemTable, variant: str) -> dict[str, Interval]:
    kinds = sorted({kind for row in table.of_variant(variant) for kind in row.revotes})
    return {kind: st.share_interval(table.means(variant, partial(_is_right_by, kind)), table.draws) for kind in kinds}


def _is_right_by(kind: str, row: Row) -> float:
    return row.revotes.get(kind, False)


def _overall(tables: Mapping[str, ProblemTable], variant: str, baseline: str) -> Overall:
    def right(table: ProblemTable, of: str) -> Floats:
        return table.means(of, lambda row: row.correct)

    groups = [(right(table, variant), table.draws) for table in tables.values()]
    gains = [(right(table, variant) - right(table, baseline), table.draws) for table in tables.values()]
    gain = None if variant == baseline else st.pooled_mean_interval(gains)
    tokens = [_cost(table, variant, _tokens) for table in tables.values()]
    seconds = [_mean_seconds(table, variant, table.turns()) for table in tables.values()]
    return Overall(variant, st.stratified_mean_interval(groups), gain, _mean_value(tokens), _mean_value(seconds))


def _mean_value(intervals: Sequence[Interval | None]) -> float | None:
    known = [interval.value for interval in intervals if interval is not None]
    return float(np.mean(known)) if len(known) == len(intervals) else None


# -- comparisons -----------------------------------------------------------------------------------------------


def _comparisons(tables: Mapping[str, ProblemTable], variants: Sequence[str], baseline: str) -> list[MethodComparison]:
    """Compares all pairs of a few variants; of many, each with the baseline."""
    pairs = [(second, first) for first, second in itertools.combinations(variants, 2)]
    if len(variants) > MOST_FOR_ALL_PAIRS:
        pairs = [(variant, baseline) for variant in variants if variant != baseline]
    return [_compare(table, name, first, second) for name, table in tables.items() for first, second in pairs]


def _compare(table: ProblemTable, benchmark: str, first: str, second: str) -> MethodComparison:
    pairs = [
        list(zip(table.rows[first, name], table.rows[second, name], strict=True)) for name in table.problems
    ]  # seeds in the same order
    gains = [Fraction(sum(a.correct - b.correct for a, b in rows), len(rows)) for rows in pairs]
    p = st.sign_flip_p(gains)
    return MethodComparison(
        benchmark=benchmark,
        first=first,
        second=second,
        num_problems=len(gains),
        gain=st.mean_interval(np.array([float(gain) for gain in gains]), table.draws),
        only_first=sum(mean_of(a.correct > b.correct for a, b in rows) for rows in pairs),
        only_second=sum(mean_of(a.correct < b.correct for a, b in rows) for rows in pairs),
        p=p,
        p_corrected=p,
    )


def _corrected(comparisons: list[MethodComparison]) -> list[MethodComparison]:
    corrected = st.holm([comparison.p for comparison in comparisons])
    pairs = zip(comparisons, corrected, strict=True)
    return [dataclasses.replace(comparison, p_corrected=p) for comparison, p in pairs]


# -- sweeps ----------------------------------------------------------------------------------------------------


def _sweep(table: ProblemTable, benchmark: str, methods: Sequence[BenchVariant]) -> Iterator[SweepPoint]:
    places = {(m.policy, option, m.changes[option]): None for m in methods for option in m.swept}
    for policy, option, value in places:
        labels = [m.label for m in methods if m.policy == policy and option in m.swept and m.changes[option] == value]
        right = np.mean([table.means(label, lambda row: row.correct) for label in labels], axis=0)
        tokens = np.mean([table.costs(label, _tokens) for label in labels], axis=0)
        known = tokens[~np.isnan(tokens)]
        yield SweepPoint(
            benchmark, policy, option, value, len(labels), st.share_interval(right, table.draws),
            st.mean_interval(known, st.resamples(len(known))) if len(known) else None,
        )  # fmt: skip

"""The figures of a bench report: rows are grouped by problem, and each figure is declared with its computation."""

# ruff: noqa: RUF009 # figure() returns a field

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from operator import attrgetter
from statistics import stdev
from typing import Any, Self

import numpy as np

from gambit import stats as st
from gambit.bench.recipe import BenchVariant, Scalar
from gambit.bench.rows import Row
from gambit.bench.subsets import majority_at, pass_at, sizes_up_to
from gambit.results.result import EarlyEnds
from gambit.stats import Floats, Interval, supports_claim

Measure = Callable[[Row], float]

MOST_FOR_ALL_PAIRS = 6
MOST_READ = 1.3  # tokens that a verifier computes for each that is generated; more, and its cache does not hold
FEWEST_TURNS = 6  # with fewer no paired test can reach 0.05, so that nothing is claimed about seconds
PARTS = ("engine", "scoring", "tree", "scheduling", "other")
# Fields of rows that a report gives as means.
MEANS = (
    "completed", "reused", "recomputed", "kv_peak", "queued", "waited_steps", "waited_seconds", "evicted", "pruned",
    "branched", "at_limit", "forced", "looped", "children_right", "parents_right", "verifier_thoughts",
    "verifier_tokens", "verifier_seconds", "verifier_waited",
)  # fmt: skip
right: Measure = attrgetter("correct")
tokens: Measure = attrgetter("generated")
seconds: Measure = attrgetter("seconds.total")


# -- rows by problem -------------------------------------------------------------------------------------------


class ProblemTable:
    """The rows of one benchmark by variant and problem, for the problems and seeds that all variants have searched.

    Of a run that was cut short, each problem keeps the seeds that every variant has done.
    """

    def __init__(self, rows: Sequence[Row], variants: Sequence[str]) -> None:
        searched = Counter((row.problem, row.seed) for row in rows)
        self.rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.seed):
            if searched[row.problem, row.seed] == len(variants):
                self.rows[row.variant, row.problem].append(row)
        self.problems = sorted({problem for _, problem in self.rows})
        self.num_left_out = len({row.problem for row in rows}) - len(self.problems)
        self.draws = st.resamples(len(self.problems)) if self.problems else np.zeros((0, 0))
        self.turns = self._turns()

    def _turns(self) -> list[st.Ints]:
        """Returns blocks of problems, by index, that ran side by side: their seconds are not independent.

        The order of methods changes from block to block, so that one method may go through two blocks without a break.
        The other methods separate them.
        """
        rows = sorted(itertools.chain(*self.rows.values()), key=lambda row: (row.shard, row.engine, row.began))
        goes: dict[str, list[int]] = defaultdict(list)
        in_one_go = itertools.groupby(rows, key=lambda row: (row.shard, row.engine, row.variant))
        for number, (_, found) in enumerate(in_one_go):
            for row in found:
                goes[row.problem].append(number)
        blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, name in enumerate(self.problems):
            blocks[tuple(goes[name])].append(place)
        return [np.array(block) for block in blocks.values()]

    def means(self, variant: str, measure: Measure) -> Floats:
        """Returns a measure by problem, averaged over seeds."""
        return np.array([mean_of(map(measure, self.rows[variant, name])) for name in self.problems])

    def costs(self, variant: str, measure: Measure) -> Floats:
        """Returns the same over searches that did not fail; NaN for a problem without one."""
        good = [[row for row in self.rows[variant, name] if row.error is None] for name in self.problems]
        return np.array([mean_of(map(measure, rows)) for rows in good])

    def right_shares(self, variant: str) -> Floats:
        """Returns the share of completed traces that are right, by problem; NaN where none is complete."""
        found = ([row for row in self.rows[variant, name] if row.completed] for name in self.problems)
        return np.array([mean_of(row.right_traces / row.completed for row in rows) for rows in found])

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


# -- figures of a method ---------------------------------------------------------------------------------------


class Method:
    """One variant on one benchmark and the baseline that it is compared with; its own baseline is None."""

    def __init__(self, table: ProblemTable, variant: str, benchmark: str, baseline: str) -> None:
        self.table, self.variant, self.benchmark = table, variant, benchmark
        self.baseline = None if variant == baseline else baseline
        self.rows = [row for name in table.problems for row in table.rows[variant, name]]
        self.good = [row for row in self.rows if row.error is None]
        spans: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
        for row in self.good:
            spans[row.shard, row.engine, row.engines].append((row.began, row.began + row.seconds.total))
        self.busy_seconds = sum(union_seconds(found) * engines for (_, _, engines), found in sorted(spans.items()))

    def share(self, measure: Measure) -> Interval:
        """Returns the mean over all searches, failed ones included, of what is between 0 and 1."""
        return st.share_interval(self.table.means(self.variant, measure), self.table.draws)

    def mean(self, measure: Measure, rows: Sequence[Row] | None = None) -> float:
        """Returns the mean over searches that did not fail."""
        chosen = self.good if rows is None else rows
        return mean_of(map(measure, chosen)) if chosen else 0.0

    def total(self, name: str) -> float:
        return sum(map(attrgetter(name), self.good), 0.0)

    def tokens(self) -> Interval | None:
        [known], draws = self.table.known(self.table.costs(self.variant, tokens))
        return st.mean_interval(known, draws) if len(known) else None

    def token_ratio(self) -> Interval | None:
        return self._against_baseline(lambda name: self.table.costs(name, tokens), st.ratio_interval)

    def seconds(self) -> Interval | None:
        costs = self.table.costs(self.variant, seconds)
        return self._by_turn(costs, np.where(np.isnan(costs), np.nan, 1.0))

    def seconds_ratio(self) -> Interval | None:
        if self.baseline is None:
            return None
        return self._by_turn(*(self.table.costs(name, seconds) for name in (self.variant, self.baseline)))

    def _by_turn(self, above: Floats, below: Floats) -> Interval | None:
        """Returns the ratio of two sums over the problems that have both, with turns resampled as wholes.

        The machine's other work is the same for all problems of a turn. Too few turns cannot show it: then the unit is
        a problem, and nothing is claimed.
        """
        turns = self.table.turns
        if len(turns) < FEWEST_TURNS:
            turns = [np.array([place]) for place in range(len(above))]
        both = ~np.isnan(above) & ~np.isnan(below)
        if not both.any():
            return None
        sums = np.array([(above[turn][both[turn]].sum(), below[turn][both[turn]].sum()) for turn in turns])
        return st.ratio_interval(sums[:, 0], sums[:, 1], st.resamples(len(turns)))

    def trace_accuracy(self) -> Interval | None:
        [shares], draws = self.table.known(self.table.right_shares(self.variant))
        return st.share_interval(shares, draws) if len(shares) else None

    def trace_gain(self) -> Interval | None:
        return self._against_baseline(
            self.table.right_shares, lambda mine, theirs, draws: st.mean_interval(mine - theirs, draws)
        )

    def _against_baseline(
        self, column: Callable[[str], Floats], interval: Callable[[Floats, Floats, Floats], Interval | None]
    ) -> Interval | None:
        """Compares a column with the baseline's over the problems that have both; None for the baseline itself."""
        if self.baseline is None:
            return None
        [mine, theirs], draws = self.table.known(column(self.variant), column(self.baseline))
        return interval(mine, theirs, draws) if len(mine) else None

    def mean_read(self, name: str) -> float | None:
        return _over(self.total(name), sum(row.read_unique > 0 for row in self.good))

    def stretch(self) -> float | None:
        found = [row.steps / max(row.total_lengths) for row in self.good if row.total_lengths]
        return _over(sum(found), len(found))

    def early_ends(self) -> EarlyEnds | None:
        rows = (row for row in self.good if row.warmup_tokens)
        return EarlyEnds.of((length, row.warmup_tokens) for row in rows for length in row.total_lengths)

    def of_subsets(self, chance: Callable[[Row, int], float]) -> dict[int, Interval]:
        """Returns the mean of a chance by k, for the sizes k that every search has completed traces for."""
        fewest = min((row.completed for row in self.good), default=0)
        found = {}
        for k in sizes_up_to(fewest):
            [known], draws = self.table.known(self.table.costs(self.variant, lambda row, k=k: chance(row, k)))  # type: ignore[misc]
            if len(known):
                found[k] = st.share_interval(known, draws)
        return found

    def by_seed(self) -> tuple[float, ...]:
        """Returns the accuracy of each seed that has been through all problems of the table."""
        found: dict[int, list[bool]] = defaultdict(list)
        for row in self.rows:
            found[row.seed].append(row.correct)
        return tuple(mean_of(found[seed]) for seed in sorted(found) if len(found[seed]) == len(self.table.problems))

    def revotes(self) -> dict[str, Interval]:
        def right_by(kind: str) -> Measure:
            return lambda row: row.revotes.get(kind, False)

        return {
            kind: self.share(right_by(kind)) for kind in sorted({kind for row in self.rows for kind in row.revotes})
        }


def _majority_at(row: Row, k: int) -> float:
    wrong = row.wrong_traces
    return math.nan if wrong is None else majority_at(k, row.completed, row.right_traces, wrong)


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def figure(of: Callable[[Method], object]) -> Any:
    """Declares a field of `Cell` with the function that computes it."""
    return field(metadata={"of": of})


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant on one benchmark. Costs are means over searches that did not fail."""

    variant: str = figure(lambda m: m.variant)
    benchmark: str = figure(lambda m: m.benchmark)
    num_problems: int = figure(lambda m: len(m.table.problems))
    num_rows: int = figure(lambda m: len(m.rows))
    num_failed: int = figure(lambda m: len(m.rows) - len(m.good))
    error: str | None = figure(lambda m: next((row.error for row in m.rows if row.error), None))
    num_turns: int = figure(lambda m: len(m.table.turns))  # how often the methods took turns on the machine
    accuracy: Interval = figure(lambda m: m.share(right))
    trace_accuracy: Interval | None = figure(Method.trace_accuracy)  # of a single completed trace
    trace_gain: Interval | None = figure(Method.trace_gain)  # that, minus the baseline's, paired by problem
    coverage: Interval = figure(lambda m: m.share(lambda row: row.right_traces > 0))  # is some completed trace right?
    pass_at: Mapping[int, Interval] = figure(
        lambda m: m.of_subsets(lambda row, k: pass_at(k, row.completed, row.right_traces))
    )
    majority_at: Mapping[int, Interval] = figure(lambda m: m.of_subsets(_majority_at))
    by_seed: tuple[float, ...] = figure(Method.by_seed)  # accuracy
    seed_deviation: float | None = figure(
        lambda m: stdev(found) if len(found := m.by_seed()) > 1 else None  # of a run, from one seed to another
    )
    means: Mapping[str, float] = figure(lambda m: {name: m.mean(attrgetter(name)) for name in MEANS})
    tokens: Interval | None = figure(Method.tokens)
    token_ratio: Interval | None = figure(Method.token_ratio)  # to the baseline's, paired by problem
    seconds: Interval | None = figure(Method.seconds)
    seconds_ratio: Interval | None = figure(Method.seconds_ratio)
    parts: Mapping[str, float] = figure(lambda m: {part: m.mean(attrgetter(f"seconds.{part}")) for part in PARTS})
    wall_seconds: float = figure(lambda m: m.busy_seconds)  # of engines; searches of one batch share them
    engine_seconds: float | None = figure(lambda m: _over(m.busy_seconds, len(m.good)))  # the cost of a search
    completed_per_second: float | None = figure(lambda m: _over(m.total("completed"), m.busy_seconds))
    tokens_per_second: float | None = figure(lambda m: _over(m.total("generated"), m.busy_seconds))
    # Of generated tokens, the share in completed traces.
    productive_share: float | None = figure(lambda m: _over(m.total("productive"), m.total("generated")))
    # Tokens read by decode steps, which older rows do not hold, and the same with shared prefixes once in a step.
    read_total: float | None = figure(lambda m: m.mean_read("read_total"))
    read_unique: float | None = figure(lambda m: m.mean_read("read_unique"))
    sharing: float | None = figure(lambda m: _over(m.total("read_total"), m.total("read_unique")))
    # Decode steps by the tokens of the longest completed trace: 1 where no trace has waited.
    stretch: float | None = figure(Method.stretch)
    kv_capacity: int = figure(lambda m: max((row.kv_capacity for row in m.good), default=0))
    # Share of the thoughts that a tournament needed.
    verifier_in_time: float | None = figure(lambda m: _over(m.total("verifier_in_time"), m.total("verifier_needed")))
    # Behind the answer.
    winning_islands: float = figure(
        lambda m: m.mean(attrgetter("winning_islands"), [row for row in m.good if row.answer is not None])
    )
    pools: tuple[str, ...] = figure(lambda m: tuple(dict.fromkeys(row.pool for row in m.good if row.pool)))
    warmup: EarlyEnds | None = figure(Method.early_ends)  # of a method with tournaments
    revotes: Mapping[str, Interval] = figure(Method.revotes)

    @classmethod
    def of(cls, method: Method) -> Self:
        return cls(**{each.name: each.metadata["of"](method) for each in fields(cls)})

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


def summarise(
    rows: Sequence[Row], variants: Sequence[BenchVariant], names: Sequence[str], seeds: Sequence[int], num_expected: int
) -> BenchSummary:
    """Compares only problems that every variant has searched with every seed; `names` are those of the benchmarks."""
    labels = [variant.label for variant in variants]
    baseline = "sc" if "sc" in labels else labels[0]
    tables = {name: ProblemTable([row for row in rows if row.benchmark == name], labels) for name in names}
    tables = {name: table for name, table in tables.items() if table.problems}
    working = {row.variant for row in rows if row.error is None}  # the others are compared with nothing
    methods = {(x, name): Method(table, x, name, baseline) for name, table in tables.items() for x in labels}
    return BenchSummary(
        benchmarks=tuple(tables),
        variants=tuple(labels),
        baseline=baseline,
        seeds=tuple(seeds),
        cells=tuple(map(Cell.of, methods.values())),
        comparisons=tuple(_comparisons(tables, [x for x in labels if x in working], baseline)),
        overall=tuple(_overall([methods[x, name] for name in tables]) for x in labels) if len(tables) > 1 else (),
        num_rows=len(rows),
        num_expected=num_expected,
        num_failed=sum(row.error is not None for row in rows),
        left_out={name: table.num_left_out for name, table in tables.items() if table.num_left_out},
        sweep=tuple(point for name, table in tables.items() for point in _sweep(table, name, variants)),
        swept=tuple(variant.label for variant in variants if variant.swept),
    )


def _overall(methods: Sequence[Method]) -> Overall:
    """Returns the figures of one variant over all benchmarks."""
    columns = [(method.table.means(method.variant, right), method.table.draws) for method in methods]
    gains = [
        (column - method.table.means(method.baseline, right), draws)
        for method, (column, draws) in zip(methods, columns, strict=True)
        if method.baseline is not None
    ]
    return Overall(
        variant=methods[0].variant,
        accuracy=st.stratified_mean_interval(columns),
        gain=st.pooled_mean_interval(gains) if gains else None,
        tokens=_mean_value([method.tokens() for method in methods]),
        seconds=_mean_value([method.seconds() for method in methods]),
    )


def _mean_value(intervals: Sequence[Interval | None]) -> float | None:
    known = [interval.value for interval in intervals if interval is not None]
    return float(np.mean(known)) if len(known) == len(intervals) else None


# -- comparisons -----------------------------------------------------------------------------------------------


def _comparisons(tables: Mapping[str, ProblemTable], variants: Sequence[str], baseline: str) -> list[MethodComparison]:
    """Compares all pairs of a few variants; of many, each with the baseline."""
    pairs = [(second, first) for first, second in itertools.combinations(variants, 2)]
    if len(variants) > MOST_FOR_ALL_PAIRS:
        pairs = [(variant, baseline) for variant in variants if variant != baseline in variants]
    found = [_compare(table, name, first, second) for name, table in tables.items() for first, second in pairs]
    corrected = st.holm([comparison.p for comparison in found])
    return [replace(comparison, p_corrected=p) for comparison, p in zip(found, corrected, strict=True)]


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


# -- sweeps ----------------------------------------------------------------------------------------------------


def _sweep(table: ProblemTable, benchmark: str, variants: Sequence[BenchVariant]) -> Iterator[SweepPoint]:
    places = {(v.policy, option, v.changes[option]): None for v in variants for option in v.swept}
    for policy, option, value in places:
        labels = [v.label for v in variants if v.policy == policy and option in v.swept and v.changes[option] == value]
        shares = np.mean([table.means(label, right) for label in labels], axis=0)
        costs = np.mean([table.costs(label, tokens) for label in labels], axis=0)
        known = costs[~np.isnan(costs)]
        yield SweepPoint(
            benchmark, policy, option, value, len(labels), st.share_interval(shares, table.draws),
            st.mean_interval(known, st.resamples(len(known))) if len(known) else None,
        )  # fmt: skip

"""The tables and sentences of a bench report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gambit.bench.summary import FEWEST_TURNS, MOST_READ, PARTS, BenchSummary, Cell, MethodComparison
from gambit.results.html import Markup, joined, table, tag
from gambit.stats import FEWEST_PROBLEMS, Interval, supports_claim

MINUS = "−"
MOST_POOLS = 3  # shown of a method whose searches differ


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table of text; columns but the first `num_names` hold numbers."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 2

    def to_markdown(self) -> str:
        marks = [":--" if i < self.num_names else "--:" for i in range(len(self.columns))]
        lines = [self.columns, tuple(marks), *(tuple(c.replace("|", "\\|") for c in row) for row in self.rows)]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{text}\n\n{self.note}\n"

    def to_html(self) -> Markup:
        scrolled = tag("div", table(self.columns, self.rows, self.num_names), class_="scroll")
        return joined([tag("h2", self.title), scrolled, tag("p", self.note, class_="note")])


def all_tables(summary: BenchSummary) -> list[Table]:
    """Returns the tables in the order of the page."""
    tables = [_main(summary), _comparisons(summary), _latency(summary), _decomposition(summary), _throughput(summary)]
    tables += [_memory(summary), *_verifier(summary), _traces(summary), _pools(summary), _revotes(summary)]
    if summary.overall:
        tables.insert(1, _overall(summary))
    return [table for table in tables if table.rows]


# -- claims ----------------------------------------------------------------------------------------------------


def findings(summary: BenchSummary) -> list[str]:
    """Returns a sentence per comparison with the baseline and per cost; sweeps are counted, not listed."""
    with_baseline = [c for c in summary.comparisons if summary.baseline in (c.first, c.second)]
    plain = [c for c in with_baseline if not {c.first, c.second} & set(summary.swept)]
    sentences = [_accuracy_sentence(comparison, summary) for comparison in plain]
    for cell in summary.cells:
        if cell.variant != summary.baseline and cell.variant not in summary.swept:
            sentences.append(_cost_sentence(cell, cell.token_ratio, "tokens", summary))
            if cell.num_turns >= FEWEST_TURNS:
                sentences.append(_cost_sentence(cell, cell.seconds_ratio, "seconds", summary))
    if len(plain) < len(with_baseline):
        swept = [c for c in with_baseline if c not in plain]
        sentences.append(f"Of {len(swept)} comparisons of swept variants with {summary.baseline}, a difference in "
                         f"accuracy is shown in {sum(c.is_shown for c in swept)}.")  # fmt: skip
    return [sentence for sentence in sentences if sentence]


def _accuracy_sentence(c: MethodComparison, summary: BenchSummary) -> str:
    first, second, gain = c.first, c.second, c.gain
    if second != summary.baseline:  # the baseline comes second in a sentence
        first, second, gain = second, first, Interval(-gain.value, -gain.high, -gain.low)
    figures = f"{points(gain)}, p {_relation(c.p_corrected)} after correction, {c.num_problems} problems"
    where = _where(c.benchmark, summary)
    if not c.is_shown:
        return f"No difference in accuracy is shown between {first} and {second}{where} ({figures})."
    word = "more" if gain.value > 0 else "fewer"
    return f"{first} answers {word} problems right than {second}{where} ({figures})."


def _cost_sentence(cell: Cell, ratio: Interval | None, what: str, summary: BenchSummary) -> str:
    if ratio is None:
        return ""
    where = _where(cell.benchmark, summary)
    if not supports_claim(ratio.low, ratio.high, cell.num_problems, no_difference=1.0):
        return (
            f"No difference in {what} is shown between {cell.variant} and {summary.baseline}{where} ({_change(ratio)})."
        )
    word = "fewer" if ratio.value < 1 else "more"
    return f"{cell.variant} takes {word} {what} than {summary.baseline}{where} ({_change(ratio)})."


def cautions(summary: BenchSummary) -> list[str]:
    """Returns what readers must know before they trust the tables."""
    found = []
    if summary.num_rows < summary.num_expected:
        found.append(f"The run is incomplete: {summary.num_rows:,} of {summary.num_expected:,} searches are done.")
    for name, count in summary.left_out.items():
        found.append(f"{count} problems of {name} are left out: not every method has searched them with the same seed.")
    if summary.num_failed:
        found.append(f"{summary.num_failed} searches failed; they count as wrong, and their cost is left out.")
    found += [
        c.warmup.sentence(f"{c.variant}'s traces{_where(c.benchmark, summary)}") + "."
        for c in summary.cells if c.warmup and c.warmup.are_most
    ]  # fmt: skip
    found += [
        f"{c.variant}'s verifier{_where(c.benchmark, summary)} read {c.read_per_generated:.1f} tokens for every "
        "generated one: its KV cache is too small for the traces that run at a time, and it reads them again; raise "
        "--verifier-memory, or lower --concurrency."
        for c in summary.cells if (c.read_per_generated or 0) > MOST_READ
    ]  # fmt: skip
    few = sorted({c.num_problems for c in summary.cells if c.num_problems < FEWEST_PROBLEMS})
    if few:
        found.append(f"Only {few[0]} problems: bootstrap intervals of so few are rough, and tend to be too narrow; no "
                     f"difference is claimed from fewer than {FEWEST_PROBLEMS}.")  # fmt: skip
    if any(c.num_turns < FEWEST_TURNS for c in summary.cells) and len(summary.variants) > 1:
        found.append(f"Each method had the machine for fewer than {FEWEST_TURNS} turns: its seconds hold whatever else "
                     "the machine did meanwhile, so that nothing is claimed about them.")  # fmt: skip
    return found


# -- tables ----------------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Cell], str]]


def _cells(summary: BenchSummary, title: str, note: str, columns: Sequence[Column]) -> Table:
    has_many = len(summary.benchmarks) > 1
    names = ("benchmark", "method") if has_many else ("method",)
    rows = [
        ((cell.benchmark, cell.variant) if has_many else (cell.variant,)) + tuple(make(cell) for _, make in columns)
        for cell in summary.cells
    ]
    return Table(title, note, (*names, *(name for name, _ in columns)), tuple(rows), len(names))


def _mean(title: str, name: str, digits: int) -> Column:
    return title, lambda cell: f"{cell.means[name]:,.{digits}f}"


def _main(summary: BenchSummary) -> Table:
    base = summary.baseline
    seeds = "one seed" if len(summary.seeds) == 1 else "seeds averaged inside each problem"
    return _cells(
        summary, "Accuracy and tokens",
        f"In brackets 95 % bootstrap intervals over problems, {seeds} (exact binomial ones where all problems agree); "
        f"changes against {base} are paired by problem, and not corrected for their number. Tokens are those "
        "generated; what a branch inherits is not generated again.",
        [
            ("problems", lambda c: f"{c.num_problems}"),
            ("accuracy %", lambda c: percent(c.accuracy)),
            ("tokens a problem", lambda c: number(c.tokens)),
            (f"tokens against {base}", lambda c: _change(c.token_ratio)),
            ("failed", lambda c: f"{c.num_failed}"),
        ],
    )  # fmt: skip


def _overall(summary: BenchSummary) -> Table:
    rows = [
        (o.variant, percent(o.accuracy), points(o.gain), _plain(o.tokens),
         "–" if o.seconds is None else f"{o.seconds:,.1f}")
        for o in summary.overall
    ]  # fmt: skip
    note = (
        f"Means over benchmarks, each counting alike; problems are resampled inside each. Against {summary.baseline}: "
        "paired by problem, every problem of all benchmarks counting alike."
    )
    columns = ("method", "accuracy %", f"against {summary.baseline}", "tokens", "seconds")
    return Table("Over all benchmarks", note, columns, tuple(rows), 1)


def _latency(summary: BenchSummary) -> Table:
    base = summary.baseline
    return _cells(
        summary, "Latency",
        "Seconds from a search's start to its vote; searches that share a batch wait for each other. "
        "Engine-seconds, the cost of a search: how long an engine was busy with a method, a search; searches of one "
        "batch share them. Intervals resample turns: all problems "
        "that a method searched in one go are one, since they shared whatever else the machine did "
        f"(with fewer than {FEWEST_TURNS} turns: problems, and that is not in them).",
        [
            ("seconds a problem", lambda c: number(c.seconds, 2)),
            (f"seconds against {base}", lambda c: _change(c.seconds_ratio)),
            ("engine-seconds a problem", lambda c: _plain(c.engine_seconds, 2)),
            ("engine-seconds in all", lambda c: f"{c.wall_seconds:,.1f}"),
        ],
    )  # fmt: skip


def _decomposition(summary: BenchSummary) -> Table:
    def part(name: str) -> Callable[[Cell], str]:
        return lambda c: f"{c.parts[name]:,.3f} ({_share(c.parts[name], sum(c.parts.values()))})"

    return _cells(
        summary, "Where the seconds go",
        "Mean seconds a search. Engine: forward passes and sampling. Tree: events, tournaments, answers, the vote. "
        "Other: the rest of the wall clock, searches in the same batch among it.",
        [(name, part(name)) for name in PARTS],
    )  # fmt: skip


def _throughput(summary: BenchSummary) -> Table:
    return _cells(
        summary, "Throughput",
        "Per second that an engine was busy with a method. Productive tokens are part of at least one completed trace. "
        "Sharing: tokens that attention reads in decode steps, divided by what it would read if each token of a shared "
        "prefix were read once in a step; 1: nothing is shared.",
        [
            _mean("completed traces", "completed", 1),
            ("completed traces/s", lambda c: _plain(c.completed_per_second, 3)),
            ("tokens/s", lambda c: _plain(c.tokens_per_second)),
            ("productive %", lambda c: _plain(None if c.productive_share is None else 100 * c.productive_share, 1)),
            ("sharing", lambda c: _plain(c.sharing, 2)),
        ],
    )  # fmt: skip


def _memory(summary: BenchSummary) -> Table:
    return _cells(
        summary, "Memory and waiting",
        "Means a search. Peak KV is the most tokens seen in the engine's cache at sampled moments. Queued: a running "
        "trace lost its memory and waited to be recomputed; waiting is summed over traces.",
        [
            _mean("peak KV tokens", "kv_peak", 0),
            ("of capacity", lambda c: _share(c.means["kv_peak"], c.kv_capacity)),
            _mean("queued", "queued", 1),
            _mean("steps waited", "waited_steps", 0),
            _mean("seconds waited", "waited_seconds", 1),
            _mean("evicted", "evicted", 1),
            _mean("tokens recomputed", "recomputed", 0),
        ],
    )  # fmt: skip


def _verifier(summary: BenchSummary) -> list[Table]:
    """Returns the verifier's table; none for a run without a verifier."""
    if not any(cell.means["verifier_thoughts"] for cell in summary.cells):
        return []
    table = _cells(
        summary, "Verifier",
        "Means a search. Tokens are those the verifier computed, without what was in its cache; its seconds are shared "
        "by the thoughts that it read together. In time: of the thoughts that a tournament needed, those whose scores "
        "were there when it came; waited: the search stood still for the others.",
        [
            _mean("thoughts read", "verifier_thoughts", 1),
            ("in time %", lambda c: _plain(None if c.verifier_in_time is None else 100 * c.verifier_in_time, 1)),
            _mean("tokens read", "verifier_tokens", 0),
            _mean("verifier's seconds", "verifier_seconds", 2),
            _mean("seconds waited", "verifier_waited", 2),
        ],
    )  # fmt: skip
    return [table]


def _traces(summary: BenchSummary) -> Table:
    return _cells(
        summary, "Traces",
        "Means a search. One trace right: how often a single completed trace is, and how much more often than the "
        f"{summary.baseline} method's, paired by problem; some trace right: how often at least one of them is.",
        [
            _mean("completed", "completed", 1),
            _mean("branched", "branched", 1),
            _mean("pruned", "pruned", 1),
            _mean("tokens reused", "reused", 0),
            ("one trace right %", lambda c: percent(c.trace_accuracy)),
            (f"against {summary.baseline}", lambda c: points(c.trace_gain)),
            ("some trace right %", lambda c: percent(c.coverage)),
        ],
    )  # fmt: skip


def _pools(summary: BenchSummary) -> Table:
    """Returns the pools of methods with tournaments; others have none."""
    rows = [
        (cell.benchmark, cell.variant, "; ".join(cell.pools[:MOST_POOLS]), f"{cell.winning_islands:,.1f}")
        for cell in summary.cells
        if cell.pools
    ]
    note = "M, K and w of each method, and why these; on how many islands the winning answer was found, a search."
    return Table("Islands", note, ("benchmark", "method", "pool", "islands behind the answer"), tuple(rows), 3)


def _revotes(summary: BenchSummary) -> Table:
    kinds = sorted({kind for cell in summary.cells for kind in cell.revotes})

    def column(kind: str) -> Column:
        return f"{kind} %", lambda c: percent(c.revotes.get(kind))

    return _cells(
        summary, "The same traces, voted otherwise",
        "Accuracy if the completed traces of the same searches had been counted in another way.",
        [column(kind) for kind in kinds],
    )  # fmt: skip


def _comparisons(summary: BenchSummary) -> Table:
    rows = [
        (c.benchmark, f"{c.first} − {c.second}", f"{c.num_problems}", points(c.gain), _brief(c.only_first),
         _brief(c.only_second), _p(c.p), _p(c.p_corrected), "shown" if c.is_shown else "no difference shown")
        for c in summary.comparisons
    ]  # fmt: skip
    columns = ("benchmark", "methods", "problems", "points", "first only", "second only", "p", "p corrected", "verdict")
    note = (
        "Accuracy of the first minus that of the second, paired by problem. p: exact two-sided sign-flip test (with "
        f"one seed, McNemar's), corrected for {len(rows)} comparisons by Holm's method. A difference is shown where "
        f"the interval excludes 0, the corrected p is below 0.05, and there are at least {FEWEST_PROBLEMS} problems."
    )
    return Table("Paired comparisons", note, columns, tuple(rows))


# -- numbers ---------------------------------------------------------------------------------------------------


def _where(benchmark: str, summary: BenchSummary) -> str:
    return f" on {benchmark}" if len(summary.benchmarks) > 1 else ""


def percent(x: Interval | None) -> str:
    return "–" if x is None else f"{100 * x.value:.1f} ({100 * x.low:.1f} to {100 * x.high:.1f})"


def points(x: Interval | None) -> str:
    return "–" if x is None else f"{_signed(100 * x.value)} points ({_signed(100 * x.low)} to {_signed(100 * x.high)})"


def _change(ratio: Interval | None) -> str:
    if ratio is None:
        return "–"
    value, low, high = (100 * (x - 1) for x in (ratio.value, ratio.low, ratio.high))
    return f"{_signed(value)} % ({_signed(low)} to {_signed(high)})"


def _signed(x: float) -> str:
    text = f"{x:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)


def number(x: Interval | None, digits: int = 0) -> str:
    return "–" if x is None else f"{x.value:,.{digits}f} ({x.low:,.{digits}f} to {x.high:,.{digits}f})"


def _plain(x: float | None, digits: int = 0) -> str:
    return "–" if x is None else f"{x:,.{digits}f}"


def _brief(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")


def _share(part: float, whole: float) -> str:
    return "–" if not whole else f"{100 * part / whole:.1f} %"


def _relation(p: float) -> str:
    return _p(p) if p < 0.0001 else f"= {_p(p)}"


def _p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"

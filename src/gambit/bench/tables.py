"""The tables and sentences of a bench report."""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO

from gambit.bench.summary import FEWEST_TURNS, MOST_READ, PARTS, BenchSummary, Cell, MethodComparison
from gambit.results.html import Markup, table, tag
from gambit.stats import FEWEST_PROBLEMS, Interval, supports_claim
from gambit.types import count_of

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

    def to_html(self, *, is_open: bool = False) -> Markup:
        """Returns a folded table; a narrow screen scrolls it alone, also by keys."""
        scrolled = tag("div", table(self.columns, self.rows, self.num_names), class_="scroll", tabindex=0,
                       role="region", aria_label=self.title)  # fmt: skip
        title, note = tag("summary", tag("h2", self.title)), tag("p", self.note, class_="note")
        return tag("details", title, scrolled, note, open="" if is_open else None)

    def to_csv(self) -> str:
        text = StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def to_latex(self) -> str:
        """Returns a `tabular` with booktabs' rules."""
        kinds = "l" * self.num_names + "r" * (len(self.columns) - self.num_names)
        head, *rows = (
            " & ".join(each.translate(_LATEX) for each in row) + r" \\" for row in (self.columns, *self.rows)
        )
        begin = rf"\begin{{tabular}}{{{kinds}}}"
        return "\n".join((f"% {self.title}", begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule",
                          r"\end{tabular}", ""))  # fmt: skip


_LATEX = str.maketrans({
    **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", MINUS: "$-$", "–": "--", "…": r"\ldots{}",
})  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------


def all_tables(summary: BenchSummary) -> list[Table]:
    """Returns the tables in the order of the page."""
    main, *costs = [
        _cells(summary, title, note, columns)
        for title, note, columns in TABLES
        if title != "Verifier" or any(cell.means["verifier_thoughts"] for cell in summary.cells)
    ]
    more = (_subsets(summary), _seeds(summary), _pools(summary), _revotes(summary))
    tables = [main, _overall(summary), _comparisons(summary), *costs, *more]
    return [table for table in tables if table.rows]


def _cells(summary: BenchSummary, title: str, note: str, columns: Sequence["Column"]) -> Table:
    has_many = len(summary.benchmarks) > 1
    names = ("benchmark", "method") if has_many else ("method",)
    rows = [
        ((cell.benchmark, cell.variant) if has_many else (cell.variant,)) + tuple(make(cell) for _, make in columns)
        for cell in summary.cells
    ]
    seeds = "one seed" if len(summary.seeds) == 1 else "seeds averaged inside each problem"
    titles = [name.format(base=summary.baseline) for name in (*names, *(name for name, _ in columns))]
    return Table(title, note.format(base=summary.baseline, seeds=seeds), tuple(titles), tuple(rows), len(names))


Column = tuple[str, Callable[[Cell], str]]


def _mean(title: str, name: str, digits: int) -> Column:
    return title, lambda cell: number(cell.means[name], digits)


def _part(name: str) -> Column:
    return name, lambda c: f"{number(c.parts[name], 3)} ({_share(c.parts[name], sum(c.parts.values()))})"


# A row for every method on every benchmark: title, note, columns. {base} is the baseline.
TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    (
        "Accuracy and tokens",
        "In brackets 95 % bootstrap intervals over problems, {seeds} (exact binomial ones where all problems agree); "
        "changes against {base} are paired by problem, and not corrected for their number. Tokens are those "
        "generated; what a branch inherits is not generated again.",
        (
            ("problems", lambda c: str(c.num_problems)),
            ("accuracy %", lambda c: percent(c.accuracy)),
            ("tokens a problem", lambda c: number(c.tokens)),
            ("tokens against {base}", lambda c: _change(c.token_ratio)),
            ("failed", lambda c: str(c.num_failed)),
        ),
    ),
    (
        "Latency",
        "Seconds from a search's start to its vote; searches that share a batch wait for each other. "
        "Engine-seconds, the cost of a search: how long an engine was busy with a method, a search; searches of one "
        "batch share them. Intervals resample turns: all problems that a method searched in one go are one, since they "
        f"shared whatever else the machine did (with fewer than {FEWEST_TURNS} turns: problems, and that is not in "
        "them).",
        (
            ("seconds a problem", lambda c: number(c.seconds, 2)),
            ("seconds against {base}", lambda c: _change(c.seconds_ratio)),
            ("engine-seconds a problem", lambda c: number(c.engine_seconds, 2)),
            ("engine-seconds in all", lambda c: number(c.wall_seconds, 1)),
        ),
    ),
    (
        "Where the seconds go",
        "Mean seconds a search. Engine: forward passes and sampling. Tree: events, tournaments, answers, the vote. "
        "Other: the rest of the wall clock, searches in the same batch among it.",
        tuple(map(_part, PARTS)),
    ),
    (
        "Throughput",
        "Per second that an engine was busy with a method. Productive tokens are part of at least one completed trace. "
        "Sharing: tokens that attention reads in decode steps, divided by what it would read if each token of a shared "
        "prefix were read once in a step; 1: nothing is shared.",
        (
            _mean("completed traces", "completed", 1),
            ("completed traces/s", lambda c: number(c.completed_per_second, 3)),
            ("tokens/s", lambda c: number(c.tokens_per_second)),
            ("productive %", lambda c: percent(c.productive_share)),
            ("sharing", lambda c: number(c.sharing, 2)),
        ),
    ),
    (
        "Memory and waiting",
        "Means a search. Peak KV is the most tokens seen in the engine's cache at sampled moments. Queued: a running "
        "trace lost its memory and waited to be recomputed; waiting is summed over traces. Stretch: decode steps by "
        "the tokens of the longest completed trace. It is 1 where no trace has waited, and so the latency against an "
        "ample cache, at the same speed of a step.",
        (
            _mean("peak KV tokens", "kv_peak", 0),
            ("of capacity", lambda c: _share(c.means["kv_peak"], c.kv_capacity)),
            _mean("queued", "queued", 1),
            ("stretch", lambda c: number(c.stretch, 2)),
            _mean("steps waited", "waited_steps", 0),
            _mean("seconds waited", "waited_seconds", 1),
            _mean("evicted", "evicted", 1),
            _mean("tokens recomputed", "recomputed", 0),
        ),
    ),
    (
        "Verifier",
        "Means a search. Tokens are those the verifier computed, without what was in its cache; its seconds are shared "
        "by the thoughts that it read together. In time: of the thoughts that a tournament needed, those whose scores "
        "were there when it came; waited: the search stood still for the others.",
        (
            _mean("thoughts read", "verifier_thoughts", 1),
            ("in time %", lambda c: percent(c.verifier_in_time)),
            _mean("tokens read", "verifier_tokens", 0),
            _mean("verifier's seconds", "verifier_seconds", 2),
            _mean("seconds waited", "verifier_waited", 2),
        ),
    ),
    (
        "Traces",
        "Means a search. One trace right: how often a single completed trace is, and how much more often than the "
        "{base} method's, paired by problem; some trace right: how often at least one of them is.",
        (
            _mean("completed", "completed", 1),
            _mean("branched", "branched", 1),
            _mean("pruned", "pruned", 1),
            _mean("tokens reused", "reused", 0),
            ("one trace right %", lambda c: percent(c.trace_accuracy)),
            ("against {base}", lambda c: points(c.trace_gain)),
            ("some trace right %", lambda c: percent(c.coverage)),
        ),
    ),
    (
        "Ends and branches",
        "Means a search. At their limit: completed traces that ran out of tokens, and may have had more to say. Forced "
        "traces were given the beginning of an answer, looping ones repeated themselves. Child right: its parent ended "
        "too, with a wrong answer; parent right: the reverse.",
        (
            _mean("completed", "completed", 1),
            _mean("of these at their limit", "at_limit", 1),
            _mean("forced", "forced", 1),
            _mean("in loops", "looped", 1),
            _mean("child right, parent wrong", "children_right", 2),
            _mean("parent right, child wrong", "parents_right", 2),
        ),
    ),
)


def _overall(summary: BenchSummary) -> Table:
    rows = [
        (o.variant, percent(o.accuracy), points(o.gain), number(o.tokens), number(o.seconds, 1))
        for o in summary.overall
    ]  # fmt: skip
    note = (
        f"Means over benchmarks, each counting alike; problems are resampled inside each. Against {summary.baseline}: "
        "paired by problem, every problem of all benchmarks counting alike."
    )
    columns = ("method", "accuracy %", f"against {summary.baseline}", "tokens", "seconds")
    return Table("Over all benchmarks", note, columns, tuple(rows), 1)


def _subsets(summary: BenchSummary) -> Table:
    """Returns a row for each method and number of traces."""
    rows = [
        (cell.benchmark, cell.variant, f"{k}", percent(found), percent(cell.majority_at.get(k)))
        for cell in summary.cells
        for k, found in cell.pass_at.items()
    ]
    note = (
        "Of k of a search's completed traces, all choices of k alike: how often one of them is right, and how often "
        "the right answer has most votes, ties shared. Exact for each search, with intervals over problems. Traces "
        "that share a prefix are no independent samples: only methods without branches show what fewer would find."
    )
    return Table("pass@k and majority@k", note, ("benchmark", "method", "k", "pass@k %", "majority@k %"), tuple(rows))


def _seeds(summary: BenchSummary) -> Table:
    cells = [cell for cell in summary.cells if len(summary.seeds) > 1 and len(cell.by_seed) == len(summary.seeds)]
    rows = [
        (cell.benchmark, cell.variant, *map(percent, (*cell.by_seed, cell.accuracy.value, cell.seed_deviation)))
        for cell in cells
    ]
    columns = ("benchmark", "method", *(f"seed {seed}" for seed in sorted(summary.seeds)), "mean", "standard deviation")
    note = "Accuracy in %. The standard deviation is that of one seed's accuracy, over the same problems."
    return Table("Seeds", note, columns, tuple(rows))


def _pools(summary: BenchSummary) -> Table:
    """Returns the pools of methods with tournaments; others have none."""
    rows = [
        (cell.benchmark, cell.variant, "; ".join(cell.pools[:MOST_POOLS]), number(cell.winning_islands, 1))
        for cell in summary.cells
        if cell.pools
    ]
    note = "The pool of each method, and why this one; on how many islands the winning answer was found, a search."
    return Table("Islands", note, ("benchmark", "method", "pool", "islands behind the answer"), tuple(rows), 3)


def _revotes(summary: BenchSummary) -> Table:
    def column(kind: str) -> Column:
        return f"{kind} %", lambda c: percent(c.revotes.get(kind))

    columns = [column(kind) for kind in sorted({kind for cell in summary.cells for kind in cell.revotes})]
    note = "Accuracy if the completed traces of the same searches had been counted in another way."
    return _cells(summary, "The same traces, voted otherwise", note, columns)


def _comparisons(summary: BenchSummary) -> Table:
    rows = [
        (c.benchmark, f"{c.first} − {c.second}", f"{c.num_problems}", points(c.gain), f"{round(c.only_first, 1):g}",
         f"{round(c.only_second, 1):g}", _p(c.p), _p(c.p_corrected), "shown" if c.is_shown else "no difference shown")
        for c in summary.comparisons
    ]  # fmt: skip
    columns = ("benchmark", "methods", "problems", "points", "first only", "second only", "p", "p corrected", "verdict")
    note = (
        "Accuracy of the first minus that of the second, paired by problem. p: exact two-sided sign-flip test (with "
        f"one seed, McNemar's), corrected for {len(rows)} comparisons by Holm's method. A difference is shown where "
        f"the interval excludes 0, the corrected p is below 0.05, and there are at least {FEWEST_PROBLEMS} problems."
    )
    return Table("Paired comparisons", note, columns, tuple(rows))


# -- claims ----------------------------------------------------------------------------------------------------


def headline(summary: BenchSummary) -> str:
    """Returns the result in a sentence per benchmark: the best method, the baseline, and whether chance may be all."""
    return " ".join(filter(None, (*failures(summary), *(_headline_of(name, summary) for name in summary.benchmarks))))


def failures(summary: BenchSummary) -> list[str]:
    """Returns a sentence for each method that failed in all of its searches: its figures are no comparison."""
    return [
        f"{c.variant} failed in all of its {c.num_rows:,} searches{_where(c.benchmark, summary)} ({c.error})."
        for c in summary.cells if c.num_failed == c.num_rows
    ]  # fmt: skip


def _headline_of(benchmark: str, summary: BenchSummary) -> str:
    cells = {c.variant: c for c in summary.cells if c.benchmark == benchmark and c.num_failed < c.num_rows}
    base = cells.get(summary.baseline)
    if base is None or len(cells) < 2:
        return ""
    name = "sc (voting)" if base.variant == "sc" else base.variant
    best = max(cells.values(), key=lambda cell: cell.accuracy.value)
    if best.num_problems < FEWEST_PROBLEMS:
        are = "problem is" if best.num_problems == 1 else "problems are"
        others = [f"{cell.variant} {_per_cent(cell.accuracy)}" for cell in cells.values() if cell is not base]
        return (f"On {benchmark} {best.num_problems} {are} too few to tell: {name} answers {_per_cent(base.accuracy)} "
                f"right, {', '.join(others)}.")  # fmt: skip
    if best.accuracy.value == base.accuracy.value:
        return f"On {benchmark} no method is right more often than {name}, {_per_cent(base.accuracy)}."
    pair = {best.variant, base.variant}
    is_shown = any(c.is_shown for c in summary.comparisons if c.benchmark == benchmark and {c.first, c.second} == pair)
    words = "more than chance explains" if is_shown else "which chance may explain"
    return (f"On {benchmark} {best.variant} answers {_per_cent(best.accuracy)} of {best.num_problems:,} problems right "
            f"and {name} {_per_cent(base.accuracy)}, {words}.")  # fmt: skip


def _per_cent(x: Interval) -> str:
    ends = "" if math.isnan(x.low) else f" ({100 * x.low:.1f} to {100 * x.high:.1f})"
    return f"{100 * x.value:.1f} %{ends}"


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
    p = _p(c.p_corrected) if c.p_corrected < 0.0001 else f"= {_p(c.p_corrected)}"
    figures = f"{points(gain)}, p {p} after correction, {count_of(c.num_problems, 'problem')}{_too_few(c.num_problems)}"
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
        figures = f"{_change(ratio)}, {count_of(cell.num_problems, 'problem')}{_too_few(cell.num_problems)}"
        return f"No difference in {what} is shown between {cell.variant} and {summary.baseline}{where} ({figures})."
    word = "fewer" if ratio.value < 1 else "more"
    return f"{cell.variant} takes {word} {what} than {summary.baseline}{where} ({_change(ratio)})."


def _too_few(num_problems: int) -> str:
    """Returns why nothing is claimed of an interval that may exclude 0."""
    return f": a claim takes {FEWEST_PROBLEMS}" if num_problems < FEWEST_PROBLEMS else ""


def cautions(summary: BenchSummary) -> list[str]:
    """Returns what readers must know before they trust the tables."""
    found = failures(summary)
    if summary.num_rows < summary.num_expected:
        found.append(f"The run is incomplete: {summary.num_rows:,} of {summary.num_expected:,} searches are done.")
    for name, count in summary.left_out.items():
        found.append(
            f"{count_of(count, 'problem')} of {name} left out: not every method has searched them with the same seed."
        )
    if summary.num_failed:
        failed = count_of(summary.num_failed, "search", "searches")
        found.append(f"{failed} failed, which count as wrong, and whose cost is left out.")
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
        found.append(f"Only {count_of(few[0], 'problem')}: bootstrap intervals of so few are rough, and tend to be too "
                     f"narrow; no difference is claimed from fewer than {FEWEST_PROBLEMS}.")  # fmt: skip
    if any(c.num_turns < FEWEST_TURNS for c in summary.cells) and len(summary.variants) > 1:
        found.append(f"Nothing is claimed about seconds: each method searched in fewer than {FEWEST_TURNS} batches of "
                     "problems, and what else a machine does weighs on a whole batch.")  # fmt: skip
    return found


# -- numbers ---------------------------------------------------------------------------------------------------


def _where(benchmark: str, summary: BenchSummary) -> str:
    return f" on {benchmark}" if len(summary.benchmarks) > 1 else ""


def number(x: Interval | float | None, digits: int = 0, scale: float = 1) -> str:
    """Returns a figure times `scale`, with its interval if it has one; a dash where it is not known."""
    if x is None:
        return "–"
    if not isinstance(x, Interval):
        return f"{scale * x:,.{digits}f}"
    value, low, high = (f"{scale * each:,.{digits}f}" for each in (x.value, x.low, x.high))
    return f"{value} ({low} to {high})"


def percent(x: Interval | float | None) -> str:
    return number(x, 1, 100)


def points(x: Interval | None) -> str:
    return "–" if x is None else _difference(x, "points", 0)


def _change(ratio: Interval | None) -> str:
    return "–" if ratio is None else _difference(ratio, "%", 1)


def _difference(x: Interval, unit: str, none: float) -> str:
    """Returns the distance from `none`, which is no difference, in hundredths."""
    texts = [f"{100 * (each - none):+.1f}" for each in (x.value, x.low, x.high)]
    value, low, high = ("0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS) for text in texts)
    return f"{value} {unit} ({low} to {high})"


def _share(part: float, whole: float) -> str:
    return "–" if not whole else f"{100 * part / whole:.1f} %"


def _p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}"

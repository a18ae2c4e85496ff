"""Reports from made-up rows: what is claimed and what is not, the tables, the page; and the bar of a running bench."""

import dataclasses
import itertools
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gambit import events as ev
from gambit.bench import figures
from gambit.bench.folder import BenchmarkInfo, BenchPlan, create
from gambit.bench.recipe import BenchVariant, recipe_from
from gambit.bench.report import made_with, write_report
from gambit.bench.rows import NUM_MOMENTS, Row, RowWriter, Series, Spent, productive_tokens, series_of
from gambit.bench.summary import BenchSummary, ProblemTable, summarise
from gambit.bench.tables import Table, all_tables, cautions, findings, headline
from gambit.cli.progress import BenchScreen
from gambit.errors import UserError
from gambit.results.dots import Dot
from gambit.stats import Interval
from gambit.tree import TraceTree
from gambit.types import Aggregation, EndReason


def row(variant: str, problem: int, correct: bool, *, seed: int = 0, benchmark: str = "b", **more: object) -> Row:
    values = {
        "generated": 100, "completed": 4, "right_traces": 2, "productive": 80,
        "seconds": Spent(2.0, 1.5, 0.1, 0.1, 0.1), "began": 10.0 * problem, "kv_capacity": 1000, "kv_peak": 500,
        "revotes": {"majority": correct}, "unique_lengths": (10, 20), "total_lengths": (20, 30),
        "series": Series((0.0, 1.0, 2.0), (0, 4, 0), (4, 0, 0), (0, 2, 4), (0, 400, 100)), **more,
    }  # fmt: skip
    return Row(
        variant, benchmark, f"p{problem:03d}", seed, "1", "1" if correct else "2", correct, "completed", **values
    )


def summary_of(rows: list[Row], *labels: str, seeds: int = 1, benchmarks: tuple[str, ...] = ("b",)) -> BenchSummary:
    methods = [BenchVariant(label, label, {}) for label in labels or ("sc", "gambit")]
    return summarise(rows, methods, benchmarks, range(seeds), len(rows))


def two(num_problems: int, right: tuple[int, int], **more: object) -> list[Row]:
    """sc and gambit; each is right on its first so many problems."""
    pairs = zip(("sc", "gambit"), right, strict=True)
    return [row(variant, i, i < count, **more) for variant, count in pairs for i in range(num_problems)]


def cell_of(summary, variant: str, benchmark: str):
    return next(cell for cell in summary.cells if (cell.variant, cell.benchmark) == (variant, benchmark))


def test_traces_that_end_within_the_warmup_are_told_with_a_better_one() -> None:
    def found(warmup: int) -> list[str]:
        return cautions(summary_of([*two(40, (10, 30)), *two(40, (10, 30), benchmark="c", warmup_tokens=warmup)],
                                   benchmarks=("b", "c")))  # fmt: skip

    assert not any("warm-up" in caution for caution in found(20)), "half of the traces are longer"
    told = [caution for caution in found(30) if "warm-up" in caution]
    assert told[1] == ("100% of gambit's traces on c ended within the warm-up of 30 tokens, before a tournament could "
                       "judge them: give --warmup-tokens 12, half a trace.")  # fmt: skip


def test_problems_of_all_benchmarks_count_alike_in_the_gain() -> None:
    """9 of 30 problems in one, none of 10 in the other."""
    rows = [*two(30, (10, 19)), *two(10, (5, 5), benchmark="c")]
    summary = summary_of(rows, benchmarks=("b", "c"))
    gain = summary.overall[1].gain
    assert gain.value == pytest.approx(9 / 40) and 0.05 < gain.low < 9 / 40 < gain.high < 0.4
    [table] = [table for table in all_tables(summary) if table.title == "Over all benchmarks"]
    assert table.columns[2] == "against sc" and [row[2][:12] for row in table.rows] == ["–", "+22.5 points"]


@pytest.mark.parametrize(("tokens", "is_told"), [(0, False), (110, False), (178, True)])
def test_a_verifier_that_reads_again_what_it_has_read_is_told(tokens: int, is_told: bool) -> None:
    found = [
        caution for caution in cautions(summary_of(two(40, (10, 30), verifier_tokens=tokens))) if "verifier" in caution
    ]
    assert len(found) == 2 * is_told  # both methods have the same rows here
    assert all("read 1.8 tokens for every generated one" in each and "--verifier-memory" in each for each in found)


# -- claims ----------------------------------------------------------------------------------------------------


def test_a_clear_difference_is_claimed_with_its_figures() -> None:
    [claim, *_] = findings(summary_of(two(40, (10, 30))))
    assert claim.startswith("gambit answers more problems right than sc (+50.0 points (+35.0 to +65.0), p < 0.0001")


def test_the_same_accuracy_is_no_claim_of_equality() -> None:
    [claim, tokens, seconds] = findings(summary_of(two(40, (20, 20))))
    assert claim.startswith("No difference in accuracy is shown between gambit and sc (0.0 points")
    assert tokens.startswith("No difference in tokens") and seconds.startswith("No difference in seconds")


def test_an_interval_alone_is_not_enough() -> None:
    """Four of 24: the bootstrap excludes 0, the exact test says 1 in 8."""
    summary = summary_of(two(24, (20, 24)))
    [comparison] = summary.comparisons
    assert comparison.gain.low > 0 and comparison.p == pytest.approx(0.125) and not comparison.is_shown
    assert findings(summary)[0].startswith("No difference in accuracy is shown")


def test_nothing_is_claimed_from_fewer_than_twenty_problems() -> None:
    few, enough = summary_of(two(19, (2, 17))), summary_of(two(20, (2, 17)))
    assert few.comparisons[0].p_corrected < 0.001 and not few.comparisons[0].is_shown
    assert all(line.startswith("No difference") for line in findings(few)), findings(few)
    assert enough.comparisons[0].is_shown and findings(enough)[0].startswith("gambit answers more problems right")
    assert "no difference is claimed from fewer than 20." in cautions(few)[0] and not cautions(enough)


def test_methods_with_tournaments_say_their_pool_and_where_answers_were_found() -> None:
    rows = two(24, (12, 18))
    rows = [dataclasses.replace(each, pool="4 islands (M) …", winning_islands=3) if each.variant == "gambit" else each
            for each in rows]  # fmt: skip
    [table] = [table for table in all_tables(summary_of(rows)) if table.title == "Islands"]
    assert table.rows == (("b", "gambit", "4 islands (M) …", "3.0"),)
    assert all(table.title != "Islands" for table in all_tables(summary_of(two(24, (12, 18)))))


def test_sharing_is_that_of_all_searches_together_and_unknown_for_rows_from_before() -> None:
    rows = two(2, (1, 1))
    rows[2:] = [dataclasses.replace(rows[2], read_total=900, read_unique=300),
                dataclasses.replace(rows[3], read_total=100, read_unique=100)]  # fmt: skip
    [table] = [table for table in all_tables(summary_of(rows)) if table.title == "Throughput"]
    assert [line[table.columns.index("sharing")] for line in table.rows] == ["–", "2.50"]


def test_stretch_is_the_steps_by_the_longest_trace() -> None:
    """Of 20 tokens in 60 steps: two thirds of the time it or what it came from waited."""
    rows = two(2, (1, 1))
    rows[2:] = [dataclasses.replace(rows[2], steps=60, total_lengths=(20, 7)),
                dataclasses.replace(rows[3], steps=12, total_lengths=(12,))]  # fmt: skip
    rows[:2] = [dataclasses.replace(row, total_lengths=()) for row in rows[:2]]
    [table] = [table for table in all_tables(summary_of(rows)) if table.title == "Memory and waiting"]
    assert [line[table.columns.index("stretch")] for line in table.rows] == ["–", "2.00"]


def test_nothing_is_claimed_from_an_interval_without_a_width() -> None:
    summary = summary_of(two(30, (0, 30)))
    [comparison] = summary.comparisons
    assert comparison.gain.low == comparison.gain.high == 1 and not comparison.is_shown


def test_costs_are_claimed_by_the_same_rule() -> None:
    def lines(num_problems):
        rows = [
            row(v, i, i % 2 == 0, generated=t + i)
            for v, t in (("sc", 200), ("gambit", 100))
            for i in range(num_problems)
        ]
        return [line for line in findings(summary_of(rows)) if "tokens" in line]

    assert [line.split(" (")[0] for line in lines(19)] == ["No difference in tokens is shown between gambit and sc"]
    assert [line.split(" (")[0] for line in lines(20)] == ["gambit takes fewer tokens than sc"]


def test_comparisons_are_corrected_for_their_number() -> None:
    rows = [row(v, i, i < n) for v, n in (("sc", 10), ("a", 16), ("c", 10)) for i in range(30)]
    found = {(c.first, c.second): c for c in summary_of(rows, "sc", "a", "c").comparisons}
    assert set(found) == {("a", "sc"), ("c", "sc"), ("c", "a")}
    assert found["a", "sc"].p == pytest.approx(2 / 2**6)
    assert found["a", "sc"].p_corrected == pytest.approx(3 * 2 / 2**6)  # no longer below 0.05
    assert not found["a", "sc"].is_shown


def test_seeds_are_averaged_inside_problems() -> None:
    right = {
        ("sc", 0): (True, False),
        ("sc", 1): (False, False),
        ("gambit", 0): (True, True),
        ("gambit", 1): (True, False),
    }
    rows = [row(v, i, c, seed=s) for (v, i), verdicts in right.items() for s, c in enumerate(verdicts)]
    summary = summary_of(rows, seeds=2)
    assert cell_of(summary, "sc", "b").accuracy.value == 0.25 and cell_of(summary, "gambit", "b").accuracy.value == 0.75
    [comparison] = summary.comparisons
    assert comparison.num_problems == 2 and comparison.gain.value == 0.5
    assert comparison.p == pytest.approx(0.5)  # of ++, +-, -+, -- two are as far from 0
    assert comparison.only_first == 1.0 and comparison.only_second == 0  # half a problem each


def test_nothing_is_claimed_about_costs_from_a_handful_nor_about_seconds_from_one_turn() -> None:
    def halved(n: int) -> list[Row]:
        plain = [r for r in two(n, (2, 2)) if r.variant == "sc"]
        slow = [dataclasses.replace(r, generated=200 + i, seconds=Spent(4 + i / 10)) for i, r in enumerate(plain)]
        return slow + [r for r in two(n, (2, 2)) if r.variant == "gambit"]

    few = summary_of(halved(5))
    assert all(claim.startswith("No difference") for claim in findings(few))
    assert any("Only 5 problems" in caution for caution in cautions(few))
    many = findings(summary_of(halved(30)))
    assert any(claim.startswith("gambit takes fewer tokens than sc (−53.4 % (−54.") for claim in many), many
    assert any(claim.startswith("gambit takes fewer seconds than sc (−63.3 % (−6") for claim in many), many
    one_turn = summary_of([dataclasses.replace(r, began=float(r.variant == "gambit")) for r in halved(30)])
    assert not any("seconds" in claim for claim in findings(one_turn))
    assert any("fewer than 6 batches" in caution for caution in cautions(one_turn))


def test_seconds_of_problems_that_ran_side_by_side_are_one_observation() -> None:
    """The machine slowed down in some turns of gambit's: noise, although every problem of such a turn agrees."""
    turn, slow = 10, {0, 3, 4, 7}
    rows = []
    for problem in range(8 * turn):
        seconds = Spent(3.0 if problem // turn in slow else 1.2)
        rows.append(row("sc", problem, True, began=100.0 * (problem // turn), seconds=Spent(2.0)))
        rows.append(row("gambit", problem, True, began=100.0 * (problem // turn) + 50, seconds=seconds))
    together = summary_of(rows)
    alone = summary_of([dataclasses.replace(r, began=100.0 * int(r.problem[1:])) for r in rows])
    ratio, if_alone = (cell_of(each, "gambit", "b").seconds_ratio for each in (together, alone))
    assert ratio.value == if_alone.value == pytest.approx(1.05)
    assert ratio.high - ratio.low > 2.5 * (if_alone.high - if_alone.low)
    mean = cell_of(together, "gambit", "b").seconds
    assert mean.value == pytest.approx(2.1) and (mean.low, mean.high) == pytest.approx((2 * ratio.low, 2 * ratio.high))


def test_a_turn_is_what_a_method_searched_in_one_go() -> None:
    began = {"sc": [0, 1, 10, 11, 0], "gambit": [5, 6, 15, 17, 9]}  # sc, gambit, sc, gambit; the last elsewhere
    rows = [
        row(variant, i, True, began=float(when), shard="2/2" if i == 4 else "1/2")
        for variant, times in began.items()
        for i, when in enumerate(times)
    ]
    turns = ProblemTable(rows, ["sc", "gambit"]).turns
    assert [turn.tolist() for turn in turns] == [[0, 1], [2, 3], [4]]


def test_blocks_that_a_method_goes_through_without_a_break_are_turns_of_their_own() -> None:
    """As two methods do that take turns in changing order, and with two seeds."""
    rows, clock = [], itertools.count()
    for seed, block in itertools.product((0, 1), range(4)):
        methods = ("sc", "gambit") if block % 2 == 0 else ("gambit", "sc")
        for variant, problem in itertools.product(methods, (2 * block, 2 * block + 1)):
            rows.append(row(variant, problem, True, seed=seed, began=float(next(clock))))
    turns = ProblemTable(rows, ["sc", "gambit"]).turns
    assert [turn.tolist() for turn in turns] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_failures_count_as_wrong_and_cost_nothing() -> None:
    rows = two(4, (4, 4))
    rows[0] = row("sc", 0, False, error="broken", generated=0, completed=0)
    cell = cell_of(summary_of(rows), "sc", "b")
    assert cell.accuracy.value == 0.75 and cell.num_failed == 1
    assert cell.tokens.value == 100  # not 75
    assert any("1 search failed, which count" in caution for caution in cautions(summary_of(rows)))


def test_a_method_that_failed_everywhere_is_named_first_and_compared_with_nothing() -> None:
    rows = [row("sc", i, i < 20) for i in range(25)]
    rows += [row("gambit", i, False, error="KeyError: 7", generated=0, completed=0) for i in range(25)]
    summary = summary_of(rows)
    failed = "gambit failed in all of its 25 searches (KeyError: 7)."
    assert cautions(summary)[0] == failed and headline(summary) == failed
    assert summary.comparisons == () and findings(summary) == []
    rows[-1] = row("gambit", 24, False)
    assert "failed in all" not in " ".join(cautions(summary_of(rows))) and summary_of(rows).comparisons


def test_single_traces_are_compared_by_problem_where_both_have_completed_any() -> None:
    shares = {"sc": (0, 1, 2, 4, 0, 0, 1), "gambit": (0, 2, 3, 4, 1, 0, None)}  # right ones of four, or none completed
    rows = [
        row(variant, i, True, right_traces=right or 0, completed=0 if right is None else 4)
        for variant, rights in shares.items()
        for i, right in enumerate(rights)
    ]
    cells = {cell.variant: cell for cell in summary_of(rows).cells}
    gain = cells["gambit"].trace_gain
    assert gain.value == pytest.approx((1 + 1 + 0 + 1) / 4 / 6) and 0 < gain.low < gain.value < gain.high
    assert cells["sc"].trace_gain is None
    assert cells["sc"].coverage.value == pytest.approx(4 / 7) and cells["gambit"].coverage.value == pytest.approx(4 / 7)
    [table] = [table for table in all_tables(summary_of(rows)) if table.title == "Traces"]
    assert table.columns[-2:] == ("against sc", "some trace right %")
    assert table.rows[0][-2] == "–" and table.rows[1][-2].startswith("+12.5 points (+")


def test_only_problems_that_all_have_searched_are_compared() -> None:
    rows = two(6, (6, 0))[:-2]  # gambit lacks the last two
    summary = summarise(rows, [BenchVariant("sc", "sc", {}), BenchVariant("gambit", "gambit", {})], ["b"], [0], 12)
    assert cell_of(summary, "sc", "b").num_problems == 4 and summary.left_out == {"b": 2}
    assert any("10 of 12 searches" in caution for caution in cautions(summary))


def test_a_run_that_was_cut_short_compares_the_seeds_that_all_have_done() -> None:
    again = two(6, (6, 0), seed=1)
    rows = [*two(6, (0, 6)), *again[:6], *again[6:8]]  # with the second seed gambit has searched two problems
    summary = summarise(rows, [BenchVariant("sc", "sc", {}), BenchVariant("gambit", "gambit", {})], ["b"], [0, 1], 24)
    sc, gambit = (cell_of(summary, name, "b") for name in ("sc", "gambit"))
    assert sc.num_problems == gambit.num_problems == 6 and sc.num_rows == gambit.num_rows == 8
    assert sc.accuracy.value == pytest.approx(2 * 0.5 / 6) and gambit.accuracy.value == pytest.approx((4 + 2 * 0.5) / 6)
    assert not summary.left_out and any("20 of 24 searches" in caution for caution in cautions(summary))


def test_many_methods_are_compared_with_the_baseline_only() -> None:
    names = ["sc", *"abcdefg"]
    rows = [row(v, i, i % 2 == 0) for v in names for i in range(4)]
    assert {c.second for c in summary_of(rows, *names).comparisons} == {"sc"}


def test_benchmarks_count_alike_in_the_overall_mean() -> None:
    rows = [
        row(v, i, b == "b", benchmark=b) for v in ("sc", "gambit") for b, n in (("b", 9), ("c", 1)) for i in range(n)
    ]
    summary = summary_of(rows, benchmarks=("b", "c"))
    assert [overall.accuracy.value for overall in summary.overall] == [0.5, 0.5]
    assert [overall.gain for overall in summary.overall] == [None, Interval(0.0, 0.0, 0.0)]
    assert {table.columns[0] for table in all_tables(summary)} == {"benchmark", "method"}


def test_a_sweep_averages_over_the_other_options() -> None:
    methods = [BenchVariant(f"g k={k} d={d}", "gambit", {"k": k, "d": d}, ("k", "d")) for k in (1, 2) for d in (5, 9)]
    right = {(1, 5): 4, (1, 9): 2, (2, 5): 0, (2, 9): 4}
    rows = [row(m.label, i, i < right[m.changes["k"], m.changes["d"]]) for m in methods for i in range(4)]
    points = {(p.option, p.value): p for p in summarise(rows, methods, ["b"], [0], 16).sweep}
    assert points["k", 1].accuracy.value == 0.75 and points["k", 2].accuracy.value == 0.5
    assert points["d", 5].accuracy.value == 0.5 and points["d", 9].accuracy.value == 0.75
    assert points["k", 1].num_variants == 2


# -- measures --------------------------------------------------------------------------------------------------


def test_productive_tokens_are_those_of_completed_traces_and_what_they_inherit() -> None:
    """0 is pruned at 10 tokens, its child 1 (from token 6) completes at 9; 2 completes; 3 from 1 at 8 is cut off."""
    tree = TraceTree(4, Aggregation.MEAN)
    for event in (
        ev.Created(0, 0), ev.Admitted(0, 0, 0, 0, 0), ev.Branched(6, 1, 0, 6, 1.0), ev.Admitted(6, 1, 6, 0, 0),
        ev.Created(6, 2), ev.Admitted(6, 2, 0, 0, 0), ev.Branched(8, 3, 1, 8, 1.0), ev.Admitted(8, 3, 8, 0, 0),
        ev.Pruned(10, 0, "swap", None, (0,) * 10), ev.Finished(10, 1, EndReason.STOP, "1", (0,) * 3),
        ev.Finished(11, 2, EndReason.STOP, "1", (0,) * 5), ev.Cancelled(12, 3, (0,) * 7),
    ):  # fmt: skip
        tree.apply(event)
    assert productive_tokens(tree) == 6 + 3 + 5


def test_a_series_is_thinned_evenly_and_keeps_its_end() -> None:
    samples = [ev.Sample(i, i, 0, 0, 0, 0, 0, 0, float(i), 0, 0, 0, 0) for i in range(1000)]
    series = series_of(samples)
    assert len(series.running) <= NUM_MOMENTS and series.running[0] == 0 and series.running[-1] == 999
    assert max(np.diff(series.running)) <= 1000 / (NUM_MOMENTS - 1) + 1
    assert series_of(samples[:3]).running == (0, 1, 2) and series_of([]).running == ()


def test_a_search_that_has_ended_counts_as_nothing_in_the_mean_curve() -> None:
    short = dataclasses.replace(row("sc", 0, True), series=Series((0.0, 1.0), (4, 4), (0, 0), (0, 0), (0, 0)))
    long = dataclasses.replace(row("sc", 1, True), series=Series((0.0, 3.0), (2, 2), (0, 0), (0, 0), (0, 0)))
    curve = figures.mean_curve([short, long], np.array([0.5, 2.0, 4.0]), lambda row: row.series.running)
    assert curve.tolist() == [3.0, 1.0, 0.0]


# -- the files -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = recipe_from({"benchmarks": ["b"], "policies": ["sc", "gambit"]})
    create(tmp_path, BenchPlan(recipe, tuple(recipe.variants()), (BenchmarkInfo("b", 30, "hash"),), {"model": "<m>"}))
    with RowWriter(tmp_path) as writer:
        for made in two(30, (10, 25)):
            writer.write(made)
    return tmp_path


def test_the_page_stands_alone_and_has_both_themes(run: Path) -> None:
    write_report(run)
    page = (run / "report.html").read_text()
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"|<!--.*?-->|<metadata>.*?</metadata>', "", page, flags=re.DOTALL)
    assert "http" not in without_names and not re.search(r"<(script|link|img|iframe)\b", page)
    assert page.count("<svg") == page.count('class="dots"') == 7 and "prefers-color-scheme: dark" in page
    assert "&lt;m&gt;" in page and "<m>" not in page


def test_the_page_begins_with_a_sentence_and_a_plot_and_folds_its_tables(run: Path) -> None:
    report = write_report(run)
    page = (run / "report.html").read_text()
    sentence = "On b gambit answers 83.3 % (70.0 to 96.7) of 30 problems right and sc (voting) 33.3 % "
    assert report.headline.startswith(sentence) and f"**{sentence}" in report.to_markdown()
    assert page.index(sentence) < page.index('class="dots"') < page.index("<details>") < page.index("<table>")
    assert page.count("<details>") == page.count("</table>") + 1, "all tables, and the figures"
    assert " open=" not in page


def test_the_sentence_claims_no_more_than_is_shown() -> None:
    assert headline(summary_of(two(30, (10, 12)), "sc", "gambit")).endswith("which chance may explain.")
    assert "no method is right more often than sc (voting)," in headline(summary_of(two(30, (12, 10)), "sc", "gambit"))


def test_few_problems_are_no_finding_and_a_sentence_says_why_nothing_is_claimed() -> None:
    few = summary_of(two(8, (8, 8)), "sc", "gambit")
    assert headline(few) == (
        "On b 8 problems are too few to tell: sc (voting) answers 100.0 % (63.1 to 100.0) right, gambit "
        "100.0 % (63.1 to 100.0)."
    )
    assert all(line.endswith("8 problems: a claim takes 20).") for line in findings(few)) and findings(few)
    assert "1 problem: a claim takes 20)" in findings(summary_of(two(1, (1, 0))))[0]
    assert "On b 1 problem is too few" in headline(summary_of(two(1, (1, 0))))
    assert not any("a claim takes" in line for line in findings(summary_of(two(30, (12, 10)))))
    assert headline(summary_of([each for each in two(30, (12, 10)) if each.variant == "sc"], "sc")) == ""


def test_figures_and_words_are_written_in_every_form(run: Path) -> None:
    report = write_report(run)
    pictures = sorted(path.name for path in (run / "figures").iterdir())
    words = (
        "KV_tokens_in_use_over_seconds_and_most",
        "accuracy",
        "own_tokens_of_a_trace_middle_80_",
        "running_traces_over_seconds_and_most",
        "seconds_a_problem",
        "tokens_a_problem",
        "tokens_of_a_trace_middle_80_",
    )
    assert pictures == [f"b_{each}.svg" for each in words]
    for name in pictures:
        assert f"(figures/{name})" in report.to_markdown()
        assert (run / "figures" / name).read_text() in (run / "report.html").read_text()
    assert "| gambit | 30 | 83.3 (" in report.to_markdown()


@pytest.mark.parametrize("line", ["garbage", "[]"])
def test_a_damaged_line_about_the_machine_is_named(run: Path, line: str) -> None:
    (run / "environment.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"environment\.jsonl, line 1 is not a start of a bench run"):
        made_with(run)


def test_a_folder_without_anything_to_compare_is_refused(run: Path) -> None:
    rows = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    (run / "rows.jsonl").write_text("".join(rows[:5]))
    with pytest.raises(UserError, match="nothing can be compared"):
        write_report(run)
    with pytest.raises(UserError, match=r"run\.json"):
        write_report(run / "elsewhere")


# -- the bar ---------------------------------------------------------------------------------------------------


def screen(progress: BenchScreen) -> list[str]:
    console = Console(file=StringIO(), width=60)
    console.print(progress.render())
    return console.file.getvalue().splitlines()


def test_the_bar_fits_60_columns_and_shows_accuracy_and_the_time_left() -> None:
    progress = BenchScreen(Console(file=StringIO()), is_live=False)
    progress.loading("some/model")
    assert screen(progress) == ["loading some/model"]
    progress.begin(
        40, ["sc", "gambit with a very long name that says everything about its options"], [row("sc", 0, True)]
    )
    assert progress.seconds_left is None
    progress.on_row(row("sc", 1, False))
    head, first, second = screen(progress)
    assert "2/40" in head and re.search(r"\d:\d\d left", head)
    assert first.strip() == "sc: 1/2 right (50%), 100 tokens each"
    assert len(second) <= 60 and second.endswith("…")


def test_the_time_left_counts_this_start_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 110.0])
    monkeypatch.setattr("gambit.cli.progress.time.monotonic", lambda: next(clock))
    progress = BenchScreen(Console(file=StringIO()), is_live=False)
    progress.begin(12, ["sc"], [row("sc", i, True) for i in range(8)])
    progress.on_row(row("sc", 9, True))
    assert progress.seconds_left == pytest.approx(30.0)  # ten seconds a search, three to go


def test_nothing_is_drawn_where_nobody_looks() -> None:
    out = StringIO()
    with BenchScreen(Console(file=out), is_live=False) as progress:
        progress.begin(2, ["sc"], [])
        progress.on_row(row("sc", 0, True))
    assert out.getvalue() == ""


# -- figures ---------------------------------------------------------------------------------------------------


def drawn(rows: list[Row], *labels: str) -> dict[str, str]:
    return dict(figures.further(summary_of(rows, *labels), rows))


def places(picture: str, what: str) -> list[list[str]]:
    return re.findall(rf'<{what} [^>]*?points="([^"]*)"', picture)


def test_a_plot_of_lengths_has_the_median_and_the_middle_80_percent() -> None:
    rows = [row("sc", 0, True, total_lengths=tuple(range(0, 1001, 10)))]
    picture = drawn(rows, "sc")["b: tokens of a trace, middle 80 %"]
    assert "sc 500</title>" in picture and 'x1="239.4" x2="442.6"' in picture, "from 100 to 900 on an axis to 1000"


def test_a_curve_of_the_pool_rises_and_falls_as_the_pool_does() -> None:
    rows = [row(name, i, True) for name in ("sc", "gambit") for i in range(4)]
    picture = drawn(rows, "sc", "gambit")["b: running traces over seconds, and most"]
    assert "sc at most 4; gambit at most 4" in picture
    first, second = ([float(point.split(",")[1]) for point in curve.split()] for curve in places(picture, "polyline"))
    assert len(first) == figures.NUM_MOMENTS and first[0] == first[-1] == max(first) == min(first) + 26
    assert second == [y + 34 for y in first], "the same curve a row lower"


def test_a_swept_option_has_a_row_for_each_value_below_the_other_methods() -> None:
    methods = [
        BenchVariant("sc", "sc", {}),
        *(BenchVariant(f"c{n}", "gambit", {"capacity": n}, ("capacity",)) for n in (8, 16)),
    ]
    rows = [row(method.label, i, True, generated=n) for n, method in enumerate(methods, start=1) for i in range(4)]
    found = dict(figures.further(summarise(rows, methods, ("b",), range(1), len(rows)), rows))
    assert "sc 100.0 %; 8 100.0 %; 16 100.0 %" in found["b: accuracy by gambit capacity"]
    assert "sc 1; 8 2; 16 3" in found["b: tokens by gambit capacity"]


def test_a_report_has_pass_at_k_majority_at_k_and_the_accuracy_of_each_seed(tmp_path: Path) -> None:
    """Two of four traces are right, and the wrong two agree: any two hold a right one in five of six choices."""
    rows = [
        row(variant, i, seed == 0 or i < 5, seed=seed, wrong_traces=(2,), at_limit=1, forced=seed, looped=3,
            children_right=2)
        for variant in ("sc", "gambit") for i in range(20) for seed in range(2)
    ]  # fmt: skip
    summary = summary_of(rows, seeds=2)
    cell = summary.cells[0]
    assert {k: found.value for k, found in cell.pass_at.items()} == pytest.approx({1: 1 / 2, 2: 5 / 6, 4: 1.0})
    assert {k: found.value for k, found in cell.majority_at.items()} == pytest.approx({1: 0.5, 2: 0.5, 4: 0.5})
    assert cell.by_seed == (1.0, 0.25) and cell.seed_deviation == pytest.approx(0.75 / 2**0.5)
    tables = {table.title: table for table in all_tables(summary)}
    assert [line[2:] for line in tables["Seeds"].rows] == [("100.0", "25.0", "62.5", "53.0")] * 2
    assert tables["Ends and branches"].rows[0][1:] == ("4.0", "1.0", "0.5", "3.0", "2.00", "0.00")
    older = summary_of([dataclasses.replace(each, wrong_traces=None) for each in rows], seeds=2).cells[0]
    assert older.majority_at == {} and older.pass_at == cell.pass_at
    assert "Seeds" not in {table.title for table in all_tables(summary_of(two(20, (5, 9))))}


def test_tables_are_written_for_spreadsheets_and_for_latex() -> None:
    table = Table("A & B", "", ("method", "accuracy %"), (("gambit, p_1", "50.0 (−1.0 to 2.0)"), ("sc", "–")), 1)
    assert table.to_csv() == 'method,accuracy %\n"gambit, p_1",50.0 (−1.0 to 2.0)\nsc,–\n'
    latex = table.to_latex().splitlines()
    assert latex[1:5] == [r"\begin{tabular}{lr}", r"\toprule", r"method & accuracy \% \\", r"\midrule"]
    assert latex[5:] == [r"gambit, p\_1 & 50.0 ($-$1.0 to 2.0) \\", r"sc & -- \\", r"\bottomrule", r"\end{tabular}"]


def test_one_problem_has_a_point_without_a_bar() -> None:
    assert Dot.of("sc", Interval(0.5, float("nan"), float("nan")), is_ours=False) == Dot("sc", 0.5, 0.5, 0.5)
    assert Dot.of("gambit", Interval(0.5, 0.4, 0.6), is_ours=True, scale=100) == Dot("gambit", 50, 40, 60, is_ours=True)

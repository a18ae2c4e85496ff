"""Prints results of searches, and turns them into an exit code."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gambit.answers.structured import THINK_END
from gambit.cli.terminal import FAILURE, NO_ANSWER, OK, USER_MISTAKE, put
from gambit.results.result import STOP_WORDS, Counts, Cuts, SearchResult, VerifierCost
from gambit.results.vote import VoteEntry
from gambit.types import StopReason, count_of

MOST_VOTES, FEW_VOTES = 10, 5
LAST_LINES, LAST_CHARACTERS = 4, 800  # of a trace's text
BAR_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Shown:
    """A result and its right answer, where that is known."""

    result: SearchResult
    gold: str | None = None
    is_right: bool | None = None

    def to_json(self) -> str:
        graded = {} if self.gold is None else {"expected": self.gold, "is_right": self.is_right}
        can_show_all = sys.stdout.encoding.lower() == "utf-8"  # elsewhere escapes keep it JSON
        return json.dumps({**self.result.to_json(), **graded}, ensure_ascii=not can_show_all)

    @property
    def verdict(self) -> str | None:
        if self.gold is None or self.result.answer is None:
            return self.gold
        return f"{self.gold} ({'right' if self.is_right else 'wrong'})"


@dataclass(frozen=True, slots=True)
class Style:
    """The form in which results are printed."""

    as_json: bool = False
    is_quiet: bool = False
    has_titles: bool = False  # of one of several problems
    has_traces: bool = False  # prints all of the trace behind the answer
    is_verbose: bool = False  # prints all that is known about the search
    effort: str = ""  # that no option named, where it is not the full pool

    def show(self, shown: Shown) -> None:
        result = shown.result
        if self.as_json:
            typer.echo(shown.to_json())
        elif self.is_quiet:
            title = f"{result.problem_id}\t" if self.has_titles else ""
            typer.echo(f"{title}{'' if result.answer is None else result.answer}")
        else:
            put(report(shown, self))
            if self.has_titles:
                put("")


def code_of(result: SearchResult) -> int:
    """Returns the exit code of a result; an incomplete log is a failure even with an answer."""
    if result.log_error is not None:
        return FAILURE
    return USER_MISTAKE if result.error is not None else OK


def worst(codes: Iterable[int]) -> int:
    """Returns the exit code of a run out of those of its results."""
    found = set(codes)
    return next(code for code in (FAILURE, USER_MISTAKE, NO_ANSWER, OK) if code in found)


def report(shown: Shown, style: Style) -> RenderableType:
    """Returns the answer, its reasoning, the votes, the cost and what speaks against it; verbose, all facts."""
    result, title = shown.result, shown.result.problem_id if style.has_titles else None
    if result.error is not None:
        return _headline(result, title)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    effort = {"effort": style.effort} if style.effort else {}
    for name, value in (effort | _facts(result, shown.verdict, is_verbose=style.is_verbose)).items():
        facts.add_row(name, Text(value))
    parts: list[RenderableType] = [_headline(result, title)]
    if result.text:
        heading = "its best trace" if style.has_traces else "the end of its best trace (all of it: --trace)"
        text = result.text.strip() if style.has_traces else last_thoughts(result.text)
        parts += ["", Text(heading, style="dim"), Padding(Text(text), (0, 0, 0, 2))]
    if result.votes:
        parts += ["", _vote_table(result, is_verbose=style.is_verbose)]
    return Group(*parts, "", facts)


def last_thoughts(text: str) -> str:
    """Returns the last lines of a trace, without blank ones and the tag, cut at the front where they are long."""
    lines = [line.rstrip() for line in text.replace(THINK_END, "").splitlines() if line.strip()]
    shown = "\n".join(lines[-LAST_LINES:])
    return shown if len(shown) <= LAST_CHARACTERS else f"…{shown[-LAST_CHARACTERS:]}"


def _headline(result: SearchResult, title: str | None) -> Text:
    name = f"{title}: " if title else ""
    if result.error is not None:
        return Text(f"{name}not solved: {result.error}", style="red")
    if result.answer is None:
        return Text(f"{name}no answer: {_why_none(result.counts)}", style="yellow")
    return Text.assemble(f"{name}answer: ", (result.answer, "bold green"))


def _why_none(counts: Counts) -> str:
    if counts.completed == 0:
        return "no trace was completed"
    return f"none of the {count_of(counts.completed, 'completed trace')} gave one"


def _vote_table(result: SearchResult, *, is_verbose: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("  answer", overflow="fold")
    columns: dict[str, Callable[[VoteEntry], str]] = {"traces": lambda entry: f"{entry.traces:,}"}
    if is_verbose:
        columns = {"weight": lambda entry: f"{entry.weight:.2f}", **columns, "roots": lambda entry: f"{entry.roots:,}"}
        if result.num_islands > 1:
            columns["islands"] = lambda entry: f"{entry.islands:,}"
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share", no_wrap=True)
    total = sum(entry.weight for entry in result.votes)
    most = MOST_VOTES if is_verbose else FEW_VOTES
    for entry in result.votes[:most]:
        bar = share_bar(entry.weight / total) if total > 0 else ""
        table.add_row(Text(f"  {entry.answer}"), *(cell(entry) for cell in columns.values()), bar)
    if hidden := result.votes[most:]:
        cells = {"weight": f"{sum(entry.weight for entry in hidden):.2f}",
                 "traces": f"{sum(entry.traces for entry in hidden):,}"}  # fmt: skip
        share = share_bar(sum(entry.weight for entry in hidden) / total) if total > 0 else ""
        table.add_row(f"  {count_of(len(hidden), 'other answer')}", *(cells.get(name, "") for name in columns), share)
    if result.num_abstained:
        table.add_row("  none", *(f"{result.num_abstained:,}" if name == "traces" else "" for name in columns))
    return table


def share_bar(share: float) -> str:
    """Returns a share as a percentage and a bar."""
    return f"{share:4.0%} {'█' * round(BAR_WIDTH * share)}"


def _facts(result: SearchResult, verdict: str | None, *, is_verbose: bool) -> dict[str, str]:
    """Returns one line of costs and what a reader must not miss; verbose, all that is known."""
    counts, waiting = result.counts, result.waiting
    facts = {"expected": verdict} if verdict else {}
    if is_verbose:
        facts["traces"] = _trace_counts(counts, result.cuts)
        facts["tokens"] = f"{result.tokens}; sharing {result.sharing.factor:.2f}"
        facts["seconds"] = str(result.seconds)
        facts["search"] = f"{result.policy}, seed {result.seed}" + ("" if result.pool is None else f", {result.pool}")
    else:
        traces = f"{count_of(counts.completed, 'trace')} completed, {counts.pruned:,} pruned"
        facts["cost"] = f"{result.tokens.generated:,} tokens, {result.seconds.total:.1f} s, {traces} (more: -v)"
    if is_verbose or result.stop_reason is not StopReason.COMPLETED:
        facts["stopped"] = STOP_WORDS[result.stop_reason]
    if result.vote_warnings:
        facts["in doubt"] = "; ".join(result.vote_warnings)
    if is_verbose and waiting.traces:
        facts["waiting"] = (
            f"{count_of(waiting.traces, 'trace')}, {waiting.steps / waiting.traces:,.0f} steps each, "
            f"{waiting.seconds / waiting.traces:.1f} s each, at most {waiting.most_seconds:.1f} s"
        )
    if is_verbose and result.verifier is not None:
        facts["verifier"] = _verifier_words(result.verifier)
    return facts | ({"run": result.out_dir} if result.out_dir else {})


def _verifier_words(cost: VerifierCost) -> str:
    words = f"{cost.thoughts:,} thoughts, {cost.tokens:,} tokens read in {cost.seconds:.1f} s"
    words += f", waited for {cost.seconds_waited:.1f} s"
    if not cost.is_repeatable:
        words += "; nothing waited for its scores (--verifier-async): another run may go another way"
    return words if cost.lost is None else f"{words}; given up: {cost.lost}"


def _trace_counts(counts: Counts, cuts: Cuts) -> str:
    """Counts the traces by origin and by end; both sums are equal."""
    ended = ", ".join(f"{number:,} {name}" for name, number in counts.by_end.items() if number or name == "completed")
    notes = {
        "were forced to answer": cuts.forced,
        "repeated themselves": cuts.looped,
        "were evicted": counts.evicted,
        "of the completed have no vote": counts.discarded,
    }
    noted = "".join(f"; {number:,} {words}" for words, number in notes.items() if number)
    return f"{counts.roots:,} roots + {counts.branched:,} branched: {ended}{noted}"

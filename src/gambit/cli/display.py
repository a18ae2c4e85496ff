"""What a person sees: the live view of running searches, made from their events alone, and the final report."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gambit import events as ev
from gambit.cli.live import LiveScreen
from gambit.results.record import SearchRecord
from gambit.results.result import STOP_WORDS, Counts, SearchResult, VerifierCost
from gambit.tree import LIVE, TraceState

MAX_VOTES_SHOWN = 10
MAX_SEARCHES_SHOWN = 8
STOPPING = "stopping: the best vote so far follows; Ctrl-C again aborts at once"


class SearchView:
    """One search as far as its events tell."""

    def __init__(self, started: ev.RunStarted) -> None:
        self.record = SearchRecord(started)
        self.step = 0
        self.generated = 0
        self.leader = "no answer yet"

    def apply(self, event: ev.Event) -> None:
        self._count_tokens(event)
        self.record.apply(event)
        if isinstance(event, ev.Finished | ev.Discarded):
            self._count_votes()

    def _count_votes(self) -> None:
        """Only equal forms pool here: the grader's word is not worth its time before the end."""
        entries = self.record.vote(lambda first, second: False).entries
        if entries:
            share = entries[0].weight / sum(entry.weight for entry in entries)
            self.leader = f"{' '.join(entries[0].answer.split())} ({share:.0%})"

    def _count_tokens(self, event: ev.Event) -> None:
        """Every running trace says one token per step; each sample has the exact number."""
        if isinstance(event, ev.Sample):
            self.step, self.generated = event.step, event.generated
        elif not isinstance(event, ev.RunStarted | ev.Voted) and event.step > self.step:
            self.generated += (event.step - self.step) * self.count(TraceState.RUNNING)
            self.step = event.step

    def count(self, state: TraceState) -> int:
        return self.record.tree.count(state)

    @property
    def done(self) -> str:
        return f"{self.count(TraceState.FINISHED)}/{self.record.started.num_traces}"

    @property
    def pool(self) -> str:
        parts = {"running": TraceState.RUNNING, "waiting": TraceState.WAITING, "ghosts": TraceState.GHOST}
        return " · ".join(f"{self.count(state)} {name}" for name, state in parts.items())

    @property
    def islands(self) -> str:
        """How many still run, where there are several."""
        if self.record.num_islands == 1:
            return ""
        live = {trace.island for state in LIVE for trace in self.record.tree.in_state(state)}
        return f" · {len(live)}/{self.record.num_islands} islands"


class Display(LiveScreen):
    """A line of totals and one per running search."""

    stopping_words = STOPPING

    def __init__(self, console: Console, *, is_live: bool, num_problems: int = 1) -> None:
        super().__init__(console, is_live=is_live)
        self._num_problems = num_problems
        self._views: dict[str, SearchView] = {}
        self._num_done = 0
        self._generated_before = 0  # by searches that are over
        self._began: float | None = None
        self._spinner = Spinner("dots")

    def on_event(self, problem_id: str, event: ev.Event) -> None:
        if isinstance(event, ev.RunStarted):
            self._began = self._began or time.monotonic()
            self._views[problem_id] = SearchView(event)
        elif isinstance(event, ev.Voted):
            self._generated_before += self._views.pop(problem_id).generated
            self._num_done += 1
        else:
            self._views[problem_id].apply(event)

    # -- the lines ---------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """At most a line per running search below a line of totals; each is cut, never wrapped."""
        views = list(self._views.items())
        lines = [STOPPING] if self._is_stopping else []
        if self._num_problems > 1:
            lines += [f"{name}: {view.done} done · {view.leader}" for name, view in views[:MAX_SEARCHES_SHOWN]]
            if len(views) > MAX_SEARCHES_SHOWN:
                lines.append(f"… and {len(views) - MAX_SEARCHES_SHOWN} more")
        elif views:
            view = views[0][1]
            lines += [f"{view.pool} · done {view.done}{view.islands}", f"leading: {view.leader}"]
        return Group(self._head(), *(_line(f"  {line}") for line in lines))

    def _head(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        head.add_row(self._spinner, _line(self._totals()))
        return head

    def _totals(self) -> str:
        if self._began is None:
            return self._loading
        seconds = time.monotonic() - self._began
        views = list(self._views.values())
        generated = self._generated_before + sum(view.generated for view in views)
        first = f"step {views[0].step:,}" if views else "voting"
        if self._num_problems > 1:
            first = f"{self._num_done}/{self._num_problems} problems"
        rate = f"{generated / max(seconds, 1e-3):,.0f} tokens/s"
        return f"{first} · {generated:,} tokens · {rate} · {_clock(seconds)}"


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


# -- the report ------------------------------------------------------------------------------------------------


def report(result: SearchResult, *, title: str | None = None, verdict: str | None = None) -> RenderableType:
    """The answer, the vote table, what it cost, why it ended and where its log is; a refused problem has only why."""
    if result.error is not None:
        return _headline(result, title)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(result, verdict).items():
        facts.add_row(name, Text(value))
    parts: list[RenderableType] = [_headline(result, title)]
    if result.votes:
        parts += ["", _vote_table(result)]
    return Group(*parts, "", facts)


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
    return f"none of the {counts.completed} completed traces gave one"


def _vote_table(result: SearchResult) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim")
    table.add_column("  answer", overflow="fold")
    has_islands = result.num_islands > 1
    for name in ("weight", "traces", "roots", *(("islands",) if has_islands else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in result.votes[:MAX_VOTES_SHOWN]:
        counts = (entry.traces, entry.roots, *((entry.islands,) if has_islands else ()))
        table.add_row(Text(f"  {entry.answer}"), f"{entry.weight:.2f}", *(f"{count:,}" for count in counts))
    hidden = result.votes[MAX_VOTES_SHOWN:]
    if hidden:
        weight, traces = sum(entry.weight for entry in hidden), sum(entry.traces for entry in hidden)
        table.add_row(f"  {len(hidden)} other answers", f"{weight:.2f}", f"{traces:,}", "")
    if result.num_abstained:
        table.add_row("  none", "", f"{result.num_abstained:,}", "")
    return table


def _facts(result: SearchResult, verdict: str | None) -> dict[str, str]:
    tokens, seconds = result.tokens, result.seconds
    facts = {"expected": verdict} if verdict else {}
    facts |= {
        "traces": _trace_counts(result.counts),
        "tokens": f"{tokens.generated:,} generated, {tokens.reused:,} reused, {tokens.recomputed:,} recomputed; "
        f"sharing {result.sharing.factor:.2f}",
        "seconds": f"{seconds.total:.1f}, of these {seconds.engine:.1f} engine, {seconds.search:.1f} search",
        "search": f"{result.policy}, seed {result.seed}" + ("" if result.pool is None else f", {result.pool}"),
        "stopped": STOP_WORDS[result.stop_reason],
    }
    if (waiting := result.waiting).traces:
        facts["waiting"] = (
            f"{waiting.traces:,} traces, {waiting.steps / waiting.traces:,.0f} steps each, "
            f"{waiting.seconds / waiting.traces:.1f} s each, at most {waiting.most_seconds:.1f} s"
        )
    if (verifier := result.verifier) is not None:
        facts["verifier"] = _verifier_words(verifier)
    return facts | ({"run": result.out_dir} if result.out_dir else {})


def _verifier_words(cost: VerifierCost) -> str:
    words = f"{cost.thoughts:,} thoughts, {cost.tokens:,} tokens read in {cost.seconds:.1f} s"
    words += f", waited for {cost.seconds_waited:.1f} s"
    if not cost.is_repeatable:
        words += "; nothing waited for its scores (--verifier-async): another run may go another way"
    return words if cost.lost is None else f"{words}; given up: {cost.lost}"


def _trace_counts(counts: Counts) -> str:
    """Where all traces came from and what became of them: the two sums are equal."""
    ended = ", ".join(f"{number:,} {name}" for name, number in counts.by_end.items() if number or name == "completed")
    notes = {"were evicted": counts.evicted, "of the completed have no vote": counts.discarded}
    noted = "".join(f"; {number:,} {words}" for words, number in notes.items() if number)
    return f"{counts.roots:,} roots + {counts.branched:,} branched: {ended}{noted}"

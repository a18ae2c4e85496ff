"""Live displays: a few lines that are redrawn on a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gambit import events as ev
from gambit.cli.terminal import say, stderr
from gambit.results.html import BLUE, GREY, ORANGE
from gambit.results.record import SearchRecord
from gambit.tree import LIVE, Trace, TraceState

if TYPE_CHECKING:
    from gambit.bench.rows import Row
    from gambit.cluster.engines import EnginePool, EngineSlot

MOST_SEARCHES = 8  # with a line of their own
MOST_ENGINES = 8
MOST_METHODS = 12
MOST_CELLS = 512  # of the strip of traces
FLASH_SECONDS = 0.6  # for which a branch or a prune is seen
T = TypeVar("T")


class LiveScreen(ABC):
    """Lines that are redrawn while the screen is open, with room for lasting ones above them."""

    stopping_words: ClassVar[str]

    def __init__(self, console: Console, *, is_live: bool) -> None:
        self.is_live = is_live
        self._console = console
        self._loading = ""
        self._is_stopping = False
        self._live: Live | None = None

    @abstractmethod
    def lines(self) -> Iterator[RenderableType | str]:
        """Yields the lines of this moment; text is cut at the terminal's edge, never wrapped."""

    def render(self) -> RenderableType:
        """Returns the lines as rich draws them."""
        return Group(*(_cut(line) if isinstance(line, str) else line for line in self.lines()))

    def loading(self, model: str) -> None:
        """Shows that a model is being loaded, until there is more to show."""
        self._loading = f"loading {model}"

    def stopping(self) -> None:
        """Shows that the run ends soon. Safe in a signal handler: it takes no lock and touches no buffer."""
        self._is_stopping = True
        if not self.is_live:
            os.write(2, f"{self.stopping_words}\n".encode())

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes the live lines away while lasting ones are printed."""
        was_on = self._live is not None
        self._stop()
        try:
            yield
        finally:
            if was_on:
                self._start()

    def _start(self) -> None:
        if self.is_live:
            self._live = Live(
                console=self._console, get_renderable=self.render, transient=True, refresh_per_second=8,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _cut(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class SearchProgress:
    """The progress of a search, from its events alone."""

    def __init__(self, started: ev.RunStarted) -> None:
        self.record = SearchRecord(started)
        self.step = 0
        self.generated = 0
        self.leader = "no answer yet"
        self._leading: str | None = None  # the answer itself
        self._changed_at: dict[int, float] = {}  # when a trace was branched or pruned

    def apply(self, event: ev.Event) -> None:
        self._count_tokens(event)
        self.record.apply(event)
        if isinstance(event, ev.Finished | ev.Discarded):
            self._count_votes()
        elif isinstance(event, ev.Branched | ev.Pruned):
            self._changed_at[event.trace] = time.monotonic()

    def _count_votes(self) -> None:
        """Counts the answers so far; those spelled alike are equal, since the grader takes too long before the end."""
        entries = self.record.vote(lambda first, second: False).entries
        if entries:
            share = entries[0].weight / sum(entry.weight for entry in entries)
            self._leading = entries[0].answer
            self.leader = f"{' '.join(entries[0].answer.split())} ({share:.0%})"

    def strip(self) -> Text:
        """Returns a cell for each trace that lives, is complete or was pruned just now; spaces divide islands."""
        traces = sorted(self.record.tree.traces, key=lambda trace: (trace.island, trace.root, trace.id))
        strip, island = Text(), 0
        for trace in traces:
            is_new = time.monotonic() - self._changed_at.get(trace.id, -FLASH_SECONDS) < FLASH_SECONDS
            cell = self._cell(trace, is_new=is_new)
            if cell is None:
                continue
            if len(strip) >= MOST_CELLS:
                return strip.append("…")
            if trace.island != island and strip:
                strip.append(" ")
            island = trace.island
            strip.append(*cell)
        return strip

    def _cell(self, trace: Trace, *, is_new: bool) -> tuple[str, str] | None:
        if trace.state is TraceState.PRUNED:
            return ("×", ORANGE) if is_new else None
        if trace.state is TraceState.FINISHED:
            return ("█", BLUE if trace.answer == self._leading else ORANGE)
        if trace.state is TraceState.RUNNING:
            return ("+", f"bold {BLUE}") if is_new else ("▪", GREY)
        return None if trace.state is TraceState.CANCELLED else ("·", GREY)

    def _count_tokens(self, event: ev.Event) -> None:
        """Counts a token per running trace and step; each sample has the exact number."""
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
        """The number of islands that still run, where there are several."""
        if self.record.num_islands == 1:
            return ""
        live = {trace.island for state in LIVE for trace in self.record.tree.in_state(state)}
        return f" · {len(live)}/{self.record.num_islands} islands"


class SearchScreen(LiveScreen):
    """A line of totals and one per running search."""

    stopping_words = "stopping: the best vote so far follows; Ctrl-C again aborts at once"

    def __init__(self, console: Console, *, is_live: bool, num_problems: int = 1) -> None:
        super().__init__(console, is_live=is_live)
        self._num_problems = num_problems
        self._running: dict[str, SearchProgress] = {}
        self._num_done = 0
        self._generated_before = 0  # by searches that are over
        self._began: float | None = None
        self._spinner = Spinner("dots")

    def on_event(self, problem_id: str, event: ev.Event) -> None:
        """Takes the next event of a problem's search."""
        if isinstance(event, ev.RunStarted):
            if self._num_problems == 1 or self._began is None:  # another search of the same session counts from zero
                self._began, self._generated_before = time.monotonic(), 0
            self._running[problem_id] = SearchProgress(event)
        elif isinstance(event, ev.Voted):
            self._generated_before += self._running.pop(problem_id).generated
            self._num_done += 1
        else:
            self._running[problem_id].apply(event)

    def lines(self) -> Iterator[RenderableType | str]:
        head = Table.grid(padding=(0, 1))
        head.add_row(self._spinner, _cut(self._totals()))
        yield head
        if self._is_stopping:
            yield f"  {self.stopping_words}"
        running = list(self._running.items())
        if self._num_problems > 1:
            yield from (f"  {name}: {each.done} done · {each.leader}" for name, each in running[:MOST_SEARCHES])
            if len(running) > MOST_SEARCHES:
                yield f"  … and {len(running) - MOST_SEARCHES} more"
        elif running:
            search = running[0][1]
            yield Padding(search.strip(), (0, 2))
            yield f"  {search.pool} · done {search.done}{search.islands}"
            yield f"  leading: {search.leader}"

    def _totals(self) -> str:
        if self._began is None:
            return self._loading
        seconds = time.monotonic() - self._began
        running = list(self._running.values())
        generated = self._generated_before + sum(search.generated for search in running)
        first = f"{running[0].record.started.policy} · step {running[0].step:,}" if running else "voting"
        if self._num_problems > 1:
            first = f"{self._num_done}/{self._num_problems} problems"
        rate = f"{generated / max(seconds, 1e-3):,.0f} tokens/s"
        return f"{first} · {generated:,} tokens · {rate} · {_clock(seconds)}"


class PoolScreen(LiveScreen):
    """The number of problems that are done, and what each engine does."""

    stopping_words = "stopping: results so far are kept; Ctrl-C again aborts at once"

    def __init__(self, console: Console, *, is_live: bool, total: int) -> None:
        super().__init__(console, is_live=is_live)
        self._total = total
        self._num_done = 0
        self._slots: Sequence[EngineSlot] = ()

    def watch(self, pool: EnginePool[Any]) -> None:
        """Shows the engines of a pool."""
        self._slots = pool.slots
        self._loading = ""

    def counted(self, results: Iterable[T]) -> Iterator[T]:
        """Yields results and counts them."""
        for result in results:
            self._num_done += 1
            yield result

    def lines(self) -> Iterator[str]:
        yield self._loading or f"{self._num_done}/{self._total} problems"
        if self._is_stopping:
            yield self.stopping_words
        yield from (f"  {line}" for line in engine_lines(self._slots))


def engine_lines(slots: Sequence[EngineSlot]) -> list[str]:
    """Returns a line for each engine where they are few, else two for all."""
    if len(slots) <= MOST_ENGINES:
        return [_engine_line(slot) for slot in slots]
    states = [str(slot.state) for slot in slots]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    rates = sorted(slot.tokens_per_second for slot in slots)
    middle, total, deaths = rates[len(rates) // 2], sum(rates), sum(slot.num_deaths for slot in slots)
    return [f"{len(slots)} engines: {counted}", f"{middle:,.0f} tokens/s each, {total:,.0f} in all{_deaths(deaths)}"]


def _engine_line(slot: EngineSlot) -> str:
    speed = f"{slot.tokens_per_second:,.0f} tokens/s, {slot.num_done} done" if slot.pid else str(slot.state)
    return f"engine {slot.number}{slot.place}: {speed}{_deaths(slot.num_deaths)}"


def _deaths(count: int) -> str:
    return f", {count} death{'s' if count > 1 else ''}" if count else ""


class BenchScreen(LiveScreen):
    """A bar, the time left, and the accuracy of each method so far."""

    stopping_words = "stopping: finished searches are kept, --resume goes on; Ctrl-C again aborts at once"

    def __init__(self, console: Console, *, is_live: bool, is_quiet: bool = True) -> None:
        super().__init__(console, is_live=is_live)
        self._has_lines = not (is_live or is_quiet)  # one for each search that is done
        self._total = 0
        self._num_before = 0  # done by earlier starts of the run
        self._num_done = 0
        self._scores: dict[str, tuple[int, int, int]] = {}  # variant -> right, rows, tokens
        self._began = time.monotonic()
        self.engine_lines: Callable[[], Sequence[str]] = tuple  # of a run on several

    def begin(self, total: int, variants: Sequence[str], before: Sequence[Row]) -> None:
        """Starts the bar; `before`: rows of earlier starts of the run."""
        self._total, self._num_before = total, len(before)
        self._scores = dict.fromkeys(variants, (0, 0, 0))
        for row in before:
            self._count(row)
        self._loading = ""
        self._began = time.monotonic()

    def on_row(self, row: Row) -> None:
        self._count(row)
        self._num_done += 1
        if self._has_lines:
            found = "failed" if row.error else "right" if row.correct else "wrong"
            done = f"{self._num_before + self._num_done}/{self._total}"
            say(f"{done} {row.benchmark} {row.problem}, {row.variant}: {found}, {row.generated:,} tokens")

    def _count(self, row: Row) -> None:
        right, rows, tokens = self._scores.get(row.variant, (0, 0, 0))
        self._scores[row.variant] = (right + row.correct, rows + 1, tokens + row.generated)

    @property
    def seconds_left(self) -> float | None:
        """The seconds left at the pace of this start of the run; None before its first row."""
        if self._num_done == 0:
            return None
        left = self._total - self._num_before - self._num_done
        return (time.monotonic() - self._began) / self._num_done * left

    def lines(self) -> Iterator[RenderableType | str]:
        if self._loading:
            yield self._loading
            return
        yield self._head()
        if self._is_stopping:
            yield f"  {self.stopping_words}"
        yield from (f"  {_accuracy(label, *score)}" for label, score in list(self._scores.items())[:MOST_METHODS])
        if len(self._scores) > MOST_METHODS:
            yield f"  … and {len(self._scores) - MOST_METHODS} more"
        yield from (f"  {text}" for text in self.engine_lines())

    def _head(self) -> Table:
        done = self._num_before + self._num_done
        head = Table.grid(padding=(0, 1))
        left = "" if self.seconds_left is None else f"{_clock(self.seconds_left)} left"
        bar = ProgressBar(total=max(1, self._total), completed=done, width=16)
        head.add_row(bar, _cut(f"{done}/{self._total}"), _cut(left))
        return head


def _accuracy(label: str, right: int, rows: int, tokens: int) -> str:
    if rows == 0:
        return f"{label}: –"
    return f"{label}: {right}/{rows} right ({right / rows:.0%}), {tokens / rows:,.0f} tokens each"


class BarWithLines(Progress):
    """A bar, and below it lines of the moment."""

    lines: Callable[[], Sequence[str]] = tuple

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield from (_cut(f"  {line}") for line in self.lines())


@contextmanager
def progress_bar(
    what: str, *, is_quiet: bool = False, lines: Callable[[], Sequence[str]] = tuple
) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar with the time that is left, on a terminal only; yields the function that moves it."""
    console = stderr()
    times = (TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with BarWithLines(*columns, console=console, disable=is_quiet or not console.is_terminal, transient=True) as bar:
        bar.lines = lines
        job = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(job, completed=done, total=total)

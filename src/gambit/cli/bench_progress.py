"""A bench run as it goes: a bar with the time left and every method's accuracy so far; silent where nobody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gambit.bench.rows import Row
from gambit.cli.live import LiveScreen

STOPPING = "stopping: finished searches are kept, --resume goes on; Ctrl-C again aborts at once"
MOST_LINES = 12


class BenchProgress(LiveScreen):
    """A bar, the time left, a line per method."""

    stopping_words = STOPPING
    refresh_per_second = 4

    def __init__(self, console: Console, *, is_live: bool) -> None:
        super().__init__(console, is_live=is_live)
        self._total = 0
        self._num_before = 0  # done by earlier starts of the run
        self._num_done = 0
        self._scores: dict[str, tuple[int, int, int]] = {}  # variant -> right, rows, tokens
        self._began = time.monotonic()
        self.engine_lines: Callable[[], Sequence[str]] = tuple  # of a run on several

    def begin(self, total: int, variants: Sequence[str], before: Sequence[Row]) -> None:
        self._total, self._num_before = total, len(before)
        self._scores = dict.fromkeys(variants, (0, 0, 0))
        for row in before:
            self._count(row)
        self._loading = ""
        self._began = time.monotonic()

    def on_row(self, row: Row) -> None:
        self._count(row)
        self._num_done += 1

    def _count(self, row: Row) -> None:
        right, rows, tokens = self._scores.get(row.variant, (0, 0, 0))
        self._scores[row.variant] = (right + row.correct, rows + 1, tokens + row.generated)

    @property
    def seconds_left(self) -> float | None:
        """At the pace of this start of the run."""
        if self._num_done == 0:
            return None
        left = self._total - self._num_before - self._num_done
        return (time.monotonic() - self._began) / self._num_done * left

    # -- the lines ---------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """Fits into 60 columns; a line is cut, never wrapped."""
        if self._loading:
            return _line(self._loading)
        lines = [_line(f"  {STOPPING}")] if self._is_stopping else []
        shown = list(self._scores.items())[:MOST_LINES]
        lines += [_line(f"  {_score(label, *score)}") for label, score in shown]
        if len(self._scores) > MOST_LINES:
            lines.append(_line(f"  … and {len(self._scores) - MOST_LINES} more"))
        lines += [_line(f"  {text}") for text in self.engine_lines()]
        return Group(self._head(), *lines)

    def _head(self) -> Table:
        done = self._num_before + self._num_done
        head = Table.grid(padding=(0, 1))
        left = "" if self.seconds_left is None else f"{_clock(self.seconds_left)} left"
        bar = ProgressBar(total=max(1, self._total), completed=done, width=16)
        head.add_row(bar, _line(f"{done}/{self._total}"), _line(left))
        return head


def _score(label: str, right: int, rows: int, tokens: int) -> str:
    if rows == 0:
        return f"{label}: –"
    return f"{label}: {right}/{rows} right ({right / rows:.0%}), {tokens / rows:,.0f} tokens each"


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

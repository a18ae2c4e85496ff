"""Live progress of searches in a notebook, as the `on_event` of `Solver.solve`."""

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from gambit import events as ev
from gambit.errors import UserError
from gambit.results.html import Markup, joined, tag
from gambit.results.record import SearchRecord
from gambit.tree import TraceState

SECONDS_BETWEEN = 0.2  # a notebook redraws slowly
MOST_ANSWERS = 4


class NotebookProgress:
    """Shows a running search in the cell that runs it: traces, tokens and answers so far.

    >>> solver.solve(problem, on_event=NotebookProgress())
    >>> solver.solve_many(problems, on_event=NotebookProgress().of_problem)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = _notebook_display()
        self._clock = clock
        self._area: Any = None  # the output of the cell, which its method `update` replaces
        self._drawn_at = -SECONDS_BETWEEN
        self._searches: dict[str, SearchRecord] = {}
        self._num_done = 0
        self._lock = threading.Lock()  # votes come from another thread than the steps of a search

    def __call__(self, event: ev.Event) -> None:
        """Follows a search as `on_event` of `Solver.solve`."""
        self.of_problem("", event)

    def of_problem(self, problem_id: str, event: ev.Event) -> None:
        """Follows searches side by side as `on_event` of `Solver.solve_many`."""
        with self._lock:
            if isinstance(event, ev.RunStarted):
                self._searches[problem_id] = SearchRecord(event)
            elif problem_id in self._searches:
                self._searches[problem_id].apply(event)
            else:
                return
            self._follow(problem_id, event)

    def _follow(self, problem_id: str, event: ev.Event) -> None:
        is_over = isinstance(event, ev.Voted)
        if is_over and problem_id:
            self._num_done += 1
        if is_over or self._clock() - self._drawn_at >= SECONDS_BETWEEN:
            self._draw()
        if is_over:
            del self._searches[problem_id]

    def _draw(self) -> None:
        self._drawn_at = self._clock()
        done = [tag("p", f"{self._num_done:,} problems done")] if self._num_done else []
        content = joined([*done, *(_line(name, record) for name, record in self._searches.items())])
        if self._area is None:
            self._area = self._display(content, display_id=True)
        else:
            self._area.update(content)


def _line(name: str, record: SearchRecord) -> Markup:
    """Returns the line of one search, by its events so far."""
    planned, completed = record.started.num_traces, record.tree.count(TraceState.FINISHED)
    bar = tag("progress", max=planned, value=min(planned, completed))
    facts = [f"{completed:,} of {planned:,} traces complete", *_pool(record), _answer(record)]
    return tag("p", *([tag("b", name), " "] if name else []), bar, " ", joined(filter(None, facts), " · "))


def _pool(record: SearchRecord) -> list[str]:
    sample = record.sample
    if sample is None:
        return []
    waiting = f", {sample.waiting:,} waiting" if sample.waiting else ""
    running = [] if record.voted else [f"{sample.running:,} running{waiting}"]
    speed = sample.generated / sample.seconds_total if sample.seconds_total else 0.0
    return [*running, f"{sample.generated:,} tokens", f"{speed:,.0f} tokens/s"]


def _answer(record: SearchRecord) -> str:
    if record.voted is not None:
        return joined(["answer ", tag("b", record.voted.answer or "none")])
    answers = Counter(trace.answer for trace in record.tree.voters() if trace.answer is not None)
    return ", ".join(f"{answer} ×{count}" for answer, count in answers.most_common(MOST_ANSWERS))


def _notebook_display() -> Callable[..., Any]:
    try:
        display: Callable[..., Any] = importlib.import_module("IPython.display").display
    except ImportError as error:
        raise UserError(
            "progress in a notebook needs IPython, which every notebook has: pip install ipython"
        ) from error
    return display

"""Live progress of searches in a notebook, as the `on_event` of `Solver.solve`."""

from __future__ import annotations

import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from gambit import events as ev
from gambit.errors import UserError
from gambit.results.html import Markup, joined, tag

SECONDS_BETWEEN = 0.2  # a notebook redraws slowly
MOST_ANSWERS = 4


class Area(Protocol):
    """Output of a notebook cell that can be replaced."""

    def update(self, content: object) -> None: ...


class NotebookProgress:
    """Shows a running search in the cell that runs it: traces, tokens and answers so far.

    >>> solver.solve(problem, on_event=NotebookProgress())
    >>> solver.solve_many(problems, on_event=NotebookProgress().of_problem)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._display = _notebook_display()
        self._clock = clock
        self._area: Area | None = None
        self._drawn_at = -SECONDS_BETWEEN
        self._searches: dict[str, _Running] = {}
        self._num_done = 0
        self._lock = threading.Lock()  # votes come from another thread than the steps of a search

    def __call__(self, event: ev.Event) -> None:
        """Follows a search as `on_event` of `Solver.solve`."""
        self.of_problem("", event)

    def of_problem(self, problem_id: str, event: ev.Event) -> None:
        """Follows searches side by side as `on_event` of `Solver.solve_many`."""
        with self._lock:
            if isinstance(event, ev.RunStarted):
                self._searches[problem_id] = _Running(event)
            if problem_id in self._searches:
                self._follow(problem_id, event)

    def _follow(self, problem_id: str, event: ev.Event) -> None:
        self._searches[problem_id].apply(event)
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
        content = joined([*done, *(search.html(name) for name, search in self._searches.items())])
        if self._area is None:
            self._area = self._display(content, display_id=True)
        else:
            self._area.update(content)


class _Running:
    """One running search, by its events so far."""

    def __init__(self, started: ev.RunStarted) -> None:
        self._started = started
        self._answers: Counter[str] = Counter()
        self._sample: ev.Sample | None = None
        self._voted: ev.Voted | None = None
        self._num_finished = 0

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sample):
            self._sample = event
        elif isinstance(event, ev.Finished):
            self._num_finished += 1
            if event.answer is not None:
                self._answers[event.answer] += 1
        elif isinstance(event, ev.Voted):
            self._voted = event

    def html(self, name: str) -> Markup:
        wanted = self._started.num_traces
        bar = tag("progress", max=wanted, value=min(wanted, self._num_finished))
        facts = [f"{self._num_finished:,} of {wanted:,} traces complete", *self._pool(), self._answer()]
        return tag("p", *([tag("b", name), " "] if name else []), bar, " ", joined(filter(None, facts), " · "))

    def _pool(self) -> list[str]:
        sample = self._sample
        if sample is None:
            return []
        waiting = f", {sample.waiting:,} waiting" if sample.waiting else ""
        running = [] if self._voted else [f"{sample.running:,} running{waiting}"]
        speed = sample.generated / sample.seconds_total if sample.seconds_total else 0.0
        return [*running, f"{sample.generated:,} tokens", f"{speed:,.0f} tokens/s"]

    def _answer(self) -> str:
        if self._voted is not None:
            return joined(["answer ", tag("b", self._voted.answer or "none")])
        return ", ".join(f"{answer} ×{count}" for answer, count in self._answers.most_common(MOST_ANSWERS))


def _notebook_display() -> Callable[..., Area | None]:
    try:
        display: Callable[..., Area | None] = importlib.import_module("IPython.display").display
    except ImportError as error:
        raise UserError(
            "progress in a notebook needs IPython, which every notebook has: pip install ipython"
        ) from error
    return display

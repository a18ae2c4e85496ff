"""A part of a search that is spread over several engines, on the engine of one solver."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from gambit.answers import Extractor
from gambit.config.options import SearchConfig
from gambit.config.presets import SearchSettings
from gambit.results.result import SearchResult
from gambit.search.host import SearchTicket
from gambit.search.reporting import PartReporter, ReportTimes, StepGate
from gambit.types import Problem


@dataclass(frozen=True, slots=True)
class PartOrder:
    """What a solver is to run of a search."""

    problem: Problem
    config: SearchConfig
    settings: SearchSettings  # of the part; those of the whole were resolved once for all engines
    times: ReportTimes
    allowed_step: int | None  # up to which it may go without asking; None: to its end
    extractor: Extractor | None = None


class StartedPart:
    """A part that runs; its news go to whoever ordered it, the last when it has left the engine."""

    def __init__(self, ticket: SearchTicket, reporter: PartReporter, gate: StepGate) -> None:
        self._ticket = ticket
        self._reporter = reporter
        self._gate = gate
        ticket.result.add_done_callback(self._end)

    def allow(self, step: int | None) -> None:
        """It may go on up to this step; None: to its end."""
        self._gate.allow(step)

    def stop(self) -> None:
        """End it within two engine steps; a second call does nothing."""
        self._ticket.cancel()
        self._gate.allow(None)

    def _end(self, done: Future[SearchResult]) -> None:
        error = done.exception()
        self._reporter.end(None if error is None else str(error) or type(error).__name__)

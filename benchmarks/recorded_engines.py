"""Stub engines that give one recorded search for every problem, to test and measure what is around engines."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from gambit import events as ev
from gambit.bench.run import BenchEngine
from gambit.cluster.actor import JobDesk
from gambit.config.options import SearchConfig
from gambit.pawn.puzzles import Split, generate
from gambit.results.result import SearchResult
from gambit.solver import Solver
from gambit.storage.run_folder import LOG_FILE, EventCallback, EventSink
from gambit.types import Problem


@dataclass(frozen=True, slots=True)
class Recording:
    """The events of a search and its result."""

    events: tuple[ev.Event, ...]
    result: SearchResult

    @classmethod
    def of(cls, solver: Solver, question: str, capacity: int) -> Recording:
        events: list[ev.Event] = []
        result = solver.solve(Problem(question), SearchConfig(capacity=capacity), on_event=events.append)
        return cls(tuple(events), dataclasses.replace(result, traces=()))

    def named(self, problem: str) -> Recording:
        started, *rest = self.events
        assert isinstance(started, ev.RunStarted)
        renamed = dataclasses.replace(started, problem_id=problem)
        return Recording((renamed, *rest), dataclasses.replace(self.result, problem_id=problem))


@dataclass(frozen=True, slots=True)
class RecordedSolver:
    """A solver that gives the same recorded search for every problem, after a while."""

    recording: Recording
    seconds: float = 0.0
    on_problem: Callable[[str], None] = lambda problem: None
    padding: int = 0  # bytes to add to each log

    def solve_many(
        self, problems: Iterable[Problem], config: SearchConfig, *, out_dir: str | Path | None = None,
        on_event: EventCallback | None = None, **_: object,
    ) -> Iterator[SearchResult]:  # fmt: skip
        for problem in problems:
            self.on_problem(problem.id)
            time.sleep(self.seconds)
            mine = self.recording.named(problem.id)
            sink = EventSink(problem.id, None if out_dir is None else Path(out_dir) / problem.id, on_event)
            for event in mine.events:
                sink.write(event)
            sink.finish(mine.result)
            if out_dir is not None and self.padding:
                with (Path(out_dir) / problem.id / LOG_FILE).open("ab") as log:
                    log.write(b" " * self.padding)
            yield mine.result

    @property
    def engine(self) -> SimpleNamespace:
        return SimpleNamespace(info=None)

    def equivalent(self, first: str, second: str) -> bool:
        return first == second

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class RecordedMaker:
    """Makes a stub in the process of an engine."""

    recording: bytes  # pickled: a description crosses the border once for each engine
    seconds: float = 0.0
    on_problem: Callable[[str], None] = lambda problem: None
    padding: int = 0

    def __call__(self) -> BenchEngine:
        solver = RecordedSolver(pickle.loads(self.recording), self.seconds, self.on_problem, self.padding)
        return BenchEngine(lambda: solver)


@dataclass(frozen=True, slots=True)
class Chatter:
    """A job that says so many things, one after the other."""

    count: int

    def __call__(self, engine: BenchEngine, desk: JobDesk) -> None:
        for number in range(self.count):
            desk.send(number)
            time.sleep(0.005)  # longer than the driver's patience: each is a message of its own


def recorded(capacity: int, solver: Solver) -> bytes:
    """A search of the bundled model."""
    puzzle = next(generate(Split.DEV, 0))
    return pickle.dumps(Recording.of(solver, puzzle.text, capacity))

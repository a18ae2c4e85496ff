"""Samples traces of many problems at once on any engine, and grades them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from gambit import chains
from gambit import events as ev
from gambit.answers import AnswerKind, Extractor, Grader, extractor_for
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.pawn.puzzles import Split, generate
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.solver import Solver
from gambit.text.boundary import BLANK_LINE
from gambit.types import Problem, StatePosition, StopReason

if TYPE_CHECKING:
    import torch

PAWN_SOURCE = "pawn:"  # then the name of a split
WHOLE = (StopReason.COMPLETED, StopReason.EXHAUSTED)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and its right answer."""

    problem: Problem
    answer: str

    @property
    def id(self) -> str:
        return self.problem.id


def pawn_tasks(split: str, count: int, seed: int) -> list[Task]:
    """Puzzles of one of pawn's splits; a puzzle's id is made from the puzzle."""
    names = [known.name.lower() for known in Split]
    if split not in names:
        raise UserError(f"unknown split {split!r} of pawn's puzzles: use {', '.join(names)}")
    puzzles = islice(generate(Split[split.upper()], seed), count)
    return [Task(Problem(puzzle.text, id=puzzle.key[:16]), str(puzzle.answer)) for puzzle in puzzles]


def generated_tasks(name: str, count: int, seed: int) -> list[Task]:
    """Word problems of long chains, of the split that the name gives, else of the train split."""
    spec = chains.parse_spec(name)
    rows = chains.generate(name, spec.split or "train", count, seed)
    return [Task(Problem(f"{row['question']}\n\n{chains.HOW_TO_WRITE}", id=row["id"]), row["answer"]) for row in rows]


@dataclass(frozen=True, slots=True)
class ThoughtMeter:
    """Reports where thoughts end and how confident the model was in each; its "scores" are raw confidences."""

    boundary: str = BLANK_LINE
    with_confidence: bool = True  # without, engines need not sort the vocabulary at every token

    @property
    def info(self) -> ScorerInfo:
        return ScorerInfo(
            "meter", state_position=StatePosition.BEFORE, is_probability=False,
            needs_confidence=self.with_confidence, boundary_rule=self.boundary,
        )  # fmt: skip

    def to(self, device: torch.device) -> ThoughtMeter:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.float()


@dataclass(slots=True)
class SampledTrace:
    """A trace while it is being written."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    end: str = ""
    boundaries: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    """The finished traces of one problem, and the grades that are on their way."""

    task: Task
    prompt: tuple[int, ...]
    traces: list[SampledTrace]
    grades: list[Future[tuple[str | None, bool]]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] | None = None  # by trace, where the engine's process has read them

    @property
    def num_tokens(self) -> int:
        return sum(len(self.prompt) + len(trace.tokens) for trace in self.traces)


class Watch:
    """Gathers traces from the events of running searches, until `take` hands over a problem."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._traces: dict[str, dict[int, SampledTrace]] = {}
        self._last_text = ""

    def keep_text(self, text: str) -> str | None:
        """As the searches' extractor: a search reads a trace's text right before it announces the trace's end.

        No answer is given, so that no vote compares answers: grading happens elsewhere, beside the engine.
        """
        self._last_text = text
        return None

    def on_event(self, problem_id: str, event: ev.Event) -> None:
        if isinstance(event, ev.RunStarted):
            self._prompts[problem_id], self._traces[problem_id] = tuple(event.prompt_tokens), {}
        elif isinstance(event, ev.Scored):
            for trace, score, num_tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
                mine = self._traces[problem_id].setdefault(trace, SampledTrace())
                mine.boundaries.append(num_tokens - 1)
                mine.confidences.append(score)
        elif isinstance(event, ev.Finished):
            mine = self._traces[problem_id].setdefault(event.trace, SampledTrace())
            mine.tokens, mine.text, mine.end = event.tokens, self._last_text, str(event.reason)

    def take(self, task: Task) -> Sampled:
        traces = self._traces.pop(task.id, {})
        return Sampled(task, self._prompts.pop(task.id, ()), [traces[i] for i in sorted(traces) if traces[i].end])


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """How traces are sampled."""

    config: SearchConfig
    traces_per_problem: int
    traces_at_once: int  # on one engine

    @property
    def search(self) -> SearchConfig:
        """The search of one problem."""
        count = self.traces_per_problem
        # With one seed for all, traces of all problems would share their luck, and so would every figure made of them.
        update = {"policy": "sc", "capacity": count, "num_traces": count, "own_noise": True}
        return self.config.model_copy(update=update)

    @property
    def concurrency(self) -> int:
        return max(1, self.traces_at_once // self.traces_per_problem)


class Sampler(Protocol):
    """Samples traces, with an engine here or many in a cluster."""

    def sample(
        self, tasks: Iterable[Task], order: SamplingOrder, refused: list[str], should_stop: Callable[[], bool]
    ) -> Iterator[Sampled]:
        """Problems as they finish, with all their traces; `refused` gathers those that cannot be sampled."""


@dataclass(frozen=True, slots=True)
class LocalSampler:
    solver: Solver

    def sample(
        self, tasks: Iterable[Task], order: SamplingOrder, refused: list[str], should_stop: Callable[[], bool]
    ) -> Iterator[Sampled]:
        watch = Watch()
        begun: dict[str, Task] = {}

        def problems() -> Iterator[Problem]:
            for task in tasks:
                begun[task.id] = task
                yield task.problem

        results = self.solver.solve_many(
            problems(), order.search, concurrency=order.concurrency, extractor=watch.keep_text,
            on_event=watch.on_event, should_stop=should_stop,
        )  # fmt: skip
        for result in results:
            if result.error is not None:
                refused.append(f"{result.problem_id}: {result.error}")
            sampled = watch.take(begun.pop(result.problem_id))
            if result.stop_reason in WHOLE and sampled.traces:
                yield sampled


def sample(
    sampler: Sampler, tasks: Iterable[Task], order: SamplingOrder, grading: Grading, refused: list[str],
    should_stop: Callable[[], bool], may_begin: Callable[[], bool] = lambda: True,
) -> Iterator[Sampled]:  # fmt: skip
    """Sampled problems with their grades on the way.

    Once `may_begin` says no, those that were begun are finished and no more are.
    """
    for sampled in sampler.sample(takewhile(lambda _: may_begin(), tasks), order, refused, should_stop):
        sampled.grades = [grading.submit(trace.text, sampled.task.answer) for trace in sampled.traces]
        yield sampled


class Grading:
    """Reads and grades answers in threads, each with a grading process of its own, while the engine goes on."""

    def __init__(self, kind: AnswerKind, num_graders: int) -> None:
        self._extract: Extractor = extractor_for(kind)
        self._threads = ThreadPoolExecutor(num_graders, thread_name_prefix="grader")
        self._mine = threading.local()
        self._graders: list[Grader] = []

    def submit(self, text: str, gold: str) -> Future[tuple[str | None, bool]]:
        return self._threads.submit(self._grade, text, gold)

    def _grade(self, text: str, gold: str) -> tuple[str | None, bool]:
        answer = self._extract(text)
        return answer, self._grader().grade(answer, gold)

    def _grader(self) -> Grader:
        if not hasattr(self._mine, "grader"):
            self._mine.grader = Grader()
            self._graders.append(self._mine.grader)
        grader: Grader = self._mine.grader
        return grader

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._threads.shutdown(wait=error is None, cancel_futures=True)
        for grader in self._graders:
            grader.close()

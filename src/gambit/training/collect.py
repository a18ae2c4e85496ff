"""Samples traces, grades them, reads their boundary states and streams all of it to disk; fits nothing.

Sampling is a self-consistency search over many problems at once, on any engine; the states come from one teacher-forced
pass over the finished text (`states.py` says why). A problem counts as done once its shard is in the index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from gambit import events as ev
from gambit import models
from gambit.answers import Extractor, Grader, extractor_for
from gambit.config import EngineConfig, SearchConfig
from gambit.errors import UserError
from gambit.pawn.puzzles import Split, generate
from gambit.prompts import BoundaryRule
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.solver import Problem, Solver
from gambit.training.states import Reading, StateReader
from gambit.training.storage import CollectionWriter, Header, ProblemRecord, TraceRecord, new_id, writing
from gambit.types import StatePosition, StopReason

if TYPE_CHECKING:
    from types import TracebackType

PAWN_SOURCE = "pawn:"
_WHOLE = (StopReason.COMPLETED, StopReason.EXHAUSTED)
_KEPT_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "system_prompt", "enable_thinking", "answer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and its right answer."""

    problem: Problem
    answer: str

    @property
    def id(self) -> str:
        return self.problem.id


@dataclass(frozen=True, slots=True)
class Plan:
    """How to collect."""

    out: Path
    source: str
    engine: EngineConfig
    search: SearchConfig
    traces_per_problem: int = 16
    traces_at_once: int = 64
    layers: tuple[int, ...] = (-1,)
    positions: tuple[StatePosition, ...] = tuple(StatePosition)
    with_confidence: bool = True
    batch_tokens: int | None = None  # of the pass that reads states; None: what suits the device
    num_graders: int = 2


@dataclass(slots=True)
class Summary:
    """What a run of `collect` did."""

    num_before: int = 0
    num_problems: int = 0  # written by this run
    num_traces: int = 0
    num_correct: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_mixed: int = 0  # problems with right and wrong traces: the only ones that say something about ranking
    refused: list[str] = field(default_factory=list)
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class ThoughtMeter:
    """Tells where thoughts end and how confident the model was in each; its "scores" are raw confidences."""

    info: ClassVar[ScorerInfo] = ScorerInfo(
        "meter", state_position=StatePosition.BEFORE, is_probability=False, needs_confidence=True
    )

    def to(self, device: torch.device) -> ThoughtMeter:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.float()


@dataclass(frozen=True, slots=True)
class ThoughtMarker(ThoughtMeter):
    """The same without confidences, which cost a sort of the vocabulary at every token."""

    info: ClassVar[ScorerInfo] = ScorerInfo("marker", state_position=StatePosition.BEFORE, is_probability=False)


def pawn_tasks(split: str, count: int, seed: int) -> list[Task]:
    """Puzzles of one of pawn's splits; a puzzle's id is made from the puzzle."""
    names = [known.name.lower() for known in Split]
    if split not in names:
        raise UserError(f"unknown split {split!r} of pawn's puzzles: use {', '.join(names)}")
    puzzles = islice(generate(Split[split.upper()], seed), count)
    return [Task(Problem(puzzle.text, id=puzzle.key[:16]), str(puzzle.answer)) for puzzle in puzzles]


# -- the run ---------------------------------------------------------------------------------------------------


def collect(
    tasks: Sequence[Task],
    plan: Plan,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Sample what is not yet in the folder. Interrupted, it keeps every problem that was written."""
    source = models.locate(plan.engine.model)
    with _solver(plan) as solver:
        reader = StateReader(source, layers=plan.layers, positions=plan.positions, device=_device(plan),
                             dtype=plan.engine.dtype, batch_tokens=plan.batch_tokens)  # fmt: skip
        header = _header(plan, source, reader.hidden_size)
        with writing(plan.out, header) as writer, _Grading(plan) as grading:
            summary = Summary(num_before=len(writer.done))
            todo = [task for task in tasks if task.id not in writer.done]
            total = len(todo) + summary.num_before
            on_progress(summary.num_before, total)
            sink = _Sink(reader, writer, summary, lambda: on_progress(summary.num_before + summary.num_problems, total))
            for sampled in _sample(solver, todo, plan, grading, summary, should_stop):
                sink.add(sampled)
            sink.flush()
            summary.was_stopped = should_stop()
    return summary


def _solver(plan: Plan) -> Solver:
    scorer = ThoughtMeter() if plan.with_confidence else ThoughtMarker()
    return Solver(scorer=scorer, **plan.engine.model_dump(exclude_unset=True, exclude={"scorer"}))


def _device(plan: Plan) -> str:
    return plan.engine.device


def _header(plan: Plan, source: str, hidden_size: int) -> Header:
    return Header(
        id=new_id(),
        source=plan.source,
        model=models.name_of(plan.engine.model),
        model_hash=models.weight_hash(source),
        hidden_size=hidden_size,
        layers=plan.layers,
        positions=tuple(str(position) for position in plan.positions),
        boundary_rule=BoundaryRule.name,
        traces_per_problem=plan.traces_per_problem,
        has_confidence=plan.with_confidence,
        sampling=plan.search.model_dump(mode="json", include=set(_KEPT_SETTINGS)),
    )


# -- sampling --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trace:
    """A trace while it is being written."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    end: str = ""
    boundaries: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Sampled:
    """The finished traces of one problem, and the grades that are on their way."""

    task: Task
    prompt: tuple[int, ...]
    traces: list[_Trace]
    grades: list[Future[tuple[str | None, bool]]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(self.prompt) + len(trace.tokens) for trace in self.traces)


class _Watch:
    """Follows the searches' events; holds nothing of a problem once it has been taken."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._traces: dict[str, dict[int, _Trace]] = {}
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
                mine = self._traces[problem_id].setdefault(trace, _Trace())
                mine.boundaries.append(num_tokens - 1)
                mine.confidences.append(score)
        elif isinstance(event, ev.Finished):
            mine = self._traces[problem_id].setdefault(event.trace, _Trace())
            mine.tokens, mine.text, mine.end = event.tokens, self._last_text, str(event.reason)

    def take(self, task: Task) -> _Sampled:
        traces = self._traces.pop(task.id, {})
        return _Sampled(task, self._prompts.pop(task.id, ()), [traces[i] for i in sorted(traces) if traces[i].end])


def _sample(
    solver: Solver, tasks: Sequence[Task], plan: Plan, grading: _Grading, summary: Summary,
    should_stop: Callable[[], bool],
) -> Iterator[_Sampled]:  # fmt: skip
    watch = _Watch()
    of = {task.id: task for task in tasks}
    count = plan.traces_per_problem
    config = plan.search.model_copy(update={"policy": "sc", "capacity": count, "num_traces": count})
    results = solver.solve_many(
        [task.problem for task in tasks],
        config,
        concurrency=max(1, plan.traces_at_once // count),
        extractor=watch.keep_text,
        on_event=watch.on_event,
        should_stop=should_stop,
    )
    for result in results:
        if result.error is not None:
            summary.refused.append(f"{result.problem_id}: {result.error}")
        sampled = watch.take(of[result.problem_id])
        if result.stop_reason in _WHOLE and sampled.traces:
            sampled.grades = [grading.submit(trace.text, sampled.task.answer) for trace in sampled.traces]
            yield sampled


class _Grading:
    """Reads and grades answers in threads, each with a grading process of its own, while the engine goes on."""

    def __init__(self, plan: Plan) -> None:
        self._extract: Extractor = extractor_for(plan.search.answer)
        self._threads = ThreadPoolExecutor(plan.num_graders, thread_name_prefix="grader")
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

    def __enter__(self) -> _Grading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._threads.shutdown(wait=error is None, cancel_futures=True)
        for grader in self._graders:
            grader.close()


# -- to disk ---------------------------------------------------------------------------------------------------


class _Sink:
    """Gathers finished problems until a pass over them is worth it; memory is bounded by that."""

    def __init__(
        self, reader: StateReader, writer: CollectionWriter, summary: Summary, on_written: Callable[[], None]
    ) -> None:
        self._reader, self._writer, self._summary, self._on_written = reader, writer, summary, on_written
        self._waiting: list[_Sampled] = []

    def add(self, sampled: _Sampled) -> None:
        self._waiting.append(sampled)
        if sum(problem.num_tokens for problem in self._waiting) >= 2 * self._reader.batch_tokens:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        problems, self._waiting = self._waiting, []
        readings = [_reading(problem.prompt, trace) for problem in problems for trace in problem.traces]
        states = self._reader.read(readings)
        records = [_record(problem) for problem in problems]
        self._writer.add(records, _tensors(problems, states))
        self._count(records)
        self._on_written()

    def _count(self, records: Sequence[ProblemRecord]) -> None:
        summary = self._summary
        for record in records:
            right = sum(trace.is_correct for trace in record.traces)
            summary.num_problems += 1
            summary.num_traces += len(record.traces)
            summary.num_correct += right
            summary.num_steps += sum(trace.num_steps for trace in record.traces)
            summary.num_tokens += sum(trace.num_tokens for trace in record.traces)
            summary.num_mixed += 0 < right < len(record.traces)


def _reading(prompt: tuple[int, ...], trace: _Trace) -> Reading:
    return Reading(prompt, trace.tokens, tuple(trace.boundaries))


def _record(problem: _Sampled) -> ProblemRecord:
    question = problem.task.problem.question
    traces = []
    for trace, grade in zip(problem.traces, problem.grades, strict=True):
        answer, is_correct = grade.result()
        traces.append(
            TraceRecord(answer=answer, is_correct=is_correct, num_tokens=len(trace.tokens),
                        num_steps=len(trace.boundaries), end=trace.end)
        )  # fmt: skip
    text = question if isinstance(question, str) else question[-1]["content"]
    return ProblemRecord(id=problem.task.id, question=text, gold=problem.task.answer, traces=tuple(traces))


def _tensors(problems: Sequence[_Sampled], states: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One row per step; tokens one after the other."""
    traces = [trace for problem in problems for trace in problem.traces]
    tensors = {name: torch.cat([found[name] for found in states]).contiguous() for name in states[0]}
    tensors["step_ends"] = torch.tensor([place + 1 for t in traces for place in t.boundaries], dtype=torch.int32)
    tensors["confidences"] = torch.tensor([value for t in traces for value in t.confidences], dtype=torch.float32)
    tensors["tokens"] = torch.tensor([token for t in traces for token in t.tokens], dtype=torch.int32)
    return tensors

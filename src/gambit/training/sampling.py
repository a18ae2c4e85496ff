"""Problems with answers, the traces that searches sample for them, and the grades of those."""

import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Self

import torch

from gambit import chains
from gambit import events as ev
from gambit.answers import AnswerKind, Extractor, Grader, extractor_for
from gambit.errors import UserError
from gambit.pawn.puzzles import Split, generate
from gambit.scorers.base import ScorerInfo, ThoughtBatch
from gambit.text.boundary import BLANK_LINE
from gambit.types import Problem, StatePosition

PAWN_SOURCE = "pawn:"  # then the name of a split


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and its right answer."""

    problem: Problem
    answer: str

    @property
    def id(self) -> str:
        return self.problem.id


def pawn_tasks(split: str, count: int, seed: int) -> list[Task]:
    """Returns puzzles of one of pawn's splits; a puzzle's id is made from the puzzle."""
    names = [known.name.lower() for known in Split]
    if split not in names:
        raise UserError(f"unknown split {split!r} of pawn's puzzles: use {', '.join(names)}")
    puzzles = islice(generate(Split[split.upper()], seed), count)
    return [Task(Problem(puzzle.text, id=puzzle.key[:16]), str(puzzle.answer)) for puzzle in puzzles]


def generated_tasks(name: str, count: int, seed: int) -> list[Task]:
    """Returns word problems of long chains, of the split in the name, else of the train split."""
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

    def to(self, device: torch.device) -> Self:
        return self

    def score(self, thoughts: ThoughtBatch) -> torch.Tensor:
        return thoughts.confidences.float()


@dataclass(slots=True)
class SampledTrace:
    """A trace, complete once it has an end."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    text: str = ""
    end: str = ""
    boundaries: list[int] = field(default_factory=list)  # places of the boundary tokens among `tokens`
    confidences: list[float] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        """Returns how many tokens to read for its states: everything up to the last boundary."""
        return len(self.prompt) + self.boundaries[-1] + 1 if self.boundaries else 0


@dataclass(slots=True)
class Sampled:
    """The finished traces of one problem, none if its search failed or was stopped, and the grades on their way."""

    task: Task
    traces: list[SampledTrace]
    error: str | None = None
    grades: list[Future[tuple[str | None, bool]]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] | None = None  # by trace, where the engine's process has read them

    @property
    def num_tokens(self) -> int:
        return sum(len(trace.prompt) + len(trace.tokens) for trace in self.traces)


class Watch:
    """Gathers traces from the events of running searches, until `take` returns those of a problem."""

    def __init__(self) -> None:
        self._traces: dict[str, defaultdict[int, SampledTrace]] = {}
        self._last_text = ""

    def keep_text(self, text: str) -> str | None:
        """Serves as the searches' extractor: a search reads a trace's text right before the event of its end.

        It returns no answer, so that no vote compares answers: grading happens elsewhere, beside the engine.
        """
        self._last_text = text
        return None

    def on_event(self, problem_id: str, event: ev.Event) -> None:
        if isinstance(event, ev.RunStarted):
            self._traces[problem_id] = defaultdict(partial(SampledTrace, tuple(event.prompt_tokens)))
        elif isinstance(event, ev.Scored):
            for trace, score, num_tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
                mine = self._traces[problem_id][trace]
                mine.boundaries.append(num_tokens - 1)
                mine.confidences.append(score)
        elif isinstance(event, ev.Finished):
            mine = self._traces[problem_id][event.trace]
            mine.tokens, mine.text, mine.end = event.tokens, self._last_text, str(event.reason)

    def take(self, problem_id: str) -> list[SampledTrace]:
        """Returns the finished traces of a problem and forgets them."""
        traces = sorted(self._traces.pop(problem_id, {}).items())
        return [trace for _, trace in traces if trace.end]


class Grading:
    """Reads and grades answers in threads, each with a grading process of its own, while the engine goes on."""

    def __init__(self, kind: AnswerKind, num_graders: int) -> None:
        self._extract: Extractor = extractor_for(kind)
        self._mine = threading.local()
        self._graders: list[Grader] = []
        self._threads = ThreadPoolExecutor(num_graders, thread_name_prefix="grader", initializer=self._add_grader)

    def _add_grader(self) -> None:
        self._mine.grader = Grader()
        self._graders.append(self._mine.grader)

    def submit(self, text: str, gold: str) -> Future[tuple[str | None, bool]]:
        """Returns the answer to come and whether it is right."""
        return self._threads.submit(self._grade, text, gold)

    def _grade(self, text: str, gold: str) -> tuple[str | None, bool]:
        answer = self._extract(text)
        return answer, self._mine.grader.grade(answer, gold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._threads.shutdown(wait=error is None, cancel_futures=True)
        for grader in self._graders:
            grader.close()

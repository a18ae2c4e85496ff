"""Values of prefixes: how often traces that continue a collected one from one of its thoughts end right.

They lie in a file of their own beside the collection, one line a prefix, so that they can be added to any collection.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gambit.errors import UserError
from gambit.storage.lines import append_synced, drop_torn_line, opened_to_append, whole_lines
from gambit.training.dataset import Dataset
from gambit.training.sampling import Grading, Sampled, Sampler, SamplingOrder, Task, sample
from gambit.training.storage import ProblemRecord, Shard, read_shards
from gambit.types import Problem

VALUES_FILE = "values.jsonl"


class PrefixKey(NamedTuple):
    """A trace of a collection up to one of its thoughts."""

    problem: str
    trace: int  # its number among the problem's traces
    step: int  # thoughts in the prefix, at least one

    @property
    def id(self) -> str:
        return f"{self.problem}.{self.trace}.{self.step}"


class PrefixValue(BaseModel):
    """What became of the continuations (rollouts) of one prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem: str
    trace: int = Field(ge=0)
    step: int = Field(ge=1)
    answers: tuple[str | None, ...] = Field(min_length=1)
    is_right: tuple[bool, ...]
    num_tokens: int = Field(ge=0)  # that the rollouts generated

    @model_validator(mode="after")
    def _check_parallel(self) -> PrefixValue:
        if len(self.answers) != len(self.is_right):
            raise ValueError(f"{len(self.answers)} answers, {len(self.is_right)} of them graded")
        return self

    @property
    def key(self) -> PrefixKey:
        return PrefixKey(self.problem, self.trace, self.step)

    @property
    def value(self) -> float:
        """The share that is right."""
        return sum(self.is_right) / len(self.is_right)


@dataclass(frozen=True, slots=True)
class TraceText:
    """A collected trace without its states."""

    problem: ProblemRecord
    number: int
    tokens: npt.NDArray[np.int32]
    step_ends: npt.NDArray[np.int32]  # tokens up to the end of each thought

    @property
    def inner_ends(self) -> npt.NDArray[np.int32]:
        """Of the thoughts after which the trace goes on."""
        return self.step_ends[self.step_ends < len(self.tokens)]

    def key(self, step: int) -> PrefixKey:
        return PrefixKey(self.problem.id, self.number, step)


# -- on disk ---------------------------------------------------------------------------------------------------


def read_values(folder: Path) -> Iterator[PrefixValue]:
    """The values beside a collection; none where there are none."""
    for number, line in whole_lines(folder / VALUES_FILE):
        try:
            yield PrefixValue.model_validate_json(line)
        except ValidationError as error:
            raise UserError(f"{folder / VALUES_FILE}, line {number}: not the value of a prefix "
                            f"({error.errors()[0]['msg']})") from error  # fmt: skip


def merge_values(parts: Sequence[Path], out: Path) -> None:
    """Add the values of several collections to those of another."""
    drop_torn_line(out / VALUES_FILE)
    known = {value.key for value in read_values(out)}
    found = [value for part in parts for value in read_values(part) if value.key not in known]
    if found:
        with opened_to_append(out / VALUES_FILE) as file:
            for value in found:
                append_synced(file, value.model_dump_json())


def read_texts(folder: Path) -> list[TraceText]:
    """Every trace of a collection."""
    return [text for shard in read_shards(folder, skip_corrupted=False) for text in _texts(shard)]


def _texts(shard: Shard) -> Iterator[TraceText]:
    records = [(problem, i) for problem in shard.entry.problems for i in range(len(problem.traces))]
    lengths = [problem.traces[i].num_tokens for problem, i in records]
    counts = [problem.traces[i].num_steps for problem, i in records]
    tokens, ends = (torch.split(shard.tensors[n], c) for n, c in (("tokens", lengths), ("step_ends", counts)))
    for (problem, number), own, own_ends in zip(records, tokens, ends, strict=True):
        yield TraceText(problem, number, own.numpy(), own_ends.numpy())


# -- where to cut ----------------------------------------------------------------------------------------------

Cut = Callable[[TraceText], Iterable[int]]  # the steps after which a trace is cut


def at_random(count: int, seed: int) -> Cut:
    """So many thoughts of each trace, or all it has; always the same ones with the same seed."""

    def steps(text: TraceText) -> list[int]:
        rng = random.Random(f"{seed} {text.problem.id} {text.number}")
        inner = range(1, len(text.inner_ends) + 1)
        return sorted(rng.sample(inner, min(count, len(inner))))

    return steps


def nearest_step(text: TraceText, fraction: float) -> int | None:
    """The thought that ends nearest to a share of the trace's tokens; None where it goes on after no thought."""
    gaps = np.abs(text.inner_ends - fraction * len(text.tokens))
    return int(gaps.argmin()) + 1 if len(gaps) else None


def at_fractions(fractions: Sequence[float]) -> Cut:
    def steps(text: TraceText) -> list[int]:
        found = {nearest_step(text, fraction) for fraction in fractions}
        return sorted(step for step in found if step is not None)

    return steps


# -- rollouts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueRun:
    """One run that adds values to a collection."""

    sampler: Sampler
    folder: Path
    order: SamplingOrder  # as many traces a problem as there are to be rollouts a prefix
    grading: Grading
    refused: list[str]
    on_progress: Callable[[int, int], None] = lambda done, total: None
    should_stop: Callable[[], bool] = lambda: False

    def add(self, tasks: Iterable[Task], texts: Iterable[TraceText], cut: Cut) -> list[PrefixValue]:
        """Roll out every prefix that has no value yet, and give the new ones; the caller holds the folder's lock."""
        problems = {task.id: task for task in tasks}
        path = self.folder / VALUES_FILE
        drop_torn_line(path)
        done = {value.key for value in read_values(self.folder)}
        wanted = [(text, step) for text in texts if text.problem.id in problems for step in cut(text)]
        todo = [(text, step) for text, step in wanted if text.key(step) not in done]
        num_before, found = len(wanted) - len(todo), []
        self.on_progress(num_before, len(wanted))
        with opened_to_append(path) as file:
            for value in self._rolled_out(problems, todo):
                append_synced(file, value.model_dump_json())
                found.append(value)
                self.on_progress(num_before + len(found), len(wanted))
        return found

    def _rolled_out(self, problems: Mapping[str, Task], todo: Sequence[tuple[TraceText, int]]) -> Iterator[PrefixValue]:
        """As they are graded: the engine does not wait for a slow comparison."""
        keys = {text.key(step).id: text.key(step) for text, step in todo}
        tasks = (_continued(problems[text.problem.id], text, step) for text, step in todo)
        waiting: list[Sampled] = []
        for sampled in sample(self.sampler, tasks, self.order, self.grading, self.refused, self.should_stop):
            waiting.append(sampled)
            is_ready = [all(grade.done() for grade in each.grades) for each in waiting]
            yield from (_value(keys[each.task.id], each) for each in compress(waiting, is_ready))
            waiting = list(compress(waiting, map(not_, is_ready)))
        yield from (_value(keys[each.task.id], each) for each in waiting)


def _continued(task: Task, text: TraceText, step: int) -> Task:
    prefix = tuple(text.tokens[: text.step_ends[step - 1]].tolist())
    problem = Problem(task.problem.question, text.key(step).id, prefix)
    return Task(problem, task.answer)


def _value(key: PrefixKey, sampled: Sampled) -> PrefixValue:
    answers, is_right = zip(*(grade.result() for grade in sampled.grades), strict=True)
    num_tokens = sum(len(trace.tokens) for trace in sampled.traces)
    return PrefixValue(**key._asdict(), answers=answers, is_right=is_right, num_tokens=num_tokens)


# -- as labels -------------------------------------------------------------------------------------------------


def with_value_labels(data: Dataset, folder: Path) -> Dataset:
    """The same steps, labelled by values. Those between known values are interpolated.

    Known are the problem's share of right traces before the first thought, the values, and the outcome at the end. The
    chance to end right is a martingale, so that a straight line between two known points is its best guess. A trace
    without a value keeps its outcome at every step.
    """
    known: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for value in read_values(folder):
        known[value.problem, value.trace][value.step] = value.value
    if not known:
        raise UserError(f"{folder} holds no values: add some with `gambit scorer collect --rollouts 8`, or leave "
                        "--labels out")  # fmt: skip
    labels = [
        _labels(problem, number, known.get((problem.id, number), {}))
        for problem in data.problems
        for number in range(len(problem.traces))
    ]
    return dataclasses.replace(data, labels=np.concatenate(labels).astype(np.float32))


def _labels(problem: ProblemRecord, number: int, values: Mapping[int, float]) -> npt.NDArray[np.float64]:
    """[step]."""
    trace = problem.traces[number]
    if not values:
        return np.full(trace.num_steps, float(trace.is_correct))
    start = float(np.mean([each.is_correct for each in problem.traces]))
    points = {0: start, trace.num_steps: float(trace.is_correct), **values}
    places = sorted(points)
    found: npt.NDArray[np.float64] = np.interp(
        np.arange(1, trace.num_steps + 1), places, [points[place] for place in places]
    )
    return found

"""Values of prefixes: the share of right traces among those that continue a collected one from one of its thoughts.

The values stand in a file of their own beside the collection, one line per prefix.
"""

from __future__ import annotations

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
from gambit.training.collect import Collector
from gambit.training.sampling import Grading, Sampled, SamplingOrder, Task, sample
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
    """The continuations (rollouts) of one prefix, graded."""

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
        """Token counts up to the end of each thought that is not the last."""
        return self.step_ends[self.step_ends < len(self.tokens)]

    def key(self, step: int) -> PrefixKey:
        return PrefixKey(self.problem.id, self.number, step)


# -- on disk ---------------------------------------------------------------------------------------------------


def read_values(folder: Path) -> Iterator[PrefixValue]:
    """Yields the values beside a collection; none where the file is missing."""
    for number, line in whole_lines(folder / VALUES_FILE):
        try:
            yield PrefixValue.model_validate_json(line)
        except ValidationError as error:
            raise UserError(f"{folder / VALUES_FILE}, line {number}: not the value of a prefix "
                            f"({error.errors()[0]['msg']})") from error  # fmt: skip


def merge_values(parts: Sequence[Path], out: Path) -> None:
    """Adds the values of several collections to those of another."""
    drop_torn_line(out / VALUES_FILE)
    known = {value.key for value in read_values(out)}
    found = [value for part in parts for value in read_values(part) if value.key not in known]
    if found:
        with opened_to_append(out / VALUES_FILE) as file:
            for value in found:
                append_synced(file, value.model_dump_json())


def read_texts(folder: Path) -> list[TraceText]:
    """Returns every trace of a collection."""
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


def nearest_step(text: TraceText, fraction: float) -> int | None:
    """Returns the thought that ends nearest to a share of the trace's tokens; None for a trace of one thought."""
    gaps = np.abs(text.inner_ends - fraction * len(text.tokens))
    return int(gaps.argmin()) + 1 if len(gaps) else None


def at_fractions(fractions: Sequence[float]) -> Cut:
    def steps(text: TraceText) -> list[int]:
        found = {nearest_step(text, fraction) for fraction in fractions}
        return sorted(step for step in found if step is not None)

    return steps


# -- rollouts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Continues collected traces from prefixes that have no value yet."""

    collector: Collector
    num_rollouts: int  # from each prefix
    cut: Cut
    chosen: Callable[[ProblemRecord], bool] = lambda problem: True
    on_progress: Callable[[int, int], None] = lambda done, total: None
    should_stop: Callable[[], bool] = lambda: False

    def add(
        self, tasks: Iterable[Task], folder: Path, source: str, refused: list[str], num_traces: int | None = None
    ) -> list[PrefixValue]:
        """Returns the new values; the caller holds the folder's lock.

        `num_traces` were collected of each problem, if not the plan's.
        """
        self.collector.open(folder, source, num_traces)
        problems = {task.id: task for task in tasks}
        path = folder / VALUES_FILE
        drop_torn_line(path)
        done = {value.key for value in read_values(folder)}
        texts = [text for text in read_texts(folder) if self.chosen(text.problem) and text.problem.id in problems]
        wanted = [(text, step) for text in texts for step in self.cut(text)]
        todo = [(text, step) for text, step in wanted if text.key(step) not in done]
        num_before, found = len(wanted) - len(todo), []
        self.on_progress(num_before, len(wanted))
        with opened_to_append(path) as file:
            for value in self._rolled_out(problems, todo, refused):
                append_synced(file, value.model_dump_json())
                found.append(value)
                self.on_progress(num_before + len(found), len(wanted))
        return found

    def _rolled_out(
        self, problems: Mapping[str, Task], todo: Sequence[tuple[TraceText, int]], refused: list[str]
    ) -> Iterator[PrefixValue]:
        """Yields values as they are graded: the engine does not wait for a slow comparison."""
        plan = self.collector.plan
        order = SamplingOrder(plan.search, self.num_rollouts, plan.traces_at_once)
        keys = {text.key(step).id: text.key(step) for text, step in todo}
        tasks = (_continued(problems[text.problem.id], text, step) for text, step in todo)
        waiting: list[Sampled] = []
        with Grading(plan.search.answer, plan.num_graders) as grading:
            for sampled in sample(self.collector.sampler, tasks, order, grading, refused, self.should_stop):
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

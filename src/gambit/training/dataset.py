"""A collection in memory: the thoughts of all traces in one tensor, with a division by problem."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from gambit.errors import UserError
from gambit.stats import Bools, Ints
from gambit.storage.files import record_in, whole_lines
from gambit.training.storage import Header, ProblemRecord, Record, Shard, read_header, read_shards, state_name
from gambit.types import StatePosition

OUTCOMES = "outcomes"  # a thought's label is the outcome of its trace


class Part(StrEnum):
    """The use of a problem."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Division:
    """Shares of the problems. A problem's part follows from its id, so that it stays when more problems join."""

    validation: float = 0.15
    test: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.validation, self.test) < 0 or self.validation + self.test >= 1:
            raise UserError(f"validation {self.validation} and test {self.test} leave no problem to train on")

    def part_of(self, problem_id: str) -> Part:
        digest = hashlib.sha256(f"{self.seed} {problem_id}".encode()).digest()
        ticket = int.from_bytes(digest[:8], "big") / 2**64
        if ticket < self.test:
            return Part.TEST
        return Part.VALIDATION if ticket < self.test + self.validation else Part.TRAIN


@dataclass(frozen=True, slots=True)
class Traces:
    """The facts about every trace besides its states, [trace] or [thought]."""

    problem_of: Ints  # index into `problems`
    starts: Ints  # first thought of each trace among all thoughts
    num_thoughts: Ints
    num_tokens: Ints
    is_correct: Bools
    thought_ends: Ints  # generated tokens up to the end of each thought
    confidences: npt.NDArray[np.float32]  # of each thought's tokens

    def thoughts_of(self, trace: int) -> slice:
        """Returns the places of a trace's thoughts among all thoughts."""
        return slice(self.starts[trace], self.starts[trace] + self.num_thoughts[trace])

    def places(self, chosen: Ints) -> Ints:
        """Returns the places of the chosen traces' thoughts, one trace after the other."""
        counts = self.num_thoughts[chosen]
        places: Ints = np.arange(counts.sum()) + np.repeat(self.starts[chosen] - np.cumsum(counts) + counts, counts)
        return places


@dataclass(frozen=True, slots=True)
class Dataset:
    """One collection at one state position and one choice of layers."""

    header: Header
    position: StatePosition
    layers: tuple[int, ...]
    problems: tuple[ProblemRecord, ...]
    traces: Traces
    states: torch.Tensor  # [thought, hidden × layers], half precision
    tokens: tuple[npt.NDArray[np.int32], ...] = ()  # of each trace, if they were loaded
    prompts: tuple[npt.NDArray[np.int32], ...] = ()  # of each problem, if they were loaded
    labels: npt.NDArray[np.float32] | None = None  # [thought] to fit to; None: the outcome of its trace
    labelled_by: str = OUTCOMES  # or the name of a file

    def of_part(self, division: Division, part: Part) -> Ints:
        """Returns the traces of the problems that belong to a part."""
        is_in = np.array([division.part_of(problem.id) is part for problem in self.problems], dtype=np.bool_)
        return np.flatnonzero(is_in[self.traces.problem_of])

    def with_confidences(self) -> Self:
        """Returns the dataset with each thought's confidence as its last feature."""
        if not self.header.has_confidence:
            raise UserError("the collection holds no confidences: collect without --no-confidence")
        column = torch.from_numpy(self.traces.confidences).to(self.states.dtype)[:, None]
        return dataclasses.replace(self, states=torch.cat((self.states, column), dim=1))

    @property
    def thought_labels(self) -> npt.NDArray[np.float32]:
        """Returns the label of each thought; thoughts of traces that were left out stay 0."""
        if self.labels is not None:
            return self.labels
        found = np.zeros(len(self.states), np.float32)
        found[self.traces.places(self.all_traces())] = np.repeat(self.traces.is_correct, self.traces.num_thoughts)
        return found

    def origin(self, division: Division) -> dict[str, object]:
        """Returns what a checkpoint records of the data that it was trained on."""
        return {
            "collection": self.header.id,
            "source": self.header.source,
            "problems": len(self.problems),
            "traces": {str(part): len(self.of_part(division, part)) for part in Part},
            "labels": self.labelled_by,
            "division": dataclasses.asdict(division),
        }

    def all_traces(self) -> Ints:
        return np.arange(len(self.traces.num_thoughts))


def load_dataset(
    folder: Path,
    position: StatePosition,
    layers: Sequence[int] = (-1,),
    *,
    with_tokens: bool = False,
    skipped: list[str] | None = None,
) -> Dataset:
    """Loads the whole collection; raises for a state position or layer it does not hold. No layers: no states.

    A corrupted shard raises too, or is left out and named in `skipped`.
    """
    header = read_header(folder)
    _check_holds(folder, header, position, layers)
    shards = list(read_shards(folder, skipped))
    if not shards:
        raise UserError(f"{folder} holds no finished problem: run `gambit scorer collect` first")
    states = torch.cat([_states(shard, position, layers) for shard in shards])
    problems = tuple(problem for shard in shards for problem in shard.entry.problems)
    found = Dataset(header, position, tuple(layers), problems, _traces(problems, shards), states)
    if not with_tokens:
        return found
    tokens, prompts = [], []
    for shard in shards:
        counts = [trace.num_tokens for trace in shard.entry.traces]
        tokens += _split(shard.tensors["tokens"], counts)
        prompts += _split(shard.tensors["prompts"], shard.tensors["prompt_lengths"].tolist())
    return dataclasses.replace(found, tokens=tuple(tokens), prompts=tuple(prompts))


def _split(tokens: torch.Tensor, counts: list[int]) -> list[npt.NDArray[np.int32]]:
    return [each.numpy() for each in torch.split(tokens.int(), counts)]


def _states(shard: Shard, position: StatePosition, layers: Sequence[int]) -> torch.Tensor:
    none = torch.zeros(len(shard.tensors["thought_ends"]), 0, dtype=torch.half)
    return torch.cat([none, *(shard.tensors[state_name(layer, position)] for layer in layers)], dim=-1)


def _check_holds(folder: Path, header: Header, position: StatePosition, layers: Sequence[int]) -> None:
    if layers and position not in header.positions:
        raise UserError(f"states at position '{position}' are wanted, {folder} holds {', '.join(header.positions)}: "
                        "collect that position, or choose another with --state-position")  # fmt: skip
    missing = [layer for layer in layers if layer not in header.layers]
    if missing:
        raise UserError(f"layers {missing} are wanted, {folder} holds {list(header.layers) or 'none'}: "
                        "collect them, or choose others with --layers")  # fmt: skip


def _traces(problems: Sequence[ProblemRecord], shards: Sequence[Shard]) -> Traces:
    records = [trace for problem in problems for trace in problem.traces]
    num_thoughts = np.array([trace.num_thoughts for trace in records], dtype=np.int64)
    return Traces(
        problem_of=np.repeat(np.arange(len(problems)), [len(problem.traces) for problem in problems]),
        starts=np.cumsum(num_thoughts) - num_thoughts,
        num_thoughts=num_thoughts,
        num_tokens=np.array([trace.num_tokens for trace in records], dtype=np.int64),
        is_correct=np.array([trace.is_correct for trace in records], dtype=np.bool_),
        thought_ends=np.concatenate([shard.tensors["thought_ends"].numpy() for shard in shards]).astype(np.int64),
        confidences=np.concatenate([shard.tensors["confidences"].numpy() for shard in shards]).astype(np.float32),
    )


class TraceLabels(Record):
    """One line of a file of labels: a label of every thought of one trace."""

    problem: str
    trace: int = Field(ge=0)  # its number among the problem's traces
    labels: tuple[Annotated[float, Field(ge=0, le=1)], ...]


Labels = Mapping[tuple[str, int], tuple[float, ...]]  # by problem and number of the trace


def read_labels(source: str) -> Labels:
    """Reads the labels that `--labels` names: a file of JSON lines, or none for `outcomes`."""
    if source == OUTCOMES:
        return {}
    path = Path(source)
    if not path.is_file():
        raise UserError(f"unknown labels {source!r}: use {OUTCOMES}, or a .jsonl file with a label of each thought")
    fix = "give one object a line with problem, trace and labels from 0 to 1"
    lines = (
        record_in(TraceLabels, line, f"{path}, line {number}", "labels", fix) for number, line in whole_lines(path)
    )
    return {(line.problem, line.trace): line.labels for line in lines}


def with_labels(data: Dataset, labels: Labels, source: str) -> Dataset:
    """Returns the dataset with the labels of a source; a trace without any keeps its outcome at every thought."""
    if source == OUTCOMES:
        return data
    known = data.traces
    found, num_labelled = data.thought_labels.copy(), 0
    numbers = np.arange(len(known.problem_of)) - np.searchsorted(known.problem_of, known.problem_of)
    for trace, number in enumerate(numbers.tolist()):  # of the trace among those of its problem, which lie together
        problem = data.problems[known.problem_of[trace]].id
        given = labels.get((problem, number))
        if given is None:
            continue
        if len(given) != (count := known.num_thoughts[trace]):
            raise UserError(f"{source}: {len(given)} labels for trace {number} of {problem}, which has {count} "
                            "thoughts: give one for each")  # fmt: skip
        found[known.thoughts_of(trace)] = given
        num_labelled += 1
    if not num_labelled:
        raise UserError(f"{source} labels no trace of this collection: name its problems by their ids")
    return dataclasses.replace(data, labels=found, labelled_by=Path(source).name)


Item = TypeVar("Item")


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Yields items in groups, each complete once its sizes sum to `least`; the last one may be smaller."""
    group: list[Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group

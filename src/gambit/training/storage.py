"""A collection on disk: shards of hidden states, and an append-only index of the complete ones.

A shard is written whole, synced and renamed before its index line is appended and synced. What a kill leaves behind is
therefore either in the index and complete, or not in the index and removed by the next run.
"""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load, save

from gambit.errors import UserError
from gambit.scorers.base import MadeFor
from gambit.storage.files import (
    PARTIAL,
    append_synced,
    drop_torn_line,
    opened_to_append,
    read_record,
    record_in,
    whole_lines,
    write_whole,
)

HEADER_FILE, INDEX_FILE = "collection.json", "index.jsonl"
_MAY_DIFFER = ("id", "source")  # more problems may join a collection; how its traces were made may not change


class Record(BaseModel):
    """A JSON object of a collection."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Header(Record):
    """The origin of every trace of a collection."""

    format: Literal[1] = 1
    id: str
    source: str  # where the problems come from: a file's name, or pawn:<split>
    model: str
    model_hash: str | None
    hidden_size: int
    layers: tuple[int, ...]
    positions: tuple[str, ...]
    boundary_rule: str
    traces_per_problem: int
    has_confidence: bool
    sampling: dict[str, float | int | str | None]

    def made_for(self, name: str) -> MadeFor:
        """Returns what a scorer trained on these traces is made for."""
        return MadeFor(name, self.hidden_size, self.boundary_rule, self.model_hash, self.model)


class TraceRecord(Record):
    """One sampled trace; its thoughts are rows of the shard's tensors."""

    answer: str | None
    is_correct: bool
    num_tokens: int = Field(ge=0)
    num_thoughts: int = Field(ge=0)
    end: str


class ProblemRecord(Record):
    """One problem with its sampled traces."""

    id: str
    question: str
    gold: str
    traces: tuple[TraceRecord, ...]

    @property
    def is_mixed(self) -> bool:
        """Returns whether it has right and wrong traces: otherwise there is nothing to rank."""
        return len({trace.is_correct for trace in self.traces}) > 1


class ShardEntry(Record):
    """One line of the index. Rows of the shard follow its problems, their traces and their thoughts in this order."""

    file: str = Field(pattern=r"^shard-\d+\.safetensors$")
    sha256: str
    problems: tuple[ProblemRecord, ...]

    @property
    def number(self) -> int:
        return int(self.file.removeprefix("shard-").partition(".")[0])

    @property
    def traces(self) -> list[TraceRecord]:
        """Returns the traces of all problems, in their order."""
        return [trace for problem in self.problems for trace in problem.traces]


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as it was read."""

    entry: ShardEntry
    tensors: Mapping[str, torch.Tensor]


def state_name(layer: int, position: str) -> str:
    """Returns the name of the tensor that holds the states of one layer at one position."""
    return f"states.{layer}.{position}"


class CollectionWriter:
    """Adds shards to a collection, a new one or one that an earlier run began; one writer at a time."""

    def __init__(self, folder: Path) -> None:
        entries = list(read_index(folder))
        self._folder, self._next_number = folder, 1 + max((entry.number for entry in entries), default=-1)
        self.done = frozenset(problem.id for entry in entries for problem in entry.problems)

    def add(self, problems: Sequence[ProblemRecord], tensors: Mapping[str, torch.Tensor]) -> None:
        # Named by its number: what an interrupted run wrote under that name was never in the index.
        content = save(dict(tensors))
        write_whole(self._folder / self._next_name, content)
        digest = hashlib.sha256(content).hexdigest()
        self._append(ShardEntry(file=self._next_name, sha256=digest, problems=tuple(problems)))

    def adopt(self, folder: Path, entry: ShardEntry) -> None:
        """Adds a shard of another collection as it is; a damaged one is reported when it is read."""
        with suppress(FileNotFoundError):
            write_whole(self._folder / self._next_name, (folder / entry.file).read_bytes())
        self._append(entry.model_copy(update={"file": self._next_name}))

    @property
    def _next_name(self) -> str:
        return f"shard-{self._next_number:05d}.safetensors"

    def _append(self, entry: ShardEntry) -> None:
        with opened_to_append(self._folder / INDEX_FILE) as index:
            append_synced(index, entry.model_dump_json())
        self._next_number += 1


def merge(parts: Sequence[Path], out: Path) -> int:
    """Joins collections made in the same way, and returns the number of problems. Resumes where `out` exists already.

    The caller holds the lock of `out`.
    """
    if out in parts:
        raise UserError(f"{out} is one of the collections: choose a new folder")
    first = read_header(parts[0])
    for folder in parts[1:]:
        for name, mine, theirs in _differences(read_header(folder), first):
            raise UserError(f"{folder} has {name} = {mine}, {parts[0]} has {theirs}: "
                            "only collections made in the same way can be one")  # fmt: skip
    writer = opened_collection(out, first.model_copy(update={"id": new_id()}))
    done = set(writer.done)
    for folder in parts:
        for entry in read_index(folder):
            new = {problem.id for problem in entry.problems} - done
            if not new:
                continue
            if len(new) < len(entry.problems):
                raise UserError(f"{folder / entry.file} holds problems that {out} has already, and others: "
                                "collections of one problem file are merged by their shards")  # fmt: skip
            writer.adopt(folder, entry)
            done |= new
    return len(done)


def new_id() -> str:
    return secrets.token_hex(8)


def opened_collection(folder: Path, header: Header) -> CollectionWriter:
    """Begins a collection, or resumes the one that is there. The caller holds the folder's lock."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / HEADER_FILE).exists():
        if any(folder.glob("shard-*")):
            raise UserError(f"{folder} holds shards but no {HEADER_FILE}: give --out a new folder")
        write_whole(folder / HEADER_FILE, header.model_dump_json(indent=2).encode())
        return CollectionWriter(folder)
    for name, before, now in _differences(read_header(folder), header):
        raise UserError(f"{folder} was begun with {name} = {before}, this run has {now}: "
                        "use the same settings, or give --out a new folder")  # fmt: skip
    for leftover in folder.glob(f"*{PARTIAL}"):
        leftover.unlink()
    drop_torn_line(folder / INDEX_FILE)  # its shard counts as never written
    return CollectionWriter(folder)


def _differences(one: Header, other: Header) -> Iterator[tuple[str, object, object]]:
    """Yields name and values of what was made differently."""
    for name in Header.model_fields:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name not in _MAY_DIFFER and mine != theirs:
            yield name, mine, theirs


def read_header(folder: Path) -> Header:
    path = folder / HEADER_FILE
    if not path.is_file():
        raise UserError(f"no {HEADER_FILE} in {folder}: give a folder that `gambit scorer collect` wrote")
    return read_record(Header, path, "a collection's header", "copy the collection again, or collect it anew")


def read_index(folder: Path) -> Iterator[ShardEntry]:
    """Yields every complete line of the index; raises for a problem that is there twice, which would count twice."""
    path, seen = folder / INDEX_FILE, set[str]()
    for number, line in whole_lines(path):
        entry = record_in(ShardEntry, line, f"{path}, line {number}", "a shard's entry", "collect its problems anew")
        for problem in entry.problems:
            if problem.id in seen:
                raise UserError(f"{path}, line {number}: the problem {problem.id!r} is there twice: delete that line, "
                                "and collect what is missing then")  # fmt: skip
            seen.add(problem.id)
        yield entry


def read_shards(folder: Path, skipped: list[str] | None = None) -> Iterator[Shard]:
    """Yields shards, each checked against its checksum; raises for a wrong one, or names it in `skipped`."""
    header = read_header(folder)
    for entry in read_index(folder):
        try:
            yield _read_shard(folder, header, entry)
        except UserError as error:
            if skipped is None:
                raise UserError(f"{error}; --skip-corrupted goes on without its "
                                f"{len(entry.problems)} problems, or collect them anew") from error  # fmt: skip
            skipped.append(f"{error}; {len(entry.problems)} problems are left out")


def _read_shard(folder: Path, header: Header, entry: ShardEntry) -> Shard:
    path = folder / entry.file
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise UserError(f"shard {path} is corrupted: its checksum is not the one in the index")
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise UserError(f"shard {path} is corrupted: {error}") from error
    for name, shape in _shapes(header, entry, tensors):
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise UserError(f"shard {path} contradicts its line in {INDEX_FILE}: {name} must be {_times(shape)}, "
                            f"and is {'missing' if found is None else _times(found)}")  # fmt: skip
    return Shard(entry, tensors)


def _shapes(
    header: Header, entry: ShardEntry, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors that a shard must hold: else rows would be taken for those of another trace."""
    num_thoughts = sum(trace.num_thoughts for trace in entry.traces)
    states = (state_name(layer, position) for layer in header.layers for position in header.positions)
    yield from ((name, (num_thoughts, header.hidden_size)) for name in states)
    yield from ((name, (num_thoughts,)) for name in ("thought_ends", "confidences"))
    yield "tokens", (sum(trace.num_tokens for trace in entry.traces),)
    yield "prompt_lengths", (len(entry.problems),)
    yield "prompts", (int(tensors["prompt_lengths"].sum()),)


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)

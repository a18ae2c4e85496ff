"""Result rows: one JSON line per finished search, in a file that is only appended to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from gambit.errors import UserError
from gambit.storage.lines import append_synced, drop_torn_line, opened_to_append, whole_lines

ROWS_FILE = "rows.jsonl"


class TaskKey(NamedTuple):
    """Which search a row is about."""

    variant: str
    benchmark: str
    problem: str
    seed: int


@dataclass(frozen=True, slots=True)
class Series:
    """The pool over one search, thinned out: parallel arrays over the same moments."""

    seconds: tuple[float, ...] = ()
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    kv_used: tuple[int, ...] = ()  # tokens in the engine's cache, those of searches beside it included


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the seconds of a search went; with several in one batch the engine's are shared by all of them."""

    total: float = 0.0
    engine: float = 0.0
    scoring: float = 0.0
    tree: float = 0.0
    scheduling: float = 0.0

    @property
    def other(self) -> float:
        """What no part claims: searches beside it, the log, the loop."""
        return max(0.0, self.total - self.engine - self.scoring - self.tree - self.scheduling)


@dataclass(frozen=True, slots=True)
class Row:
    """One search: what it answered and what it cost. Everything a report says is made from these."""

    variant: str
    benchmark: str
    problem: str
    seed: int
    answer: str | None
    gold: str
    correct: bool
    stop_reason: str
    error: str | None = None  # a failed search counts as wrong, and its cost as unknown
    generated: int = 0
    reused: int = 0
    recomputed: int = 0
    read_total: int = 0  # tokens that decode steps read, those of a shared prefix for every trace; 0: not known
    read_unique: int = 0  # and once in a step
    productive: int = 0  # generated tokens that are part of at least one completed trace
    roots: int = 0
    branched: int = 0
    pruned: int = 0
    evicted: int = 0
    completed: int = 0
    cancelled: int = 0
    right_traces: int = 0  # completed ones with the right answer
    queued: int = 0  # times a running trace lost its memory and had to wait
    waited_steps: int = 0  # decode steps that traces spent waiting for memory
    waited_seconds: float = 0.0
    verifier_thoughts: int = 0  # that a second model read, where there is one
    verifier_needed: int = 0  # of these, by a tournament
    verifier_in_time: int = 0  # of the needed, those whose scores were there when it came
    verifier_tokens: int = 0
    verifier_seconds: float = 0.0
    verifier_waited: float = 0.0  # seconds for which the search stood still for its scores
    steps: int = 0
    began: float = 0.0  # Unix time
    seconds: Spent = field(default_factory=Spent)
    kv_peak: int = 0  # tokens, at the sampled moments
    kv_capacity: int = 0
    revotes: dict[str, bool] = field(default_factory=dict)  # vote -> is it right, over the same traces
    unique_lengths: tuple[int, ...] = ()  # of completed traces: tokens of their own
    total_lengths: tuple[int, ...] = ()  # and with the inherited part
    series: Series = field(default_factory=Series)
    shard: str = "1/1"
    engine: int = 0  # its number, in a run on several
    engines: int = 1  # that it was spread over
    log: str | None = None  # the event log, relative to the run's folder
    pool: str = ""  # islands, swaps and warm-up of a search with tournaments, and why these
    warmup_tokens: int = 0  # of a search with tournaments
    winning_islands: int = 0  # distinct ones behind the answer

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.variant, self.benchmark, self.problem, self.seed)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        raw = json.loads(line)
        lists = {key: tuple(raw[key]) for key in ("unique_lengths", "total_lengths")}
        series = Series(**{key: tuple(values) for key, values in raw["series"].items()})
        return cls(**{**raw, **lists, "seconds": Spent(**raw["seconds"]), "series": series})


class RowWriter:
    """Appends rows, each on the disk before the next search is begun in its place."""

    def __init__(self, folder: Path) -> None:
        path = folder / ROWS_FILE
        drop_torn_line(path)
        self._file = opened_to_append(path)

    def write(self, row: Row) -> None:
        append_synced(self._file, row.to_json())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_rows(folder: Path) -> Iterator[Row]:
    """The rows of a run; a torn last line is left out, any other broken line is an error."""
    path = folder / ROWS_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {ROWS_FILE}: give the folder of a `gambit bench`")
    for number, line in whole_lines(path):
        try:
            yield Row.from_json(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: not a row of this version ({error})") from error

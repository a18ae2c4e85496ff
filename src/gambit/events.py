"""The event log: what happened in one search, one JSON line each, append-only."""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeAlias, get_args

from pydantic import BeforeValidator, Field, JsonValue, StrictBool, TypeAdapter, ValidationError

from gambit.errors import UserError
from gambit.types import EndReason, StopReason, TraceConfidence

Json: TypeAlias = JsonValue

LOG_FORMAT = 2  # lines are numbered and chained
SHOWN_CHARS = 40  # of a wrong value

# What a field of a log may hold, checked when the log is read.
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Packed: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]  # a token, or another number in an array
Number: TypeAlias = Annotated[float, Field(strict=True)]
Seed: TypeAlias = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63)]
_FIVE = TypeAdapter(tuple[Count, Number, Number, Number, Number])
Confidence: TypeAlias = Annotated[TraceConfidence, BeforeValidator(_FIVE.validate_python)]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The header: everything that is needed to read the rest."""

    format: Count
    problem_id: str
    question: str
    policy: str
    vote: str
    aggregation: str
    seed: Seed
    capacity: Count
    num_traces: Count
    prompt_tokens: tuple[Packed, ...]
    settings: Mapping[str, Json]
    environment: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Created:
    """A root joined the pool; it waits until it is admitted."""

    step: Count
    trace: Count
    island: Count = 0


@dataclass(frozen=True, slots=True)
class Branched:
    """A child joined the pool, its first `inherited` tokens being its parent's; it waits until it is admitted."""

    step: Count
    trace: Count
    parent: Count
    inherited: Count
    temperature: Number


@dataclass(frozen=True, slots=True)
class Forced:
    """A child joined the pool in place of its parent, to write an answer: it goes on after tokens that it was given."""

    step: Count
    trace: Count
    parent: Count  # pruned just before as "forced"
    inherited: Count
    reason: str  # "thinking", "length", "loop", "budget_tokens", "budget_seconds", or the policy's
    given: tuple[Packed, ...]  # the first of its own tokens


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting trace got its KV blocks and runs."""

    step: Count
    trace: Count
    reused: Count
    recomputed: Count
    waited_steps: Count


@dataclass(frozen=True, slots=True)
class Queued:
    """A running trace lost its KV blocks and waits to be recomputed (plain sampling under memory pressure)."""

    step: Count
    trace: Count
    num_tokens: Count


@dataclass(frozen=True, slots=True)
class Scored:
    """The thoughts that finished in one engine step, as parallel arrays."""

    step: Count
    traces: tuple[Packed, ...]
    scores: tuple[Number, ...]
    num_tokens: tuple[Packed, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """Scores of a verifier, which come later than the thoughts they are of, as parallel arrays."""

    step: Count
    traces: tuple[Packed, ...]
    scores: tuple[Number, ...]
    num_tokens: tuple[Packed, ...]
    ended_steps: tuple[Packed, ...]  # in which each thought ended; the score came `step` minus that many steps later
    engine_scores: tuple[Number | None, ...]  # of its own scorer; None after the last thought


@dataclass(frozen=True, slots=True)
class Pruned:
    """A trace left the pool for good; `reason` is the policy's, "pressure" or "confidence" (its stop rule)."""

    step: Count
    trace: Count
    reason: str
    score: Number | None
    tokens: tuple[Packed, ...]
    answer: str | None = None  # read only where pruned traces vote, and then it does


@dataclass(frozen=True, slots=True)
class Evicted:
    """A trace became a ghost: it holds no memory and generates nothing more, but keeps its place in the pool."""

    step: Count
    trace: Count
    reason: str
    score: Number | None
    tokens: tuple[Packed, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A trace came to its own end."""

    step: Count
    trace: Count
    reason: EndReason
    answer: str | None
    tokens: tuple[Packed, ...]
    confidence: Confidence | None = None


@dataclass(frozen=True, slots=True)
class IslandsSplit:
    """Every island was divided into smaller ones: from here on these settings hold."""

    step: Count
    islands: Count
    swap_size: Count
    warmup_tokens: Count
    why: str
    island_of: tuple[Packed, ...]  # of every trace so far, by id


@dataclass(frozen=True, slots=True)
class Discarded:
    """A finished trace that shall not vote."""

    step: Count
    trace: Count
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A trace was still running or waiting when the search stopped."""

    step: Count
    trace: Count
    tokens: tuple[Packed, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment: taken at every wake of the policy, every check interval and at the end."""

    step: Count
    running: Count
    waiting: Count
    ghosts: Count
    completed: Count
    generated: Count
    kv_used_tokens: Count
    kv_capacity_tokens: Count
    seconds_total: Number
    seconds_engine: Number
    seconds_scoring: Number
    seconds_scheduling: Number
    seconds_search: Number


@dataclass(frozen=True, slots=True)
class Waited:
    """Steps and seconds for which traces waited for KV blocks, as parallel arrays; once, at the end, if any waited.

    Seconds differ between two runs with the same seed. Like those of a Sample they have a line of their own.
    """

    step: Count
    traces: tuple[Packed, ...]
    steps: tuple[Packed, ...]
    seconds: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class VerifierTotals:
    """The verifier's work for a search in all; once, before the vote. Counts and seconds differ between two runs."""

    step: Count
    verifier: str
    thoughts: Count
    needed: Count  # of these, by a tournament: all but the last ones of traces that completed in the meantime
    in_time: Count  # of the needed, those whose scores were there when the tournament came
    tokens: Count  # that it computed
    seconds: Number  # of its own work
    seconds_waited: Number  # for which the search stood still
    seconds_for_vote: Number  # of these, after it had stopped
    is_async: StrictBool  # tournaments went by the scores that had arrived: the run may not repeat
    lost: str | None  # why it was given up, if the search went on without it


@dataclass(frozen=True, slots=True)
class Stopped:
    """The search ended."""

    step: Count
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Voted:
    """The answer, as it was announced; a replay must arrive at the same one."""

    answer: str | None
    margin: Number
    votes: tuple[Mapping[str, Json], ...]


Event: TypeAlias = (
    RunStarted | Created | Branched | Forced | Admitted | Queued | Scored | Verified | Pruned | Evicted | Finished
    | IslandsSplit | Discarded | Cancelled | Sample | Waited | VerifierTotals | Stopped | Voted
)  # fmt: skip

# Thoughts end in nearly every step of a large pool, so that writing one is on the critical path.
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in get_args(Event)}
_KINDS = {kind.__name__: kind for kind in _FIELDS}
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def to_json(event: Event) -> str:
    """Returns one line without its newline. Floats keep every digit, so that a replay computes the same sums."""
    kind = type(event)
    record = {"event": kind.__name__}
    for name in _FIELDS[kind]:
        record[name] = getattr(event, name)
    return _encode(record)


def from_json(line: str) -> Event:
    """Returns the event of one line, without a look at its place in the chain."""
    record = json.loads(line)
    record.pop(_LINE, None)
    record.pop(_CHAIN, None)
    return _event_of(record)


def _event_of(record: dict[str, Any]) -> Event:
    """Returns the event of a record; raises ValueError with the first field that holds something else."""
    kind = _KINDS[record.pop("event")]
    if unknown := record.keys() - _FIELDS[kind]:
        raise ValueError(f"unknown field {min(unknown)!r}")
    try:
        event: Event = _reader(kind).validate_python(record)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        shown = repr(record[name]) if name in record else "missing"
        raise ValueError(f"{name} is {shown[:SHOWN_CHARS]}{'…' * (len(shown) > SHOWN_CHARS)}") from error
    return event


@cache
def _reader(kind: type[Event]) -> TypeAdapter[Event]:
    return TypeAdapter(kind)


class LogWriter(AbstractContextManager["LogWriter"]):
    """Writes events to a new file, each line as soon as it is complete, so that a killed run leaves a readable log."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._chain = Chain()
        self._file = path.open("x", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        self._file.write(self._chain.link(to_json(event)) + "\n")

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(path: Path | str) -> Iterator[Event]:
    """Yields the events of a log file, plain or gzip-compressed (.gz), one for each line.

    A last line cut short by a kill is left out. Any other broken line is an error that names it, and so is one that
    does not fit the lines before it.
    """
    chain = Chain()
    for number, line in enumerate(_whole_lines(Path(path)), start=1):
        try:
            event = _read_line(line, chain)
        except BrokenChainError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: not an event of this log format ({error})") from error
        yield event


def _read_line(line: str, chain: "Chain") -> Event:
    record = json.loads(line)
    if record.get("event") not in _KINDS:
        raise ValueError(f"unknown event {record.get('event')!r}")
    if record["event"] == RunStarted.__name__ and record.get("format") != LOG_FORMAT:
        raise ValueError(f"log format {record.get('format')}, this version reads {LOG_FORMAT}")
    chain.unlink(line.rstrip("\n"), record)
    event = _event_of(record)
    if "\\ud" in line.lower():  # half a character, which no file or page can hold, is only possible as an escape
        to_json(event).encode()
    return event


def _whole_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, plain or compressed, without a last one that was cut short."""
    opened: Callable[..., TextIO] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file, suppress(EOFError):  # a .gz that was never finished
        try:
            for line in file:
                if line.endswith("\n"):
                    yield line
        except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is no event log ({error}): give the folder of a run, or its log") from error


DIGEST_BYTES = 8
_LINE, _CHAIN = "line", "chain"
_CHAIN_MARK = f',"{_CHAIN}":"'


class BrokenChainError(ValueError):
    """A line does not follow the one before it; the message is what is wrong with it."""


class Chain:
    """Links JSON objects, one a line: each carries its number and a hash over itself and all lines before it."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._last = b""

    def link(self, text: str) -> str:
        """Returns the object with its two fields; `text` is encoded without spaces."""
        self.num_lines += 1
        body = f'{text[:-1]},"{_LINE}":{self.num_lines}}}'
        return f'{body[:-1]}{_CHAIN_MARK}{self._advance(body)}"}}'

    def unlink(self, line: str, record: dict[str, object]) -> None:
        """Checks a line against those before it, and takes the two fields out of its `record`."""
        self.num_lines += 1
        number, digest = record.pop(_LINE, None), record.pop(_CHAIN, None)
        if number != self.num_lines:
            raise BrokenChainError(f"it is numbered {json.dumps(number)}: lines are missing, doubled or out of order")
        body, mark, _ = line.rpartition(_CHAIN_MARK)
        if not mark or self._advance(body + "}") != digest:
            raise BrokenChainError("it does not fit the lines before it: it, or one of them, was changed")

    def _advance(self, body: str) -> str:
        self._last = blake2b(self._last + body.encode(), digest_size=DIGEST_BYTES).digest()
        return self._last.hex()

"""The event log: what happened in one search, one JSON line each, append-only."""

from __future__ import annotations

import dataclasses
import gzip
import json
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeAlias, Union, get_args, get_origin, get_type_hints

from gambit.errors import UserError
from gambit.types import EndReason, StopReason, TraceConfidence

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"

LOG_FORMAT = 2  # lines are numbered and chained


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The header: everything that must be known to read the rest."""

    format: int
    problem_id: str
    question: str
    policy: str
    vote: str
    aggregation: str
    seed: int
    capacity: int
    num_traces: int
    prompt_tokens: tuple[int, ...]
    settings: Mapping[str, Json]
    environment: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Created:
    """A root joined the pool; it waits until it is admitted."""

    step: int
    trace: int
    island: int = 0


@dataclass(frozen=True, slots=True)
class Branched:
    """A child joined the pool, its first `inherited` tokens being its parent's; it waits until it is admitted."""

    step: int
    trace: int
    parent: int
    inherited: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting trace got its KV blocks and runs."""

    step: int
    trace: int
    reused: int
    recomputed: int
    waited_steps: int


@dataclass(frozen=True, slots=True)
class Queued:
    """A running trace lost its KV blocks and waits to be recomputed (plain sampling under memory pressure)."""

    step: int
    trace: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Scored:
    """The thoughts that finished in one engine step, as parallel arrays."""

    step: int
    traces: tuple[int, ...]
    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """Scores of a verifier, which come later than the thoughts they are of, as parallel arrays."""

    step: int
    traces: tuple[int, ...]
    scores: tuple[float, ...]
    num_tokens: tuple[int, ...]
    ended_steps: tuple[int, ...]  # when each thought ended: the score is `step` minus that many steps old
    engine_scores: tuple[float | None, ...]  # what the engine's own scorer says; None for what a trace said at its end


@dataclass(frozen=True, slots=True)
class Pruned:
    """A trace left the pool for good; `reason` is the policy's word, "pressure" or "confidence" (its stop rule)."""

    step: int
    trace: int
    reason: str
    score: float | None
    tokens: tuple[int, ...]
    answer: str | None = None  # read only where pruned traces vote, and then it does


@dataclass(frozen=True, slots=True)
class Evicted:
    """A trace became a ghost: it holds no memory and says nothing more, but keeps its place in the pool."""

    step: int
    trace: int
    reason: str
    score: float | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A trace came to its own end."""

    step: int
    trace: int
    reason: EndReason
    answer: str | None
    tokens: tuple[int, ...]
    confidence: TraceConfidence | None = None


@dataclass(frozen=True, slots=True)
class IslandsSplit:
    """Every island was divided into smaller ones: from here on these settings hold."""

    step: int
    islands: int
    swap_size: int
    warmup_tokens: int
    why: str
    island_of: tuple[int, ...]  # of every trace so far, by id


@dataclass(frozen=True, slots=True)
class Discarded:
    """A finished trace that shall not vote."""

    step: int
    trace: int
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A trace was still running or waiting when the search stopped."""

    step: int
    trace: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment: taken at every wake of the policy, every check interval and at the end."""

    step: int
    running: int
    waiting: int
    ghosts: int
    completed: int
    generated: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    seconds_total: float
    seconds_engine: float
    seconds_scoring: float
    seconds_scheduling: float
    seconds_search: float


@dataclass(frozen=True, slots=True)
class Waited:
    """How long traces waited for KV blocks in all, as parallel arrays; once, at the end, and only where any did.

    Seconds differ between two runs with the same seed: they have a line of their own, as those of a Sample.
    """

    step: int
    traces: tuple[int, ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VerifierTotals:
    """What the verifier did for a search in all; once, before the vote. Counts and seconds differ between two runs."""

    step: int
    verifier: str
    thoughts: int
    needed: int  # of these, by a tournament: all but the last ones of traces that completed in the meantime
    in_time: int  # of the needed, those whose scores were there when the tournament came
    tokens: int  # that it computed
    seconds: float  # of its own work
    seconds_waited: float  # for which the search stood still
    seconds_for_vote: float  # of these, after it had stopped
    is_async: bool  # tournaments took the scores that had arrived: the run may not repeat
    lost: str | None  # why it was given up, where the search went on without it


@dataclass(frozen=True, slots=True)
class Stopped:
    """The search ended."""

    step: int
    reason: StopReason


@dataclass(frozen=True, slots=True)
class Voted:
    """The answer, as it was announced; a replay must arrive at the same one."""

    answer: str | None
    margin: float
    votes: tuple[Mapping[str, Json], ...]


Event: TypeAlias = (
    RunStarted
    | Created
    | Branched
    | Admitted
    | Queued
    | Scored
    | Verified
    | Pruned
    | Evicted
    | Finished
    | IslandsSplit
    | Discarded
    | Cancelled
    | Sample
    | Waited
    | VerifierTotals
    | Stopped
    | Voted
)

_KINDS: Mapping[str, Callable[..., Event]] = {kind.__name__: kind for kind in get_args(Event)}
_ENUMS = {"Finished": EndReason, "Stopped": StopReason}
# Thoughts end in nearly every step of a large pool, so that writing one is on the critical path.
_FIELDS = {kind: tuple(f.name for f in dataclasses.fields(kind)) for kind in get_args(Event)}
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def to_json(event: Event) -> str:
    """One line without its newline; floats keep every digit, so that a replay computes the same sums."""
    kind = type(event)
    record = {"event": kind.__name__}
    for name in _FIELDS[kind]:
        record[name] = getattr(event, name)
    return _encode(record)


def from_json(line: str) -> Event:
    """The event of one line, whatever its chain says."""
    record = json.loads(line)
    record.pop("line", None)
    record.pop("chain", None)
    return _event_of(record)


def _event_of(record: dict[str, Any]) -> Event:
    name = record.pop("event")
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
    if name in _ENUMS:
        values["reason"] = _ENUMS[name](record["reason"])
    if values.get("confidence"):
        values["confidence"] = TraceConfidence(*record["confidence"])
    return _KINDS[name](**values)


class LogWriter:
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

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_log(path: Path) -> Iterator[Event]:
    """Yields the events of a log file, plain or gzip-compressed (.gz), one for each line.

    A last line cut short by a kill is left out. Any other broken line is an error that names it, and so is one that
    does not fit the lines before it.
    """
    chain = Chain()
    with _opened(path) as file:
        for number, line in enumerate(_text_lines(file, path), start=1):
            try:
                event = _read_line(line, chain)
            except BrokenChainError as error:
                raise UserError(f"{path}, line {number}: {error}") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}, line {number}: not an event of this log format ({error})") from error
            yield event


def _read_line(line: str, chain: Chain) -> Event:
    record = json.loads(line)
    if record.get("event") not in _KINDS:
        raise ValueError(f"unknown event {record.get('event')!r}")
    if record["event"] == RunStarted.__name__ and record.get("format") != LOG_FORMAT:
        raise ValueError(f"log format {record.get('format')}, this version reads {LOG_FORMAT}")
    chain.unlink(line.rstrip("\n"), record)
    return _checked(_event_of(record), line)


def _checked(event: Event, line: str) -> Event:
    check_fields(event)
    if "\\ud" in line.lower():  # half a character, which no file or page can hold, is only to be had as an escape
        to_json(event).encode()
    return event


def _opened(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _text_lines(file: TextIO, path: Path) -> Iterator[str]:
    try:
        yield from _whole_lines(file)
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is no event log ({error}): give the folder of a run, or its log") from error


def _whole_lines(file: TextIO) -> Iterator[str]:
    with suppress(EOFError):  # a .gz that was never finished
        for line in file:
            if line.endswith("\n"):
                yield line


DIGEST_BYTES = 8
_LINE, _CHAIN = "line", "chain"
_CHAIN_MARK = f',"{_CHAIN}":"'


class BrokenChainError(ValueError):
    """A line that does not follow the one before it; says what is wrong with it."""


class Chain:
    """Links JSON objects, one a line: each carries its number and a hash over itself and all lines before it."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._last = b""

    def link(self, text: str) -> str:
        """The object with its two fields; `text` is encoded without spaces."""
        self.num_lines += 1
        body = f'{text[:-1]},"{_LINE}":{self.num_lines}}}'
        return f'{body[:-1]}{_CHAIN_MARK}{self._advance(body)}"}}'

    def unlink(self, line: str, record: dict[str, object]) -> None:
        """Check a line against those before it, and take the two fields out of its `record`."""
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


MOST = 2**63 - 1  # of counts and steps
MOST_PACKED = 2**31 - 1  # tokens, which traces keep in 32 bits, and whatever else comes in arrays
SHOWN_CHARS = 40

Check = Callable[[Any], bool]


def check_fields(event: Any) -> None:
    """Raises ValueError with the first field that holds something else."""
    kind: type = type(event)
    for name, is_right in _checks(kind):
        value = getattr(event, name)
        if not is_right(value):
            shown = repr(value)
            raise ValueError(f"{name} is {shown[:SHOWN_CHARS]}{'…' if len(shown) > SHOWN_CHARS else ''}")


@cache
def _checks(kind: type) -> tuple[tuple[str, Check], ...]:
    hints = get_type_hints(kind)
    return tuple((name, _is_seed if name == "seed" else _check_of(hint)) for name, hint in hints.items())


def _check_of(hint: Any) -> Check:
    if hint is int:
        return lambda value: type(value) is int and 0 <= value <= MOST
    if hint is float:
        return lambda value: type(value) is float or (type(value) is int and abs(value) <= MOST)
    if hint == tuple[int, ...]:
        return _is_packable
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return _any_of([_check_of(part) for part in parts])
    if get_origin(hint) is tuple:
        return _all_are(_check_of(parts[0]))
    if hasattr(hint, "_fields"):  # a named tuple
        return _has_right_fields(hint)
    return _is_a(Mapping if get_origin(hint) is Mapping else hint)


def _is_seed(value: Any) -> bool:
    return type(value) is int and abs(value) <= MOST + 1


def _is_packable(value: Any) -> bool:
    """Asked about every token of a log, hence without a call for each."""
    return isinstance(value, tuple) and (
        not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST_PACKED)
    )


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _all_are(check: Check) -> Check:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


def _has_right_fields(kind: type) -> Check:
    checks = _checks(kind)
    return lambda value: isinstance(value, kind) and all(check(getattr(value, name)) for name, check in checks)


def _is_a(kind: type) -> Check:
    return lambda value: isinstance(value, kind)

"""Result rows: a finished search is measured from its events, and is one JSON line of a file that only grows."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from gambit import events as ev
from gambit.answers import canonical
from gambit.errors import UserError
from gambit.results.record import fold
from gambit.results.result import SearchResult
from gambit.results.vote import VoteKind, ballots_of, count_votes, pools_of
from gambit.storage.files import append_synced, drop_torn_line, opened_to_append, whole_lines
from gambit.tree import TraceState, TraceTree
from gambit.types import EndReason

ROWS_FILE = "rows.jsonl"
COSTS = ("thoughts", "needed", "in_time", "tokens", "seconds")  # of a verifier, as a result has them
COUNTS = ("roots", "branched", "pruned", "evicted", "completed", "cancelled")  # of traces, as a result has them
# Votes that need nothing but what every completed trace has.
REVOTES = (VoteKind.MAJORITY, VoteKind.SCORE, VoteKind.POSITION, VoteKind.BEST)
NUM_MOMENTS = 40  # of a series: enough for a curve, little enough for thousands of rows
Judge = Callable[[str, str], bool]  # are two answers equal?


class TaskKey(NamedTuple):
    """The search that a row is about."""

    variant: str
    benchmark: str
    problem: str
    seed: int


@dataclass(frozen=True, slots=True)
class Series:
    """The pool in the course of a search: parallel arrays over the same few moments."""

    seconds: tuple[float, ...] = ()
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    kv_used: tuple[int, ...] = ()  # tokens in the engine's cache, those of searches beside it included


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of a search by what they went into; searches of one batch share those of the engine."""

    total: float = 0.0
    engine: float = 0.0
    scoring: float = 0.0
    tree: float = 0.0
    scheduling: float = 0.0

    @property
    def other(self) -> float:
        """Returns the rest: searches beside it, the log, the loop."""
        return max(0.0, self.total - self.engine - self.scoring - self.tree - self.scheduling)


@dataclass(frozen=True, slots=True)
class Row:
    """One search: its answer and its cost. A report is made from rows alone."""

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
    wrong_traces: tuple[int, ...] | None = None  # of each wrong answer; None in rows of earlier versions
    at_limit: int = 0  # completed ones that had no token left
    forced: int = 0  # traces that were forced to answer
    looped: int = 0  # traces that repeated themselves
    children_right: int = 0  # completed ones that are right where their parents ended wrong
    parents_right: int = 0  # and the reverse
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
    def from_json(cls, line: str) -> Self:
        raw = json.loads(line)
        lists = {key: tuple(raw[key]) for key in ("unique_lengths", "total_lengths", "wrong_traces")
                 if raw.get(key) is not None}  # fmt: skip
        series = Series(**{key: tuple(values) for key, values in raw["series"].items()})
        return cls(**{**raw, **lists, "seconds": Spent(**raw["seconds"]), "series": series})


class RowWriter(AbstractContextManager["RowWriter"]):
    """Appends rows, each on the disk before the next search is begun in its place."""

    def __init__(self, folder: Path) -> None:
        path = folder / ROWS_FILE
        drop_torn_line(path)
        self._file = opened_to_append(path)

    def write(self, row: Row) -> None:
        append_synced(self._file, row.to_json())

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_rows(folder: Path) -> Iterator[Row]:
    """Yields the rows of a run without a torn last line; any other broken line is an error."""
    path = folder / ROWS_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no {ROWS_FILE}: give the folder of a `gambit bench`")
    for number, line in whole_lines(path):
        try:
            yield Row.from_json(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}, line {number}: not a row of this version ({error})") from error


def measure(row: Row, result: SearchResult, events: Sequence[ev.Event], equal: Judge) -> Row:
    """Adds the figures of a search to its row; one that was refused before it began has no events."""

    def is_right(answer: str | None) -> bool:
        return answer is not None and equal(answer, row.gold)

    row = _with_result(row, result, is_right=result.error is None and is_right(result.answer))
    if not events:
        return row
    record = fold(events)
    samples = [event for event in events if isinstance(event, ev.Sample)]
    done = sorted(record.tree.in_state(TraceState.FINISHED), key=lambda trace: trace.id)
    answers = Counter(trace.answer for trace in done)  # also without a vote: some policies let only the surest vote
    at_limit = sum(isinstance(event, ev.Finished) and event.reason is EndReason.LENGTH for event in events)
    rights = {trace.id: is_right(trace.answer) for trace in done}
    families = [(rights[each.id], rights[each.parent]) for each in done if each.parent in rights]
    votes = {kind: count_votes(ballots_of(record.tree, kind), kind, equal) for kind in REVOTES}
    spent = Spent()
    if samples:
        last, total = samples[-1], result.seconds.total  # which includes the vote
        spent = Spent(total, last.seconds_engine, last.seconds_scoring, last.seconds_search, last.seconds_scheduling)
    return dataclasses.replace(
        row,
        right_traces=sum(rights.values()),
        wrong_traces=tuple(sorted(_wrong(answers, is_right, equal), reverse=True)),
        at_limit=at_limit,
        children_right=families.count((True, False)),
        parents_right=families.count((False, True)),
        productive=productive_tokens(record.tree),
        queued=sum(isinstance(event, ev.Queued) for event in events),
        waited_steps=record.waiting.steps,
        waited_seconds=record.waiting.seconds,
        steps=max((sample.step for sample in samples), default=0),
        seconds=spent,
        kv_peak=max((sample.kv_used_tokens for sample in samples), default=0),
        kv_capacity=max((sample.kv_capacity_tokens for sample in samples), default=0),
        revotes={kind.value: is_right(vote.answer) for kind, vote in votes.items()},
        unique_lengths=tuple(len(trace.own_tokens) for trace in done),
        total_lengths=tuple(trace.num_tokens for trace in done),
        series=series_of(samples),
        engines=record.num_engines,
    )


def _wrong(answers: Counter[str | None], is_right: Callable[[str | None], bool], equal: Judge) -> list[int]:
    """Returns the number of traces of each wrong answer; equal answers count together."""
    given = [answer for answer in answers if answer is not None and canonical(answer) and not is_right(answer)]
    return [sum(answers[answer] for answer in pool) for pool in pools_of(given, equal)]


def _with_result(row: Row, result: SearchResult, *, is_right: bool) -> Row:
    row = dataclasses.replace(
        row,
        answer=result.answer,
        correct=is_right,
        stop_reason=str(result.stop_reason),
        error=result.error,
        read_total=result.sharing.total_tokens,
        read_unique=result.sharing.unique_tokens,
        winning_islands=result.votes[0].islands if result.votes else 0,
        **dataclasses.asdict(result.tokens),
        **dataclasses.asdict(result.cuts),
        **{name: getattr(result.counts, name) for name in COUNTS},
    )
    if (pool := result.pool) is not None:
        row = dataclasses.replace(row, pool=str(pool), warmup_tokens=pool.warmup_tokens)
    if (verifier := result.verifier) is not None:
        costs = {f"verifier_{name}": getattr(verifier, name) for name in COSTS}
        row = dataclasses.replace(row, verifier_waited=verifier.seconds_waited, **costs)
    return row


def productive_tokens(tree: TraceTree) -> int:
    """Counts generated tokens that are in some completed trace, also as the inherited prefix of a child."""
    needed = [0] * len(tree.traces)  # of each trace, from its first token on
    total = 0
    for trace in reversed(tree.traces):  # children come after their parents
        if trace.state is TraceState.FINISHED:
            needed[trace.id] = trace.num_tokens
        if trace.parent is not None:
            shared = min(trace.inherited, needed[trace.id])
            needed[trace.parent] = max(needed[trace.parent], shared)
        total += max(0, needed[trace.id] - trace.inherited)
    return total


def series_of(samples: Sequence[ev.Sample]) -> Series:
    """Returns at most NUM_MOMENTS samples, evenly spaced, the last one among them."""
    stride = max(1, -(-len(samples) // (NUM_MOMENTS - 1)))
    chosen = [*samples[:-1:stride], *samples[-1:]]
    return Series(
        seconds=tuple(round(sample.seconds_total, 3) for sample in chosen),
        running=tuple(sample.running for sample in chosen),
        waiting=tuple(sample.waiting for sample in chosen),
        completed=tuple(sample.completed for sample in chosen),
        kv_used=tuple(sample.kv_used_tokens for sample in chosen),
    )

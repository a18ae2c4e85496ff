"""Replicas behind one server: searches go to the engine that is least busy, and their events come back as they happen.

The server keeps everything that clients share (queue, limits, ids, logs) and has the tokenizer; replicas only search.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from gambit import events as ev
from gambit.answers import Grader
from gambit.cluster.actor import Done, JobDesk
from gambit.cluster.engines import EnginePool, EngineSlot, JobEnd, RemoteJob
from gambit.config.options import SearchConfig
from gambit.config.presets import resolved_capacity
from gambit.errors import EngineError, UserError
from gambit.models import files as models
from gambit.results.record import SearchRecord, extended
from gambit.results.result import SearchResult
from gambit.search.choice import with_fixed_pool
from gambit.solver import PendingSearch, Solver
from gambit.storage.run_folder import EventSink
from gambit.text.boundary import boundary_rule
from gambit.text.prompts import stop_ids
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import Problem

NEWS_SECONDS = 0.2  # between two messages of a running search
THOUGHT_SECONDS = 1.0  # between two thoughts that are sent in words
MOST_THOUGHT_TOKENS = 400
LET_GO = "let go"  # its vote is not wanted


# -- in the process of a replica -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LiveThought:
    """The last tokens of a live trace; comes before the event of the thought that they end with."""

    trace: int
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedEnd:
    """The result of a search on a replica, or why there is none."""

    result: SearchResult | None
    notes: tuple[str, ...] = ()
    thinks: bool = False
    error: str | None = None
    is_users: bool = False


@dataclass(frozen=True, slots=True)
class ServedJob:
    """Searches for a client of the server; sends its events, and now and then the words of a leading trace."""

    problem: Problem
    config: SearchConfig

    def __call__(self, solver: Solver, desk: JobDesk) -> ServedEnd:
        spoke = -THOUGHT_SECONDS
        pending: PendingSearch | None = None

        def send(event: ev.Event) -> None:
            nonlocal spoke
            if isinstance(event, ev.Scored) and pending is not None and time.monotonic() - spoke >= THOUGHT_SECONDS:
                spoke = time.monotonic()
                if (thought := _leading_thought(event, pending)) is not None:
                    desk.send(thought)
            desk.send(event)

        pending = solver.submit(self.problem, self.config, on_event=send)
        desk.listen(pending.cancel, lambda _: pending.ticket.abandon())
        try:
            result = pending.result()
        except Exception as error:
            if not pending.ticket.failed_alone:
                raise
            return ServedEnd(None, error=str(error) or type(error).__name__, is_users=isinstance(error, UserError))
        return ServedEnd(dataclasses.replace(result, traces=()), pending.notes, pending.thinks)


def _leading_thought(event: ev.Scored, pending: PendingSearch) -> LiveThought | None:
    """Returns the best of the thoughts that have just ended; None if its trace ended with this very step."""
    tree = pending.record.tree
    leader = max(event.traces, key=lambda trace: tree.score_of(tree.traces[trace]) or 0.0)
    start = max(event.num_tokens[event.traces.index(leader)] - MOST_THOUGHT_TOKENS, 0)
    try:
        return LiveThought(leader, start, tuple(pending.live_tokens(leader, start)))
    except LookupError:
        return None


# -- in the process of the server ------------------------------------------------------------------------------


class NoEngineError(EngineError):
    """A search has not begun: there was no engine, or it died just then."""


@dataclass(slots=True, eq=False)
class RemoteTicket:
    """The result to come of a search on a replica. Its failures concern this search alone."""

    job: RemoteJob | None = None
    result: Future[SearchResult] = field(default_factory=Future)
    failed_alone: bool = True

    def cancel(self) -> None:
        """Ends the search soon, with the best vote so far."""
        if self.job is not None:
            self.job.stop()

    def abandon(self) -> None:
        """Ends the search soon; its vote is not wanted."""
        if self.job is not None:
            self.job.post(LET_GO)
            self.job.stop()


@dataclass(slots=True, eq=False)
class RemoteSearch:
    """A search on a replica, as `PendingSearch` is one on an engine of this process."""

    sink: EventSink
    ticket: RemoteTicket = field(default_factory=RemoteTicket)
    notes: tuple[str, ...] = ()
    thinks: bool = False
    _record: SearchRecord | None = None
    _thought: LiveThought | None = None

    @property
    def record(self) -> SearchRecord:
        """The record of the events that have come so far."""
        assert self._record is not None, "the search has not begun"
        return self._record

    @property
    def has_begun(self) -> bool:
        return self._record is not None

    def cancel(self) -> None:
        """Ends it soon, with the best vote so far."""
        self.ticket.cancel()

    def live_tokens(self, trace: int, start: int = 0) -> Sequence[int]:
        """Returns the tokens of a live trace, if it is the one that its replica reported last."""
        thought = self._thought
        if thought is None or thought.trace != trace or thought.start > start:
            raise LookupError(trace)
        return thought.tokens[start - thought.start :]

    def result(self) -> SearchResult:
        """Waits for the result."""
        try:
            result = self.ticket.result.result()
        except BaseException:
            self.abandon()
            raise
        return self.sink.finish(result)

    def abandon(self) -> None:
        """Ends it, and waits for that."""
        self.ticket.cancel()
        self.ticket.result.exception()
        self.sink.close()

    # -- on the thread that follows its replica ----------------------------------------------------------------

    def take(self, item: ev.Event | LiveThought) -> None:
        """Takes what its replica sent."""
        if isinstance(item, LiveThought):
            self._thought = item
            return
        self._record = extended(self._record, item)
        self.sink.write(item)

    def end(self, end: JobEnd) -> None:
        """Takes its end."""
        if not isinstance(end, Done):
            words = f"the engine of this search died: {end.reason}"
            if not self.has_begun:
                self.sink.discard()
            self.ticket.result.set_exception(EngineError(words) if self.has_begun else NoEngineError(words))
        elif end.value.result is None:
            kind = UserError if end.value.is_users else EngineError
            self.ticket.result.set_exception(kind(end.value.error))
        else:
            self.notes, self.thinks = end.value.notes, end.value.thinks
            self.ticket.result.set_result(end.value.result)


class ReplicaSolver:
    """Searches on replicas; a `Solver` to the server in front of them."""

    def __init__(self, model: str, pool: EnginePool[Solver]) -> None:
        source = models.locate(model)
        generation = models.generation_of(source)
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self.think_end = boundary_rule(self.tokenizer).think_end
        self._named = models.named_model(model)
        self._defaults = models.defaults_of(source, generation)
        self._stop_ids = stop_ids(self.tokenizer, generation.eos_ids)
        self._grader = Grader()
        self._pool = pool
        self._choosing = threading.Lock()

    @property
    def most_traces(self) -> int | None:
        """The number of traces that run at a time on all replicas; None: as many as their KV caches hold."""
        each = self._pool.ask_one(attrgetter("most_traces"))
        return None if each is None else each * len(self.replicas)

    @property
    def replicas(self) -> Sequence[EngineSlot]:
        return self._pool.slots

    def listen(self, on_change: Callable[[], None], on_lost: Callable[[EngineError], None]) -> None:
        """Sets callbacks for a replica that is ready, and for the loss of all."""
        self._pool.listen(on_change, on_lost)

    def submit(
        self,
        problem: Problem,
        config: SearchConfig,
        *,
        out_dir: Path | None = None,
        on_event: Callable[[ev.Event], None] | None = None,
    ) -> RemoteSearch:
        """Begins a search on the replica that runs fewest."""
        callback = None if on_event is None else lambda _, event: on_event(event)
        search = RemoteSearch(EventSink(problem.id, out_dir, callback))
        with self._choosing:
            ready = [replica for replica in self.replicas if replica.is_ready]
            if not ready:
                raise NoEngineError("all engines have died and are being started again")
            replica = min(ready, key=lambda replica: len(replica.jobs))
            try:
                search.ticket.job = self._pool.begin(
                    replica, ServedJob(problem, config), search.take, search.end, NEWS_SECONDS
                )
            except EngineError as error:  # it died just now
                raise NoEngineError(str(error)) from error
        return search

    def check_question(self, question: str) -> None:
        if self._named is not None:
            self._named.check_question(question)

    def capacity_of(self, config: SearchConfig) -> int:
        return resolved_capacity(with_fixed_pool(config), self._defaults)

    def text_of(self, tokens: Sequence[int]) -> str:
        spoken = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return self.tokenizer.decode(spoken)

    def equivalent(self, first: str, second: str) -> bool:
        return self._grader.equivalent(first, second)

    def close(self) -> None:
        self._grader.close()


AnySolver: TypeAlias = Solver | ReplicaSolver
AnySearch: TypeAlias = PendingSearch | RemoteSearch

"""Searches for a server: on an engine of its own process, or on replicas that send their events back.

The server keeps everything that clients share (queue, limits, ids, logs) and has the tokenizer; replicas only search.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TypeAlias

from gambit import events as ev
from gambit.answers import Grader
from gambit.cluster.actor import Failed, JobDesk, JobEnd
from gambit.cluster.engines import EnginePool, EngineSlot, RemoteJob
from gambit.config.options import SearchConfig
from gambit.config.presets import resolved_capacity
from gambit.errors import EngineError, GambitError, UserError
from gambit.models import files as models
from gambit.results.record import SearchRecord, extended
from gambit.results.result import SearchResult
from gambit.search.choice import with_fixed_pool
from gambit.search.host import SearchTicket
from gambit.solver import PendingSearch, Solver
from gambit.solver.builder import SearchPlan
from gambit.storage.run_folder import EventSink
from gambit.text.boundary import THINK_END, THINK_START, boundary_rule
from gambit.text.prompts import stop_ids
from gambit.text.tokenizers import Tokenizer, load_tokenizer
from gambit.types import Problem

NEWS_SECONDS = 0.2  # between two messages of a running search
SECONDS_BETWEEN_NOTES = 1.0
MOST_THOUGHT_TOKENS = 400  # read back to find where a thought began
MOST_THOUGHT_LENGTH = 600  # characters of a note
MOST_ANSWERS = 4
LET_GO = "let go"  # its vote is not needed
OnEvent: TypeAlias = Callable[[ev.Event], None]
OnNote: TypeAlias = Callable[[str], None]


# -- on an engine ------------------------------------------------------------------------------------------------


class Commentary:
    """Writes notes about a running search: the newest thought of a leading trace, and the answers so far."""

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._last = -SECONDS_BETWEEN_NOTES
        self._answers: Counter[str] = Counter()
        self._num_completed = 0

    def note(self, event: ev.Event, pending: PendingSearch) -> str | None:
        """Takes an event of a search; returns a note if it leads to one, and the last was long enough ago."""
        if isinstance(event, ev.Finished):
            self._num_completed += 1
            if event.answer is not None:
                self._answers[event.answer] += 1
        if not isinstance(event, ev.Scored | ev.Finished) or time.monotonic() - self._last < SECONDS_BETWEEN_NOTES:
            return None
        note = self._thought(event, pending) if isinstance(event, ev.Scored) else f"[{self._standing}]\n"
        if note is not None:
            self._last = time.monotonic()
        return note

    def _thought(self, event: ev.Scored, pending: PendingSearch) -> str | None:
        """Returns the new thought of the trace with the best score, among those that ended a thought in this step."""
        tree = pending.record.tree
        leader = max(event.traces, key=lambda trace: tree.score_of(tree.traces[trace]) or 0.0)
        length = event.num_tokens[event.traces.index(leader)]
        start = max(length - MOST_THOUGHT_TOKENS, 0)
        try:
            text = self._text_of(pending.live_tokens(leader, start)[: length - start])
        except LookupError:  # it ended with this very step
            return None
        thought = text.strip().rpartition("\n\n")[2]
        for tag in (THINK_START, THINK_END):
            thought = thought.replace(tag, "").strip()
        standing = f"; {self._standing}" if self._num_completed else ""
        score = tree.score_of(tree.traces[leader])
        return f"[trace {leader}, score {score:.2f}{standing}] {thought[-MOST_THOUGHT_LENGTH:]}\n" if thought else None

    @property
    def _standing(self) -> str:
        answers = ", ".join(f"{answer} ×{count}" for answer, count in self._answers.most_common(MOST_ANSWERS))
        return f"{self._num_completed} complete{': ' + answers if answers else ''}"


def submit_here(
    solver: Solver,
    problem: Problem,
    config: SearchConfig,
    on_event: OnEvent,
    on_note: OnNote | None,
    out_dir: Path | None = None,
) -> PendingSearch:
    """Begins a search on an engine of this process. `on_note` gets notes about it, after the event that led to each."""
    pending: PendingSearch | None = None
    commentary = Commentary(solver.text_of)

    def follow(event: ev.Event) -> None:
        on_event(event)
        if on_note is not None and pending is not None and (note := commentary.note(event, pending)) is not None:
            on_note(note)

    pending = solver.submit(problem, config, out_dir=out_dir, on_event=follow)
    return pending


def run_served(
    problem: Problem, config: SearchConfig, has_notes: bool, solver: Solver, desk: JobDesk
) -> SearchResult | Failed:
    """Searches for a client of the server; sends events, notes and at last the plan. Called in a replica's process.

    Returns what failed in this search alone: an exception would cost the engine its life.
    """
    pending = submit_here(solver, problem, config, desk.send, desk.send if has_notes else None)
    desk.listen(pending.cancel, lambda _: pending.ticket.abandon())
    try:
        result = pending.result()
    except Exception as error:
        if not pending.ticket.failed_alone:
            raise
        return Failed(str(error) or type(error).__name__, isinstance(error, UserError))
    assert pending.run is not None, "a search with a result has begun"
    desk.send(pending.run.plan)
    return dataclasses.replace(result, traces=())


# -- in the process of the server ------------------------------------------------------------------------------


class NoEngineError(EngineError):
    """A search has not begun: there was no engine, or it died just then."""


class RemoteSearch:
    """A search on a replica, as `PendingSearch` is one on an engine of this process."""

    def __init__(self, sink: EventSink, on_note: OnNote | None) -> None:
        self.ticket = SearchTicket(on_cancel=self._stop, failed_alone=True)  # a lost engine is replaced
        self.job: RemoteJob | None = None
        self.notes: tuple[str, ...] = ()
        self.thinks = False
        self._sink = sink
        self._on_note = on_note
        self._record: SearchRecord | None = None

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

    def result(self) -> SearchResult:
        return self._sink.finish(self.ticket.result.result())

    def abandon(self) -> None:
        """Ends it, and waits for that."""
        self.ticket.cancel()
        self.ticket.result.exception()
        self._sink.close()

    def _stop(self) -> None:
        if self.job is None:
            return
        if self.ticket.is_abandoned:
            self.job.post(LET_GO)
        self.job.stop()

    # -- on the thread that follows its replica ----------------------------------------------------------------

    def take(self, item: ev.Event | str | SearchPlan) -> None:
        """Takes an event, a note or the plan that its replica sent."""
        if isinstance(item, SearchPlan):
            self.notes, self.thinks = item.notes, item.thinks
        elif not isinstance(item, str):
            self._record = extended(self._record, item)
            self._sink.write(item)
        elif self._on_note is not None:
            self._on_note(item)

    def end(self, end: JobEnd) -> None:
        if not isinstance(end, Failed) and not isinstance(end.value, Failed):
            self.ticket.result.set_result(end.value)
            return
        error: GambitError
        if not isinstance(end, Failed):
            error = UserError(end.value.reason) if end.value.is_users else EngineError(end.value.reason)
        elif self.has_begun:
            error = EngineError(f"the engine of this search died: {end.reason}")
        else:
            error = NoEngineError(f"the engine of this search died: {end.reason}")
            self._sink.discard()
        self._sink.close()
        self.ticket.result.set_exception(error)


class ReplicaSolver:
    """Searches on replicas; a `Solver` to the server in front of them."""

    def __init__(self, model: str, pool: EnginePool[Solver]) -> None:
        source = models.locate(model)
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self.think_end = boundary_rule(self.tokenizer).think_end
        self._named = models.named_model(model)
        self._defaults = models.defaults_of(source)
        self._stop_ids = stop_ids(self.tokenizer, models.end_ids(source))
        self._grader = Grader()
        self._pool = pool
        self._choosing = threading.Lock()
        self.equivalent = self._grader.equivalent
        self.close = self._grader.close
        self.listen = pool.listen

    @property
    def most_traces(self) -> int | None:
        """The number of traces that run at a time on all replicas; None: as many as their KV caches hold."""
        each = self._pool.call_one(attrgetter("most_traces"))
        return None if each is None else each * len(self.replicas)

    @property
    def replicas(self) -> Sequence[EngineSlot]:
        return self._pool.slots

    def submit(
        self,
        problem: Problem,
        config: SearchConfig,
        on_event: OnEvent,
        on_note: OnNote | None,
        out_dir: Path | None = None,
    ) -> RemoteSearch:
        """Begins a search on the replica that runs fewest."""
        search = RemoteSearch(EventSink(problem.id, out_dir, lambda _, event: on_event(event)), on_note)
        job = partial(run_served, problem, config, on_note is not None)
        with self._choosing:
            ready = [replica for replica in self.replicas if replica.is_ready]
            if not ready:
                raise NoEngineError("all engines have died and are being started again")
            replica = min(ready, key=lambda replica: len(replica.jobs))
            try:
                search.job = self._pool.begin(replica, job, search.take, search.end, NEWS_SECONDS)
            except EngineError as error:  # it died just now
                raise NoEngineError(str(error)) from error
        return search

    def check_question(self, question: str) -> None:
        if self._named is not None:
            self._named.check_question(question)

    def check_schema(self, schema: str) -> None:
        """Has an engine check a schema; raises as it does."""
        self._pool.call_one(methodcaller("check_schema", schema))

    def capacity_of(self, config: SearchConfig) -> int:
        return resolved_capacity(with_fixed_pool(config), self._defaults)

    def text_of(self, tokens: Sequence[int]) -> str:
        spoken = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return self.tokenizer.decode(spoken)


AnySolver: TypeAlias = Solver | ReplicaSolver
AnySearch: TypeAlias = PendingSearch | RemoteSearch

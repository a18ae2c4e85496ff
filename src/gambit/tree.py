"""The tree of a search: every trace, its state and its lineage, changed by events alone."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from gambit import events as ev
from gambit.types import Aggregation, EndReason, RunningScore, TraceConfidence


class TraceState(StrEnum):
    """The state of a trace."""

    WAITING = "waiting"  # logically active, holds no KV blocks yet
    RUNNING = "running"
    GHOST = "ghost"  # logically active, lost its KV blocks for good
    FINISHED = "finished"
    PRUNED = "pruned"
    CANCELLED = "cancelled"


ACTIVE = frozenset({TraceState.WAITING, TraceState.RUNNING, TraceState.GHOST})
LIVE = frozenset({TraceState.WAITING, TraceState.RUNNING})

_LEAVES = {TraceState.GHOST, TraceState.PRUNED, TraceState.CANCELLED}
_TRANSITIONS = {
    TraceState.WAITING: {TraceState.RUNNING, *_LEAVES},
    TraceState.RUNNING: {TraceState.WAITING, TraceState.FINISHED, *_LEAVES},
    TraceState.GHOST: {TraceState.PRUNED},
}


@dataclass(slots=True)
class Trace:
    """The only mutable record of a trace; `TraceTree` alone writes to it."""

    id: int
    parent: int | None
    root: int
    depth: int
    created_step: int
    inherited: int
    temperature: float | None  # None: the run's own
    island: int = 0
    state: TraceState = TraceState.WAITING
    score: RunningScore = field(default_factory=RunningScore)
    boundary_tokens: int = 0  # length at the last scored boundary
    packed_tokens: "array[int]" = field(default_factory=lambda: array("i"))  # its own, known once it has ended
    num_given: int = 0  # of its own tokens, the first: they were not sampled, and it was forced to answer
    ended_step: int | None = None  # of its last token
    was_evicted: bool = False
    end_reason: EndReason | None = None
    answer: str | None = None
    is_discarded: bool = False  # finished, yet shall not vote
    confidence: TraceConfidence | None = None
    reused: int = 0
    recomputed: int = 0
    waited_steps: int = 0
    waited_seconds: float = 0.0  # known at the end of the search
    admitted_steps: list[int] = field(default_factory=list)
    queued_tokens: list[int] = field(default_factory=list)  # its own, each time it lost its memory and had to wait

    @property
    def num_admissions(self) -> int:
        return len(self.admitted_steps)

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """Unpacked at every call: a tuple takes nine times the memory, and a search has millions of tokens."""
        return tuple(self.packed_tokens)

    @property
    def num_own_tokens(self) -> int:
        return len(self.packed_tokens)

    @property
    def num_tokens(self) -> int:
        """Its length after its end, inherited tokens included."""
        return self.inherited + len(self.packed_tokens)


class TraceTree:
    """Traces by id, ids dense from 0; the paper's views of the pool are queries on it."""

    def __init__(self, capacity: int, aggregation: Aggregation) -> None:
        self.capacity = capacity
        self.aggregation = aggregation
        self.traces: list[Trace] = []
        self.num_forced = 0  # traces that took their parents' places
        self.num_looped = 0  # traces that repeated themselves
        self._in_state: dict[TraceState, dict[int, None]] = {state: {} for state in TraceState}
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Created: self._created,
            ev.Branched: self._branched,
            ev.Forced: self._forced,
            ev.Admitted: self._admitted,
            ev.Queued: self._queued,
            ev.Scored: self._scored,
            ev.Verified: self._verified,
            ev.Pruned: self._pruned,
            ev.Evicted: self._evicted,
            ev.Finished: self._finished,
            ev.Discarded: self._discarded,
            ev.IslandsSplit: self._split,
            ev.Cancelled: self._cancelled,
            ev.Waited: self._waited,
        }

    def apply(self, event: ev.Event) -> None:
        """Folds one event in; events that are not about traces change nothing."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    # -- the views ---------------------------------------------------------------------------------------------

    def in_state(self, state: TraceState) -> Iterator[Trace]:
        return (self.traces[i] for i in self._in_state[state])

    def count(self, state: TraceState) -> int:
        return len(self._in_state[state])

    def tree_view(self) -> list[Trace]:
        """Returns the logically active traces by id, ghosts and waiting ones included."""
        return sorted((t for state in ACTIVE for t in self.in_state(state)), key=_by_id)

    def voters(self) -> list[Trace]:
        """Returns finished traces that were not discarded, and pruned ones with an answer, by id."""
        finished = [trace for trace in self.in_state(TraceState.FINISHED) if not trace.is_discarded]
        pruned = [trace for trace in self.in_state(TraceState.PRUNED) if trace.answer is not None]
        return sorted([*finished, *pruned], key=_by_id)

    @property
    def num_active(self) -> int:
        return sum(self.count(state) for state in ACTIVE)

    @property
    def num_live(self) -> int:
        """The number of running and waiting traces: a waiting child keeps a search from its end."""
        return sum(self.count(state) for state in LIVE)

    def score_of(self, trace: Trace) -> float | None:
        return trace.score.value(self.aggregation)

    def lineage(self, trace_id: int) -> list[int]:
        """Returns the ids from the root down to the trace."""
        path = [trace_id]
        while (parent := self.traces[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def tokens_of(self, trace_id: int) -> tuple[int, ...]:
        """Returns all generated tokens of an ended trace, assembled along its lineage."""
        pieces: list[array[int]] = []
        trace = self.traces[trace_id]
        length = trace.num_tokens  # of the tokens to take up to here
        while True:
            pieces.append(trace.packed_tokens[: max(length - trace.inherited, 0)])
            if trace.parent is None:
                break
            trace, length = self.traces[trace.parent], min(length, trace.inherited)
        return tuple(chain.from_iterable(reversed(pieces)))

    # -- the transitions ---------------------------------------------------------------------------------------

    def _move(self, trace_id: int, state: TraceState) -> Trace:
        trace = self.traces[trace_id]
        assert state in _TRANSITIONS.get(trace.state, ()), f"trace {trace_id}: {trace.state} -> {state}"
        del self._in_state[trace.state][trace_id]
        trace.state = state
        self._in_state[state][trace_id] = None
        return trace

    def _add(self, trace: Trace) -> None:
        assert trace.id == len(self.traces), f"trace ids are dense: {trace.id} after {len(self.traces) - 1}"
        assert self.num_active < self.capacity, f"trace {trace.id} would be one over the capacity {self.capacity}"
        self.traces.append(trace)
        self._in_state[trace.state][trace.id] = None

    def _created(self, event: ev.Created) -> None:
        self._add(Trace(event.trace, None, event.trace, 0, event.step, 0, None, event.island))

    def _branched(self, event: ev.Branched) -> None:
        parent = self.traces[event.parent]
        assert parent.state in (TraceState.RUNNING, TraceState.GHOST), f"parent {parent.id} is {parent.state}"
        self._add_child(event, parent, event.temperature)

    def _forced(self, event: ev.Forced) -> None:
        parent = self.traces[event.parent]
        is_whole = parent.state is TraceState.PRUNED and parent.num_tokens == event.inherited
        assert is_whole and event.given, f"trace {event.trace} does not take the place of {parent.id}"
        self._add_child(event, parent, parent.temperature).num_given = len(event.given)
        self.num_forced += 1
        self.num_looped += event.reason == EndReason.LOOP

    def _add_child(self, event: ev.Branched | ev.Forced, parent: Trace, temperature: float | None) -> Trace:
        child = Trace(
            event.trace, parent.id, parent.root, parent.depth + 1, event.step, event.inherited, temperature,
            parent.island, score=parent.score, boundary_tokens=parent.boundary_tokens,
        )  # fmt: skip
        assert child.boundary_tokens <= child.inherited, f"child {child.id} inherits a score of tokens it lacks"
        self._add(child)
        return child

    def _admitted(self, event: ev.Admitted) -> None:
        trace = self._move(event.trace, TraceState.RUNNING)
        if trace.num_admissions == 0:
            length = trace.inherited + trace.num_given
            assert event.reused + event.recomputed == length, f"trace {trace.id}: inherited tokens unaccounted"
            trace.reused = event.reused
        trace.recomputed += event.recomputed
        trace.waited_steps += event.waited_steps
        trace.admitted_steps.append(event.step)

    def _queued(self, event: ev.Queued) -> None:
        trace = self._move(event.trace, TraceState.WAITING)
        trace.queued_tokens.append(event.num_tokens - trace.inherited)

    def _scored(self, event: ev.Scored) -> None:
        for trace_id, score, num_tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
            trace = self.traces[trace_id]
            assert trace.state is TraceState.RUNNING, f"trace {trace_id} is {trace.state}, yet finished a thought"
            self._add_score(trace, score, num_tokens)

    def _verified(self, event: ev.Verified) -> None:
        """Adds scores, also of traces that left the pool since the thought ended: they count in the vote."""
        for trace_id, score, num_tokens in zip(event.traces, event.scores, event.num_tokens, strict=True):
            self._add_score(self.traces[trace_id], score, num_tokens)

    def _add_score(self, trace: Trace, score: float, num_tokens: int) -> None:
        assert num_tokens > trace.boundary_tokens, f"trace {trace.id}: the thought at {num_tokens} is scored twice"
        trace.score = trace.score.add(score)
        trace.boundary_tokens = num_tokens

    def _end(self, trace_id: int, state: TraceState, step: int, tokens: tuple[int, ...]) -> Trace:
        was_ghost = self.traces[trace_id].state is TraceState.GHOST
        trace = self._move(trace_id, state)
        if was_ghost:
            assert not tokens, f"ghost {trace_id} generated tokens"
            return trace
        trace.packed_tokens, trace.ended_step = array("i", tokens), step
        return trace

    def _pruned(self, event: ev.Pruned) -> None:
        self._end(event.trace, TraceState.PRUNED, event.step, event.tokens).answer = event.answer

    def _evicted(self, event: ev.Evicted) -> None:
        self._end(event.trace, TraceState.GHOST, event.step, event.tokens).was_evicted = True

    def _finished(self, event: ev.Finished) -> None:
        trace = self._end(event.trace, TraceState.FINISHED, event.step, event.tokens)
        trace.end_reason, trace.answer, trace.confidence = event.reason, event.answer, event.confidence
        self.num_looped += event.reason is EndReason.LOOP

    def _discarded(self, event: ev.Discarded) -> None:
        trace = self.traces[event.trace]
        assert trace.state is TraceState.FINISHED and not trace.is_discarded, f"trace {trace.id} has no vote to lose"
        trace.is_discarded = True

    def _split(self, event: ev.IslandsSplit) -> None:
        before = 1 + max((trace.island for trace in self.traces), default=0)
        assert event.islands > before, f"{before} islands are split into {event.islands}"
        assert len(event.island_of) == len(self.traces), f"{len(self.traces)} traces, {len(event.island_of)} placed"
        for trace, island in zip(self.traces, event.island_of, strict=True):
            assert island in range(event.islands), f"trace {trace.id} is put on island {island} of {event.islands}"
            trace.island = island
            assert trace.parent is None or island == self.traces[trace.parent].island, f"{trace.id} left its parent"

    def _cancelled(self, event: ev.Cancelled) -> None:
        self._end(event.trace, TraceState.CANCELLED, event.step, event.tokens)

    def _waited(self, event: ev.Waited) -> None:
        for trace_id, steps, seconds in zip(event.traces, event.steps, event.seconds, strict=True):
            trace = self.traces[trace_id]
            trace.waited_steps, trace.waited_seconds = steps, seconds


def _by_id(trace: Trace) -> int:
    return trace.id

"""Turns what engine steps did into the events of one search, and applies them to its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.policies.base import FinishedView, ScoreSpread, TraceView
from gambit.policies.slim_sc import Embed
from gambit.results.record import SearchRecord
from gambit.search.score_spread import SpreadMeter
from gambit.search.thoughts import Decode
from gambit.tree import Trace, TraceTree
from gambit.types import EndReason, Eviction, PressureAction, Progress, SearchStep, ThoughtScore, TraceEnd


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a search calls outside the loop."""

    answer_of: Callable[[Sequence[int]], str | None]  # all tokens of a finished trace -> its answer
    equivalent_until: Callable[[float], Equivalent]  # are answers equal, as far as a deadline (monotonic) lets one tell
    on_event: Callable[[ev.Event], None]
    decode: Decode | None = None  # for policies that read thoughts
    embed: Embed | None = None  # and compare them as text
    after_step: Callable[[int], None] = lambda step: None  # everything of an engine step has been recorded


class Recorder:
    """Writes the events of one search; its record changes by them alone."""

    def __init__(
        self,
        record: SearchRecord,
        callbacks: Callbacks,
        *,
        keeps_ghosts: bool,
        reads_pruned: bool,
        spread: SpreadMeter | None = None,
    ) -> None:
        self.record = record
        self.waits = WaitLedger()
        self.finished: list[FinishedView] = []  # in the order of their ends
        self.ghost_tokens: dict[int, tuple[int, ...]] = {}  # kept only where ghosts may be parents
        self._callbacks = callbacks
        self._keeps_ghosts = keeps_ghosts
        self._reads_pruned = reads_pruned
        self._spread = spread

    def emit(self, event: ev.Event) -> None:
        self.record.apply(event)
        if self._spread is not None and isinstance(event, ev.Scored | ev.Verified):
            self._spread.note(event, self.record.tree)
        if isinstance(event, ev.Verified | ev.IslandsSplit):  # scores or islands of traces that are complete changed
            tree = self.record.tree
            self.finished = [finished_view(tree, tree.traces[view.id]) for view in self.finished]
        self._callbacks.on_event(event)

    def found_spread(self) -> ScoreSpread | None:
        return None if self._spread is None else self._spread.found()

    def join(self, event: ev.Created | ev.Branched) -> None:
        """A trace begins to wait for KV blocks."""
        self.waits.begin(event.trace, event.step)
        self.emit(event)

    def leave(self, event: ev.Pruned | ev.Evicted | ev.Cancelled) -> None:
        """The search, not the engine, ended a trace."""
        self.waits.give_up(event.trace, event.step)
        self.emit(event)

    def apply(self, step: SearchStep, scored: Sequence[ThoughtScore], at: int) -> None:
        """Records an engine step in its order: blocks are lost, blocks are found, thoughts end, traces end.

        `scored` are the thoughts whose scores count with it.
        """
        for lost in step.evicted:
            self._lose(lost, at)
        for won in step.admitted:
            self.waits.admit(won.trace, won.waited_steps)
            self.emit(ev.Admitted(at, won.trace, won.reused, won.recomputed, won.waited_steps))
        if scored:
            traces, scores, lengths = zip(*((each.trace, each.score, each.num_tokens) for each in scored), strict=True)
            self.emit(ev.Scored(at, traces, scores, lengths))
        for done in step.finished:
            self._finish(done, at)

    def _lose(self, lost: Eviction, at: int) -> None:
        if lost.action is PressureAction.QUEUE:
            self.waits.begin(lost.trace, at)
            self.emit(ev.Queued(at, lost.trace, lost.num_tokens))
            return
        own = self.own(lost.trace, lost.tokens)
        if lost.action is PressureAction.GHOST:
            self.emit(ev.Evicted(at, lost.trace, "pressure", lost.score, own))
            return
        answer = self._callbacks.answer_of(lost.tokens) if self._reads_pruned else None
        self.emit(ev.Pruned(at, lost.trace, "pressure", lost.score, own, answer))

    def _finish(self, done: TraceEnd, at: int) -> None:
        tree, own = self.record.tree, self.own(done.trace, done.tokens)
        if done.reason is EndReason.CONFIDENCE:  # cut off in the middle: it has no answer to give
            score = tree.score_of(tree.traces[done.trace])
            self.emit(ev.Pruned(at, done.trace, "confidence", score, own))
            return
        answer = self._callbacks.answer_of(done.tokens)
        self.emit(ev.Finished(at, done.trace, done.reason, answer, own, done.confidence))
        self.finished.append(finished_view(tree, tree.traces[done.trace]))

    def own(self, trace_id: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The part of an ended trace's tokens that it generated itself."""
        if self._keeps_ghosts:
            self.ghost_tokens[trace_id] = tokens
        return tokens[self.record.tree.traces[trace_id].inherited :]


def trace_view(tree: TraceTree, trace: Trace, progress: Progress | None) -> TraceView:
    """A logically active trace; without progress it is a ghost."""
    num_tokens = progress.num_tokens if progress else trace.num_tokens
    return TraceView(
        id=trace.id,
        state=trace.state,
        score=tree.score_of(trace),
        num_scored=trace.score.count,
        num_generated=num_tokens - trace.inherited,
        num_tokens=num_tokens,
        boundary_tokens=trace.boundary_tokens,
        is_thinking=progress.is_thinking if progress else True,
        island=trace.island,
    )


def finished_view(tree: TraceTree, trace: Trace) -> FinishedView:
    return FinishedView(trace.id, trace.answer, tree.score_of(trace), trace.num_tokens, trace.confidence, trace.island)


@dataclass(slots=True)
class WaitLedger:
    """Follows traces that wait; `total` is known for each once it was admitted, for the rest at the end."""

    since: dict[int, tuple[int, float]] = field(default_factory=dict)  # trace -> step and time
    total: dict[int, tuple[int, float]] = field(default_factory=dict)

    def begin(self, trace: int, step: int) -> None:
        self.since[trace] = (step, time.monotonic())

    def admit(self, trace: int, waited_steps: int) -> None:
        _, began = self.since.pop(trace)
        self._add(trace, waited_steps, began)

    def give_up(self, trace: int, step: int) -> None:
        """A trace that ended before it got its blocks; nothing for one that was not waiting."""
        if trace in self.since:
            since, began = self.since.pop(trace)
            self._add(trace, step - since, began)

    def _add(self, trace: int, steps: int, began: float) -> None:
        if steps <= 0:  # got its blocks in the next step, as every trace at the start
            return
        steps_before, seconds_before = self.total.get(trace, (0, 0.0))
        self.total[trace] = (steps_before + steps, seconds_before + time.monotonic() - began)

    def event(self, step: int) -> ev.Waited | None:
        """What the log says at the end; nothing where nobody waited."""
        if not self.total:
            return None
        traces = tuple(sorted(self.total))
        steps, seconds = zip(*(self.total[trace] for trace in traces), strict=True)
        return ev.Waited(step, traces, steps, seconds)

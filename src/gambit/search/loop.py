"""The loop: the one place where a policy's decisions and an engine's facts meet the tree; it knows neither's inside."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gambit import events as ev
from gambit.config import SearchSettings
from gambit.engines.base import Engine, SearchSpec
from gambit.record import Equivalent, SearchRecord, SearchResult
from gambit.search.policy import Branch, Decision, Evict, Policy, PoolView, Prune, Start, State, Stop, TraceView
from gambit.tree import LIVE, Trace, TraceState
from gambit.types import (
    OnPressure,
    PressureAction,
    Progress,
    SearchStep,
    StepBatch,
    StopReason,
    TraceKey,
    TraceSpec,
)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a search calls outside the loop."""

    answer_of: Callable[[Sequence[int]], str | None]  # all tokens of a finished trace -> its answer
    equivalent: Equivalent
    on_event: Callable[[ev.Event], None]


@dataclass(slots=True)
class _Spent:
    """Seconds by part."""

    engine: float = 0.0
    scoring: float = 0.0
    scheduling: float = 0.0
    search: float = 0.0


class Search:
    """One problem being searched: decides through its policy, executes on the engine, applies events to its record."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy[State],
        settings: SearchSettings,
        spec: SearchSpec,
        started: ev.RunStarted,
        hooks: Hooks,
    ) -> None:
        self.record = SearchRecord(started)
        self.result: SearchResult | None = None
        self.num_generated = 0
        self._engine = engine
        self._policy = policy
        self._policy_state = policy.initial_state()
        self._settings = settings
        self._spec = spec
        self._hooks = hooks
        self._num_steps = 0
        self._pressure: dict[int, OnPressure] = {}
        self._ghost_tokens: dict[int, tuple[int, ...]] = {}  # kept only where ghosts may be parents
        self._kv = (0, 0)
        self._spent = _Spent()
        self._began = time.monotonic()

    @property
    def number(self) -> int:
        return self._spec.search

    @property
    def is_done(self) -> bool:
        return self.result is not None

    # -- the life of a search ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._began = time.monotonic()
        self._engine.open(self._spec)
        self._hooks.on_event(self.record.started)
        self._ask_policy()
        self._end_if_due()

    def absorb(self, step: SearchStep, batch: StepBatch) -> None:
        """Apply what an engine step did, then let the policy act if it is its turn."""
        began = time.perf_counter()
        self._kv = (batch.kv_used_tokens, batch.kv_capacity_tokens)
        self._spent.engine += batch.seconds.engine
        self._spent.scoring += batch.seconds.scoring
        self._spent.scheduling += batch.seconds.scheduling
        self._num_steps += step.num_generated > 0
        self._apply(step)
        if not self._reached_target() and self._is_wanted(step):
            self._ask_policy()
        elif step.num_generated > 0 and self._num_steps % self._settings.check_interval == 0:
            self._sample()  # the pool's curve is as fine for a policy that sleeps as for one that is asked
        self._end_if_due()
        self._spent.search += time.perf_counter() - began

    def end(self, reason: StopReason, error: str | None = None) -> None:
        """Cancel what still runs, vote, and close the search on the engine."""
        live = sorted(trace.id for state in LIVE for trace in self.record.tree.in_state(state))
        for trace_id, tokens in self._leave_engine(live, reason).items():
            self._emit(ev.Cancelled(self._num_steps, trace_id, tokens))
        self._sample()
        self._emit(ev.Stopped(self._num_steps, reason))
        vote = self.record.vote(self._hooks.equivalent)
        votes = tuple(dataclasses.asdict(entry) for entry in vote.entries)
        self._emit(ev.Voted(vote.answer, vote.margin, votes))
        self.result = dataclasses.replace(self.record.result(vote), error=error)

    def _leave_engine(self, live: Sequence[int], reason: StopReason) -> dict[int, tuple[int, ...]]:
        """Last tokens of the live traces; an engine that failed may not be able to tell them any more."""
        try:
            tokens = self._stop_on_engine(live)
            self._engine.close_search(self.number)
        except Exception:
            if reason is not StopReason.FAILED:
                raise
            return dict.fromkeys(live, ())
        return tokens

    def _end_if_due(self) -> None:
        reason = self._due_reason()
        if reason is not None and not self.is_done:
            self.end(reason)

    def _due_reason(self) -> StopReason | None:
        settings, tree = self._settings, self.record.tree
        completed = tree.count(TraceState.FINISHED)
        if settings.budget_traces is not None and completed >= settings.budget_traces:
            return StopReason.BUDGET_TRACES
        if self._reached_target():
            return StopReason.COMPLETED
        if tree.num_live == 0:
            return StopReason.EXHAUSTED
        # The cap is never passed: a step that might generate more than what is left is not taken.
        if settings.budget_tokens is not None and self.num_generated + tree.num_live > settings.budget_tokens:
            return StopReason.BUDGET_TOKENS
        if settings.budget_seconds is not None and time.monotonic() - self._began >= settings.budget_seconds:
            return StopReason.BUDGET_SECONDS
        return None

    def _reached_target(self) -> bool:
        return self.record.tree.count(TraceState.FINISHED) >= self._settings.num_traces

    # -- engine facts -> events --------------------------------------------------------------------------------

    def _emit(self, event: ev.Event) -> None:
        self.record.apply(event)
        self._hooks.on_event(event)

    def _apply(self, step: SearchStep) -> None:
        """In the order of an engine step: room is lost, room is found, tokens come, thoughts end, traces end."""
        at = self._num_steps
        for lost in step.evicted:
            if lost.action is PressureAction.QUEUE:
                self._emit(ev.Queued(at, lost.trace, lost.num_tokens))
            else:
                kind = ev.Evicted if lost.action is PressureAction.GHOST else ev.Pruned
                self._emit(kind(at, lost.trace, "pressure", lost.score, self._own(lost.trace, lost.tokens)))
        for won in step.admitted:
            self._emit(ev.Admitted(at, won.trace, won.reused, won.recomputed, won.waited_steps))
        self.num_generated += step.num_generated
        if step.scored:
            traces, scores, lengths = zip(*((s.trace, s.score, s.num_tokens) for s in step.scored), strict=True)
            self._emit(ev.Scored(at, traces, scores, lengths))
        for done in step.finished:
            answer = self._hooks.answer_of(done.tokens)
            self._emit(ev.Finished(at, done.trace, done.reason, answer, self._own(done.trace, done.tokens)))

    def _own(self, trace_id: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The part of an ended trace's tokens that it generated itself."""
        if self._settings.ghost_parents:
            self._ghost_tokens[trace_id] = tokens
        return tokens[self.record.tree.traces[trace_id].inherited :]

    # -- decide, execute, apply --------------------------------------------------------------------------------

    def _is_wanted(self, step: SearchStep) -> bool:
        wake = self._policy.wake
        is_round = wake.every_steps is not None and step.num_generated > 0 and self._num_steps % wake.every_steps == 0
        return is_round or (wake.on_completion and bool(step.finished)) or (wake.on_boundary and bool(step.scored))

    def _ask_policy(self) -> None:
        self._policy_state, decisions = self._policy.decide(self._policy_state, self._view())
        for decision in decisions:
            self._execute(decision)
        if not self.is_done:
            self._sample()

    def _view(self) -> PoolView:
        tree, progress = self.record.tree, self._engine.progress(self.number)
        traces = tuple(self._trace_view(trace, progress.get(trace.id)) for trace in tree.tree_view())
        return PoolView(self._num_steps, traces, len(tree.traces), tree.count(TraceState.FINISHED))

    def _trace_view(self, trace: Trace, progress: Progress | None) -> TraceView:
        num_tokens = progress.num_tokens if progress else trace.num_tokens
        return TraceView(
            id=trace.id,
            state=trace.state,
            score=self.record.tree.score_of(trace),
            num_scored=trace.score.count,
            num_generated=num_tokens - trace.inherited,
            num_tokens=num_tokens,
            boundary_tokens=trace.boundary_tokens,
            is_thinking=progress.is_thinking if progress else True,
        )

    def _execute(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._start(decision)
        elif isinstance(decision, Branch):
            self._branch(decision)
        elif isinstance(decision, Stop):
            self.end(StopReason.POLICY)
        elif isinstance(decision, Prune | Evict):
            kind = ev.Pruned if isinstance(decision, Prune) else ev.Evicted
            trace = self.record.tree.traces[decision.trace]
            score = self.record.tree.score_of(trace)
            own = self._stop_on_engine([trace.id] if trace.is_live else []).get(trace.id, ())
            self._emit(kind(self._num_steps, trace.id, decision.reason, score, own))

    def _stop_on_engine(self, trace_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Own tokens of traces that were still going."""
        tokens = self._engine.stop([TraceKey(self.number, trace_id) for trace_id in trace_ids])
        return {key.trace: self._own(key.trace, all_tokens) for key, all_tokens in tokens.items()}

    def _start(self, decision: Start) -> None:
        first = len(self.record.tree.traces)
        specs = [self._spec_of(first + i, decision.on_pressure) for i in range(decision.count)]
        self._engine.submit(specs)
        for spec in specs:
            self._emit(ev.Created(self._num_steps, spec.key.trace))

    def _branch(self, decision: Branch) -> None:
        parent = self.record.tree.traces[decision.parent]
        child = self._spec_of(len(self.record.tree.traces), decision.on_pressure)
        temperature = child.sampling.temperature * self._settings.child_temperature
        is_ghost = parent.state is TraceState.GHOST
        child = dataclasses.replace(
            child,
            sampling=dataclasses.replace(child.sampling, temperature=temperature),
            inherited=decision.inherited,
            parent=None if is_ghost else TraceKey(self.number, parent.id),
            prefix=self._ghost_tokens[parent.id][: decision.inherited] if is_ghost else (),
            score=parent.score,
        )
        self._engine.submit([child])
        self._emit(ev.Branched(self._num_steps, child.key.trace, parent.id, decision.inherited, temperature))

    def _spec_of(self, trace_id: int, on_pressure: OnPressure) -> TraceSpec:
        settings = self._settings
        return TraceSpec(TraceKey(self.number, trace_id), settings.sampling, settings.max_new_tokens, on_pressure)

    def _sample(self) -> None:
        tree, spent = self.record.tree, self._spent
        self._emit(
            ev.Sample(
                step=self._num_steps,
                running=tree.count(TraceState.RUNNING),
                waiting=tree.count(TraceState.WAITING),
                ghosts=tree.count(TraceState.GHOST),
                completed=tree.count(TraceState.FINISHED),
                generated=self.num_generated,
                kv_used_tokens=self._kv[0],
                kv_capacity_tokens=self._kv[1],
                seconds_total=time.monotonic() - self._began,
                seconds_engine=spent.engine,
                seconds_scoring=spent.scoring,
                seconds_scheduling=spent.scheduling,
                seconds_search=spent.search,
            )
        )


def run_searches(
    engine: Engine,
    searches: Iterable[Search],
    *,
    concurrency: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Search]:
    """Drive searches, up to `concurrency` in one batch, and give each back as it ends.

    Whatever ends the iteration early, every begun search gets its vote and the end of its log.
    """
    coming = iter(searches)
    running: dict[int, Search] = {}
    reason, failure = StopReason.INTERRUPTED, None
    try:
        while True:
            yield from _begin_more(coming, running, concurrency)
            if not running:
                return
            if should_stop():
                break
            batch = engine.step()
            for search in list(running.values()):
                search.absorb(batch.searches.get(search.number, SearchStep()), batch)
            yield from _take_done(running)
        for search in running.values():
            search.end(StopReason.INTERRUPTED)
        yield from _take_done(running)
    except Exception as error:
        reason, failure = StopReason.FAILED, str(error)
        raise
    finally:
        for search in running.values():
            search.end(reason, failure)


def _begin_more(coming: Iterator[Search], running: dict[int, Search], concurrency: int) -> Iterator[Search]:
    """Fill up; a search that ends while it begins (an exhausted budget) makes room for the next at once."""
    while len(running) < concurrency:
        search = next(coming, None)
        if search is None:
            return
        search.begin()
        running[search.number] = search
        yield from _take_done(running)


def _take_done(running: dict[int, Search]) -> Iterator[Search]:
    for search in [search for search in running.values() if search.is_done]:
        del running[search.number]
        yield search

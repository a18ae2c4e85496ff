"""The search loop: asks a policy, carries out its decisions on an engine, and records what the engine did."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.engines.base import Engine, SearchSpec
from gambit.policies.base import (
    Decision,
    Discard,
    Policy,
    PoolView,
    ScoreUse,
    SplitIslands,
    State,
    Stop,
    ThoughtView,
    TraceView,
    requirements_of,
)
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord, voted
from gambit.results.result import SearchResult
from gambit.results.vote import NO_VOTE
from gambit.search.execution import Execution
from gambit.search.limits import Rounds, SearchLimits
from gambit.search.recorder import Callbacks, Recorder, trace_view
from gambit.search.score_spread import SpreadMeter
from gambit.search.scores import Scores, VerifierScores, VerifierUse
from gambit.search.thoughts import ThoughtReader
from gambit.tree import LIVE, TraceState
from gambit.types import PressureAction, SearchStep, StepBatch, StopReason, TraceKey


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
        callbacks: Callbacks,
        verifier: VerifierUse | None = None,
    ) -> None:
        self.record = SearchRecord(started)
        self._requirements = requirements_of(policy)
        self._recorder = Recorder(
            self.record,
            callbacks,
            keeps_ghosts=settings.ghost_parents,
            reads_pruned=self._requirements.pruned_answers,
            spread=None if settings.doubt is None else SpreadMeter(settings.doubt),
        )
        self.result: SearchResult | None = None
        self.is_stopped = False  # nothing of it is on the engine any more; its vote may be still to come
        self.is_waiting = False  # nothing of it runs until the verifier has said what the vote needs
        self.failure: BaseException | None = None  # of this search alone
        self._error: str | None = None
        self.num_generated = 0
        self._engine = engine
        self._policy = policy
        self._policy_state = policy.initial_state()
        need = self._requirements.thoughts
        self._reader = None if need is None else ThoughtReader(need, self.tokens_of, callbacks.decode, callbacks.embed)
        self._settings = settings
        self._spec = spec
        islands = Islands.of(settings)
        self._scores = self._scores_of(verifier)
        self._execution = Execution(engine, spec.search, settings, islands, self._recorder, self._scores)
        self._limits = SearchLimits(settings, islands, self.record.tree)
        self._rounds = Rounds(
            settings, self.record, self._requirements, self._scores, self._limits, callbacks.equivalent_until
        )
        self._callbacks = callbacks
        self._num_steps = 0
        self._kv = (0, 0)
        self._spent = _Spent()

    def _scores_of(self, use: VerifierUse | None) -> Scores:
        if use is None:
            return Scores()
        assert self._spec.has_verifier, "the engine would evict by its own scores"
        return VerifierScores(use, self._engine, self.number, self._recorder)

    @property
    def number(self) -> int:
        return self._spec.search

    # -- the life of a search ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._limits.start_clock()
        self._engine.open(self._spec)
        self._callbacks.on_event(self.record.started)
        self._ask_policy()
        self._stop_if_due()
        self._tell_of_step()

    def absorb(self, step: SearchStep, batch: StepBatch) -> None:
        """Apply what an engine step did, then let the policy act if it is its turn."""
        began, waited = time.perf_counter(), self._scores.seconds_waited
        self._kv = (batch.kv_used_tokens, batch.kv_capacity_tokens)
        self._spent.engine += batch.seconds.engine
        self._spent.scoring += batch.seconds.scoring
        self._spent.scheduling += batch.seconds.scheduling
        self._num_steps += step.num_generated > 0
        self.num_generated += step.num_generated
        is_check = step.num_generated > 0 and self._num_steps % self._settings.check_interval == 0
        self._recorder.apply(step, self._scores.note(step, self._num_steps), self._num_steps)
        if self._reader is not None:
            self._reader.note(step.scored)
        if self._is_wanted(step):
            self._collect_scores(self._looks_at_scores(step), with_latest=self._policy.wake.on_boundary)
            self._ask_policy()
        elif is_check:
            self._collect_scores(self._requirements.scores is not ScoreUse.NEVER)
            self._sample()  # the pool's curve is as fine for a policy that sleeps as for one that is asked
        self._rounds.note(bool(step.finished))
        self._go_on(is_check=is_check)
        self._spent.search += time.perf_counter() - began - (self._scores.seconds_waited - waited)
        self._tell_of_step()

    def wait(self) -> None:
        """For the scores that it needs to go on: of use where all searches of an engine do."""
        self._go_on(is_check=False, holds_up=True)

    def _go_on(self, *, is_check: bool, holds_up: bool = False) -> None:
        """Look at the vote, begin a next round of traces or end the search, if it is time to.

        A search that has to wait for its verifier lets others go on meanwhile, unless there are none to be held up.
        """
        self.is_waiting = not holds_up and not self.is_stopped and self._rounds.must_wait
        if self.is_waiting:
            return
        self._rounds.look(self._num_steps, is_check=is_check)
        if not self.is_stopped and self._rounds.plan_next():
            self._ask_policy()
        self._stop_if_due()

    def _tell_of_step(self) -> None:
        if not self.is_stopped:
            self._callbacks.after_step(self._num_steps)

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        """Cancel what still runs and leave the engine; `conclude` then takes the vote."""
        self._error = error
        live = sorted(trace.id for state in LIVE for trace in self.record.tree.in_state(state))
        for trace_id, tokens in self._leave_engine(live, reason).items():
            self._recorder.leave(ev.Cancelled(self._num_steps, trace_id, tokens))
        self._sample()
        if (waited := self._recorder.waits.event(self._num_steps)) is not None:
            self._recorder.emit(waited)
        self._recorder.emit(ev.Stopped(self._num_steps, reason))
        self.is_stopped = True

    def fail(self, error: BaseException) -> None:
        """Something of this search alone went wrong: it ends with what it has."""
        self.failure = self.failure or error
        with suppress(Exception):  # a callback that always fails leaves a log without an end, and no trace running
            self.stop(StopReason.FAILED, str(error) or type(error).__name__)
        self.is_stopped = True

    def conclude(self, *, is_hurried: bool = False) -> SearchResult:
        """Take the vote. Comparing answers takes time and needs no engine: any thread may do it.

        `budget_seconds` covers it; answers not compared by then are equal only if they are spelled alike, and in a
        hurried vote all that were not compared before. A part of a search has no vote of its own.
        """
        deadline = -math.inf if is_hurried else self._limits.vote_deadline
        failure = self._scores.finish(self._num_steps, deadline, are_wanted=self.failure is None)
        if failure is not None:
            self.failure, self._error = failure, str(failure)
        vote = NO_VOTE
        if self._settings.part is None:
            vote = self.record.vote(self._callbacks.equivalent_until(deadline))
            self._recorder.emit(voted(vote))
        self.result = dataclasses.replace(self.record.result(vote), error=self._error)
        return self.result

    def _leave_engine(self, live: Sequence[int], reason: StopReason) -> dict[int, tuple[int, ...]]:
        """Last tokens of the live traces.

        After a failure the engine may not be able to tell them any more, or have ended traces that live in the tree.
        """
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(live, ())
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            there = self._engine.progress(self.number)
            tokens |= self._execution.stop([trace for trace in live if trace in there])
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            self._engine.close_search(self.number)
        return tokens

    def _stop_if_due(self) -> None:
        reason = self._limits.due_reason(self.num_generated, is_settled=self._rounds.is_settled)
        if reason is not None and not self.is_stopped:
            self.stop(reason)

    def _collect_scores(self, is_needed: bool, *, with_latest: bool = False) -> None:
        if is_needed:
            self._scores.collect(self._num_steps, self._limits.search_deadline, with_latest=with_latest)

    # -- decide, execute, apply --------------------------------------------------------------------------------

    def _looks_at_scores(self, step: SearchStep) -> bool:
        """Whether the policy, which is about to be asked, will: a completion may wake one that does not."""
        if self._requirements.scores is ScoreUse.ROUNDS:
            return self._is_round(step) or (self._policy.wake.on_boundary and bool(step.scored))
        return self._requirements.scores is ScoreUse.ALWAYS

    def _is_wanted(self, step: SearchStep) -> bool:
        wake = self._policy.wake
        has_left = bool(step.finished) or any(lost.action is PressureAction.PRUNE for lost in step.evicted)
        if self._limits.has_enough_traces:
            return wake.on_completion and has_left
        return self._is_round(step) or (wake.on_completion and has_left) or (wake.on_boundary and bool(step.scored))

    def _is_round(self, step: SearchStep) -> bool:
        every = self._policy.wake.every_steps
        return every is not None and step.num_generated > 0 and self._num_steps % every == 0

    def _ask_policy(self) -> None:
        self._policy_state, decisions = self._policy.decide(self._policy_state, self._view())
        is_over = self._limits.has_enough_traces  # then only who votes is left to decide
        for decision in decisions:
            if not is_over or isinstance(decision, Discard):
                self._execute(decision)
        self._execution.send()
        if not is_over and any(isinstance(decision, SplitIslands) for decision in decisions):
            self._ask_policy()
        elif not self.is_stopped:
            self._sample()

    def _execute(self, decision: Decision) -> None:
        if isinstance(decision, Stop):
            self._execution.send()
            self.stop(StopReason.POLICY)
        elif isinstance(decision, SplitIslands):
            self._limits.islands = self._execution.split(decision, self._num_steps)
        else:
            self._execution.execute(decision, self._num_steps)

    def _view(self) -> PoolView:
        tree, progress = self.record.tree, self._engine.progress(self.number)
        traces = tuple(trace_view(tree, trace, progress.get(trace.id)) for trace in tree.tree_view())
        return PoolView(
            self._num_steps,
            traces,
            len(tree.traces),
            tuple(self._recorder.finished),
            self._thoughts(traces),
            self._recorder.found_spread(),
            self._rounds.num_planned,
        )

    def _thoughts(self, traces: Sequence[TraceView]) -> tuple[ThoughtView, ...]:
        if self._reader is None:
            return ()
        return self._reader.collect([trace.id for trace in traces if trace.is_thinking and trace.state in LIVE])

    def tokens_of(self, trace_id: int, start: int) -> Sequence[int]:
        """What a live trace has said; on the engine's thread."""
        return self._engine.tokens(TraceKey(self.number, trace_id), start)

    def _sample(self) -> None:
        tree, spent = self.record.tree, self._spent
        self._recorder.emit(
            ev.Sample(
                step=self._num_steps,
                running=tree.count(TraceState.RUNNING),
                waiting=tree.count(TraceState.WAITING),
                ghosts=tree.count(TraceState.GHOST),
                completed=tree.count(TraceState.FINISHED),
                generated=self.num_generated,
                kv_used_tokens=self._kv[0],
                kv_capacity_tokens=self._kv[1],
                seconds_total=self._limits.seconds,
                seconds_engine=spent.engine,
                seconds_scoring=spent.scoring,
                seconds_scheduling=spent.scheduling,
                seconds_search=spent.search,
            )
        )


class SearchBatch:
    """The running searches of one engine. What goes wrong in one of them ends that one; an engine that fails ends all.

    Whatever gives a search back has stopped it: its vote is the caller's to take (`Search.conclude`).
    """

    def __init__(self, engine: Engine) -> None:
        self.running: dict[int, Search] = {}
        self._engine = engine

    @property
    def has_room(self) -> bool:
        """Whether one more search would have a trace to run: traces that wait for others are better not begun."""
        most = self._engine.info.most_traces
        return most is None or sum(search.record.tree.num_live for search in self.running.values()) < most

    def add(self, search: Search) -> list[Search]:
        """Begin a search; gives it back where it ended while it began (an exhausted budget, a policy that fails)."""
        self.running[search.number] = search
        try:
            search.begin()
        except Exception as error:
            search.fail(error)
        return self._take_stopped()

    def step(self) -> list[Search]:
        """One engine step; gives the searches that it ended.

        Where none of them has anything to run until its verifier has read, they wait for that instead.
        """
        if all(search.is_waiting for search in self.running.values()):
            return self._wait()
        batch = self._engine.step()
        for search in self.running.values():
            try:
                search.absorb(batch.searches.get(search.number, SearchStep()), batch)
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    def _wait(self) -> list[Search]:
        for search in self.running.values():
            try:
                search.wait()
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    def stop(
        self, searches: Iterable[Search], reason: StopReason = StopReason.INTERRUPTED, error: str | None = None
    ) -> list[Search]:
        """End running searches between two steps."""
        for search in list(searches):
            try:
                search.stop(reason, error)
            except Exception as failure:
                search.fail(failure)
        return self._take_stopped()

    def stop_all(self, reason: StopReason, error: str | None = None) -> list[Search]:
        return self.stop(self.running.values(), reason, error)

    def _take_stopped(self) -> list[Search]:
        stopped = [search for search in self.running.values() if search.is_stopped]
        for search in stopped:
            del self.running[search.number]
        return stopped


def run_searches(
    engine: Engine,
    searches: Iterable[Search],
    *,
    concurrency: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Search]:
    """Drive searches in this thread, up to `concurrency` in one batch with room, and give each back with its result.

    Whatever ends the iteration early, every begun search gets its vote and the end of its log.
    """
    coming, batch = iter(searches), SearchBatch(engine)
    reason, failure = StopReason.INTERRUPTED, None
    try:
        while True:
            yield from _concluded(_fill_up(batch, coming, concurrency))
            if not batch.running or should_stop():
                break
            yield from _concluded(batch.step())
    except Exception as error:
        reason, failure = StopReason.FAILED, str(error)
        raise
    finally:
        left = list(_concluded(batch.stop_all(reason, failure)))
    yield from left


def _fill_up(batch: SearchBatch, coming: Iterator[Search], concurrency: int) -> Iterator[Search]:
    while len(batch.running) < concurrency and batch.has_room:
        search = next(coming, None)
        if search is None:
            return
        yield from batch.add(search)


def _concluded(stopped: Iterable[Search]) -> Iterator[Search]:
    """With their votes; a search that failed by itself raises, for whoever drives it here owns its callbacks."""
    for search in stopped:
        search.conclude()
        if search.failure is not None:
            raise search.failure
        yield search

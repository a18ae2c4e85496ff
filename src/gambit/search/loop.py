"""The search loop. One step: the engine decodes, scores are noted, the tree follows, the policy decides."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from gambit import events as ev
from gambit.config.presets import SearchSettings
from gambit.engines.base import Engine, SearchSpec
from gambit.errors import named, place_of
from gambit.policies.base import (
    Branch,
    Decision,
    Discard,
    Force,
    Policy,
    ScoreUse,
    SplitIslands,
    State,
    Stop,
    requirements_of,
)
from gambit.results.record import SearchRecord, voted
from gambit.results.result import SearchResult
from gambit.results.vote import NO_VOTE
from gambit.search.decisions import check_answer, checked_wake
from gambit.search.limits import LOOP_INTERVAL, Forcer, SearchLimits, VoteWatch
from gambit.search.pool import Callbacks, TracePool
from gambit.search.scores import VerifierUse
from gambit.tree import LIVE, TraceState, TraceTree
from gambit.types import EndReason, PressureAction, SearchStep, StepBatch, StopReason

NOTHING = SearchStep()


class SearchBatch:
    """The running searches of one engine. An error in one of them ends that one; an engine that fails ends all.

    A search that a method returns has stopped: its vote is the caller's to take (`Search.conclude`).
    """

    def __init__(self, engine: Engine) -> None:
        self.running: dict[int, Search] = {}
        self._engine = engine

    def step(self) -> list[Search]:
        """Takes one decode step and lets every search act on it; returns the searches that this ended.

        If all of them wait for their verifiers, no trace has a token to decode, and the wait takes the step's place.
        """
        if all(search.is_waiting for search in self.running.values()):
            return self._each(self.running.values(), lambda search: search.end_if_due(may_wait=False))
        batch = self._engine.step()
        for search in self.running.values():
            began, waited = time.perf_counter(), search.pool.scores.seconds_waited
            step, pool = batch.searches.get(search.number, NOTHING), search.pool
            at = search.meter.add(step, batch)
            try:
                if step.evicted or step.admitted or step.scored or step.finished:  # most steps bring nothing but tokens
                    scored = pool.scores.note(step, at)
                    pool.apply(step, scored, at)
                step = search.with_early_ends(step, at)
                is_turn, is_check = search.is_turn(step, at), search.is_check(step, at)
                if is_turn or is_check:
                    search.collect_scores(step, at, is_turn=is_turn)
                if is_turn:
                    decisions = search.decide(at)
                    search.execute(decisions, at)
                elif is_check:
                    search.sample()  # the pool's curve is as fine for a policy that sleeps as for one that acts
                search.end_if_due(is_check=is_check, has_finished=bool(step.finished))
                search.meter.search += time.perf_counter() - began - (pool.scores.seconds_waited - waited)
                search.report(at)
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    @property
    def has_room(self) -> bool:
        """Returns True if one more search would have a trace to run: traces that wait for others can begin later."""
        most = self._engine.info.most_traces
        return most is None or sum(search.record.tree.num_live for search in self.running.values()) < most

    def add(self, search: Search) -> list[Search]:
        """Begins a search; returns it if it ended at once (an exhausted budget, a policy that fails)."""
        self.running[search.number] = search
        return self._each([search], Search.begin)

    def stop(
        self, searches: Iterable[Search], reason: StopReason = StopReason.INTERRUPTED, error: str | None = None
    ) -> list[Search]:
        """Ends running searches between two steps."""
        return self._each(searches, lambda search: search.stop(reason, error))

    def stop_all(self, reason: StopReason, error: str | None = None) -> list[Search]:
        return self.stop(self.running.values(), reason, error)

    def _each(self, searches: Iterable[Search], act: Callable[[Search], None]) -> list[Search]:
        """Does something with searches, each of which may fail by itself; returns those that this ended."""
        for search in searches:
            try:
                act(search)
            except Exception as error:
                search.fail(error)
        return self._take_stopped()

    def _take_stopped(self) -> list[Search]:
        stopped = [search for search in self.running.values() if search.is_stopped]
        for search in stopped:
            del self.running[search.number]
        return stopped


class Search:
    """One problem being searched: its traces, its policy, its limits, and how far it is."""

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
        assert verifier is None or spec.has_verifier, "the engine would evict by its own scores"
        self.number = spec.search
        self.record = SearchRecord(started)
        self.result: SearchResult | None = None
        self.is_stopped = False  # nothing of it is on the engine any more; its vote may be still to come
        self.is_waiting = False  # nothing of it runs until the verifier has read what the vote needs
        self.failure: BaseException | None = None  # of this search alone
        self.meter = Meter()
        requirements = requirements_of(policy)
        self.pool = TracePool(engine, self.record, settings, spec.search, callbacks, requirements, verifier)
        self.limits = SearchLimits(settings, self.pool.islands, self.record.tree)
        self.forcer = Forcer(settings, self.limits, self.record.tree)
        self._watch: VoteWatch | None = None  # only if the vote may end the search; a part of one has no vote
        if settings.part is None and (settings.consensus is not None or settings.first_traces is not None):
            self._watch = VoteWatch(
                settings, self.record, requirements, self.pool.scores, self.limits, callbacks.equivalent_until
            )
        self._error: str | None = None
        self._engine = engine
        self.policy = policy
        self._policy_state = policy.initial_state()
        self._wake = checked_wake(settings.policy, policy.wake)
        self._score_use = requirements.scores
        self._settings = settings
        self._spec = spec
        self._callbacks = callbacks

    # -- its share of a step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        self.limits.start_clock()
        self._engine.open(self._spec)
        self._callbacks.on_event(self.record.started)
        self.execute(self.decide(0), 0)
        self.end_if_due()
        self.report(0)

    def with_early_ends(self, step: SearchStep, at: int) -> SearchStep:
        """Ends traces that repeat themselves, and has traces answer that must; returns the step with these ends."""
        if not step.num_generated or self.limits.has_enough_traces:
            return step
        if at % LOOP_INTERVAL == 0:
            looping = self.forcer.looping(self._engine.progress(self.number), self.pool.tokens_of)
            self.pool.execute([Force(trace, EndReason.LOOP) for trace, can_answer in looping.items() if can_answer], at)
            if ended := [trace for trace, can_answer in looping.items() if not can_answer]:
                step = dataclasses.replace(step, finished=[*step.finished, *self.pool.end_loops(ended, at)])
        if self.forcer.is_due(at, self.meter.num_generated):
            progress = self._engine.progress(self.number)
            self.pool.execute(self.forcer.decide(at, progress, self.pool.limit_of), at)
        return step

    def is_turn(self, step: SearchStep, at: int) -> bool:
        """Returns True if the policy acts on an engine step. When enough traces are complete, only votes are left."""
        has_left = step.finished or any(lost.action is PressureAction.PRUNE for lost in step.evicted)
        if self._wake.on_completion and has_left:
            return True
        return self._is_round(step, at) and not self.limits.has_enough_traces

    def is_check(self, step: SearchStep, at: int) -> bool:
        """Returns True if a check interval is over."""
        return step.num_generated > 0 and at % self._settings.pool.check_interval == 0

    def _is_round(self, step: SearchStep, at: int) -> bool:
        if self._wake.on_boundary and step.scored:
            return True
        every = self._wake.every_steps
        return every is not None and step.num_generated > 0 and at % every == 0

    def collect_scores(self, step: SearchStep, at: int, *, is_turn: bool) -> None:
        """Waits for the late scores that the policy is about to use; not if a completion alone has woken it."""
        is_unused = is_turn and self._score_use is ScoreUse.ROUNDS and not self._is_round(step, at)
        if self._score_use is not ScoreUse.NEVER and not is_unused:
            is_latest = is_turn and self._wake.on_boundary
            self.pool.scores.collect(at, self.limits.search_deadline, with_latest=is_latest)

    def decide(self, at: int) -> Sequence[Decision]:
        """Returns the policy's decisions on the pool as it is."""
        view = self.pool.view(at, None if self._watch is None else self._watch.num_planned)
        try:
            answer = self.policy.decide(self._policy_state, view)
        except Exception as error:
            error.add_note(f"policy {self._settings.policy!r}, step {at}, {place_of(error)}")
            raise
        check_answer(self._settings.policy, answer, at)
        self._policy_state, decisions = answer
        return decisions

    def execute(self, decisions: Sequence[Decision], at: int) -> None:
        """Carries decisions out. A policy that divided the islands decides once more at once."""
        if self.limits.has_enough_traces or self.limits.closing is not None:
            decisions = [decision for decision in decisions if isinstance(decision, Discard)]
        self.pool.execute(decisions, at)
        self.limits.islands = self.pool.islands
        if any(isinstance(decision, Branch) for decision in decisions):
            self.forcer.look_again()
        if any(isinstance(decision, Stop) for decision in decisions):
            self.stop(StopReason.POLICY)
        elif any(isinstance(decision, SplitIslands) for decision in decisions):
            self.execute(self.decide(at), at)
        else:
            self.sample()

    def end_if_due(self, *, is_check: bool = False, has_finished: bool = False, may_wait: bool = True) -> None:
        """Looks at the vote, begins a next round of traces or ends the search, if it is time to.

        A search that has to wait for its verifier lets others go on meanwhile, unless there are none (`may_wait`).
        """
        if self.is_stopped:
            return
        watch, at = self._watch, self.meter.num_steps
        if watch is not None:
            watch.has_news |= has_finished
            self.is_waiting = may_wait and watch.must_wait
            if self.is_waiting:
                return
            watch.look(at, is_check=is_check)
            if watch.plan_next():
                self.execute(self.decide(at), at)
        reason = self.limits.due_reason(self.meter.num_generated, is_settled=watch is not None and watch.is_settled)
        if reason is not None and not self.is_stopped:
            self.stop(reason)

    def report(self, at: int) -> None:
        if self._callbacks.after_step is not None and not self.is_stopped:
            self._callbacks.after_step(at)

    def sample(self) -> None:
        self.pool.emit(self.meter.sample(self.record.tree, self.limits.seconds))

    # -- its end -----------------------------------------------------------------------------------------------

    def stop(self, reason: StopReason, error: str | None = None) -> None:
        """Cancels what still runs and leaves the engine; `conclude` then takes the vote."""
        self._error, at = error, self.meter.num_steps
        live = sorted(trace.id for state in LIVE for trace in self.record.tree.in_state(state))
        for trace_id, tokens in self._leave_engine(live, reason).items():
            self.pool.emit(ev.Cancelled(at, trace_id, tokens))
        self.sample()
        if (waited := self.pool.waits.event(at)) is not None:
            self.pool.emit(waited)
        self.pool.emit(ev.Stopped(at, reason))
        self.is_stopped = True

    def fail(self, error: BaseException) -> None:
        """Ends the search with what it has, after an error in it alone."""
        self.failure = self.failure or error
        with suppress(Exception):  # a callback that always fails leaves a log without an end, and no trace running
            self.stop(StopReason.FAILED, named(error))
        self.is_stopped = True

    def conclude(self, *, is_hurried: bool = False) -> SearchResult:
        """Takes the vote. Comparing answers takes time and needs no engine: any thread may do it.

        `budget_seconds` covers it; answers not compared by then are equal only if they are spelled alike, and in a
        hurried vote all that were not compared before. A part of a search has no vote of its own.
        """
        deadline = -math.inf if is_hurried else self.limits.vote_deadline
        failure = self.pool.scores.finish(self.meter.num_steps, deadline, are_wanted=self.failure is None)
        if failure is not None:
            self.failure, self._error = failure, str(failure)
        vote = NO_VOTE
        if self._settings.part is None:
            vote = self.record.vote(self._callbacks.equivalent_until(deadline))
            self.pool.emit(voted(vote))
        self.result = dataclasses.replace(self.record.result(vote), error=self._error)
        return self.result

    def _leave_engine(self, live: Sequence[int], reason: StopReason) -> dict[int, tuple[int, ...]]:
        """Returns the own tokens of the live traces, and takes the search off the engine.

        After a failure the engine may not know them any more, or have ended traces that live in the tree.
        """
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(live, ())
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            there = self._engine.progress(self.number)
            tokens |= self.pool.stop([trace for trace in live if trace in there])
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            self._engine.close_search(self.number)
        return tokens


@dataclass(slots=True)
class Meter:
    """Decode steps, tokens and seconds of a search so far, and the memory of its engine."""

    num_steps: int = 0  # in which it got a token
    num_generated: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    search: float = 0.0  # seconds, as are the next three
    engine: float = 0.0
    scoring: float = 0.0
    scheduling: float = 0.0

    def add(self, step: SearchStep, batch: StepBatch) -> int:
        """Counts an engine step; returns the number of steps."""
        self.kv_used_tokens, self.kv_capacity_tokens = batch.kv_used_tokens, batch.kv_capacity_tokens
        self.engine += batch.seconds.engine
        self.scoring += batch.seconds.scoring
        self.scheduling += batch.seconds.scheduling
        self.num_steps += step.num_generated > 0
        self.num_generated += step.num_generated
        return self.num_steps

    def sample(self, tree: TraceTree, seconds_total: float) -> ev.Sample:
        return ev.Sample(
            step=self.num_steps,
            running=tree.count(TraceState.RUNNING),
            waiting=tree.count(TraceState.WAITING),
            ghosts=tree.count(TraceState.GHOST),
            completed=tree.count(TraceState.FINISHED),
            generated=self.num_generated,
            kv_used_tokens=self.kv_used_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
            seconds_total=seconds_total,
            seconds_engine=self.engine,
            seconds_scoring=self.scoring,
            seconds_scheduling=self.scheduling,
            seconds_search=self.search,
        )

"""The search loop: asks a policy, carries out its decisions on an engine, and records what the engine did."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from gambit.config.presets import SearchSettings
from gambit.core import events as ev
from gambit.core.errors import EngineError
from gambit.core.tree import LIVE, Trace, TraceState
from gambit.core.types import (
    OnPressure,
    PressureAction,
    RunningScore,
    SearchStep,
    StepBatch,
    StopReason,
    StopRule,
    TraceKey,
    TraceSpec,
)
from gambit.engines.base import Engine, SearchSpec
from gambit.results.record import SearchRecord, SearchResult
from gambit.search.consensus import is_over
from gambit.search.islands import Islands
from gambit.search.policies.base import (
    Branch,
    Decision,
    Discard,
    Evict,
    Policy,
    PoolView,
    Prune,
    ScoreUse,
    Start,
    State,
    Stop,
    ThoughtView,
    TraceView,
    requirements_of,
)
from gambit.search.recorder import Callbacks, Recorder
from gambit.search.thoughts import ThoughtReader
from gambit.search.verification import Verification, VerifierUse
from gambit.search.views import trace_view

VOTE_SHARE, MAX_VOTE_SECONDS = 0.1, 5.0  # of a time budget, kept for the vote
CHECK_SECONDS = 0.5  # the longest that a look at the vote may hold up the engine


def _until_vote(budget_seconds: float) -> float:
    return budget_seconds - min(VOTE_SHARE * budget_seconds, MAX_VOTE_SECONDS)


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
        )
        self.result: SearchResult | None = None
        self.is_stopped = False  # nothing of it is on the engine any more; its vote may be still to come
        self.failure: BaseException | None = None  # of this search alone
        self._error: str | None = None
        self.num_generated = 0
        self._engine = engine
        self._policy = policy
        self._policy_state = policy.initial_state()
        self._is_settled = False
        need = self._requirements.thoughts
        self._reader = None if need is None else ThoughtReader(need, self.tokens_of, callbacks.decode, callbacks.embed)
        self._verification = None if verifier is None else self._begin_verification(verifier, spec)
        self._settings = settings
        self._spec = spec
        self._islands = Islands(settings.islands, settings.capacity, settings.num_traces)
        self._num_on_island = [0] * settings.islands  # traces created so far
        self._callbacks = callbacks
        self._unsent: list[TraceSpec] = []  # decided in this round
        self._num_steps = 0
        self._kv = (0, 0)
        self._spent = _Spent()
        self._began = time.monotonic()

    @property
    def number(self) -> int:
        return self._spec.search

    # -- the life of a search ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._began = time.monotonic()
        self._engine.open(self._spec)
        self._callbacks.on_event(self.record.started)
        self._ask_policy()
        self._stop_if_due()

    def absorb(self, step: SearchStep, batch: StepBatch) -> None:
        """Apply what an engine step did, then let the policy act if it is its turn."""
        began, waited = time.perf_counter(), self._seconds_waited()
        self._kv = (batch.kv_used_tokens, batch.kv_capacity_tokens)
        self._spent.engine += batch.seconds.engine
        self._spent.scoring += batch.seconds.scoring
        self._spent.scheduling += batch.seconds.scheduling
        self._num_steps += step.num_generated > 0
        self.num_generated += step.num_generated
        self._apply(step)
        if self._reader is not None:
            self._reader.note(step.scored)
        if self._is_wanted(step):
            self._collect_scores(self._looks_at_scores(step))
            self._ask_policy()
        elif step.num_generated > 0 and self._num_steps % self._settings.check_interval == 0:
            self._collect_scores(self._requirements.scores is not ScoreUse.NEVER)
            self._sample()  # the pool's curve is as fine for a policy that sleeps as for one that is asked
        if step.finished and (consensus := self._settings.consensus) is not None:
            self._collect_scores(self.record.vote_kind.needs_scores)
            equivalent = self._callbacks.equivalent_until(time.monotonic() + CHECK_SECONDS)
            self._is_settled = is_over(consensus, self.record, self._requirements, equivalent)
        self._stop_if_due()
        self._spent.search += time.perf_counter() - began - self._seconds_waited(waited)

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
        hurried vote all that were not compared before.
        """
        budget = self._settings.budget_seconds
        deadline = math.inf if budget is None else self._began + budget
        deadline = -math.inf if is_hurried else deadline
        self._finish_verification(deadline)
        vote = self.record.vote(self._callbacks.equivalent_until(deadline))
        votes = tuple(dataclasses.asdict(entry) for entry in vote.entries)
        self._recorder.emit(ev.Voted(vote.answer, vote.margin, votes))
        self.result = dataclasses.replace(self.record.result(vote), error=self._error)
        return self.result

    def _leave_engine(self, live: Sequence[int], reason: StopReason) -> dict[int, tuple[int, ...]]:
        """Last tokens of the live traces.

        After a failure the engine may not be able to tell them any more, or have ended traces that live in the tree.
        """
        tokens: dict[int, tuple[int, ...]] = dict.fromkeys(live, ())
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            there = self._engine.progress(self.number)
            tokens |= self._stop_on_engine([trace for trace in live if trace in there])
        with suppress(Exception) if reason is StopReason.FAILED else nullcontext():
            self._engine.close_search(self.number)
        return tokens

    def _stop_if_due(self) -> None:
        reason = self._due_reason()
        if reason is not None and not self.is_stopped:
            self.stop(reason)

    def _due_reason(self) -> StopReason | None:
        settings, tree = self._settings, self.record.tree
        completed = tree.count(TraceState.FINISHED)
        if settings.budget_traces is not None and completed >= settings.budget_traces:
            return StopReason.BUDGET_TRACES
        if self._reached_target():
            return StopReason.COMPLETED
        if tree.num_live == 0:
            return StopReason.EXHAUSTED
        if self._is_settled:
            return StopReason.CONSENSUS
        # The cap is never passed: a step that might generate more than what is left is not taken.
        if settings.budget_tokens is not None and self.num_generated + tree.num_live > settings.budget_tokens:
            return StopReason.BUDGET_TOKENS
        if time.monotonic() - self._began >= self._seconds_to_search:
            return StopReason.BUDGET_SECONDS
        return None

    @property
    def _seconds_to_search(self) -> float:
        budget = self._settings.budget_seconds
        return math.inf if budget is None else _until_vote(budget)

    def _reached_target(self) -> bool:
        tree = self.record.tree
        if tree.count(TraceState.FINISHED) < self._settings.num_traces:
            return False
        return self._islands.are_complete(trace.island for trace in tree.in_state(TraceState.FINISHED))

    # -- a verifier's scores -----------------------------------------------------------------------------------

    def _begin_verification(self, use: VerifierUse, spec: SearchSpec) -> Verification:
        assert spec.has_verifier, "the engine would evict by its own scores"
        return Verification(use, spec.search, self.record.tree, self.tokens_of)

    def _apply(self, step: SearchStep) -> None:
        """With a verifier the engine's own scores are not recorded yet: they count only if it is given up."""
        judge = self._verification
        if judge is None:
            self._recorder.apply(step, self._num_steps)
        elif judge.lost is None:
            self._recorder.apply(dataclasses.replace(step, scored=()), self._num_steps)
            judge.note(step, self._num_steps)
        else:
            self._recorder.apply(step, self._num_steps)
            judge.note_engine_scores(step)
            self._tell_ranks([thought.trace for thought in step.scored])

    def _looks_at_scores(self, step: SearchStep) -> bool:
        """Whether the policy, which is about to be asked, will: a completion may wake one that does not."""
        if self._requirements.scores is ScoreUse.ROUNDS:
            return self._is_round(step) or (self._policy.wake.on_boundary and bool(step.scored))
        return self._requirements.scores is ScoreUse.ALWAYS

    def _collect_scores(self, is_needed: bool) -> None:
        judge = self._verification
        if judge is None or judge.lost is not None or not is_needed:
            return
        if (judged := judge.collect(self._num_steps, self._began + self._seconds_to_search)) is not None:
            self._recorder.judge(judged)
            self._tell_ranks(judged.traces)

    def _tell_ranks(self, traces: Iterable[int]) -> None:
        """The engine evicts by them."""
        tree = self.record.tree
        scores = {trace: tree.score_of(tree.traces[trace]) for trace in traces if tree.traces[trace].is_live}
        self._engine.rank({TraceKey(self.number, i): score for i, score in scores.items() if score is not None})

    def _finish_verification(self, deadline: float) -> None:
        judge = self._verification
        if judge is None:
            return
        try:
            is_asked = judge.lost is None and self.failure is None
            judged = judge.finish(self._num_steps, deadline) if is_asked else None
        except EngineError as error:  # the vote is taken all the same, so that the log has its end
            self.failure, self._error, judged = error, str(error), None
        if judged is not None:
            self._recorder.judge(judged)
        self._recorder.emit(judge.event(self._num_steps))

    def _seconds_waited(self, before: float = 0.0) -> float:
        return 0.0 if self._verification is None else self._verification.seconds_waited - before

    # -- decide, execute, apply --------------------------------------------------------------------------------

    def _is_wanted(self, step: SearchStep) -> bool:
        wake = self._policy.wake
        has_left = bool(step.finished) or any(lost.action is PressureAction.PRUNE for lost in step.evicted)
        if self._reached_target():
            return wake.on_completion and has_left
        return self._is_round(step) or (wake.on_completion and has_left) or (wake.on_boundary and bool(step.scored))

    def _is_round(self, step: SearchStep) -> bool:
        every = self._policy.wake.every_steps
        return every is not None and step.num_generated > 0 and self._num_steps % every == 0

    def _ask_policy(self) -> None:
        self._policy_state, decisions = self._policy.decide(self._policy_state, self._view())
        is_over = self._reached_target()  # then only who votes is left to decide
        for decision in decisions:
            if not is_over or isinstance(decision, Discard):
                self._execute(decision)
        self._send()
        if not self.is_stopped:
            self._sample()

    def _view(self) -> PoolView:
        tree, progress = self.record.tree, self._engine.progress(self.number)
        traces = tuple(trace_view(tree, trace, progress.get(trace.id)) for trace in tree.tree_view())
        return PoolView(
            self._num_steps,
            traces,
            len(tree.traces),
            tuple(self._recorder.finished),
            self._thoughts(traces),
        )

    def _thoughts(self, traces: Sequence[TraceView]) -> tuple[ThoughtView, ...]:
        if self._reader is None:
            return ()
        return self._reader.collect([trace.id for trace in traces if trace.is_thinking and trace.state in LIVE])

    def tokens_of(self, trace_id: int, start: int) -> Sequence[int]:
        """What a live trace has said; on the engine's thread."""
        return self._engine.tokens(TraceKey(self.number, trace_id), start)

    def _execute(self, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._start(decision)
        elif isinstance(decision, Branch):
            self._branch(decision)
        elif isinstance(decision, Stop):
            self._send()
            self.stop(StopReason.POLICY)
        elif isinstance(decision, Discard):
            self._recorder.emit(ev.Discarded(self._num_steps, decision.trace, decision.reason))
        elif isinstance(decision, Prune | Evict):
            kind = ev.Pruned if isinstance(decision, Prune) else ev.Evicted
            trace = self.record.tree.traces[decision.trace]
            score = self.record.tree.score_of(trace)
            if any(trace.id in (spec.key.trace, spec.parent and spec.parent.trace) for spec in self._unsent):
                self._send()
            own = self._stop_on_engine([trace.id] if trace.is_live else []).get(trace.id, ())
            self._recorder.leave(kind(self._num_steps, trace.id, decision.reason, score, own))

    def _stop_on_engine(self, trace_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Own tokens of traces that were still going."""
        tokens = self._engine.stop([TraceKey(self.number, trace_id) for trace_id in trace_ids])
        return {key.trace: self._recorder.own(key.trace, all_tokens) for key, all_tokens in tokens.items()}

    def _start(self, decision: Start) -> None:
        for _ in range(decision.count):
            spec = self._spec_of(decision.island, decision.on_pressure, decision.stop_rule)
            self._unsent.append(spec)
            self._recorder.join(ev.Created(self._num_steps, spec.key.trace, decision.island))

    def _branch(self, decision: Branch) -> None:
        parent = self.record.tree.traces[decision.parent]
        child = self._spec_of(parent.island, decision.on_pressure)
        temperature = child.sampling.temperature * self._settings.child_temperature
        is_ghost = parent.state is TraceState.GHOST
        child = dataclasses.replace(
            child,
            sampling=dataclasses.replace(child.sampling, temperature=temperature),
            inherited=decision.inherited,
            parent=None if is_ghost else TraceKey(self.number, parent.id),
            prefix=self._recorder.ghost_tokens[parent.id][: decision.inherited] if is_ghost else (),
            score=self._engine_score(parent, decision.inherited),
            rank=None if self._verification is None else self.record.tree.score_of(parent),
            history_of=TraceKey(self.number, parent.id) if is_ghost else None,
        )
        self._unsent.append(child)
        self._recorder.join(ev.Branched(self._num_steps, child.key.trace, parent.id, decision.inherited, temperature))
        if self._verification is not None:
            self._verification.branch(child.key.trace, parent.id, decision.inherited)

    def _engine_score(self, parent: Trace, inherited: int) -> RunningScore:
        """What the engine knows of a parent's thoughts; it counts them."""
        return parent.score if self._verification is None else self._verification.engine_score(parent.id, inherited)

    def _send(self) -> None:
        """A round's new traces together: an engine may begin them in one step."""
        specs, self._unsent = self._unsent, []
        if specs:
            self._engine.submit(specs)

    def _spec_of(self, island: int, on_pressure: OnPressure, stop_rule: StopRule | None = None) -> TraceSpec:
        """The next trace's; its random numbers are those of its place on its island."""
        key, settings = TraceKey(self.number, len(self.record.tree.traces)), self._settings
        noise_id = self._islands.noise_id(island, self._num_on_island[island])
        self._num_on_island[island] += 1
        return TraceSpec(
            key,
            settings.sampling,
            settings.max_new_tokens,
            on_pressure,
            stop_rule=stop_rule,
            island=island,
            noise_id=noise_id,
        )

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
                seconds_total=time.monotonic() - self._began,
                seconds_engine=spent.engine,
                seconds_scoring=spent.scoring,
                seconds_scheduling=spent.scheduling,
                seconds_search=spent.search,
            )
        )

"""The traces of one search: changes by its engine and decisions of its policy become events."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.config.presets import SearchSettings
from gambit.engines.base import Engine
from gambit.errors import UserError
from gambit.policies.base import (
    Branch,
    Decision,
    Discard,
    Evict,
    Force,
    PoolView,
    Prune,
    Requirements,
    SplitIslands,
    Start,
    TraceView,
)
from gambit.policies.doubt import FirstScores
from gambit.policies.islands import Islands
from gambit.policies.slim_sc import Decode, Embed, ThoughtReader
from gambit.results.record import SearchRecord
from gambit.search.decisions import DecisionCheck
from gambit.search.scores import Scores, VerifierScores, VerifierUse
from gambit.tree import LIVE, Trace, TraceState, TraceTree
from gambit.types import (
    EndReason,
    Eviction,
    OnPressure,
    PressureAction,
    Progress,
    SearchStep,
    StopRule,
    ThoughtScore,
    TraceEnd,
    TraceKey,
    TraceSpec,
)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions outside the loop that a search calls."""

    answer_of: Callable[[Sequence[int]], str | None]  # all tokens of a finished trace -> its answer
    equivalent_until: Callable[[float], Equivalent]  # equality of answers, compared until a deadline (monotonic)
    on_event: Callable[[ev.Event], None]
    decode: Decode | None = None  # for policies that compare thoughts
    embed: Embed | None = None  # for those that compare them as text
    after_step: Callable[[int], None] | None = None  # everything of an engine step has been recorded


class TracePool:
    """The traces of one search, on its engine and in its record."""

    def __init__(
        self,
        engine: Engine,
        record: SearchRecord,
        settings: SearchSettings,
        search: int,
        callbacks: Callbacks,
        requirements: Requirements,
        verifier: VerifierUse | None,
    ) -> None:
        self.islands = Islands.of(settings)
        self.waits = WaitLedger()
        self.scores = Scores() if verifier is None else VerifierScores(verifier, engine, search, record.tree, self.emit)
        self._engine = engine
        self._record = record
        self._tree = record.tree
        self._settings = settings
        self._search = search
        self._callbacks = callbacks
        self._requirements = requirements
        most = requirements.first_scores
        self._are_chances = settings.is_probability and verifier is None  # of the first scores it is checked
        self._first_scores = FirstScores(most, record.tree) if most else None
        need = requirements.thoughts
        self._reader = None if need is None else ThoughtReader(need, self.tokens_of, callbacks.decode, callbacks.embed)
        self._finished: list[TraceView] = []  # in the order of their ends
        self._ghost_tokens: dict[int, tuple[int, ...]] = {}  # kept only if ghosts may be parents
        self._num_on_island = [0] * settings.pool.islands  # traces created so far
        self._root_noise: list[int] = []  # by trace: the random numbers of its root
        self._specs: list[TraceSpec] = []  # by trace
        self._unsent: list[TraceSpec] = []  # decided on, not on the engine yet

    def emit(self, event: ev.Event) -> None:
        """Records an event; nothing else changes the record."""
        self._record.apply(event)
        self.waits.note(event)
        if self._first_scores is not None:
            self._first_scores.note(event)
        if isinstance(event, ev.Verified | ev.IslandsSplit):  # scores or islands of traces that are complete changed
            self._finished = [trace_view(self._tree, self._tree.traces[view.id], None) for view in self._finished]
        self._callbacks.on_event(event)

    def tokens_of(self, trace_id: int, start: int) -> Sequence[int]:
        """Returns the tokens of a live trace from a position on; to be called on the engine's thread."""
        return self._engine.tokens(TraceKey(self._search, trace_id), start)

    def view(self, at: int, num_planned: int | None) -> PoolView:
        """Returns the pool as a policy sees it."""
        progress = self._engine.progress(self._search)
        traces = tuple(trace_view(self._tree, trace, progress.get(trace.id)) for trace in self._tree.tree_view())
        thinking = [trace.id for trace in traces if trace.is_thinking and trace.state in LIVE]
        thoughts = () if self._reader is None else self._reader.collect(thinking)
        first_scores = () if self._first_scores is None else self._first_scores.all()
        num_created = len(self._tree.traces) - self._tree.num_forced
        return PoolView(at, traces, num_created, tuple(self._finished), thoughts, num_planned, first_scores)

    # -- what the engine did -----------------------------------------------------------------------------------

    def apply(self, step: SearchStep, scored: Sequence[ThoughtScore], at: int) -> None:
        """Records an engine step in its order; `scored` are the thoughts whose scores count with it."""
        for lost in step.evicted:
            self._lose(lost, at)
        for won in step.admitted:
            self.emit(ev.Admitted(at, won.trace, won.reused, won.recomputed, won.waited_steps))
        if scored:
            traces, scores, lengths = zip(*((each.trace, each.score, each.num_tokens) for each in scored), strict=True)
            self._check_scores(scores)
            self.emit(ev.Scored(at, traces, scores, lengths))
        for done in step.finished:
            self._finish(done, at)
        if self._reader is not None:
            self._reader.note(step.scored)

    def _check_scores(self, scores: Sequence[float]) -> None:
        """Refuses NaN, and first scores outside 0 to 1 of a scorer whose scores are to be chances."""
        are_chances, self._are_chances = self._are_chances, False
        wrong = next((each for each in scores if math.isnan(each) or (are_chances and not 0 <= each <= 1)), None)
        if wrong is not None:
            fix = "a number" if math.isnan(wrong) else "0 to 1, or have is_probability=False in its ScorerInfo"
            raise UserError(f"scorer {self._record.started.environment.get('scorer')!r} gave {wrong:g}: give {fix}")

    def _lose(self, lost: Eviction, at: int) -> None:
        if lost.action is PressureAction.QUEUE:
            self.emit(ev.Queued(at, lost.trace, lost.num_tokens))
            return
        own = self._own(lost.trace, lost.tokens)
        if lost.action is PressureAction.GHOST:
            self.emit(ev.Evicted(at, lost.trace, "pressure", lost.score, own))
            return
        answer = self._callbacks.answer_of(lost.tokens) if self._requirements.pruned_answers else None
        self.emit(ev.Pruned(at, lost.trace, "pressure", lost.score, own, answer))

    def _finish(self, done: TraceEnd, at: int) -> None:
        trace, own = self._tree.traces[done.trace], self._own(done.trace, done.tokens)
        if done.reason is EndReason.CONFIDENCE:  # cut off in the middle: it has no answer
            self.emit(ev.Pruned(at, done.trace, "confidence", self._tree.score_of(trace), own))
            return
        answer = self._callbacks.answer_of(done.tokens)
        self.emit(ev.Finished(at, done.trace, done.reason, answer, own, done.confidence))
        self._finished.append(trace_view(self._tree, trace, None))

    def _own(self, trace_id: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens that an ended trace generated itself."""
        if self._settings.ghost_parents:
            self._ghost_tokens[trace_id] = tokens
        return tokens[self._tree.traces[trace_id].inherited :]

    # -- what the policy decides -------------------------------------------------------------------------------

    def execute(self, decisions: Sequence[Decision], at: int) -> None:
        """Carries decisions out in their order, and then forces answers, all in one step of the engine."""
        has_branches = any(isinstance(decision, Branch) for decision in decisions)
        progress = self._engine.progress(self._search) if has_branches else {}
        checks = DecisionCheck(self._tree, self._settings, self.islands.count, progress)
        for decision in decisions:
            checks.check(decision, at)
            if isinstance(decision, Start):
                self._start(decision, at)
            elif isinstance(decision, Branch):
                self._branch(decision, at)
            elif isinstance(decision, Prune | Evict):
                self._end(decision, at)
            elif isinstance(decision, Discard):
                self.emit(ev.Discarded(at, decision.trace, decision.reason))
            elif isinstance(decision, SplitIslands):
                self._split(decision, at)
        self._send()
        self._force([decision for decision in decisions if isinstance(decision, Force)], at)

    def stop(self, trace_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Ends live traces on the engine; returns the tokens that each generated itself."""
        tokens = self._engine.stop([TraceKey(self._search, trace_id) for trace_id in trace_ids])
        return {key.trace: self._own(key.trace, all_tokens) for key, all_tokens in tokens.items()}

    def _send(self) -> None:
        """Submits the new traces of a round together, so that an engine may begin them in one step."""
        specs, self._unsent = self._unsent, []
        if specs:
            self._engine.submit(specs)

    def _start(self, decision: Start, at: int) -> None:
        for _ in range(decision.count):
            spec = self._next_spec(decision.island, decision.on_pressure, decision.stop_rule)
            self._unsent.append(spec)
            self._note(spec, spec.noise)
            self.emit(ev.Created(at, spec.key.trace, decision.island))

    def _note(self, spec: TraceSpec, root_noise: int) -> None:
        self._specs.append(dataclasses.replace(spec, prefix=()))
        self._root_noise.append(root_noise)

    def _branch(self, decision: Branch, at: int) -> None:
        parent = self._tree.traces[decision.parent]
        child = self._next_spec(parent.island, decision.on_pressure)
        temperature = child.sampling.temperature * self._settings.child_temperature
        is_ghost = parent.state is TraceState.GHOST
        key, parent_key = child.key, TraceKey(self._search, parent.id)
        score, eviction_score = self.scores.branch(key.trace, parent, decision.inherited)
        child = dataclasses.replace(
            child,
            sampling=dataclasses.replace(child.sampling, temperature=temperature),
            inherited=decision.inherited,
            max_new_tokens=self._limit_of(decision.inherited),
            parent=None if is_ghost else parent_key,
            prefix=self._ghost_tokens[parent.id][: decision.inherited] if is_ghost else (),
            score=score,
            eviction_score=eviction_score,
            history_of=parent_key if is_ghost else None,
        )
        self._unsent.append(child)
        self._note(child, self._root_noise[parent.root])
        self.emit(ev.Branched(at, key.trace, parent.id, decision.inherited, temperature))

    def limit_of(self, trace_id: int) -> int:
        """Returns how long a trace may get, the inherited part included."""
        return self._specs[trace_id].max_new_tokens

    def _limit_of(self, inherited: int) -> int:
        """Returns how long a child may get, the inherited part included."""
        most = self._settings.max_new_tokens
        if not self._settings.own_limit:
            return most
        room = self._engine.info.context_tokens - len(self._record.started.prompt_tokens)
        return min(inherited + most, room)

    def _force(self, decisions: Sequence[Force], at: int) -> None:
        """Has children take the places of running traces; their random numbers are those of their parents."""
        forcing = self._settings.forcing
        parents = {force.trace: self._tree.traces[force.trace] for force in decisions}
        decisions = [force for force in decisions if can_force(parents[force.trace])]
        if not decisions:
            return
        progress, forces, specs = self._engine.progress(self._search), list[Force](), list[TraceSpec]()
        for force in decisions:
            assert forcing is not None or (force.given and force.max_tokens), "the search has no tokens to force with"
            given = force.given or (forcing.answer if forcing else ())
            parent, inherited = parents[force.trace], progress[force.trace].num_tokens
            most = force.max_tokens or (forcing.answer_tokens if forcing else 0)
            known = self._specs[parent.id]
            if inherited + len(given) >= known.max_new_tokens:
                continue  # no room is left for an answer
            number = len(self._tree.traces) + len(specs)
            score, eviction_score = self.scores.branch(number, parent, inherited)
            spec = dataclasses.replace(
                known,
                key=TraceKey(self._search, number),
                noise_id=known.noise,
                inherited=inherited,
                parent=known.key,
                prefix=(),
                given=given,
                max_new_tokens=min(inherited + len(given) + most, known.max_new_tokens),
                score=score,
                eviction_score=eviction_score,
                history_of=None,
                stop_rule=None,
                island=parent.island,
            )
            specs.append(spec)
            forces.append(force)
        self._unsent += specs
        self._send()
        own = self.stop([force.trace for force in forces])
        for force, spec in zip(forces, specs, strict=True):
            parent = parents[force.trace]
            self.emit(ev.Pruned(at, parent.id, "forced", self._tree.score_of(parent), own[parent.id]))
            self._note(spec, self._root_noise[parent.root])
            self.emit(ev.Forced(at, spec.key.trace, parent.id, spec.inherited, force.reason, spec.given))

    def end_loops(self, trace_ids: Sequence[int], at: int) -> list[TraceEnd]:
        """Ends traces that repeat themselves, as complete."""
        tokens = self._engine.stop([TraceKey(self._search, trace_id) for trace_id in trace_ids])
        ends = [TraceEnd(key.trace, EndReason.LOOP, all_tokens) for key, all_tokens in tokens.items()]
        step = SearchStep(finished=ends)
        self.apply(step, self.scores.note(step, at), at)
        return ends

    def _end(self, decision: Prune | Evict, at: int) -> None:
        kind = ev.Pruned if isinstance(decision, Prune) else ev.Evicted
        trace = self._tree.traces[decision.trace]
        score = self._tree.score_of(trace)
        if any(trace.id in (spec.key.trace, spec.parent and spec.parent.trace) for spec in self._unsent):
            self._send()
        own = self.stop([trace.id] if trace.is_live else []).get(trace.id, ())
        self.emit(kind(at, trace.id, decision.reason, score, own))

    def _split(self, decision: SplitIslands, at: int) -> None:
        """Divides the islands.

        The random numbers of a root decide where it belongs, however many islands there are: the roots of each are
        those it would have had from the start. Traces to come get random numbers that none has had.
        """
        pool = decision.pool
        island_of = tuple(noise % pool.islands for noise in self._root_noise)
        used = max(map(self.islands.noise_id, self.islands, self._num_on_island))
        self.islands = dataclasses.replace(self.islands, count=pool.islands)
        self._num_on_island = [-(-used // pool.islands)] * pool.islands
        self.emit(ev.IslandsSplit(at, pool.islands, pool.swap_size, pool.warmup_tokens, pool.why, island_of))
        live = [trace for trace in self._tree.traces if trace.is_live]
        self._engine.regroup({TraceKey(self._search, trace.id): trace.island for trace in live})

    def _next_spec(self, island: int, on_pressure: OnPressure, stop_rule: StopRule | None = None) -> TraceSpec:
        """Returns the next trace; its random numbers are those of its place on its island."""
        noise_id = self.islands.noise_id(island, self._num_on_island[island])
        self._num_on_island[island] += 1
        return TraceSpec(
            TraceKey(self._search, len(self._tree.traces)),
            self._settings.sampling,
            self._settings.max_new_tokens,
            on_pressure,
            stop_rule=stop_rule,
            island=island,
            noise_id=noise_id,
        )


def can_force(trace: Trace) -> bool:
    """Returns True if a trace runs and was not forced before."""
    return trace.state is TraceState.RUNNING and not trace.num_given


def trace_view(tree: TraceTree, trace: Trace, progress: Progress | None) -> TraceView:
    """Returns a policy's view of a trace; one without progress is a ghost, or has ended."""
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
        answer=trace.answer,
        confidence=trace.confidence,
        root=trace.root,
        parent=trace.parent,
        last_score=trace.score.last if trace.score.count else None,
    )


@dataclass(slots=True)
class WaitLedger:
    """Follows traces that wait; `total` is known for each after its admission, for the rest at the end."""

    since: dict[int, tuple[int, float]] = field(default_factory=dict)  # trace -> step and time
    total: dict[int, tuple[int, float]] = field(default_factory=dict)

    def note(self, event: ev.Event) -> None:
        if isinstance(event, ev.Created | ev.Branched | ev.Forced | ev.Queued):
            self.since[event.trace] = (event.step, time.monotonic())
        elif isinstance(event, ev.Admitted | ev.Pruned | ev.Evicted | ev.Cancelled) and event.trace in self.since:
            step, began = self.since.pop(event.trace)
            steps = event.waited_steps if isinstance(event, ev.Admitted) else event.step - step
            if steps > 0:  # else it got its blocks in the next step, as every trace at the start
                steps_before, seconds_before = self.total.get(event.trace, (0, 0.0))
                self.total[event.trace] = (steps_before + steps, seconds_before + time.monotonic() - began)

    def event(self, step: int) -> ev.Waited | None:
        """Returns the event for the end of the log; None if no trace waited."""
        if not self.total:
            return None
        traces = tuple(sorted(self.total))
        steps, seconds = zip(*(self.total[trace] for trace in traces), strict=True)
        return ev.Waited(step, traces, steps, seconds)

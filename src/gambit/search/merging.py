"""The parts of one search, which run on different engines, made one again: one tree, one log, one vote.

All parts count the same decode steps, so that the whole is what one engine would have recorded step by step. Whether it
has to stop is decided here at each step, from all of its traces: what a part has done beyond that step does not count.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from gambit import events as ev
from gambit.answers import Equivalent
from gambit.config.presets import SearchSettings
from gambit.config.trust import Doubt
from gambit.policies.base import Requirements
from gambit.policies.islands import Islands
from gambit.results.record import SearchRecord, voted
from gambit.results.result import SearchResult
from gambit.search.limits import CHECK_SECONDS, SearchLimits, is_over
from gambit.search.score_spread import DoubtWatch
from gambit.tree import LIVE, Trace, TraceState
from gambit.types import StopReason

Ended: TypeAlias = ev.Finished | ev.Pruned | ev.Evicted | ev.Cancelled
WHOLE = ev.RunStarted | ev.Sample | ev.Stopped | ev.Voted | ev.Waited | ev.VerifierTotals | ev.IslandsSplit
LOSS, SCORES, ENDS, DECISIONS = range(4)  # what an engine step brings, in this order


@dataclass(frozen=True, slots=True)
class PartNews:
    """What a part of a search has done since it was last heard of."""

    step: int  # up to which everything is told
    events: tuple[ev.Event, ...]
    is_over: bool = False
    error: str | None = None  # what ended it
    is_engines: bool = False  # its engine is gone, and with it whatever was not told


@dataclass(slots=True, eq=False)
class _PartLog:
    """What is known of one part, and how much of it is merged."""

    coming: deque[ev.Event] = field(default_factory=deque)
    ids: dict[int, int] = field(default_factory=dict)  # its traces' -> the whole's
    step: int = -1
    is_over: bool = False
    sample: ev.Sample | None = None
    stopped: ev.Stopped | None = None
    waited: ev.Waited | None = None
    verified: ev.VerifierTotals | None = None

    def take(self, step: int) -> list[ev.Event]:
        """What it did until the end of a step."""
        found = []
        while self.coming and _step_of(self.coming[0]) <= step:
            found.append(self.coming.popleft())
        return found

    def own_tokens(self, trace: int) -> tuple[int, ...]:
        """Of a trace that was live at the last merged step; nothing where its engine did not live to tell."""
        ends = (event for event in self.coming if isinstance(event, Ended) and event.trace == trace)
        return next((event.tokens for event in ends), ())

    @property
    def was_called_off(self) -> bool:
        return self.stopped is not None and self.stopped.reason in (StopReason.INTERRUPTED, StopReason.FAILED)


class MergedSearch:
    """A search whose parts run elsewhere. Calls come from one thread."""

    def __init__(
        self,
        started: ev.RunStarted,
        settings: SearchSettings,
        requirements: Requirements,
        num_parts: int,
        on_event: Callable[[ev.Event], None],
        equivalent_until: Callable[[float], Equivalent],
        watch: Doubt | None = None,
    ) -> None:
        """`watch`: what one engine would divide the islands for, which those on several can only be told about."""
        self.record = SearchRecord(started)
        self.limits = SearchLimits(settings, Islands.of(settings), self.record.tree)
        self.due: StopReason | None = None  # at the last merged step
        self._settings = settings
        self._requirements = requirements
        self._parts = [_PartLog() for _ in range(num_parts)]
        self._on_event = on_event
        self._equivalent_until = equivalent_until
        self._watch = None if watch is None or num_parts == 1 else DoubtWatch(watch, settings)
        self._step = -1
        self._num_generated = 0
        self._spans = _RunningSpans()

    def begin(self) -> None:
        self.limits.start_clock()
        self._on_event(self.record.started)

    def take(self, part: int, news: PartNews) -> None:
        log = self._parts[part]
        log.coming.extend(news.events)
        log.step, log.is_over = max(log.step, news.step), log.is_over or news.is_over

    @property
    def is_over(self) -> bool:
        """Whether all parts have ended."""
        return all(part.is_over for part in self._parts)

    @property
    def allowed_step(self) -> int | None:
        """Up to which step parts may go without passing the token budget, whatever their traces do; None: any."""
        budget = self._settings.budget_tokens
        if budget is None:
            return None
        sure = (budget - self._num_generated) // self._settings.capacity
        # The next step is within the budget even if more of its places were taken: otherwise the search were due.
        return max(self._step, 0) + max(sure, int(self._step >= 0))

    def advance(self) -> None:
        """Merge the steps that all parts have done, up to the one at which the search is due to stop."""
        while self.due is None and self._step < self._last_common_step():
            self._step += 1
            self._merge(self._step)

    def _last_common_step(self) -> int:
        going = [part.step for part in self._parts if not part.is_over]
        return min(going) if going else max(part.step for part in self._parts)

    # -- one step ----------------------------------------------------------------------------------------------

    def _merge(self, step: int) -> None:
        late, lost, scored, rest = self._sorted(step)
        for part, event in (*late, *lost):
            self._apply(part, event, first_token=step)
        self._num_generated += self.record.tree.count(TraceState.RUNNING)
        if scored:
            self._emit(_joined([self._renamed(part, event) for part, event in scored]))
        for part, event in rest:
            self._apply(part, event, first_token=step + 1)
        has_finished = any(isinstance(event, ev.Finished) for _, event in rest)
        if any(part.sample is not None and part.sample.step == step for part in self._parts):
            self._emit(self._sample(step))
        self.due = self._due_reason(has_finished)

    def _sorted(self, step: int) -> tuple[list[tuple[_PartLog, ev.Event]], ...]:
        """Events of all parts: late ones of earlier steps, memory lost and found, scores, everything else.

        Each part's own order is kept; among parts, as on one engine, lower islands come first.
        """
        groups: tuple[list[tuple[int, _PartLog, ev.Event]], ...] = ([], [], [], [])
        for part in self._parts:
            phase = LOSS
            for event in part.take(step):
                if _step_of(event) < step:
                    groups[0].append((0, part, event))
                    continue
                phase = max(phase, _phase_of(event))
                groups[min(phase, ENDS) + 1].append((phase, part, event))
        return tuple([(part, event) for _, part, event in sorted(group, key=_by_phase)] for group in groups)

    def _apply(self, part: _PartLog, event: ev.Event, *, first_token: int) -> None:
        """`first_token`: the step in which a trace that is admitted now says something."""
        if isinstance(event, ev.Sample):
            part.sample = event
        elif isinstance(event, ev.Stopped):
            part.stopped = event
        elif isinstance(event, ev.Waited):
            part.waited = event
        elif isinstance(event, ev.VerifierTotals):
            part.verified = event
        elif isinstance(event, ev.IslandsSplit):
            assert len(self._parts) == 1, "islands that are divided among engines stay as they are"
            self.limits.islands = dataclasses.replace(self.limits.islands, count=event.islands)
            self._emit(event)
        elif not isinstance(event, ev.RunStarted):
            renamed = self._renamed(part, event)
            self._spans.note(renamed, first_token)
            self._emit(renamed)

    def _renamed(self, part: _PartLog, event: ev.Event) -> ev.Event:
        """With the traces' numbers in the whole search."""
        if isinstance(event, ev.Created | ev.Branched):
            part.ids[event.trace] = len(self.record.tree.traces)
        if isinstance(event, ev.Scored | ev.Verified):
            return dataclasses.replace(event, traces=tuple(part.ids[trace] for trace in event.traces))
        assert not isinstance(event, WHOLE)
        if isinstance(event, ev.Branched):
            event = dataclasses.replace(event, parent=part.ids[event.parent])
        return dataclasses.replace(event, trace=part.ids[event.trace])

    @property
    def doubt(self) -> str | None:
        """Why, on one engine, the search would have gone on with smaller islands."""
        return None if self._watch is None else self._watch.finding

    def _emit(self, event: ev.Event) -> None:
        self.record.apply(event)
        if self._watch is not None:
            self._watch.note(event, self.record.tree)
        self._on_event(event)

    def _due_reason(self, has_finished: bool) -> StopReason | None:
        if any(part.was_called_off for part in self._parts):
            return None  # it ends for a reason that is not in its traces
        consensus, is_settled = self._settings.consensus, False
        if has_finished and consensus is not None:
            equivalent = self._equivalent_until(time.monotonic() + CHECK_SECONDS)
            is_settled = is_over(
                consensus, self.record, self._requirements, equivalent, is_probability=self._settings.is_probability
            )
        return self.limits.reason_in_pool(self._num_generated, is_settled=is_settled)

    def _sample(self, step: int) -> ev.Sample:
        """Engines work side by side: their memory adds up, and the times are those of the one that took longest."""
        tree = self.record.tree
        samples = [part.sample for part in self._parts if part.sample is not None]
        slowest = max(samples, key=lambda sample: sample.seconds_total)
        return dataclasses.replace(
            slowest,
            step=step,
            running=tree.count(TraceState.RUNNING),
            waiting=tree.count(TraceState.WAITING),
            ghosts=tree.count(TraceState.GHOST),
            completed=tree.count(TraceState.FINISHED),
            generated=self._num_generated,
            kv_used_tokens=sum(sample.kv_used_tokens for sample in samples),
            kv_capacity_tokens=sum(sample.kv_capacity_tokens for sample in samples),
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self, reason: StopReason | None, error: str | None = None) -> SearchResult:
        """End the log and take the vote, once all parts are over.

        `reason`: why they were called off, if they were for something that is not in their traces.
        """
        assert self.is_over
        self.advance()
        self._cancel_live()
        if any(part.sample is not None for part in self._parts):
            self._emit(dataclasses.replace(self._sample(max(self._step, 0)), seconds_total=self.limits.seconds))
        self._note_rest()
        if (waited := self._waited()) is not None:
            self._emit(waited)
        self._emit(ev.Stopped(max(self._step, 0), self.due or reason or self._reason_of_parts()))
        self._finish_verification()
        vote = self.record.vote(self._equivalent_until(self.limits.vote_deadline))
        self._emit(voted(vote))
        return dataclasses.replace(self.record.result(vote), error=error)

    def _reason_of_parts(self) -> StopReason:
        """Of a policy that ended its own part, which then is the only one."""
        return next((part.stopped.reason for part in self._parts if part.stopped is not None), StopReason.FAILED)

    def _cancel_live(self) -> None:
        """What ran on until its part heard of the end is cut to what it had said by then."""
        tree, owner = self.record.tree, self._owners()
        for trace in sorted((t for state in LIVE for t in tree.in_state(state)), key=lambda trace: trace.id):
            part, own_id = owner[trace.id]
            tokens = part.own_tokens(own_id)[: self._spans.num_tokens(trace, self._step)]
            self._emit(ev.Cancelled(self._step, trace.id, tokens))

    def _owners(self) -> dict[int, tuple[_PartLog, int]]:
        return {whole: (part, own) for part in self._parts for own, whole in part.ids.items()}

    def _note_rest(self) -> None:
        """Of what came after the end: how long traces waited, what the verifier cost."""
        for part in self._parts:
            for event in part.coming:
                if isinstance(event, ev.Waited):
                    part.waited = event
                elif isinstance(event, ev.VerifierTotals):
                    part.verified = event

    def _waited(self) -> ev.Waited | None:
        rows = sorted(
            (part.ids[trace], steps, seconds)
            for part in self._parts
            if (w := part.waited) is not None
            for trace, steps, seconds in zip(w.traces, w.steps, w.seconds, strict=True)
            if trace in part.ids
        )
        return ev.Waited(self._step, *zip(*rows, strict=True)) if rows else None

    def _finish_verification(self) -> None:
        """Scores of completed traces that came after the end, for the vote, and what all verifiers did together."""
        for part in self._parts:
            for event in part.coming:
                if isinstance(event, ev.Verified) and (late := self._of_completed(part, event)) is not None:
                    self._emit(late)
        totals = [part.verified for part in self._parts if part.verified is not None]
        if totals:
            self._emit(_sum_of(totals, max(self._step, 0)))

    def _of_completed(self, part: _PartLog, event: ev.Verified) -> ev.Verified | None:
        traces = self.record.tree.traces
        columns = (event.traces, event.scores, event.num_tokens, event.ended_steps, event.engine_scores)
        rows = [
            (part.ids[trace], *rest)
            for trace, *rest in zip(*columns, strict=True)
            if trace in part.ids and traces[part.ids[trace]].state is TraceState.FINISHED
        ]
        return ev.Verified(max(self._step, 0), *zip(*rows, strict=True)) if rows else None


class _RunningSpans:
    """How many tokens of its own each live trace has: one for every step in which it runs."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}  # before it lost its memory
        self._since: dict[int, int] = {}

    def note(self, event: ev.Event, first_token: int) -> None:
        if isinstance(event, ev.Admitted):
            self._since[event.trace] = first_token
        elif isinstance(event, ev.Queued):
            self._said[event.trace] = self._said.get(event.trace, 0) + first_token - self._since.pop(event.trace)
        elif isinstance(event, Ended):
            self._since.pop(event.trace, None)
            self._said.pop(event.trace, None)

    def num_tokens(self, trace: Trace, step: int) -> int:
        """At the end of a step."""
        said = self._said.get(trace.id, 0)
        return said + step + 1 - self._since[trace.id] if trace.id in self._since else said


def _step_of(event: ev.Event) -> int:
    """The header comes before everything."""
    return -1 if isinstance(event, ev.RunStarted | ev.Voted) else event.step


def _phase_of(event: ev.Event) -> int:
    is_pressure = isinstance(event, ev.Evicted | ev.Pruned) and event.reason == "pressure"
    if is_pressure or isinstance(event, ev.Queued | ev.Admitted):
        return LOSS
    if isinstance(event, ev.Scored):
        return SCORES
    return ENDS if isinstance(event, ev.Finished) else DECISIONS


def _by_phase(entry: tuple[int, _PartLog, ev.Event]) -> int:
    return entry[0]


def _joined(scored: Sequence[ev.Event]) -> ev.Scored:
    """The thoughts of one step, whichever engines they ended on."""
    events = [event for event in scored if isinstance(event, ev.Scored)]
    return ev.Scored(
        events[0].step,
        tuple(chain.from_iterable(event.traces for event in events)),
        tuple(chain.from_iterable(event.scores for event in events)),
        tuple(chain.from_iterable(event.num_tokens for event in events)),
    )


def _sum_of(totals: Sequence[ev.VerifierTotals], step: int) -> ev.VerifierTotals:
    """Verifiers work side by side: their work adds up, and the search stood still as long as the slowest part."""
    return dataclasses.replace(
        totals[0],
        step=step,
        thoughts=sum(each.thoughts for each in totals),
        needed=sum(each.needed for each in totals),
        in_time=sum(each.in_time for each in totals),
        tokens=sum(each.tokens for each in totals),
        seconds=sum(each.seconds for each in totals),
        seconds_waited=max(each.seconds_waited for each in totals),
        seconds_for_vote=max(each.seconds_for_vote for each in totals),
        lost=next((each.lost for each in totals if each.lost), None),
    )

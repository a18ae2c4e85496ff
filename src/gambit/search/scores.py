"""The scores that a search goes by: those of its engine's own scorer, or those of a verifier while it has one."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from gambit import events as ev
from gambit.engines.base import Engine
from gambit.errors import EngineError
from gambit.tree import Trace, TraceState, TraceTree
from gambit.types import EndReason, RunningScore, SearchStep, ThoughtScore, TraceEnd, TraceKey
from gambit.verifiers.base import Question, ReadingKey, ThoughtReading, TimedScore, VerifierThread


class Scores:
    """The scores of the engine's own scorer. Each counts from the step on in which its thought ends."""

    seconds_waited = 0.0  # for which the search stood still
    are_late = False  # they come after the thoughts they are of, and have to be collected

    @property
    def have_come(self) -> bool:
        """True if they can be collected without waiting."""
        return True

    @property
    def are_owed_to_votes(self) -> bool:
        """True while the score of a complete trace is not recorded."""
        return False

    def note(self, step: SearchStep, at: int) -> Sequence[ThoughtScore]:
        """Takes in an engine step that is not recorded yet; returns the thoughts whose scores count with it."""
        return step.scored

    def branch(self, child: int, parent: Trace, inherited: int) -> tuple[RunningScore, float | None]:
        """Returns what the engine is to know of a child: its own scorer's scores, and the one to evict it by."""
        return parent.score, None

    def collect(self, at: int, deadline: float, *, with_latest: bool = False) -> None:
        """Records the late scores that count from now on, and waits for them until a deadline."""

    def finish(self, at: int, deadline: float, *, are_wanted: bool) -> EngineError | None:
        """Records the last scores, for the vote, and what they cost.

        A failure is returned and not raised: the vote is taken all the same, so that the log has its end.
        """
        return None


@dataclass(frozen=True, slots=True)
class VerifierUse:
    """A verifier and how a search uses it."""

    thread: VerifierThread
    question: Question
    decode: Callable[[Sequence[int]], str]
    lag: int = 0  # steps that a thought's score may take until a tournament goes by it
    is_async: bool = False  # nothing waits for it
    is_optional: bool = False  # when it fails, the engine's own scores are taken
    only_ends: bool = False  # no score counts before the vote, and there the last one of a trace is all


@dataclass(slots=True)
class _Lineage:
    """A trace as its verifier knows it: up to the end of its last thought."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    engine_scores: list[float] = field(default_factory=list)

    def cut(self, num_tokens: int) -> "_Lineage":
        """Returns the part that a child inherits."""
        count = sum(end <= num_tokens for end in self.ends)
        length = self.ends[count - 1] if count else 0
        return _Lineage(self.tokens[:length], self.ends[:count], self.thoughts[:count], self.engine_scores[:count])


@dataclass(slots=True, eq=False)
class _Awaited:
    """A thought whose score is not recorded yet."""

    trace: int
    num_tokens: int
    ended_step: int
    engine_score: float | None  # None for the text after the last thought
    score: Future[TimedScore]
    was_needed: bool = False  # a tournament was due to go by it


class VerifierScores(Scores):
    """The scores of a verifier, recorded in the order of the thoughts.

    Thoughts are sent to it as they end, so that it reads while the engine decodes. Their scores are recorded at moments
    that the seed decides, whenever they came. Only those of an asynchronous verifier are recorded as they happen to be
    there. The lag is there because the engine stands still, with all its searches, while one of them waits. After the
    failure of an optional verifier, the engine's own scores count.
    """

    are_late = True

    def __init__(
        self, use: VerifierUse, engine: Engine, search: int, tree: TraceTree, emit: Callable[[ev.Event], None]
    ) -> None:
        self._use = use
        self._engine = engine
        self._search = search
        self._tree = tree
        self._emit = emit
        self._lost: str | None = None  # why the verifier was given up
        self._lineages: defaultdict[int, _Lineage] = defaultdict(_Lineage)
        self._awaited: list[_Awaited] = []
        self._readings: list[Future[TimedScore]] = []  # all that were sent
        self._num_thoughts = self._num_needed = self._num_in_time = 0

    @property
    def have_come(self) -> bool:
        return all(each.score.done() for each in self._awaited)

    @property
    def are_owed_to_votes(self) -> bool:
        return any(self._tree.traces[each.trace].state is TraceState.FINISHED for each in self._awaited)

    # -- thoughts end, traces branch ---------------------------------------------------------------------------

    def note(self, step: SearchStep, at: int) -> Sequence[ThoughtScore]:
        ended = {done.trace: done.tokens for done in step.finished}
        for thought in step.scored:
            self._lineages[thought.trace].engine_scores.append(thought.score)
            self._extend(thought.trace, thought.num_tokens, ended.get(thought.trace))
            if self._lost is None and not self._use.only_ends:
                self._send(thought.trace, at, thought.score)
        if self._lost is not None:
            going = [thought for thought in step.scored if thought.trace not in ended]
            self._set_scores({each.trace: self._tree.traces[each.trace].score.add(each.score) for each in going})
            return step.scored
        for done in step.finished:
            if done.reason is not EndReason.CONFIDENCE:  # stopped in the middle: it has no vote
                self._send_end(done, at)
        return ()

    def branch(self, child: int, parent: Trace, inherited: int) -> tuple[RunningScore, float | None]:
        """Copies the parent's thoughts to a child, also those whose scores are still to come."""
        lineage = self._lineages[child] = self._lineages[parent.id].cut(inherited)
        self._awaited += [
            _Awaited(child, each.num_tokens, each.ended_step, each.engine_score, each.score)
            for each in self._awaited
            if each.trace == parent.id and each.num_tokens <= inherited
        ]
        return reduce(RunningScore.add, lineage.engine_scores, RunningScore()), self._tree.score_of(parent)

    def _extend(self, trace: int, num_tokens: int, tokens: Sequence[int] | None) -> None:
        """Adds the thought that ends at a length; `tokens` are all of a trace that has ended."""
        lineage = self._lineages[trace]
        lineage.ends.append(num_tokens)
        if self._lost is not None:
            return
        start = len(lineage.tokens)
        new = self._engine.tokens(TraceKey(self._search, trace), start) if tokens is None else tokens[start:]
        added = [int(token) for token in new[: num_tokens - start]]
        lineage.tokens += added
        lineage.thoughts.append(self._use.decode(added))

    def _send(self, trace: int, at: int, engine_score: float | None) -> None:
        lineage = self._lineages[trace]
        key = ReadingKey(self._search, trace, len(lineage.tokens))
        text = tuple(lineage.tokens), tuple(lineage.ends), tuple(lineage.thoughts)
        score = self._use.thread.submit(ThoughtReading(key, self._use.question, *text))
        self._readings.append(score)
        self._awaited.append(_Awaited(trace, key.num_tokens, at, engine_score, score))

    def _send_end(self, done: TraceEnd, at: int) -> None:
        """Sends the text of a trace after its last thought, in most cases its answer."""
        tokens = done.tokens[:-1] if done.reason is EndReason.STOP else done.tokens
        lineage = self._lineages[done.trace]
        rest = tokens[len(lineage.tokens) :]
        if rest and self._use.decode(rest).strip():
            self._extend(done.trace, len(tokens), tokens)
            self._send(done.trace, at, None)
        elif self._use.only_ends and lineage.ends:
            self._send(done.trace, at, None)

    # -- scores come -------------------------------------------------------------------------------------------

    def collect(self, at: int, deadline: float, *, with_latest: bool = False) -> None:
        """Records the scores that count from now on; waits for them, unless the verifier is asynchronous.

        `with_latest`: also of thoughts within the lag, and of those that count in the vote alone.
        """
        if self._lost is not None:
            return
        self._drop_unwanted()
        last_step = at if with_latest or self._use.is_async else at - self._use.lag
        due = [each for each in self._awaited if each.ended_step <= last_step]
        for each in due:
            self._num_needed += not each.was_needed
            self._num_in_time += not each.was_needed and each.score.done()
            each.was_needed = True
        if not self._use.is_async:
            self._wait(due, deadline)
        self._record(at, due)

    def finish(self, at: int, deadline: float, *, are_wanted: bool) -> EngineError | None:
        before, failure = self.seconds_waited, None
        try:
            if are_wanted and self._lost is None:
                self._drop_unwanted()
                self._wait(self._awaited, deadline)
                self._record(at, self._awaited)
        except EngineError as error:
            failure = error
        self._emit(self._totals(at, self.seconds_waited - before))
        return failure

    def _totals(self, at: int, seconds_for_vote: float) -> ev.VerifierTotals:
        """Sums up the cost of the verifier, also of scores that came after their traces had gone."""
        done = [score for score in self._readings if score.done() and not score.cancelled()]
        costs = [score.result() for score in done if score.exception() is None]
        num_tokens, seconds = sum(cost.num_tokens for cost in costs), math.fsum(cost.seconds for cost in costs)
        return ev.VerifierTotals(
            at, self._use.thread.info.name, self._num_thoughts, self._num_needed, self._num_in_time, num_tokens,
            seconds, self.seconds_waited, seconds_for_vote, self._use.is_async, self._lost,
        )  # fmt: skip

    def _drop_unwanted(self) -> None:
        """Forgets thoughts of traces that are gone and have no vote."""
        kept = [each for each in self._awaited if _is_wanted(self._tree.traces[each.trace])]
        wanted = {each.score for each in kept}  # a child may wait for a score of its parent
        for each in self._awaited:
            if each.score not in wanted:
                each.score.cancel()
        self._awaited = kept
        for trace in [trace for trace in self._lineages if not self._tree.traces[trace].is_active]:
            del self._lineages[trace]

    def _wait(self, due: Sequence[_Awaited], deadline: float) -> None:
        began = time.monotonic()
        left = None if deadline == math.inf else max(deadline - began, 0.0)
        wait_for([each.score for each in due], left)
        self.seconds_waited += time.monotonic() - began

    def _record(self, at: int, due: Sequence[_Awaited]) -> None:
        done = self._take_done(due)
        failure = next((error for each in done if (error := each.score.exception()) is not None), None)
        if failure is not None:
            if not self._use.is_optional:
                raise EngineError(f"{failure}; --verifier-optional lets a search go on without it") from failure
            self._lost, self.are_late = str(failure), False
            done, self._awaited = [*done, *self._awaited], []
        rows: list[tuple[Any, ...]] = [
            (each.trace, score, each.num_tokens, each.ended_step, each.engine_score)
            for each in done
            if (score := self._score_of(each)) is not None
        ]
        if rows:
            event = ev.Verified(at, *zip(*rows, strict=True))
            self._emit(event)
            traces = [self._tree.traces[trace] for trace in set(event.traces)]
            self._set_scores({trace.id: trace.score for trace in traces if trace.is_live})

    def _take_done(self, due: Sequence[_Awaited]) -> list[_Awaited]:
        """Takes out what has arrived; of one trace nothing before the thoughts that ended earlier."""
        done: list[_Awaited] = []
        blocked: set[int] = set()
        for each in due:
            if each.score.done() and each.trace not in blocked:
                done.append(each)
            else:
                blocked.add(each.trace)
        taken = set(done)
        self._awaited = [each for each in self._awaited if each not in taken]
        return done

    def _score_of(self, each: _Awaited) -> float | None:
        """Returns the verifier's score, or the engine's if there is none to come."""
        if not each.score.done() or each.score.exception() is not None:
            return each.engine_score
        found = each.score.result()
        self._num_thoughts += found.score is not None
        return found.score

    def _set_scores(self, scores: Mapping[int, RunningScore]) -> None:
        """Sends the engine the scores to evict live traces by."""
        values = {trace: score.value(self._tree.aggregation) for trace, score in scores.items()}
        known = {TraceKey(self._search, trace): value for trace, value in values.items() if value is not None}
        if known:
            self._engine.set_scores(known)


def _is_wanted(trace: Trace) -> bool:
    """Returns True if a trace is in the pool or votes: the others need no score any more."""
    return trace.is_active or trace.state is TraceState.FINISHED or trace.answer is not None

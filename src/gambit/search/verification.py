"""The verifier's part in one search: which thoughts it reads, and when scores count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from gambit import events as ev
from gambit.errors import EngineError
from gambit.scorers.readers.base import Question, ReadingKey, ThoughtReading
from gambit.scorers.readers.thread import ReaderThread, TimedScore
from gambit.tree import TraceState, TraceTree
from gambit.types import EndReason, RunningScore, SearchStep, TraceEnd


@dataclass(frozen=True, slots=True)
class VerifierUse:
    """A verifier and how a search uses it."""

    thread: ReaderThread
    question: Question
    decode: Callable[[Sequence[int]], str]
    lag: int = 0  # steps that a thought's score may take until a tournament goes by it
    is_async: bool = False  # nothing waits for it
    is_optional: bool = False  # when it fails, the engine's own scores are taken
    only_ends: bool = False  # nobody looks at a score before the vote, and there the last one of a trace is all


@dataclass(slots=True)
class _Lineage:
    """A trace as its verifier knows it: up to the end of its last thought."""

    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    engine_scores: list[float] = field(default_factory=list)
    last: ReadingKey | None = None

    def cut(self, num_tokens: int) -> _Lineage:
        """The part that a child inherits."""
        count = sum(end <= num_tokens for end in self.ends)
        length = self.ends[count - 1] if count else 0
        last = None if self.last is None or not count else self.last._replace(num_tokens=length)
        return _Lineage(
            self.tokens[:length], self.ends[:count], self.thoughts[:count], self.engine_scores[:count], last
        )


@dataclass(slots=True, eq=False)
class _Awaited:
    """A thought whose score has not been recorded yet."""

    trace: int
    num_tokens: int
    ended_step: int
    engine_score: float | None  # None for what a trace said at its end
    score: Future[TimedScore]
    was_needed: bool = False  # a tournament has asked for it


class Verification:
    """Hands the thoughts of one search to its verifier and records the scores, in the order of the thoughts.

    Thoughts are handed over as they end, so that the verifier reads while the engine decodes. Their scores are recorded
    at moments that the seed decides, whenever they came; only an asynchronous one records what happens to be there.
    The engine stands still while one of its searches waits, and so do all others: hence the lag.
    """

    def __init__(
        self,
        use: VerifierUse,
        search: int,
        tree: TraceTree,
        tokens_of: Callable[[int, int], Sequence[int]],
    ) -> None:
        self.lost: str | None = None  # why the verifier was given up
        self.seconds_waited = 0.0
        self._use = use
        self._search = search
        self._tree = tree
        self._tokens_of = tokens_of
        self._lineages: dict[int, _Lineage] = {}
        self._awaited: list[_Awaited] = []
        self._unused: list[Future[TimedScore]] = []  # of traces that went while they were being read
        self._counted: set[Future[TimedScore]] = set()
        self._num_thoughts = self._num_needed = self._num_in_time = 0
        self._num_tokens = 0
        self._seconds = 0.0
        self._seconds_for_vote = 0.0

    @property
    def is_given_up(self) -> bool:
        """Whether the engine's own scores count from now on."""
        return self.lost is not None

    @property
    def has_all(self) -> bool:
        """Whether every score has come, recorded or not."""
        return all(each.score.done() for each in self._awaited)

    @property
    def awaits_complete(self) -> bool:
        """Whether the score of a complete trace has not been recorded yet."""
        return any(self._tree.traces[each.trace].state is TraceState.FINISHED for each in self._awaited)

    # -- thoughts end, traces branch ---------------------------------------------------------------------------

    def note(self, step: SearchStep, at: int) -> None:
        """Take in the thoughts of an engine step that has been recorded."""
        ended = {done.trace: done.tokens for done in step.finished}
        for thought in step.scored:
            tokens = ended.get(thought.trace)
            self._extend(thought.trace, thought.num_tokens, tokens)
            self._lineage(thought.trace).engine_scores.append(thought.score)
            if not self._use.only_ends:
                self._hand_over(thought.trace, at, thought.score)
        for done in step.finished:
            if self._tree.traces[done.trace].state is TraceState.FINISHED:
                self._read_end(done, at)

    def branch(self, child: int, parent: int, inherited: int) -> None:
        """A child begins with its parent's thoughts, also those whose scores are still to come."""
        self._lineages[child] = self._lineage(parent).cut(inherited)
        self._awaited += [
            _Awaited(child, each.num_tokens, each.ended_step, each.engine_score, each.score)
            for each in self._awaited
            if each.trace == parent and each.num_tokens <= inherited
        ]

    def note_engine_scores(self, step: SearchStep) -> None:
        """Once the verifier is given up: the engine still wants to know of its own scores at a branch."""
        for thought in step.scored:
            lineage = self._lineage(thought.trace)
            lineage.ends.append(thought.num_tokens)
            lineage.engine_scores.append(thought.score)

    def engine_score(self, trace: int, num_tokens: int) -> RunningScore:
        """What the engine's own scorer made of the thoughts in a trace's first tokens."""
        lineage = self._lineage(trace)
        score = RunningScore()
        for end, each in zip(lineage.ends, lineage.engine_scores, strict=True):
            score = score.add(each) if end <= num_tokens else score
        return score

    def _lineage(self, trace: int) -> _Lineage:
        return self._lineages.setdefault(trace, _Lineage())

    def _extend(self, trace: int, num_tokens: int, tokens: Sequence[int] | None) -> None:
        """`tokens`: all of a trace that has ended."""
        lineage = self._lineage(trace)
        start = len(lineage.tokens)
        new = self._tokens_of(trace, start) if tokens is None else tokens[start:]
        added = [int(token) for token in new[: num_tokens - start]]
        lineage.tokens += added
        lineage.ends.append(num_tokens)
        lineage.thoughts.append(self._use.decode(added))

    def _hand_over(self, trace: int, at: int, engine_score: float | None) -> None:
        lineage = self._lineage(trace)
        key = ReadingKey(self._search, trace, len(lineage.tokens))
        reading = ThoughtReading(
            key,
            self._use.question,
            tuple(lineage.tokens),
            tuple(lineage.ends),
            tuple(lineage.thoughts),
            lineage.last,
        )
        lineage.last = key
        self._awaited.append(_Awaited(trace, key.num_tokens, at, engine_score, self._use.thread.submit(reading)))

    def _read_end(self, done: TraceEnd, at: int) -> None:
        """What a trace said after its last thought, its answer in most cases."""
        tokens = done.tokens[:-1] if done.reason is EndReason.STOP else done.tokens
        lineage = self._lineage(done.trace)
        rest = tokens[len(lineage.tokens) :]
        if rest and self._use.decode(rest).strip():
            self._extend(done.trace, len(tokens), tokens)
            self._hand_over(done.trace, at, None)
        elif self._use.only_ends and lineage.ends:
            self._hand_over(done.trace, at, None)

    # -- scores come -------------------------------------------------------------------------------------------

    def collect(self, at: int, deadline: float, *, with_latest: bool = False) -> ev.Verified | None:
        """The scores that count from now on. Waits for all of them until a deadline, unless it is asynchronous.

        `with_latest`: also of what has only just ended, and of what counts in the vote alone.
        """
        self._drop_unwanted()
        due = self._awaited if with_latest else self._due(at)
        self._count_in_time(due)
        if not self._use.is_async:
            self._wait(due, deadline)
        return self._verified(at, due)

    def finish(self, at: int, deadline: float) -> ev.Verified | None:
        """The last scores, for the vote: of completed traces, and these are waited for in any case."""
        before = self.seconds_waited
        self._drop_unwanted()
        self._wait(self._awaited, deadline)
        self._seconds_for_vote = self.seconds_waited - before
        return self._verified(at, self._awaited)

    def event(self, at: int) -> ev.VerifierTotals:
        """What it cost, also for scores that came after the traces they were for had gone."""
        for score in self._unused:
            if score.done() and score.exception() is None:
                self._count_cost(score)
        return ev.VerifierTotals(
            at,
            self._use.thread.info.name,
            self._num_thoughts,
            self._num_needed,
            self._num_in_time,
            self._num_tokens,
            self._seconds,
            self.seconds_waited,
            self._seconds_for_vote,
            self._use.is_async,
            self.lost,
        )

    def _is_wanted(self, trace: int) -> bool:
        """A trace that is gone and has no vote needs no score."""
        found = self._tree.traces[trace]
        return found.is_active or found.state is TraceState.FINISHED or found.answer is not None

    def _drop_unwanted(self) -> None:
        kept = [each for each in self._awaited if self._is_wanted(each.trace)]
        wanted = {id(each.score) for each in kept}  # a child may wait for what its parent was to get
        for each in self._awaited:
            if id(each.score) not in wanted and not each.score.cancel():
                self._unused.append(each.score)
        self._awaited = kept
        self._lineages = {trace: each for trace, each in self._lineages.items() if self._tree.traces[trace].is_active}

    def _due(self, at: int) -> list[_Awaited]:
        """What a tournament goes by."""
        last_step = at if self._use.is_async else at - self._use.lag
        return [each for each in self._awaited if each.ended_step <= last_step]

    def _count_in_time(self, due: Sequence[_Awaited]) -> None:
        for each in due:
            self._num_needed += not each.was_needed
            self._num_in_time += not each.was_needed and each.score.done()
            each.was_needed = True

    def _wait(self, due: Sequence[_Awaited], deadline: float) -> None:
        began = time.monotonic()
        left = None if deadline == math.inf else max(deadline - began, 0.0)
        wait_for([each.score for each in due], left)
        self.seconds_waited += time.monotonic() - began

    def _verified(self, at: int, due: Sequence[_Awaited]) -> ev.Verified | None:
        done = self._take_done(due)
        failure = next((error for each in done if (error := each.score.exception()) is not None), None)
        if failure is not None:
            self._give_up(failure)
            done, self._awaited = [*done, *self._awaited], []
        rows = [
            (each.trace, score, each.num_tokens, each.ended_step, each.engine_score)
            for each in done
            if (score := self._score_of(each)) is not None
        ]
        return ev.Verified(at, *zip(*rows, strict=True)) if rows else None

    def _take_done(self, due: Sequence[_Awaited]) -> list[_Awaited]:
        """Those that have arrived; of one trace none before the ones that ended earlier."""
        done: list[_Awaited] = []
        blocked: set[int] = set()
        for each in due:
            if each.score.done() and each.trace not in blocked:
                done.append(each)
            else:
                blocked.add(each.trace)
        taken = set(map(id, done))
        self._awaited = [each for each in self._awaited if id(each) not in taken]
        return done

    def _give_up(self, failure: BaseException) -> None:
        if not self._use.is_optional:
            raise EngineError(f"{failure}; --verifier-optional lets a search go on without it") from failure
        self.lost = str(failure)

    def _score_of(self, each: _Awaited) -> float | None:
        """The verifier's, or the engine's where there is none to come."""
        if not each.score.done() or each.score.exception() is not None:
            return each.engine_score
        found = each.score.result()
        self._num_thoughts += found.score is not None
        self._count_cost(each.score)
        return found.score

    def _count_cost(self, score: Future[TimedScore]) -> None:
        """Once, though a child may have what its parent has."""
        if score not in self._counted:
            self._counted.add(score)
            self._num_tokens += score.result().num_tokens
            self._seconds += score.result().seconds

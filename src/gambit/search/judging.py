"""Whose scores a search records: the engine's own, or those of its verifier for as long as it has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gambit.engines.base import Engine
from gambit.errors import EngineError
from gambit.search.recorder import Recorder
from gambit.search.verification import Verification
from gambit.tree import Trace
from gambit.types import RunningScore, SearchStep, TraceKey


class TraceJudge:
    """Records steps with the scores that count, and tells the engine of a verifier's."""

    def __init__(self, engine: Engine, search: int, recorder: Recorder, verification: Verification | None) -> None:
        self._engine = engine
        self._search = search
        self._recorder = recorder
        self._tree = recorder.record.tree
        self._verification = verification

    @property
    def has_verifier(self) -> bool:
        """Whether scores are still to come from one."""
        return self._verification is not None and not self._verification.is_given_up

    @property
    def has_all_scores(self) -> bool:
        """Whether nobody would have to wait for a verifier."""
        return self._verification is None or self._verification.has_all

    @property
    def awaits_votes(self) -> bool:
        """Whether the score of a trace that votes has not been recorded yet."""
        return self._verification is not None and self._verification.awaits_complete

    @property
    def seconds_waited(self) -> float:
        """For the verifier."""
        return 0.0 if self._verification is None else self._verification.seconds_waited

    def record(self, step: SearchStep, at: int) -> None:
        """With a verifier the engine's own scores are not recorded yet: they count only if it is given up."""
        verification = self._verification
        if verification is None:
            self._recorder.apply(step, at)
        elif not verification.is_given_up:
            self._recorder.apply(dataclasses.replace(step, scored=[]), at)
            verification.note(step, at)
        else:
            self._recorder.apply(step, at)
            verification.note_engine_scores(step)
            self._tell_ranks([thought.trace for thought in step.scored])

    def collect(self, at: int, deadline: float, *, with_latest: bool = False) -> None:
        """Record the verifier's scores that count from now on; waits for them until a deadline."""
        verification = self._verification
        if verification is None or verification.is_given_up:
            return
        if (judged := verification.collect(at, deadline, with_latest=with_latest)) is not None:
            self._recorder.judge(judged)
            self._tell_ranks(judged.traces)

    def finish(self, at: int, deadline: float, *, is_asked: bool) -> EngineError | None:
        """The last scores, for the vote, and what the verifier cost; `is_asked`: whether they are still wanted.

        A failure is given back: the vote is taken all the same, so that the log has its end.
        """
        verification = self._verification
        if verification is None:
            return None
        judged = failure = None
        try:
            judged = verification.finish(at, deadline) if is_asked and not verification.is_given_up else None
        except EngineError as error:
            failure = error
        if judged is not None:
            self._recorder.judge(judged)
        self._recorder.emit(verification.event(at))
        return failure

    def branch(self, child: int, parent: int, inherited: int) -> None:
        if self._verification is not None:
            self._verification.branch(child, parent, inherited)

    def engine_score(self, parent: Trace, inherited: int) -> RunningScore:
        """What the engine knows of a parent's thoughts; it counts them."""
        return parent.score if self._verification is None else self._verification.engine_score(parent.id, inherited)

    def rank(self, trace: Trace) -> float | None:
        """What the engine is to evict a trace by; None: its own scores."""
        return None if self._verification is None else self._tree.score_of(trace)

    def _tell_ranks(self, traces: Iterable[int]) -> None:
        """The engine evicts by them."""
        tree = self._tree
        scores = {trace: tree.score_of(tree.traces[trace]) for trace in traces if tree.traces[trace].is_live}
        self._engine.set_scores({TraceKey(self._search, i): score for i, score in scores.items() if score is not None})

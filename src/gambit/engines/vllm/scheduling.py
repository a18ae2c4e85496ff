"""What Gambit's scheduler decides and reports, step by step; `compat/scheduler.py` puts it into vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from gambit.engines.base import SearchSpec
from gambit.engines.vllm.messages import (
    CloseSearch,
    Message,
    Regroup,
    SetScores,
    StepReport,
    ThoughtRows,
    TraceTask,
)
from gambit.engines.vllm.trace_table import BlocksFrom, StepOutput, TraceTable
from gambit.scorers.base import HistoryScorer, Scorer
from gambit.scorers.memory import Histories
from gambit.types import Admission, EndReason, Eviction, PressureAction, TraceEnd

FAILING_CHECK = 3  # self-check: after this many compared steps an allocation is made to fail


class TraceScheduling:
    """The traces of one engine: their admissions, scores, evictions and ends, and the report of the step under way."""

    def __init__(self, scorer: Scorer, num_blocks: int, block_tokens: int, *, is_async: bool) -> None:
        self.histories = RequestHistories(scorer.max_past) if isinstance(scorer, HistoryScorer) else None
        self.failing: str | None = None  # self-check: the next allocation of this request fails once
        self._table = TraceTable(scorer, num_blocks, block_tokens)
        self._is_async = is_async  # a step is scheduled before the tokens of the one before were read
        self._report = StepReport()
        self._scored: list[str] = []  # requests whose thoughts are in the report that was read last
        self._freed: list[str] = []
        self._num_steps = 0
        self._num_queued = 0
        self._num_compared = 0

    @property
    def has_begun(self) -> bool:
        return self._num_steps > 0

    # -- searches and requests come and go ---------------------------------------------------------------------

    def obey(self, message: Message) -> None:
        """Takes a message from the front that is about no new trace."""
        match message:
            case SearchSpec():
                self._table.open(message)
                if self.histories is not None and message.keeps_histories:
                    self.histories.keep(message.search)
            case CloseSearch(search):
                self._table.searches.pop(search, None)
                if self.histories is not None:
                    self.histories.close(search)
            case SetScores(scores):
                self._table.set_scores(scores)
            case Regroup(islands):
                self._table.regroup(islands)

    def add(self, request: str, task: TraceTask) -> None:
        self._table.add(request, task, self._num_steps)
        if self.histories is not None:
            self.histories.begin(request, task)

    def free(self, request: str) -> None:
        """vLLM has freed a request. It stays in the table for now: its last token is read later."""
        self._freed.append(request)
        if request in self._table.traces:
            self._table.traces[request].has_ended = True

    def release(self, requests: Sequence[str]) -> None:
        """Lets go of histories that the front no longer needs."""
        if self.histories is not None:
            self.histories.release(requests)

    def parent_of(self, request: str) -> str | None:
        return self._table.traces[request].task.parent

    # -- before and while a step is scheduled ------------------------------------------------------------------

    def begin_step(self) -> None:
        self._num_steps += 1
        self._forget_freed()
        if self.histories is not None:
            self.histories.forget_released()

    def admit(self, request: str, num_cached: int, num_tokens: int) -> None:
        """A request has got its blocks; both counts include the prompt."""
        trace = self._table.traces[request]
        if trace.is_running:
            return
        self._table.admit(trace)
        length = num_tokens - trace.task.prompt_tokens
        reused = min(max(num_cached - trace.task.prompt_tokens, 0), length)
        waited = max(self._num_steps - trace.waiting_since - 1, 0)
        self._report.of(trace.key.search).admitted.append(Admission(trace.key.trace, reused, length - reused, waited))

    def eviction_order(self, running: Iterable[str], blocks_from: BlocksFrom, missing_blocks: int) -> list[str]:
        return self._table.eviction_order(running, blocks_from, missing_blocks)

    def lose_blocks(self, requests: Iterable[str] | None = None) -> None:
        """The blocks of these are no longer what they were; None: of all."""
        self._table.lose_blocks(self._table.traces if requests is None else requests)

    def evict(self, request: str, *, is_last: bool) -> int | None:
        """Report the loss of a request's blocks; returns its priority in the queue, or None where it ends.

        `is_last`: nothing else runs. A trace that does not fit alone would be queued and evicted for ever.
        """
        trace = self._table.traces[request]
        action, step = self._table.action_on(trace), self._report.of(trace.key.search)
        if action is PressureAction.QUEUE and is_last:
            step.finished.append(TraceEnd(trace.key.trace, EndReason.MEMORY, (), self._table.confidence_of(request)))
            return None
        step.evicted.append(Eviction(trace.key.trace, action, self._table.score_of(trace), 0, ()))
        if action is not PressureAction.QUEUE:
            return None
        trace.is_running, trace.waiting_since = False, self._num_steps
        self._num_queued += 1
        return -self._num_queued  # ahead of everything that waits, the last queued first

    def rows_to_score(self, scheduled: list[str]) -> ThoughtRows | None:
        """For a scorer with histories: the rows of a step that may end a thought."""
        if self.histories is None:
            return None
        return self.histories.propose(self._table.may_end_thought(scheduled, knows_fed=not self._is_async))

    def add_seconds(self, seconds: float) -> None:
        self._report.seconds_scheduling += seconds

    # -- after a step ------------------------------------------------------------------------------------------

    def begin_report(self) -> StepReport:
        """What has happened since the last one; later events go into the next."""
        report, self._report = self._report, StepReport()
        return report

    def read(self, report: StepReport, output: StepOutput) -> list[str]:
        """Folds a step's output into the table and the report; returns the requests that their stop rules end."""
        report.rows, report.tokens = list(output.tokens), list(output.tokens.values())
        if output.values is not None:
            report.seconds_scoring, report.seconds_waiting = output.values.seconds, output.values.waited
            self._compare(report, output)
        self._scored, unconfident = [], []
        if report.rows:
            self._scored = self._table.read(report, output)
            unconfident = self._table.track_confidence(report, output)
        stopped = {request: EndReason.CONFIDENCE for request in unconfident if request not in output.ends}
        for request, reason in {**output.ends, **stopped}.items():
            key, confidence = self._table.traces[request].key, self._table.confidence_of(request)
            report.of(key.search).finished.append(TraceEnd(key.trace, reason, (), confidence))
        return list(stopped)

    def close(self, thoughts: ThoughtRows | None) -> None:
        """After the requests that `read` named were stopped. `thoughts`: what `rows_to_score` gave for the step."""
        if self.histories is not None and thoughts is not None:
            self.histories.settle(thoughts, self._scored)
        self._forget_freed()

    def _compare(self, report: StepReport, output: StepOutput) -> None:
        """Counts, in the self-check, the rows whose state does not make the token that was sampled for them."""
        if output.values is None or output.values.greedy is None:
            return
        report.checked = len(report.rows)
        expected = output.values.greedy[output.rows(report.rows)].astype(int)
        report.mismatches = int((expected != report.tokens).sum())
        self._num_compared += 1
        if self._num_compared == FAILING_CHECK:
            self.failing = report.rows[0]

    def _forget_freed(self) -> None:
        for request in self._freed:
            self._table.remove(request)
        self._freed.clear()


# -- histories -------------------------------------------------------------------------------------------------------


class RequestHistories:
    """Histories by request.

    The front may branch a trace that has ended here as long as it has not read of its end. So a history is kept until
    the front releases it by aborting the request, which it also does for one that ended by itself.
    """

    def __init__(self, max_past: int) -> None:
        self._histories: Histories[str] = Histories()
        self._max_past = max_past
        self._released: list[str] = []
        self._kept: dict[int, list[str]] = {}  # searches that keep histories until they are closed
        self._is_kept: set[str] = set()

    @property
    def num_used(self) -> int:
        return self._histories.num_used

    def begin(self, request: str, task: TraceTask) -> None:
        # A trace of the self-check has a score without a thought.
        self._histories.begin(request, task.history_of, 0 if task.is_check else task.spec.score.count)
        if (search := task.spec.key.search) in self._kept:
            self._kept[search].append(request)
            self._is_kept.add(request)

    def keep(self, search: int) -> None:
        """Keeps all histories of a search until it is closed."""
        self._kept[search] = []

    def close(self, search: int) -> None:
        kept = self._kept.pop(search, [])
        self._is_kept.difference_update(kept)
        self._released += kept

    def release(self, requests: Iterable[str]) -> None:
        """Takes effect with the next step: an abort overtakes branches that were sent before it."""
        self._released += [request for request in requests if request not in self._is_kept]

    def forget_released(self) -> None:
        """Before a step is scheduled: branches that were sent before the release have arrived by then."""
        for request in self._released:
            self._histories.end(request)
        self._released.clear()

    def propose(self, requests: Sequence[str]) -> ThoughtRows:
        """A slot for each row that may end a thought. Whether it does is known when the step is over."""
        return ThoughtRows(list(requests), self._histories.propose(requests, self._max_past))

    def settle(self, rows: ThoughtRows, scored: Collection[str]) -> None:
        """After a step: a thought that ended joins its trace's history, the other slots are free again.

        A step that was scheduled in between has not seen the new thought, and need not: two tokens in a row do not
        both end a thought.
        """
        own = rows.past.own
        kept = [row for row, request in enumerate(rows.requests) if request in scored and request in self._histories]
        self._histories.append([rows.requests[row] for row in kept], own[kept])
        self._histories.give_back(np.delete(own, kept))
        if missing := set(scored).difference(rows.requests):
            raise RuntimeError(f"thoughts of {sorted(missing)} were scored without a slot")

"""What Gambit's scheduler decides and reports, step by step; `compat/scheduler.py` puts it into vLLM's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gambit.engines.vllm.messages import Note, RowValues, StepReport, TraceTask, is_note, noted
from gambit.engines.vllm.trace_table import BlocksFrom, TraceTable
from gambit.scorers.base import HistoryScorer, Scorer
from gambit.scorers.memory import Histories, PastRows
from gambit.types import EndReason, PressureAction

FAILING_CHECK = 3  # self-check: after this many compared steps an allocation is made to fail


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step has computed, by request."""

    tokens: Mapping[str, int]  # in the order of scheduling
    finished: Sequence[tuple[str, str]]  # requests that vLLM ended, and why
    values: RowValues | None  # what the worker says about its rows
    row_of: Mapping[str, int]


class TraceScheduling:
    """The traces of one engine: their admissions, scores, evictions and ends, and the report of the step under way."""

    def __init__(self, scorer: Scorer, num_blocks: int, block_tokens: int, *, is_async: bool) -> None:
        self.histories = RequestHistories(scorer.max_past) if isinstance(scorer, HistoryScorer) else None
        self.failing: str | None = None  # self-check: the next allocation of this request fails once
        self._table = TraceTable(scorer, num_blocks, block_tokens)
        self._is_async = is_async  # a step is scheduled before the tokens of the one before were read
        self._report = StepReport()
        self._freed: list[str] = []
        self._num_steps = 0
        self._num_queued = 0
        self._num_compared = 0

    @property
    def has_begun(self) -> bool:
        return self._num_steps > 0

    # -- requests come and go ----------------------------------------------------------------------------------

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
        """The front needs no history of these any more, or tells something of others."""
        self._table.set_scores(noted(Note.SCORES, requests))
        self._table.regroup(noted(Note.ISLANDS, requests))
        if self.histories is not None:
            self.histories.release(name for name in requests if not is_note(name))

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
        self._report.admitted.append((request, reused, length - reused, waited))

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
        action = self._table.action_on(trace)
        if action is PressureAction.QUEUE and is_last:
            self._report.finished.append((request, EndReason.MEMORY.value, None))
            return None
        self._report.evicted.append((request, action.value, self._table.score_of(trace)))
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
        """Fold a step's output into the table and the report; returns the requests that their stop rules end."""
        report.rows, report.tokens = list(output.tokens), list(output.tokens.values())
        values = output.values
        if values is not None:
            report.seconds_scoring, report.seconds_waiting = values.seconds, values.waited
            self._compare(report, values, output.row_of)
        stopped: list[str] = []
        if report.rows:
            self._table.read(report, values, output.row_of)
            stopped = self._table.track_confidence(report, values, output.row_of)
        return self._end(report, output.finished, stopped)

    def close(self, report: StepReport, thoughts: ThoughtRows | None) -> None:
        """After the requests that `read` named were stopped. `thoughts`: what `rows_to_score` gave for the step."""
        if self.histories is not None and thoughts is not None:
            self.histories.settle(thoughts, {request for request, *_ in report.scored})
        self._forget_freed()

    def _end(self, report: StepReport, finished: Sequence[tuple[str, str]], stopped: list[str]) -> list[str]:
        ends = {request: reason for request, reason, _ in report.finished} | dict(finished)
        stopped = [request for request in stopped if request not in ends]
        ends |= dict.fromkeys(stopped, EndReason.CONFIDENCE.value)
        report.finished = [(request, reason, self._table.confidence_of(request)) for request, reason in ends.items()]
        return stopped

    def _compare(self, report: StepReport, values: RowValues, row_of: Mapping[str, int]) -> None:
        """Self-check: the state of a row makes the token that was sampled for that row."""
        if values.greedy is None:
            return
        report.checked = len(report.rows)
        for request, token in zip(report.rows, report.tokens, strict=True):
            report.mismatches += int(values.greedy[row_of[request]]) != token
        self._num_compared += 1
        if self._num_compared == FAILING_CHECK:
            self.failing = report.rows[0]

    def _forget_freed(self) -> None:
        for request in self._freed:
            self._table.remove(request)
        self._freed.clear()


# -- histories -------------------------------------------------------------------------------------------------------


_CLOSED = "closed search "


def closing_id(search: int) -> str:
    """The id that the front aborts to say that a search is closed: only requests and aborts reach the scheduler."""
    return f"{_CLOSED}{search}"


@dataclass(frozen=True, slots=True)
class ThoughtRows:
    """Sent to the workers with a step: the rows that may end a thought in it, and what to score them with."""

    requests: list[str]
    past: PastRows


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
        self._histories.begin(request, task.history_of, 0 if task.is_check else task.running_score.count)
        if (announced := task.announced) is not None and announced.keeps_histories:
            self._kept[task.search] = []
        if task.search in self._kept:
            self._kept[task.search].append(request)
            self._is_kept.add(request)

    def release(self, ids: Iterable[str]) -> None:
        """Takes effect with the next step: an abort overtakes branches that were sent before it."""
        for name in ids:
            if name.startswith(_CLOSED):
                kept = self._kept.pop(int(name.removeprefix(_CLOSED)), [])
                self._is_kept.difference_update(kept)
                self._released += kept
            elif name not in self._is_kept:
                self._released.append(name)

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

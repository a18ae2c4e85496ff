"""Decisions and reports of Gambit's scheduler, step by step; `compat/scheduler.py` puts them into vLLM's."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from gambit.engines.base import SearchSpec
from gambit.engines.eviction import Standing, action_on, eviction_order, most_over_quota, standing
from gambit.engines.vllm.messages import (
    CloseSearch,
    Message,
    Regroup,
    RowValues,
    SetScores,
    StepReport,
    ThoughtRows,
    TraceTask,
)
from gambit.engines.vllm.trace_table import ScheduledTrace, TraceTable
from gambit.scorers.base import HistoryScorer, Scorer
from gambit.scorers.memory import Histories
from gambit.types import Admission, EndReason, Eviction, PressureAction, TraceEnd

T = TypeVar("T")
BlocksFrom = Callable[[str, int], Sequence[int]]  # the blocks of a request without its first so many
FAILING_CHECK = 3  # self-check: after this many compared steps an allocation is made to fail


class TraceScheduling:
    """The traces of one engine: their admissions, scores, evictions and ends, and the report of the step under way."""

    def __init__(self, scorer: Scorer, num_blocks: int, block_tokens: int, *, is_async: bool) -> None:
        self.histories = RequestHistories(scorer.max_past) if isinstance(scorer, HistoryScorer) else None
        self.failing: str | None = None  # self-check: the next allocation of this request fails once
        self.num_steps = 0
        self.report = StepReport()  # what happens goes into it
        self._table = TraceTable(scorer)
        self._usage = BlockUsage()
        self._aggregation = scorer.info.aggregation
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._is_async = is_async  # a step is scheduled before the tokens of the one before were read
        self._freed: list[str] = []
        self._num_admissions = 0
        self._num_queued = 0
        self._num_compared = 0

    # -- searches and requests come and go ---------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Acts on a message from the front that is about no new trace."""
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
                for trace, score in self._known(scores):
                    trace.eviction_score, trace.standing = score, None
            case Regroup(islands):
                for trace, island in self._known(islands):
                    trace.island, trace.standing = island, None

    def _known(self, values: Mapping[str, T]) -> Iterator[tuple[ScheduledTrace, T]]:
        """Yields traces with values that came by request, but for those that have ended in the meantime."""
        for request, value in values.items():
            if (trace := self._table.traces.get(request)) is not None:
                yield trace, value

    def add(self, request: str, task: TraceTask) -> SearchSpec:
        """Adds a trace and returns its search."""
        self._table.add(request, task, self.num_steps)
        if self.histories is not None:
            self.histories.begin(request, task)
        return self._table.searches[task.spec.key.search].spec

    def free(self, request: str) -> None:
        """Notes that vLLM has freed a request. It stays in the table for now: its last token is read later."""
        self._freed.append(request)
        if request in self._table.traces:
            self._table.traces[request].has_ended = True

    def forget_freed(self) -> None:
        for request in self._freed:
            self._table.remove(request)
        self._freed.clear()

    def release(self, requests: Sequence[str]) -> None:
        """Lets go of histories that the front no longer needs."""
        if self.histories is not None:
            self.histories.release(requests)

    # -- before and while a step is scheduled ------------------------------------------------------------------

    def begin_step(self) -> None:
        self.num_steps += 1
        self.forget_freed()
        if self.histories is not None:
            self.histories.forget_released()

    def admit(self, request: str, num_cached: int, num_tokens: int) -> None:
        """Reports that a request has got its blocks, if it had none; both counts include the prompt."""
        trace = self._table.traces[request]
        if trace.is_running:
            return
        self._num_admissions += 1
        trace.is_running, trace.admission, trace.standing = True, self._num_admissions, None
        length = num_tokens - trace.task.prompt_tokens
        reused = min(max(num_cached - trace.task.prompt_tokens, 0), length)
        waited = max(self.num_steps - trace.waiting_since - 1, 0)
        self.report.of(trace.key.search).admitted.append(Admission(trace.key.trace, reused, length - reused, waited))

    def rows_to_score(self, scheduled: list[str]) -> ThoughtRows | None:
        """Returns the rows of a step that may end a thought; None for a scorer without histories."""
        if self.histories is None:
            return None
        return self.histories.propose(self._table.may_end_thought(scheduled, knows_fed=not self._is_async))

    # -- memory pressure ---------------------------------------------------------------------------------------

    def eviction_order(self, running: Iterable[str], blocks_from: BlocksFrom, missing_blocks: int) -> list[str]:
        """Returns running requests in the order in which they would be evicted, by their scores of this moment.

        Sorted only as far as it matters: those behind the ones that free the missing blocks come in any order.
        """
        by_search = defaultdict(list)
        for request in running:
            by_search[self._table.traces[request].key.search].append(request)
        for search, candidates in by_search.items():
            by_search[search] = eviction_order(candidates, self._standing, self._num_live(search))
        if len(by_search) == 1:
            return next(iter(by_search.values()))
        self._usage.update({r: search for search, mine in by_search.items() for r in mine}, blocks_from)
        quota = {search: self._quota(search) for search in by_search}
        victims: list[str] = []
        while by_search and missing_blocks > 0:  # each eviction changes how far its search is above its quota
            used = {search: self._usage.num_held(search) * self._block_tokens for search in by_search}
            search = most_over_quota(used, quota)
            victims.append(by_search[search].pop(0))
            missing_blocks -= self._usage.forget(victims[-1])
            if not by_search[search]:
                del by_search[search]
        return [*victims, *(request for safe in by_search.values() for request in safe)]

    def lose_blocks(self, requests: Iterable[str] | None = None) -> None:
        """Forgets the blocks of requests that were evicted, or may have other blocks now; None: of all."""
        for request in self._table.traces if requests is None else requests:
            self._usage.forget(request)

    def evict(self, request: str, *, is_last: bool) -> int | None:
        """Reports the loss of a request's blocks; returns its priority in the queue, or None where it ends.

        `is_last`: nothing else runs. A trace that does not fit alone would be queued and evicted for ever.
        """
        trace = self._table.traces[request]
        num_live = self._num_live(trace.key.search)[trace.island]
        action, step = action_on(trace.task.spec.on_pressure, num_live), self.report.of(trace.key.search)
        if action is PressureAction.QUEUE and is_last:
            step.finished.append(TraceEnd(trace.key.trace, EndReason.MEMORY, (), self._table.tracks.end(request)))
            return None
        step.evicted.append(Eviction(trace.key.trace, action, self._score_of(trace), 0, ()))
        if action is not PressureAction.QUEUE:
            return None
        trace.is_running, trace.waiting_since = False, self.num_steps
        self._num_queued += 1
        return -self._num_queued  # ahead of everything that waits, the last queued first

    def _quota(self, search: int) -> float:
        """Returns how many tokens a search may hold before others."""
        quota = self._table.searches[search].spec.kv_quota_tokens
        return self._num_blocks * self._block_tokens / len(self._table.searches) if quota is None else quota

    def _score_of(self, trace: ScheduledTrace) -> float | None:
        """Returns the score that evictions go by: the verifier's, in a search that has one."""
        spec = self._table.searches[trace.key.search].spec
        return trace.eviction_score if spec.has_verifier else trace.score.value(spec.aggregation or self._aggregation)

    def _num_live(self, search: int) -> Counter[int]:
        """Counts the live traces of a search by island."""
        traces = self._table.traces.values()
        return Counter(trace.island for trace in traces if trace.key.search == search and not trace.has_ended)

    def _standing(self, request: str) -> Standing:
        trace = self._table.traces[request]
        if trace.standing is None:
            rule, score = trace.task.spec.on_pressure, self._score_of(trace)
            trace.standing = standing(rule, trace.island, score, trace.key.trace, trace.admission)
        return trace.standing

    # -- after a step ------------------------------------------------------------------------------------------

    def begin_report(self) -> StepReport:
        """Returns the report of what has happened so far; later events go into the next."""
        report, self.report = self.report, StepReport()
        return report

    def read(
        self, report: StepReport, ends: Mapping[str, EndReason], values: RowValues | None, thoughts: ThoughtRows | None
    ) -> list[str]:
        """Folds the tokens in `report` into the table; adds thoughts and ends to the report.

        `ends`: requests that vLLM has ended. `values`: the worker's, of the report's rows. `thoughts`: what
        `rows_to_score` returned for the step. Returns the requests that are to be ended because of their stop rules.
        """
        if values is not None:
            report.seconds_scoring, report.seconds_waiting = values.seconds, values.waited
            if values.greedy is not None:  # self-check: a state must make the token that was sampled for its row
                report.checked = len(report.rows)
                report.mismatches = int((values.greedy.astype(int) != report.tokens).sum())
                self._num_compared += 1
                if self._num_compared == FAILING_CHECK:
                    self.failing = report.rows[0]
        scored, unconfident = [], []
        if report.rows:
            scored = self._table.read(report, values)
            unconfident = self._table.track_confidence(report.rows, values)
        if self.histories is not None and thoughts is not None:
            self.histories.settle(thoughts, scored)
        stopped = {request: EndReason.CONFIDENCE for request in unconfident if request not in ends}
        for request, reason in {**ends, **stopped}.items():
            key, confidence = self._table.traces[request].key, self._table.tracks.end(request)
            report.of(key.search).finished.append(TraceEnd(key.trace, reason, (), confidence))
        return list(stopped)


# -- blocks ----------------------------------------------------------------------------------------------------------


class BlockUsage:
    """Blocks by trace and by search, updated with the blocks that traces got since the last update.

    Valid only where a running trace keeps its blocks and new ones are appended: a trace may hold thousands.
    """

    def __init__(self) -> None:
        self._search_of: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._holders: defaultdict[int, Counter[int]] = defaultdict(Counter)  # by search: traces that hold a block
        self._all: Counter[int] = Counter()  # a prompt may be shared by several searches

    def update(self, running: Mapping[str, int], blocks_from: BlocksFrom) -> None:
        """Takes in new blocks. `running`: searches by request."""
        for request in [request for request in self._blocks if request not in running]:
            self.forget(request)
        for request, search in running.items():
            self._search_of[request] = search
            blocks = self._blocks.setdefault(request, [])
            if new := blocks_from(request, len(blocks)):
                blocks += new
                self._holders[search].update(new)
                self._all.update(new)

    def num_held(self, search: int) -> int:
        """Counts the blocks of a search, each once."""
        return len(self._holders.get(search, ()))

    def forget(self, request: str) -> int:
        """Takes out a trace until the next update; returns how many blocks no other trace holds."""
        blocks = self._blocks.pop(request, None)
        if blocks is None:
            return 0
        search = self._search_of.pop(request)
        _release(self._holders[search], blocks)
        if not self._holders[search]:
            del self._holders[search]
        return _release(self._all, blocks)


def _release(holders: Counter[int], blocks: Iterable[int]) -> int:
    """Takes one holder off each block; returns how many blocks have none now."""
    num_free = 0
    for block in blocks:
        holders[block] -= 1
        if not holders[block]:
            del holders[block]
            num_free += 1
    return num_free


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
        """Ends released histories. Called before a step: branches sent before the release have arrived by then."""
        for request in self._released:
            self._histories.end(request)
        self._released.clear()

    def propose(self, requests: Sequence[str]) -> ThoughtRows:
        """Reserves a slot for each row that may end a thought. The end of the step shows which ones do."""
        return ThoughtRows(list(requests), self._histories.propose(requests, self._max_past))

    def settle(self, rows: ThoughtRows, scored: Collection[str]) -> None:
        """Adds the thoughts that ended in a step to their traces' histories, and frees the other slots.

        A step that was scheduled in between has not seen the new thought, and need not: two tokens in a row do not
        both end a thought.
        """
        own = rows.past.own
        kept = [row for row, request in enumerate(rows.requests) if request in scored and request in self._histories]
        self._histories.append([rows.requests[row] for row in kept], own[kept])
        self._histories.give_back(np.delete(own, kept))
        if missing := set(scored).difference(rows.requests):
            raise RuntimeError(f"thoughts of {sorted(missing)} were scored without a slot")

"""The scheduler's table of traces: thoughts, running scores, and the order in which traces would be evicted."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gambit.engines.confidence import ConfidenceTracks, fold_thoughts
from gambit.engines.eviction import Standing, action_on, eviction_order, most_over_quota, standing
from gambit.engines.vllm.messages import Announcement, RowValues, StepReport, TraceTask
from gambit.scorers.base import Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.simple import RunScores
from gambit.text.boundary import THINKING, BoundaryRule, ThoughtTables
from gambit.types import PressureAction, RunningScore, StatePosition, TraceKey

if TYPE_CHECKING:
    import torch


BlocksFrom = Callable[[str, int], Sequence[int]]  # of a request, its blocks without the first so many
SLOT = np.dtype([
    ("rule", np.int64),  # which detector
    ("num_tokens", np.int64),  # generated or inherited
    ("flags", np.uint8),  # the detector's
    ("is_pending", np.bool_),  # the last token is a boundary whose thought has not been scored
    ("confidence_total", np.float64),  # over the thought so far
    ("confidence_count", np.int64),
    ("thought_confidence", np.float64),  # of the last finished thought
])  # fmt: skip


@dataclass(slots=True, eq=False)
class ScheduledTrace:
    """One trace in the scheduler."""

    task: TraceTask
    slot: int
    # Folded here to rank traces at the very step, and once more in the tree, from the events: the scheduler may live in
    # another process and runs ahead of the tree, which in turn must be rebuilt from a log alone.
    score: RunningScore
    waiting_since: int
    is_running: bool = False
    has_ended: bool = False  # its last token is still to be read
    admission: int = 0  # ordinal
    standing: Standing | None = None  # None: its score or its admission has changed
    eviction_score: float | None = None  # the verifier's score

    @property
    def key(self) -> TraceKey:
        return self.task.key


@dataclass(slots=True)
class ScheduledSearch:
    """One search in the scheduler."""

    rule: int
    quota_tokens: int | None
    has_verifier: bool = False
    scores: RunScores = field(default_factory=RunScores)


class TraceTable:
    """Traces by request id; their numbers lie in one array, so that a step costs a few array operations."""

    def __init__(self, scorer: Scorer, num_blocks: int, block_tokens: int) -> None:
        self.traces: dict[str, ScheduledTrace] = {}
        self.searches: dict[int, ScheduledSearch] = {}
        self._tracks: ConfidenceTracks[str] = ConfidenceTracks()
        self._scorer = scorer
        self._capacity_tokens = num_blocks * block_tokens
        self._block_tokens = block_tokens
        self._usage = BlockUsage()
        self._numbers = np.zeros(64, SLOT)
        self._free_slots = list(range(64))
        self._rules: dict[BoundaryRule, int] = {}
        self._detectors: list[ThoughtTables] = []
        self._num_admissions = 0
        # Rows of the last report, which are mostly those of the next. Their numbers are current here and written back
        # to the array when the rows change.
        self._rows: list[str] = []
        self._row_traces: list[ScheduledTrace] = []
        self._slots = np.zeros(0, np.int64)
        self._batch = np.zeros(0, SLOT)

    # -- traces come and go ------------------------------------------------------------------------------------

    def add(self, request: str, task: TraceTask, step: int) -> None:
        self._settle()
        if (announced := task.announced) is not None:
            self._open(announced)
        trace = self.traces[request] = ScheduledTrace(
            task, self._take_slot(), task.running_score, step, eviction_score=task.eviction_score
        )
        row = self._numbers[trace.slot]
        row["rule"], row["num_tokens"] = self.searches[task.search].rule, task.inherited
        row["flags"], row["is_pending"] = task.flags, task.is_pending
        row["confidence_total"] = row["confidence_count"] = row["thought_confidence"] = 0
        if task.parent is not None and task.parent in self.traces:
            self._inherit_confidence(row, self._numbers[self.traces[task.parent].slot])
        if task.confidence_window:
            self._tracks.add(request, task.confidence_window, task.stop_rule, task.inherited, task.parent)

    def _inherit_confidence(self, child: np.void, parent: np.void) -> None:
        """A parent that went on since the branch no longer has the sums of that moment, only its last thought's."""
        child["thought_confidence"] = parent["thought_confidence"]
        if child["num_tokens"] == parent["num_tokens"]:
            for name in ("confidence_total", "confidence_count"):
                child[name] = parent[name]

    def remove(self, request: str) -> None:
        self._tracks.forget(request)
        trace = self.traces.pop(request, None)
        if trace is not None:
            self._free_slots.append(trace.slot)

    def admit(self, trace: ScheduledTrace) -> None:
        self._num_admissions += 1
        trace.is_running, trace.admission, trace.standing = True, self._num_admissions, None

    def _open(self, announced: Announcement) -> None:
        for search in announced.closed:
            self.searches.pop(search, None)
        rule = announced.rule
        if rule not in self._rules:
            self._rules[rule] = len(self._detectors)
            self._detectors.append(ThoughtTables(rule))
        self.searches[announced.search] = ScheduledSearch(
            self._rules[rule], announced.kv_quota_tokens, announced.has_verifier
        )

    def _take_slot(self) -> int:
        if not self._free_slots:
            have = len(self._numbers)
            self._numbers = np.concatenate((self._numbers, np.zeros(have, SLOT)))
            self._free_slots = list(range(have, 2 * have))
        return self._free_slots.pop()

    # -- thoughts ----------------------------------------------------------------------------------------------

    def read(self, report: StepReport, values: RowValues | None, row_of: Mapping[str, int]) -> None:
        """Fold in the tokens in `report` and add to it the thoughts that ended and were scored with them."""
        self._gather(report.rows)
        batch = self._batch
        was_thinking, was_pending = batch["flags"] & THINKING, batch["is_pending"].copy()
        flags, is_boundary = self._advance(batch, np.array(report.tokens, np.int64))
        batch["flags"], batch["is_pending"] = flags, is_boundary
        batch["num_tokens"] += 1
        for at in np.flatnonzero(was_thinking > (flags & THINKING)):
            report.stopped_thinking.append(report.rows[at])
        if values is None:
            return
        if values.confidences is not None:
            rows = np.fromiter((row_of[request] for request in report.rows), np.int64, len(batch))
            fold_thoughts(batch, values.confidences[rows], is_boundary)
        if self._scorer.info.state_position is StatePosition.BOUNDARY:
            self._score(report, values, row_of, np.flatnonzero(was_pending), fed=1)
        else:
            self._score(report, values, row_of, np.flatnonzero(is_boundary), fed=0)

    def _gather(self, rows: list[str]) -> None:
        """Request ids are not used twice: the same ids are the same traces."""
        if rows == self._rows:
            return
        self._settle()
        self._rows, self._row_traces = rows, [self.traces[request] for request in rows]
        self._slots = np.fromiter((trace.slot for trace in self._row_traces), np.int64, len(self._row_traces))
        self._batch = self._numbers[self._slots]

    def _settle(self) -> None:
        """Write the rows' numbers back: before the array is read, and before a free slot goes to another trace."""
        if self._rows:
            self._numbers[self._slots] = self._batch
            self._rows = []

    def track_confidence(self, report: StepReport, values: RowValues | None, row_of: Mapping[str, int]) -> list[str]:
        """Fold in the confidence of each new token; gives the requests that their stop rules end."""
        if values is None or values.confidences is None or not len(self._tracks):
            return []
        tracked = [report.rows[at] for at in self._tracks.pick(report.rows)]
        rows = np.fromiter((row_of[request] for request in tracked), np.int64, len(tracked))
        return self._tracks.fold(tracked, values.confidences[rows]) if tracked else []

    def confidence_of(self, request: str) -> Sequence[float] | None:
        """Of a trace that ends, where it was measured."""
        return self._tracks.end(request)

    def _advance(
        self, rows: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        if len(self._detectors) == 1:
            return self._detectors[0].advance_rows(rows["flags"], tokens)
        flags, is_boundary = rows["flags"].copy(), np.zeros(len(rows), np.bool_)
        for rule in np.unique(rows["rule"]):
            at = rows["rule"] == rule
            flags[at], is_boundary[at] = self._detectors[rule].advance_rows(rows["flags"][at], tokens[at])
        return flags, is_boundary

    def _score(
        self,
        report: StepReport,
        values: RowValues,
        row_of: Mapping[str, int],
        ended: npt.NDArray[np.int64],
        *,
        fed: int,
    ) -> None:
        """`ended`: which rows have finished a thought, `fed` tokens ago."""
        if not len(ended):
            return
        # By id, not by row: a row's place depends on its neighbours, and scores depend on their order.
        found = sorted((self._row_traces[at].key, int(at)) for at in ended)
        lengths = self._batch["num_tokens"] - fed
        scores = self._scores_of(values, [at for _, at in found], row_of)
        is_ranked, needs_confidence = self._scorer.info.ranks_within_run, self._scorer.info.needs_confidence
        for (key, at), score in zip(found, scores, strict=True):
            score = self.searches[key.search].scores.add(score, as_quantile=is_ranked)
            trace, request = self._row_traces[at], report.rows[at]
            trace.score, trace.standing = trace.score.add(score), None
            embedding = _embedding(values, row_of[request], trace.task.embedding_size)
            confidence = float(self._batch["thought_confidence"][at]) if needs_confidence else None
            report.scored.append((request, score, int(lengths[at]), embedding, confidence))

    def _scores_of(self, values: RowValues, ended: Sequence[int], row_of: Mapping[str, int]) -> list[float]:
        found = [] if values.scores is None else [float(values.scores[row_of[self._rows[at]]]) for at in ended]
        if not self._scorer.info.needs_confidence:
            return found
        # A scorer of confidences needs whole thoughts, and only here is known where a thought ends.
        import torch

        confidences = torch.from_numpy(self._batch["thought_confidence"][ended]).float()
        scores: torch.Tensor
        if found and isinstance(self._scorer, SplitScorer):
            scores = self._scorer.whole(torch.tensor(found), confidences)
        else:
            scores = self._scorer.score(ThoughtBatch(confidences.new_zeros(len(ended), 0), confidences))
        return [float(score) for score in scores.tolist()]

    def may_end_thought(self, requests: list[str], *, knows_fed: bool) -> list[str]:
        """Those a step may give a score. `knows_fed`: the tokens that the step feeds have been read here."""
        self._gather(requests)
        if knows_fed and self._scorer.info.state_position is StatePosition.BOUNDARY:
            return [requests[at] for at in np.flatnonzero(self._batch["is_pending"])]
        return [requests[at] for at in np.flatnonzero(self._batch["flags"] & THINKING)]

    # -- eviction ----------------------------------------------------------------------------------------------

    def eviction_order(self, requests: Iterable[str], blocks_from: BlocksFrom, missing_blocks: int) -> list[str]:
        """Running requests in the order in which they would be evicted, by their scores of this moment.

        Sorted only as far as it matters: those behind the ones that free the missing blocks come in any order.
        """
        by_search = defaultdict(list)
        for request in requests:
            by_search[self.traces[request].task.search].append(request)
        for search, candidates in by_search.items():
            by_search[search] = eviction_order(candidates, self._standing, self.num_live(search))
        if len(by_search) == 1:
            return next(iter(by_search.values()))
        self._usage.update({r: search for search, mine in by_search.items() for r in mine}, blocks_from)
        victims = self._across_searches(by_search, missing_blocks)
        return [*victims, *(request for safe in by_search.values() for request in safe)]

    def _across_searches(self, by_search: dict[int, list[str]], missing_blocks: int) -> list[str]:
        """One eviction after the other, since each one changes how far its search is above its quota."""
        simulation = self._usage.simulate_evictions()
        quota = {search: self._quota(search) for search in by_search}
        victims: list[str] = []
        while by_search and missing_blocks > 0:
            search = most_over_quota({s: simulation.used[s] * self._block_tokens for s in by_search}, quota)
            victims.append(by_search[search].pop(0))
            missing_blocks -= simulation.evict(victims[-1])
            if not by_search[search]:
                del by_search[search]
        return victims

    def lose_blocks(self, requests: Iterable[str]) -> None:
        """These no longer run, or may have other blocks the next time."""
        self._usage.forget(requests)

    def _quota(self, search: int) -> float:
        quota = self.searches[search].quota_tokens
        return self._capacity_tokens / len(self.searches) if quota is None else quota

    def score_of(self, trace: ScheduledTrace) -> float | None:
        has_verifier = self.searches[trace.task.search].has_verifier
        return trace.eviction_score if has_verifier else trace.score.value(self._scorer.info.aggregation)

    def set_scores(self, scores: Mapping[str, float]) -> None:
        """What a verifier thinks of these requests; those that have ended in the meantime are passed over."""
        for request, score in scores.items():
            if (trace := self.traces.get(request)) is not None:
                trace.eviction_score, trace.standing = score, None

    def regroup(self, islands: Mapping[str, float]) -> None:
        """The islands of these requests from now on."""
        for request, island in islands.items():
            if (trace := self.traces.get(request)) is not None:
                trace.task, trace.standing = dataclasses.replace(trace.task, island=int(island)), None

    def num_live(self, search: int) -> Counter[int]:
        """Live traces of a search by island."""
        traces = (trace for trace in self.traces.values() if not trace.has_ended)
        return Counter(trace.task.island for trace in traces if trace.task.search == search)

    def action_on(self, trace: ScheduledTrace) -> PressureAction:
        """What becomes of a trace that is evicted now."""
        return action_on(trace.task.on_pressure, self.num_live(trace.task.search)[trace.task.island])

    def _standing(self, request: str) -> Standing:
        trace = self.traces[request]
        if trace.standing is None:
            task, score = trace.task, self.score_of(trace)
            trace.standing = standing(task.on_pressure, task.island, score, task.trace, trace.admission)
        return trace.standing


def _embedding(values: RowValues, row: int, size: int) -> list[float] | None:
    if not size or values.embeddings is None:
        return None
    vector = values.embeddings[row, :size]  # another search may have asked for longer ones
    unit: list[float] = (vector / np.linalg.norm(vector)).tolist()
    return unit


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

    def update(self, running: Mapping[str, int], blocks_from: Callable[[str, int], Sequence[int]]) -> None:
        """`running`: searches by request; `blocks_from(request, n)`: its blocks without the first n."""
        self.forget([request for request in self._blocks if request not in running])
        for request, search in running.items():
            self._search_of[request] = search
            blocks = self._blocks.setdefault(request, [])
            if new := blocks_from(request, len(blocks)):
                blocks += new
                self._holders[search].update(new)
                self._all.update(new)

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            blocks = self._blocks.pop(request, None)
            if blocks is None:
                continue
            search = self._search_of.pop(request)
            _release(self._all, blocks)
            _release(self._holders[search], blocks)
            if not self._holders[search]:
                del self._holders[search]

    def simulate_evictions(self) -> EvictionSimulation:
        return EvictionSimulation(self._search_of, self._blocks, self._holders, self._all)


class EvictionSimulation:
    """What each search would hold after some evictions; the usage itself stays as it is."""

    def __init__(
        self,
        search_of: Mapping[str, int],
        blocks: Mapping[str, Sequence[int]],
        holders: Mapping[int, Counter[int]],
        everyone: Counter[int],
    ) -> None:
        self.used = {search: len(held) for search, held in holders.items()}  # blocks
        self._search_of = search_of
        self._blocks = blocks
        self._holders = holders
        self._all = everyone
        self._gone: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._gone_from_all: Counter[int] = Counter()

    def evict(self, request: str) -> int:
        """Evict one trace more; returns how many blocks that would free."""
        search, blocks = self._search_of[request], self._blocks[request]
        self.used[search] -= _count_freed(self._holders[search], self._gone[search], blocks)
        return _count_freed(self._all, self._gone_from_all, blocks)


def _count_freed(holders: Counter[int], gone: Counter[int], blocks: Iterable[int]) -> int:
    gone.update(blocks)
    return sum(gone[block] == holders[block] for block in blocks)


def _release(holders: Counter[int], blocks: Iterable[int]) -> None:
    for block in blocks:
        holders[block] -= 1
        if not holders[block]:
            del holders[block]

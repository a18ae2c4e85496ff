"""The scheduler's table of traces: thoughts, running scores, and the order in which traces would be evicted."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gambit.engines.base import SearchSpec
from gambit.engines.confidence import ConfidenceTracks, fold_thoughts
from gambit.engines.eviction import Standing, action_on, eviction_order, most_over_quota, standing
from gambit.engines.vllm.messages import RowValues, StepReport, TraceTask
from gambit.scorers.base import Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.simple import RunScores
from gambit.text.boundary import THINKING, BoundaryRule, ThoughtTables
from gambit.types import (
    EndReason,
    PressureAction,
    RunningScore,
    StatePosition,
    ThoughtScore,
    TraceConfidence,
    TraceKey,
    TraceSpec,
)

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


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step, by request."""

    tokens: Mapping[str, int]  # in the order of scheduling
    ends: Mapping[str, EndReason]  # of the requests that vLLM ended
    values: RowValues | None  # the worker's
    row_of: Mapping[str, int]  # their places in `values`

    def rows(self, requests: Sequence[str]) -> npt.NDArray[np.int64]:
        return np.fromiter(map(self.row_of.__getitem__, requests), np.int64, len(requests))


@dataclass(slots=True, eq=False)
class ScheduledTrace:
    """One trace in the scheduler."""

    task: TraceTask
    slot: int
    waiting_since: int
    spec: TraceSpec = field(init=False)
    # Folded here to rank traces at the very step, and once more in the tree, from the events: the scheduler may live in
    # another process and runs ahead of the tree, which in turn must be rebuilt from a log alone.
    score: RunningScore = field(init=False)
    eviction_score: float | None = field(init=False)  # the verifier's
    is_running: bool = False
    has_ended: bool = False  # its last token is still to be read
    admission: int = 0  # ordinal
    standing: Standing | None = None  # None: its score or its admission has changed

    def __post_init__(self) -> None:
        self.spec, self.score = self.task.spec, self.task.spec.score
        self.eviction_score = self.spec.eviction_score

    @property
    def key(self) -> TraceKey:
        return self.spec.key


@dataclass(slots=True)
class ScheduledSearch:
    """One search in the scheduler."""

    spec: SearchSpec
    rule: int
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

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        if spec.rule not in self._rules:
            self._rules[spec.rule] = len(self._detectors)
            self._detectors.append(ThoughtTables(spec.rule))
        self.searches[spec.search] = ScheduledSearch(spec, self._rules[spec.rule])

    def add(self, request: str, task: TraceTask, step: int) -> None:
        self._settle()
        trace = self.traces[request] = ScheduledTrace(task, self._take_slot(), step)
        row = self._numbers[trace.slot]
        row["rule"], row["num_tokens"] = self.searches[trace.key.search].rule, trace.spec.inherited
        row["flags"], row["is_pending"] = task.flags, task.is_pending
        row["confidence_total"] = row["confidence_count"] = row["thought_confidence"] = 0
        if task.parent is not None and task.parent in self.traces:
            self._inherit_confidence(row, self._numbers[self.traces[task.parent].slot])
        if task.confidence_window:
            spec = task.spec
            self._tracks.add(request, task.confidence_window, spec.stop_rule, spec.inherited, task.parent)

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

    def _take_slot(self) -> int:
        if not self._free_slots:
            have = len(self._numbers)
            self._numbers = np.concatenate((self._numbers, np.zeros(have, SLOT)))
            self._free_slots = list(range(have, 2 * have))
        return self._free_slots.pop()

    # -- thoughts ----------------------------------------------------------------------------------------------

    def read(self, report: StepReport, output: StepOutput) -> list[str]:
        """Folds in the tokens in `report` and adds to it the thoughts that ended and were scored with them.

        Returns the requests of these thoughts.
        """
        self._gather(report.rows)
        batch = self._batch
        was_thinking, was_pending = batch["flags"] & THINKING, batch["is_pending"].copy()
        flags, is_boundary = self._advance(batch, np.array(report.tokens, np.int64))
        batch["flags"], batch["is_pending"] = flags, is_boundary
        batch["num_tokens"] += 1
        for at in np.flatnonzero(was_thinking > (flags & THINKING)):
            report.stopped_thinking.append(report.rows[at])
        if output.values is None:
            return []
        if output.values.confidences is not None:
            fold_thoughts(batch, output.values.confidences[output.rows(report.rows)], is_boundary)
        if self._scorer.info.state_position is StatePosition.BOUNDARY:
            return self._score(report, output, np.flatnonzero(was_pending), fed=1)
        return self._score(report, output, np.flatnonzero(is_boundary), fed=0)

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

    def track_confidence(self, report: StepReport, output: StepOutput) -> list[str]:
        """Folds in the confidence of each new token; returns the requests that their stop rules end."""
        if output.values is None or output.values.confidences is None or not len(self._tracks):
            return []
        tracked = [report.rows[at] for at in self._tracks.pick(report.rows)]
        return self._tracks.fold(tracked, output.values.confidences[output.rows(tracked)]) if tracked else []

    def confidence_of(self, request: str) -> TraceConfidence | None:
        """Ends the track of a trace; returns None where its confidence was not measured."""
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

    def _score(self, report: StepReport, output: StepOutput, ended: npt.NDArray[np.int64], *, fed: int) -> list[str]:
        """Scores the rows in `ended`, which have finished a thought `fed` tokens ago."""
        if not len(ended):
            return []
        assert output.values is not None
        # By id, not by row: a row's place depends on its neighbours, and scores depend on their order.
        found = sorted((self._row_traces[at].key, int(at)) for at in ended)
        lengths = self._batch["num_tokens"] - fed
        scores = self._scores_of(output, [at for _, at in found])
        is_ranked, needs_confidence = self._scorer.info.ranks_within_run, self._scorer.info.needs_confidence
        for (key, at), score in zip(found, scores, strict=True):
            score = self.searches[key.search].scores.add(score, as_quantile=is_ranked)
            trace = self._row_traces[at]
            trace.score, trace.standing = trace.score.add(score), None
            embedding = _embedding(output.values, output.row_of[self._rows[at]], trace.task.embedding_size)
            confidence = float(self._batch["thought_confidence"][at]) if needs_confidence else None
            thought = ThoughtScore(key.trace, score, int(lengths[at]), embedding, confidence)
            report.of(key.search).scored.append(thought)
        return [self._rows[at] for _, at in found]

    def _scores_of(self, output: StepOutput, ended: Sequence[int]) -> list[float]:
        found: list[float] = []
        if output.values is not None and output.values.scores is not None:
            found = output.values.scores[output.rows([self._rows[at] for at in ended])].tolist()
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
            by_search[self.traces[request].key.search].append(request)
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
        quota = self.searches[search].spec.kv_quota_tokens
        return self._capacity_tokens / len(self.searches) if quota is None else quota

    def score_of(self, trace: ScheduledTrace) -> float | None:
        has_verifier = self.searches[trace.key.search].spec.has_verifier
        return trace.eviction_score if has_verifier else trace.score.value(self._scorer.info.aggregation)

    def set_scores(self, scores: Mapping[str, float]) -> None:
        """Takes a verifier's scores; requests that have ended in the meantime are passed over."""
        for request, score in scores.items():
            if (trace := self.traces.get(request)) is not None:
                trace.eviction_score, trace.standing = score, None

    def regroup(self, islands: Mapping[str, int]) -> None:
        """Moves requests to other islands, but for those that have ended in the meantime."""
        for request, island in islands.items():
            if (trace := self.traces.get(request)) is not None:
                trace.spec, trace.standing = dataclasses.replace(trace.spec, island=island), None

    def num_live(self, search: int) -> Counter[int]:
        """Live traces of a search by island."""
        traces = (trace for trace in self.traces.values() if not trace.has_ended)
        return Counter(trace.spec.island for trace in traces if trace.key.search == search)

    def action_on(self, trace: ScheduledTrace) -> PressureAction:
        """What becomes of a trace that is evicted now."""
        return action_on(trace.spec.on_pressure, self.num_live(trace.key.search)[trace.spec.island])

    def _standing(self, request: str) -> Standing:
        trace = self.traces[request]
        if trace.standing is None:
            spec, score = trace.spec, self.score_of(trace)
            trace.standing = standing(spec.on_pressure, spec.island, score, spec.key.trace, trace.admission)
        return trace.standing


def _embedding(values: RowValues, row: int, size: int) -> tuple[float, ...] | None:
    if not size or values.embeddings is None:
        return None
    vector = values.embeddings[row, :size]  # another search may have asked for longer ones
    return tuple((vector / np.linalg.norm(vector)).tolist())


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

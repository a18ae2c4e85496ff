"""What the scheduler knows of each trace: thoughts, running scores, who gives way next; never touches vLLM."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gambit.core.types import PressureAction, RunningScore, StatePosition, TraceKey
from gambit.engines.shared.confidence import ConfidenceTracks
from gambit.engines.shared.eviction import Standing, action_on, eviction_order, most_over_quota
from gambit.engines.vllm.inside.block_usage import BlockCensus
from gambit.engines.vllm.messages import Announcement, Order, Report, RowValues
from gambit.scorers.base import Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.simple import RunQuantiles
from gambit.text.boundary import THINKING, BoundaryRule, ThoughtTables

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
class Entry:
    """One trace in the scheduler."""

    order: Order
    slot: int
    score: RunningScore
    waiting_since: int
    is_running: bool = False
    admission: int = 0  # ordinal

    @property
    def key(self) -> TraceKey:
        return self.order.key


@dataclass(slots=True)
class OpenSearch:
    """One search in the scheduler."""

    rule: int
    quota_tokens: int | None
    quantiles: RunQuantiles = field(default_factory=RunQuantiles)


class TraceBook:
    """Entries by request id; numbers of all traces in one table, so that a step costs a few array operations."""

    def __init__(self, scorer: Scorer, num_blocks: int, block_tokens: int) -> None:
        self.entries: dict[str, Entry] = {}
        self.searches: dict[int, OpenSearch] = {}
        self._tracks: ConfidenceTracks[str] = ConfidenceTracks()
        self._scorer = scorer
        self._capacity_tokens = num_blocks * block_tokens
        self._block_tokens = block_tokens
        self._census = BlockCensus()
        self._table = np.zeros(64, SLOT)
        self._free_slots = list(range(64))
        self._rules: dict[BoundaryRule, int] = {}
        self._detectors: list[ThoughtTables] = []
        self._num_admissions = 0
        # Of the last report, mostly those of the next: what the table says of them is out of date, and true here.
        self._rows: list[str] = []
        self._entries: list[Entry] = []
        self._slots = np.zeros(0, np.int64)
        self._batch = np.zeros(0, SLOT)

    # -- traces come and go ------------------------------------------------------------------------------------

    def add(self, request: str, order: Order, step: int) -> None:
        self._settle()
        if (announced := order.announced) is not None:
            self._open(announced)
        entry = self.entries[request] = Entry(order, self._take_slot(), order.running_score, step)
        row = self._table[entry.slot]
        row["rule"], row["num_tokens"] = self.searches[order.search].rule, order.inherited
        row["flags"], row["is_pending"] = order.flags, order.is_pending
        row["confidence_total"] = row["confidence_count"] = row["thought_confidence"] = 0
        if order.parent in self.entries:
            self._inherit_confidence(row, self._table[self.entries[order.parent].slot])
        if order.confidence_window:
            self._tracks.add(request, order.confidence_window, order.stop_rule, order.inherited, order.parent)

    def _inherit_confidence(self, child: np.void, parent: np.void) -> None:
        """A parent that said more since the branch has lost the sums of that moment; its last thought's are kept."""
        child["thought_confidence"] = parent["thought_confidence"]
        if child["num_tokens"] == parent["num_tokens"]:
            for name in ("confidence_total", "confidence_count"):
                child[name] = parent[name]

    def remove(self, request: str) -> None:
        self._tracks.forget(request)
        entry = self.entries.pop(request, None)
        if entry is not None:
            self._free_slots.append(entry.slot)

    def admit(self, entry: Entry) -> None:
        self._num_admissions += 1
        entry.is_running, entry.admission = True, self._num_admissions

    def _open(self, announced: Announcement) -> None:
        for search in announced.closed:
            self.searches.pop(search, None)
        rule = announced.rule
        if rule not in self._rules:
            self._rules[rule] = len(self._detectors)
            self._detectors.append(ThoughtTables(rule))
        self.searches[announced.search] = OpenSearch(self._rules[rule], announced.kv_quota_tokens)

    def _take_slot(self) -> int:
        if not self._free_slots:
            have = len(self._table)
            self._table = np.concatenate((self._table, np.zeros(have, SLOT)))
            self._free_slots = list(range(have, 2 * have))
        return self._free_slots.pop()

    # -- thoughts ----------------------------------------------------------------------------------------------

    def read(self, report: Report, values: RowValues | None, row_of: Mapping[str, int]) -> None:
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
            self._fold_confidence(values.confidences[rows], is_boundary)
        if self._scorer.info.state_position is StatePosition.BOUNDARY:
            self._score(report, values, row_of, np.flatnonzero(was_pending), fed=1)
        else:
            self._score(report, values, row_of, np.flatnonzero(is_boundary), fed=0)

    def _gather(self, rows: list[str]) -> None:
        """Requests are never named twice, so that the same names are the same traces."""
        if rows == self._rows:
            return
        self._settle()
        self._rows, self._entries = rows, [self.entries[request] for request in rows]
        self._slots = np.fromiter((entry.slot for entry in self._entries), np.int64, len(self._entries))
        self._batch = self._table[self._slots]

    def _settle(self) -> None:
        """Bring the table up to date: before it is read, and before a free slot goes to another trace."""
        if self._rows:
            self._table[self._slots] = self._batch
            self._rows = []

    def follow(self, report: Report, values: RowValues | None, row_of: Mapping[str, int]) -> list[str]:
        """Fold in the confidence of each new token; gives the requests that their stop rules end."""
        if values is None or values.confidences is None or not len(self._tracks):
            return []
        followed = [report.rows[at] for at in self._tracks.pick(report.rows)]
        rows = np.fromiter((row_of[request] for request in followed), np.int64, len(followed))
        return self._tracks.fold(followed, values.confidences[rows]) if followed else []

    def close_tracks(self, report: Report) -> None:
        """Add to a report the confidence of each trace that it ends."""
        for request, _ in report.finished:
            if (confidence := self._tracks.end(request)) is not None:
                report.confidences.append((request, list(confidence)))

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

    def _fold_confidence(self, confidences: npt.NDArray[np.float32], is_boundary: npt.NDArray[np.bool_]) -> None:
        batch = self._batch
        total, count = batch["confidence_total"] + confidences, batch["confidence_count"] + 1
        batch["thought_confidence"] = np.where(is_boundary, total / count, batch["thought_confidence"])
        batch["confidence_total"] = np.where(is_boundary, 0.0, total)
        batch["confidence_count"] = np.where(is_boundary, 0, count)

    def _score(
        self,
        report: Report,
        values: RowValues,
        row_of: Mapping[str, int],
        ended: npt.NDArray[np.int64],
        *,
        fed: int,
    ) -> None:
        """`ended`: which rows have finished a thought, `fed` tokens ago."""
        if not len(ended):
            return
        # By id, not by row: where a row stands depends on its neighbours, and quantiles depend on the order.
        found = sorted((self._entries[at].key, int(at)) for at in ended)
        lengths = self._batch["num_tokens"] - fed
        scores = self._scores_of(values, [at for _, at in found], row_of)
        for (key, at), score in zip(found, scores, strict=True):
            request, length = report.rows[at], int(lengths[at])
            if self._scorer.info.ranks_within_run:
                score = self.searches[key.search].quantiles.squash(score)
            entry = self._entries[at]
            entry.score = entry.score.add(score)
            report.scored.append((request, score, length))
            if (size := entry.order.embedding_size) and values.embeddings is not None:
                vector = values.embeddings[row_of[request], :size]  # another search may have wanted longer ones
                report.embedded.append((request, (vector / np.linalg.norm(vector)).tolist()))

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

    # -- who gives way -----------------------------------------------------------------------------------------

    def eviction_order(self, requests: Iterable[str], blocks_from: BlocksFrom, missing_blocks: int) -> list[str]:
        """Running requests in the order in which they would lose their room, by the numbers of this moment.

        Only as far as it matters: those behind the ones that free the missing blocks are safe, in any order.
        """
        by_search = defaultdict(list)
        for request in requests:
            by_search[self.entries[request].order.search].append(request)
        for search, mine in by_search.items():
            by_search[search] = eviction_order(mine, self._standing, self.num_live(search))
        if len(by_search) == 1:
            return next(iter(by_search.values()))
        self._census.follow({r: search for search, mine in by_search.items() for r in mine}, blocks_from)
        victims = self._across_searches(by_search, missing_blocks)
        return [*victims, *(request for safe in by_search.values() for request in safe)]

    def _across_searches(self, by_search: dict[int, list[str]], missing_blocks: int) -> list[str]:
        """Plays the evictions through, since each one changes how far its search is above its quota."""
        rehearsal = self._census.rehearse()
        quota = {search: self._quota(search) for search in by_search}
        victims: list[str] = []
        while by_search and missing_blocks > 0:
            taxed = most_over_quota({s: rehearsal.used[s] * self._block_tokens for s in by_search}, quota)
            victims.append(by_search[taxed].pop(0))
            missing_blocks -= rehearsal.evict(victims[-1])
            if not by_search[taxed]:
                del by_search[taxed]
        return victims

    def lose_blocks(self, requests: Iterable[str]) -> None:
        """These are running no more, or all their blocks may be others the next time."""
        self._census.forget(requests)

    def _quota(self, search: int) -> float:
        quota = self.searches[search].quota_tokens
        return self._capacity_tokens / len(self.searches) if quota is None else quota

    def score_of(self, entry: Entry) -> float | None:
        return entry.score.value(self._scorer.info.aggregation)

    def num_live(self, search: int) -> Counter[int]:
        """Live traces of a search by island."""
        return Counter(entry.order.island for entry in self.entries.values() if entry.order.search == search)

    def action_on(self, entry: Entry) -> PressureAction:
        """What becomes of a trace that loses its blocks now."""
        return action_on(entry.order.on_pressure, self.num_live(entry.order.search)[entry.order.island])

    def _standing(self, request: str) -> Standing:
        entry = self.entries[request]
        order = entry.order
        return Standing(order.on_pressure, order.island, self.score_of(entry), order.trace, entry.admission)

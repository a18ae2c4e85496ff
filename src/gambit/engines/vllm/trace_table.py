"""The scheduler's table of traces: their thoughts, running scores and confidences, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import SearchSpec
from gambit.engines.confidence import ConfidenceTracks, fold_thoughts
from gambit.engines.eviction import Standing
from gambit.engines.vllm.messages import Floats, RowValues, StepReport, TraceTask
from gambit.scorers.base import Scorer, SplitScorer, ThoughtBatch
from gambit.scorers.simple import RunScores
from gambit.text.boundary import THINKING, BoundaryRule, ThoughtTables
from gambit.types import RunningScore, StatePosition, ThoughtScore, TraceKey

SLOT = np.dtype([
    ("rule", np.int64),  # its detector's number
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
    waiting_since: int  # the step
    # Folded here to rank traces at the very step, and once more in the tree, from the events: the scheduler may live in
    # another process and runs ahead of the tree, which in turn must be rebuilt from a log alone.
    score: RunningScore
    eviction_score: float | None  # the verifier's
    island: int
    is_running: bool = False
    has_ended: bool = False  # its last token is still to be read
    admission: int = 0  # ordinal
    standing: Standing | None = None  # None: its score, its island or its admission has changed

    @property
    def key(self) -> TraceKey:
        return self.task.spec.key


@dataclass(slots=True)
class ScheduledSearch:
    """One search in the scheduler."""

    spec: SearchSpec
    rule: int  # its detector's number
    scores: RunScores = field(default_factory=RunScores)


class TraceTable:
    """Traces by request id; their numbers lie in one array, so that a step costs a few array operations."""

    def __init__(self, scorer: Scorer) -> None:
        self.traces: dict[str, ScheduledTrace] = {}
        self.searches: dict[int, ScheduledSearch] = {}
        self.tracks: ConfidenceTracks[str] = ConfidenceTracks()
        self._scorer = scorer
        self._numbers = np.zeros(64, SLOT)
        self._free_slots = list(range(64))
        self._rules: dict[BoundaryRule, int] = {}
        self._detectors: list[ThoughtTables] = []
        # Rows of the last report, which are mostly those of the next. Their numbers are current here and written back
        # to the array when the rows change.
        self._rows: list[str] = []
        self._row_traces: list[ScheduledTrace] = []
        self._slots = np.zeros(0, np.int64)
        self._batch = np.zeros(0, SLOT)

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        number = self._rules.setdefault(spec.rule, len(self._rules))
        if number == len(self._detectors):
            self._detectors.append(ThoughtTables(spec.rule))
        self.searches[spec.search] = ScheduledSearch(spec, number)

    def add(self, request: str, task: TraceTask, step: int) -> None:
        """Adds a trace that waits from this step on."""
        self._settle()
        if not self._free_slots:
            have = len(self._numbers)
            self._numbers = np.concatenate((self._numbers, np.zeros(have, SLOT)))
            self._free_slots = list(range(have, 2 * have))
        spec, slot = task.spec, self._free_slots.pop()
        self.traces[request] = ScheduledTrace(task, slot, step, spec.score, spec.eviction_score, spec.island)
        row = self._numbers[slot]
        row["rule"], row["num_tokens"] = self.searches[spec.key.search].rule, spec.first_length
        row["flags"], row["is_pending"] = task.flags, task.is_pending
        row["confidence_total"] = row["confidence_count"] = row["thought_confidence"] = 0
        if task.parent in self.traces:
            # A parent that went on since the branch no longer has the sums of that moment, only its last thought's.
            parent = self._numbers[self.traces[task.parent].slot]
            row["thought_confidence"] = parent["thought_confidence"]
            if row["num_tokens"] == parent["num_tokens"]:
                for name in ("confidence_total", "confidence_count"):
                    row[name] = parent[name]
        if task.confidence_window:
            self.tracks.add(
                request, task.confidence_window, spec.stop_rule, spec.inherited, task.parent, len(spec.given)
            )

    def remove(self, request: str) -> None:
        self.tracks.forget(request)
        if (trace := self.traces.pop(request, None)) is not None:
            self._free_slots.append(trace.slot)

    # -- thoughts ----------------------------------------------------------------------------------------------

    def read(self, report: StepReport, values: RowValues | None) -> list[str]:
        """Folds in the tokens in `report` and adds to it the thoughts that ended and were scored with them.

        `values`: those of the report's rows. Returns the requests of these thoughts.
        """
        self._gather(report.rows)
        batch = self._batch
        was_thinking, was_pending = batch["flags"] & THINKING, batch["is_pending"].copy()
        flags, is_boundary = self._advance(batch, np.array(report.tokens, np.int64))
        batch["flags"], batch["is_pending"] = flags, is_boundary
        batch["num_tokens"] += 1
        for at in np.flatnonzero(was_thinking > (flags & THINKING)):
            report.stopped_thinking.append(report.rows[at])
        if values is None:
            return []
        if values.confidences is not None:
            fold_thoughts(batch, values.confidences, is_boundary)
        if self._scorer.info.state_position is StatePosition.BOUNDARY:
            return self._score(report, values, np.flatnonzero(was_pending), fed=1)
        return self._score(report, values, np.flatnonzero(is_boundary), fed=0)

    def may_end_thought(self, requests: list[str], *, knows_fed: bool) -> list[str]:
        """Returns those a step may give a score. `knows_fed`: the tokens that the step feeds have been read here."""
        self._gather(requests)
        if knows_fed and self._scorer.info.state_position is StatePosition.BOUNDARY:
            return [requests[at] for at in np.flatnonzero(self._batch["is_pending"])]
        return [requests[at] for at in np.flatnonzero(self._batch["flags"] & THINKING)]

    def track_confidence(self, rows: list[str], values: RowValues | None) -> list[str]:
        """Folds in the confidence of each row's new token; returns the requests that their stop rules end."""
        if values is None or values.confidences is None or not len(self.tracks):
            return []
        places = self.tracks.pick(rows)
        return self.tracks.fold([rows[at] for at in places], values.confidences[places]) if len(places) else []

    def _gather(self, rows: list[str]) -> None:
        """Makes these rows the current ones. Request ids are not used twice: the same ids are the same traces."""
        if rows == self._rows:
            return
        self._settle()
        self._rows, self._row_traces = rows, [self.traces[request] for request in rows]
        self._slots = np.fromiter((trace.slot for trace in self._row_traces), np.int64, len(self._row_traces))
        self._batch = self._numbers[self._slots]

    def _settle(self) -> None:
        """Writes the rows' numbers back: before the array is read, and before a free slot goes to another trace."""
        if self._rows:
            self._numbers[self._slots] = self._batch
            self._rows = []

    def _advance(
        self, rows: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
        """Returns the detectors' flags after these tokens, and which of them are boundaries."""
        lengths = rows["num_tokens"] + 1
        if len(self._detectors) == 1:
            return self._detectors[0].advance_rows(rows["flags"], tokens, lengths)
        flags, is_boundary = rows["flags"].copy(), np.zeros(len(rows), np.bool_)
        for rule in np.unique(rows["rule"]):
            at = rows["rule"] == rule
            flags[at], is_boundary[at] = self._detectors[rule].advance_rows(rows["flags"][at], tokens[at], lengths[at])
        return flags, is_boundary

    def _score(self, report: StepReport, values: RowValues, ended: npt.NDArray[np.int64], *, fed: int) -> list[str]:
        """Scores the rows in `ended`, which have finished a thought `fed` tokens ago; returns their requests."""
        if not len(ended):
            return []
        # By id, not by row: a row's place depends on its neighbours, and scores depend on their order.
        found = sorted((self._row_traces[at].key, int(at)) for at in ended)
        scores = self._scores_of(values.scores, [at for _, at in found])
        is_ranked, needs_confidence = self._scorer.info.ranks_within_run, self._scorer.info.needs_confidence
        for (key, at), score in zip(found, scores, strict=True):
            score = self.searches[key.search].scores.add(score, as_quantile=is_ranked)
            trace, length = self._row_traces[at], int(self._batch["num_tokens"][at]) - fed
            trace.score, trace.standing = trace.score.add(score), None
            embedding = None
            if trace.task.embedding_size and values.embeddings is not None:
                vector = values.embeddings[at, : trace.task.embedding_size]  # other searches may have longer ones
                embedding = tuple((vector / np.linalg.norm(vector)).tolist())
            confidence = float(self._batch["thought_confidence"][at]) if needs_confidence else None
            report.of(key.search).scored.append(ThoughtScore(key.trace, score, length, embedding, confidence))
        return [self._rows[at] for _, at in found]

    def _scores_of(self, scores: Floats | None, ended: Sequence[int]) -> list[float]:
        """Returns the scores of rows; of a scorer that needs confidences, `scores` are what it makes of the states."""
        if not self._scorer.info.needs_confidence:
            return [] if scores is None else scores[ended].tolist()
        # A scorer of confidences needs whole thoughts, and only here is known where a thought ends.
        confidences = torch.from_numpy(self._batch["thought_confidence"][ended]).float()
        if scores is not None and isinstance(self._scorer, SplitScorer):
            found = self._scorer.whole(torch.from_numpy(scores[ended]), confidences)
        else:
            found = self._scorer.score(ThoughtBatch(confidences.new_zeros(len(ended), 0), confidences))
        return [float(score) for score in found.tolist()]

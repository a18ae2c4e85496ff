"""The embedded engine: schedules, runs and reads the pool, one token per trace and step; knows no policy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import EngineInfo, SearchSpec, check_prompt
from gambit.engines.local.attention import DecodePlan, PoolStore, PromptPlan, RowPlan, RowSnapshot, group_by_slot
from gambit.engines.local.blocks import KvBlocks
from gambit.engines.local.model import ForwardOutput, PoolModel
from gambit.engines.local.rows import ROW, LiveTrace, Rows
from gambit.engines.local.sampling import Filters, filters_of, noise_keys, sample, token_confidence, uniforms
from gambit.errors import EngineError
from gambit.prompts import BoundaryRule, ThoughtState, ThoughtTables, Tokenizer, boundaries, pack
from gambit.scorers.base import Scorer, ThoughtBatch
from gambit.scorers.simple import RunQuantiles
from gambit.types import (
    Admitted,
    EndReason,
    Evicted,
    Finished,
    PressureAction,
    Progress,
    SearchStep,
    StatePosition,
    StepBatch,
    StepSeconds,
    ThoughtScore,
    TraceKey,
    TraceSpec,
)

THINKING_BIT = pack(ThoughtState(is_thinking=True))


@dataclass(slots=True, eq=False)
class _OpenSearch:
    """One search on this engine."""

    spec: SearchSpec
    slot: int
    prompt_blocks: list[int] | None = None  # None until its prompt was computed
    traces: dict[int, LiveTrace] = field(default_factory=dict)
    quantiles: RunQuantiles = field(default_factory=RunQuantiles)

    @property
    def segment(self) -> tuple[int, ...]:
        """The shared part of the prompt. Its last token is fed by each root: that gives a root its first logits."""
        return self.spec.prompt[:-1]


@dataclass(slots=True)
class _StepDraft:
    """A `SearchStep` in the making."""

    evicted: list[Evicted] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    num_generated: int = 0
    scored: list[ThoughtScore] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    def freeze(self) -> SearchStep:
        return SearchStep(
            tuple(self.evicted), tuple(self.admitted), self.num_generated, tuple(self.scored), tuple(self.finished)
        )


class LocalEngine:
    """Runs the traces of all open searches in one forward pass per step."""

    def __init__(
        self,
        model: PoolModel,
        tokenizer: Tokenizer,
        scorer: Scorer,
        *,
        kv_budget_tokens: int | None = None,
        memory_ratio: float = 0.9,
        block_tokens: int = 16,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._scorer = scorer.to(model.device)
        room = kv_budget_tokens if kv_budget_tokens is not None else model.kv_room_tokens(memory_ratio)
        self._blocks = KvBlocks(room, block_tokens)
        self._store = PoolStore()
        self._rows = Rows()
        self._searches: dict[int, _OpenSearch] = {}
        self._slots: list[_OpenSearch] = []  # by prompt slot, dense
        self._waiting: list[LiveTrace] = []
        self._parked: dict[LiveTrace, RowSnapshot] = {}  # former parents whose rows went before their children came
        self._parents: dict[LiveTrace, LiveTrace] = {}  # waiting child -> parent whose memory it will share
        self._tables: dict[BoundaryRule, ThoughtTables] = {}
        self._draft: defaultdict[int, _StepDraft] = defaultdict(_StepDraft)
        self._num_admissions = 0
        self._step = 0
        self._layout: _Layout | None = None
        self._clock = _Stopwatch()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            name="local",
            model=self._model.name,
            device=str(self._model.device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            hidden_size=self._model.hidden_size,
            context_tokens=self._model.context_tokens,
            kv_capacity_tokens=self._blocks.capacity_tokens,
            block_tokens=self._blocks.block_tokens,
            versions={"torch": torch.__version__},
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        assert spec.search not in self._searches and spec.prompt
        check_prompt(self.info, len(spec.prompt))
        search = _OpenSearch(spec, slot=len(self._slots))
        self._slots.append(search)
        self._searches[spec.search] = search

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        for spec in specs:
            search = self._searches[spec.key.search]
            trace = self._child(search, spec) if spec.parent is not None else self._detached(search, spec)
            trace.waiting_since = self._step
            search.traces[spec.key.trace] = trace
            self._waiting.append(trace)

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        tokens = {}
        for key in keys:
            trace = self._searches[key.search].traces[key.trace]
            tokens[key] = self._rows.tokens_of(trace)
            self._drop(trace)
        return tokens

    def progress(self, search: int) -> Mapping[int, Progress]:
        traces = self._searches[search].traces
        return {trace_id: self._rows.progress_of(trace, THINKING_BIT) for trace_id, trace in traces.items()}

    def close_search(self, search: int) -> None:
        closing = self._searches.pop(search)
        for trace in list(closing.traces.values()):
            self._drop(trace)
        self._blocks.release(closing.prompt_blocks or ())
        self._vacate_slot(closing)

    def close(self) -> None:
        for search in list(self._searches):
            self.close_search(search)
        self._model.close()

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> StepBatch:
        """Schedule, run, read: running traces get room first, waiting ones only what nobody had to give up."""
        self._step += 1
        self._draft.clear()
        self._clock = _Stopwatch()
        with self._clock.part("scheduling"):
            if not self._make_room():
                self._admit()
        if len(self._rows):
            with self._clock.part("engine"):
                output = self._forward()
                tokens, confidence = self._sample(output)
            self._read(output, tokens, confidence)
        searches = {search: draft.freeze() for search, draft in self._draft.items()}
        return StepBatch(searches, self._blocks.used_tokens, self._blocks.capacity_tokens, self._clock.seconds())

    def _forward(self) -> ForwardOutput:
        layout = self._current_layout()
        table = self._rows.table
        own = torch.from_numpy(table["num_tokens"].copy())
        positions = (own + torch.from_numpy(table["prompt_length"].copy())).to(self._model.device)
        own_length = int(own.max()) + 1
        self._store.reserve("row", len(own), own_length)
        plan = DecodePlan(self._store, own.to(self._model.device), positions, own_length, layout.prompt_lengths,
                          layout.prompt_length, layout.row_slots, layout.members, layout.places)  # fmt: skip
        tokens = torch.from_numpy(self._rows.last_tokens(layout.first_tokens)).long().to(self._model.device)
        return self._model.forward(tokens[:, None], positions[:, None], plan)

    @torch.inference_mode()
    def _sample(self, output: ForwardOutput) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
        table, layout = self._rows.table, self._current_layout()
        uniform = torch.from_numpy(uniforms(table["noise_key"], table["num_tokens"])).float()
        tokens = sample(output.logits, layout.filters, uniform.to(self._model.device))
        confidence = token_confidence(output.logits) if self._scorer.info.needs_confidence else None
        return tokens.cpu().numpy(), None if confidence is None else confidence.cpu().numpy()

    def _read(
        self, output: ForwardOutput, tokens: npt.NDArray[np.int64], confidence: npt.NDArray[np.float32] | None
    ) -> None:
        """Append the tokens, find the thoughts and traces that ended with them, score the thoughts."""
        table, layout = self._rows.table, self._current_layout()
        was_pending, fed_length = table["is_pending"].copy(), table["num_tokens"].copy()
        is_boundary = layout.advance(table, tokens)
        self._rows.append_tokens(tokens)
        table = self._rows.table  # the table may have grown
        table["is_pending"] = is_boundary
        if confidence is not None:
            _fold_confidence(table, confidence, is_boundary)
        for search, count in layout.rows_per_search.items():
            self._draft[search].num_generated += count
        if self._scorer.info.state_position is StatePosition.BOUNDARY:
            self._score(output.states, np.flatnonzero(was_pending), fed_length)
        else:
            self._score(output.states, np.flatnonzero(is_boundary), table["num_tokens"])
        self._finish(layout.is_stop(tokens))

    def _score(self, states: torch.Tensor, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        if len(rows) == 0:
            return
        with self._clock.part("scoring"), torch.inference_mode():
            confidences = torch.from_numpy(self._rows.table["thought_confidence"][rows]).float()
            index = torch.from_numpy(rows).to(states.device)
            scores = self._scorer.score(ThoughtBatch(states[index], confidences.to(states.device))).tolist()
        for row, score in zip(rows.tolist(), scores, strict=True):
            trace = self._rows.traces[row]
            if self._scorer.info.ranks_within_run:
                score = self._searches[trace.key.search].quantiles.squash(score)
            trace.score = trace.score.add(score)
            self._draft[trace.key.search].scored.append(ThoughtScore(trace.key.trace, score, int(lengths[row])))

    def _finish(self, said_stop: npt.NDArray[np.bool_]) -> None:
        table = self._rows.table
        context_left = self.info.context_tokens - 1 - table["prompt_length"]
        is_full = table["num_tokens"] >= np.minimum(table["max_new_tokens"], context_left)
        ended = [(self._rows.traces[row], bool(said_stop[row])) for row in np.flatnonzero(said_stop | is_full)]
        for trace, stopped in sorted(ended, key=lambda pair: pair[0].key):
            self._report_end(trace, EndReason.STOP if stopped else EndReason.LENGTH)

    def _report_end(self, trace: LiveTrace, reason: EndReason) -> None:
        tokens = self._rows.tokens_of(trace)
        self._drop(trace)
        self._draft[trace.key.search].finished.append(Finished(trace.key.trace, reason, tokens))

    # -- KV room -----------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Give every running row a block for the token it feeds next; True if that cost anyone its room."""
        table, block_tokens = self._rows.table, self._blocks.block_tokens
        at_block_start = np.flatnonzero((table["prompt_length"] + table["num_tokens"]) % block_tokens == 0)
        hungry = sorted((self._rows.traces[row] for row in at_block_start), key=lambda trace: trace.key)
        had_victim = False
        for trace in hungry:
            while trace.row is not None and not self._extend(trace):
                self._evict(self._victim())
                had_victim = True
        return had_victim

    def _extend(self, trace: LiveTrace) -> bool:
        record = self._rows.record_of(trace)
        position = int(record["prompt_length"][0] + record["num_tokens"][0])
        missing = self._blocks.blocks_for(position + 1) - len(trace.blocks)
        blocks = self._blocks.allocate(missing, trace.key.search) if missing > 0 else []
        if blocks is None:
            return False
        trace.blocks += blocks
        return True

    def _victim(self) -> LiveTrace:
        """Of the search furthest above its quota, the trace that its rule gives up first.

        Scores of different problems cannot be compared, so room is settled between searches before scores count.
        """
        running = defaultdict(list)
        for trace in self._rows.traces:
            running[trace.key.search].append(trace)
        search = max(running, key=lambda s: (self._blocks.used_by[s] * self._blocks.block_tokens - self._quota(s), s))
        return max(running[search], key=self._expendability)

    def _quota(self, search: int) -> float:
        quota = self._searches[search].spec.kv_quota_tokens
        return self._blocks.capacity_tokens / len(self._searches) if quota is None else quota

    def _expendability(self, trace: LiveTrace) -> tuple[float, ...]:
        rule = trace.spec.on_pressure
        if rule.action is PressureAction.QUEUE:
            return (trace.admission,)
        score = trace.score.value(self._scorer.info.aggregation)
        is_first = (score is None) == rule.unscored_first
        return (is_first, 0.0 if score is None else -score, trace.key.trace)

    def _evict(self, trace: LiveTrace) -> None:
        action = trace.spec.on_pressure.action
        if action is PressureAction.QUEUE and len(self._rows) == 1:
            # Alone it still does not fit: queueing it would go round forever.
            self._report_end(trace, EndReason.MEMORY)
            return
        tokens = self._rows.tokens_of(trace)
        score = trace.score.value(self._scorer.info.aggregation)
        self._take_row(trace)
        if action is PressureAction.QUEUE:
            trace.waiting_since = self._step
            self._waiting.insert(0, trace)
        else:
            del self._searches[trace.key.search].traces[trace.key.trace]
        kept = () if action is PressureAction.QUEUE else tokens
        self._draft[trace.key.search].evicted.append(Evicted(trace.key.trace, action, score, len(tokens), kept))

    def _admit(self) -> None:
        """Waiting traces in order, while there is room that costs no running trace anything."""
        while self._waiting:
            if self._try_admit(self._waiting[0]):
                self._waiting.pop(0)
            elif len(self._rows) or not self._drop_held_prefix():
                break
        if self._waiting and not len(self._rows):
            raise EngineError(f"a KV budget of {self._blocks.capacity_tokens} tokens has no room for a waiting trace: "
                              "raise --kv-budget-tokens or run fewer searches at once")  # fmt: skip

    def _try_admit(self, trace: LiveTrace) -> bool:
        search = self._searches[trace.key.search]
        if search.prompt_blocks is None and not self._prefill_prompt(search):
            return False
        assert search.prompt_blocks is not None
        holds_prefix = bool(trace.blocks)
        if not holds_prefix:
            trace.blocks = list(search.prompt_blocks)
            self._blocks.share(trace.blocks)
        if not self._extend(trace):
            if not holds_prefix:
                self._blocks.release(trace.blocks)
                trace.blocks = []
            return False
        self._place(search, trace)
        return True

    def _prefill_prompt(self, search: _OpenSearch) -> bool:
        segment = search.segment
        blocks = self._blocks.allocate(len(segment) // self._blocks.block_tokens, search.spec.search)
        if blocks is None:
            return False
        search.prompt_blocks = blocks
        self._store.reserve("prompt", len(self._slots), len(segment))
        if segment:
            with self._clock.part("engine"):
                tokens = torch.tensor([segment], device=self._model.device)
                positions = torch.arange(len(segment), device=self._model.device)[None]
                self._model.forward(tokens, positions, PromptPlan(self._store, search.slot))
        return True

    def _place(self, search: _OpenSearch, trace: LiveTrace) -> None:
        """Give an admitted trace its row, with the keys and values of what it already said."""
        length = len(trace.tokens)
        self._store.reserve("row", len(self._rows) + 1, length + 1)
        row = self._rows.add(trace)
        parent = self._parents.pop(trace, None)
        if length and parent is None:
            with self._clock.part("engine"):
                self._recompute(search, row, trace.tokens)
        elif length and parent is not None:
            self._share_row(parent, row, length)
        self._num_admissions += 1
        trace.admission = self._num_admissions
        inherited = trace.spec.inherited
        reused = inherited if parent is not None else 0
        recomputed = length - reused
        waited = self._step - trace.waiting_since - 1
        self._draft[trace.key.search].admitted.append(Admitted(trace.key.trace, reused, recomputed, max(waited, 0)))

    def _share_row(self, parent: LiveTrace, row: int, length: int) -> None:
        if parent.row is not None:
            self._store.copy_row(parent.row, row, length)
        else:
            self._store.restore_row(row, self._parked[parent], length)
            self._unpark(parent)

    def _recompute(self, search: _OpenSearch, row: int, tokens: npt.NDArray[np.int32]) -> None:
        """Keys and values of the prompt's last token and of all tokens but the last, which the next step feeds."""
        fed = [search.spec.prompt[-1], *tokens[:-1].tolist()]
        start = len(search.segment)
        positions = torch.arange(start, start + len(fed), device=self._model.device)[None]
        plan = RowPlan(self._store, row, search.slot, start)
        self._model.forward(torch.tensor([fed], device=self._model.device), positions, plan)

    # -- traces in and out of rows -----------------------------------------------------------------------------

    def _detached(self, search: _OpenSearch, spec: TraceSpec) -> LiveTrace:
        """A root, or a child whose inherited tokens must be computed again."""
        assert len(spec.prefix) == spec.inherited
        trace = LiveTrace(spec, self._record(search, spec), np.array(spec.prefix, np.int32), spec.score)
        self._replay_thoughts(search, trace)
        return trace

    def _child(self, search: _OpenSearch, spec: TraceSpec) -> LiveTrace:
        """A child of a live parent: it holds the parent's full blocks from now on and copies its row when admitted."""
        assert spec.parent is not None
        parent = search.traces[spec.parent.trace]
        assert parent.row is not None and spec.inherited <= len(self._rows.tokens(parent.row))
        tokens = self._rows.tokens(parent.row)[: spec.inherited].copy()
        trace = LiveTrace(spec, self._record(search, spec), tokens, spec.score)
        if spec.inherited == len(self._rows.tokens(parent.row)):
            for name in ("flags", "is_pending", "confidence_total", "confidence_count", "thought_confidence"):
                trace.record[name] = self._rows.record_of(parent)[name]
        else:
            self._replay_thoughts(search, trace)
        if spec.inherited == 0:
            return trace
        num_cached = len(search.segment) + spec.inherited  # the last inherited token has not been fed
        trace.blocks = parent.blocks[: num_cached // self._blocks.block_tokens]
        self._blocks.share(trace.blocks)
        self._parents[trace] = parent
        return trace

    def _record(self, search: _OpenSearch, spec: TraceSpec) -> npt.NDArray[np.void]:
        record = np.zeros(1, ROW)
        sampling = spec.sampling
        record["num_tokens"], record["max_new_tokens"] = spec.inherited, spec.max_new_tokens
        record["prompt_length"], record["slot"] = len(search.segment), search.slot
        record["noise_key"] = noise_keys(sampling.seed, spec.key.trace)
        record["temperature"], record["top_p"] = sampling.temperature, sampling.top_p
        record["top_k"], record["min_p"] = sampling.top_k, sampling.min_p
        record["flags"] = THINKING_BIT
        return record

    def _replay_thoughts(self, search: _OpenSearch, trace: LiveTrace) -> None:
        """The detector's state after the inherited tokens; a boundary nobody has scored yet is pending."""
        ends, state = boundaries(search.spec.rule, trace.tokens.tolist())
        trace.record["flags"] = pack(state)
        trace.record["is_pending"] = bool(ends) and ends[-1] == len(trace.tokens) - 1 and len(ends) > trace.score.count

    def _drop(self, trace: LiveTrace) -> None:
        """Forget a live trace, wherever it is."""
        if trace.row is not None:
            self._take_row(trace)
        else:
            self._waiting.remove(trace)
            self._release_hold(trace)
        del self._searches[trace.key.search].traces[trace.key.trace]

    def _take_row(self, trace: LiveTrace) -> None:
        """Free a row and its blocks; children that wait to share it get a copy."""
        row = trace.row
        assert row is not None
        if trace in self._parents.values():
            self._parked[trace] = self._store.snapshot_row(row, len(self._rows.tokens(row)))
        last = self._rows.remove(trace)
        if last != row:
            self._store.copy_row(last, row, len(self._rows.tokens(row)) + 1)
        self._blocks.release(trace.blocks)
        trace.blocks = []

    def _drop_held_prefix(self) -> bool:
        """With nothing running, waiting children that hold prefixes may lock each other out: the last one lets go."""
        for trace in reversed(self._waiting[1:]):
            if trace in self._parents:
                self._release_hold(trace)
                return True
        return False

    def _release_hold(self, trace: LiveTrace) -> None:
        self._blocks.release(trace.blocks)
        trace.blocks = []
        parent = self._parents.pop(trace, None)
        if parent is not None:
            self._unpark(parent)

    def _unpark(self, parent: LiveTrace) -> None:
        if parent not in self._parents.values():
            self._parked.pop(parent, None)

    def _vacate_slot(self, closing: _OpenSearch) -> None:
        """Slots stay dense: the last search's prompt moves into the gap."""
        moved = self._slots.pop()
        if moved is not closing:
            self._store.copy_prompt(moved.slot, closing.slot)
            self._slots[closing.slot], moved.slot = moved, closing.slot
            for trace in moved.traces.values():
                self._rows.record_of(trace)["slot"] = moved.slot
        self._rows.version += 1

    # -- what only changes when rows do ------------------------------------------------------------------------

    def _current_layout(self) -> _Layout:
        if self._layout is None or self._layout.version != self._rows.version:
            self._layout = _Layout.of(self._rows, self._slots, self._tables, self._model.device)
        return self._layout


@dataclass(slots=True)
class _Layout:
    """Everything about the rows that stays the same from step to step until a row comes, moves or goes."""

    version: int
    filters: Filters
    row_slots: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_length: int
    members: torch.Tensor | None
    places: torch.Tensor | None
    first_tokens: npt.NDArray[np.int32]
    rows_per_search: dict[int, int]
    detectors: list[tuple[npt.NDArray[np.int64], ThoughtTables]]
    stops: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @classmethod
    def of(
        cls, rows: Rows, slots: list[_OpenSearch], tables: dict[BoundaryRule, ThoughtTables], device: torch.device
    ) -> _Layout:
        row_slots = rows.table["slot"].tolist()
        lengths = [len(search.segment) for search in slots]
        members, places = group_by_slot(row_slots, len(slots)) if len(slots) > 1 else (None, None)
        by_rule: dict[BoundaryRule, list[int]] = defaultdict(list)
        by_stops: dict[frozenset[int], list[int]] = defaultdict(list)
        per_search: dict[int, int] = defaultdict(int)
        for row, slot in enumerate(row_slots):
            spec = slots[slot].spec
            by_rule[spec.rule].append(row)
            by_stops[spec.stop_ids].append(row)
            per_search[spec.search] += 1
        for rule in by_rule:
            tables.setdefault(rule, ThoughtTables(rule))
        return cls(
            version=rows.version,
            filters=filters_of(rows.table, device),
            row_slots=torch.tensor(row_slots, device=device),
            prompt_lengths=torch.tensor(lengths, device=device),
            prompt_length=max(lengths),
            members=None if members is None else torch.tensor(members, device=device),
            places=None if places is None else torch.tensor(places, device=device),
            first_tokens=np.array([slots[slot].spec.prompt[-1] for slot in row_slots], np.int32),
            rows_per_search=dict(per_search),
            detectors=[(np.array(at), tables[rule]) for rule, at in by_rule.items()],
            stops=[(np.array(at), np.array(sorted(ids))) for ids, at in by_stops.items()],
        )

    def advance(self, table: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Feed the thought detectors; says which rows ended a thought."""
        is_boundary = np.zeros(len(tokens), np.bool_)
        for at, detector in self.detectors:
            table["flags"][at], is_boundary[at] = detector.advance_rows(table["flags"][at], tokens[at])
        return is_boundary

    def is_stop(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        said_stop = np.zeros(len(tokens), np.bool_)
        for at, ids in self.stops:
            said_stop[at] = np.isin(tokens[at], ids)
        return said_stop


def _fold_confidence(
    table: npt.NDArray[np.void], confidence: npt.NDArray[np.float32], is_boundary: npt.NDArray[np.bool_]
) -> None:
    table["confidence_total"] += confidence
    table["confidence_count"] += 1
    mean = table["confidence_total"] / table["confidence_count"]
    table["thought_confidence"] = np.where(is_boundary, mean, table["thought_confidence"])
    for name in ("confidence_total", "confidence_count"):
        table[name][is_boundary] = 0


class _Stopwatch:
    """Adds up the seconds of a step by part; a part inside another is taken from the outer one."""

    def __init__(self) -> None:
        self._spent = {"engine": 0.0, "scoring": 0.0, "scheduling": 0.0}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._spent[self._open[-1]] += now - self._since
        self._since = now

    def seconds(self) -> StepSeconds:
        return StepSeconds(**self._spent)

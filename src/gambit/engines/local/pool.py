"""The traces of the local engine: admission, eviction, and KV blocks that branches share.

The numbers of running traces are in one table, objects beside it. Rows stay dense: the last one fills a gap.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gambit.engines.base import SearchSpec
from gambit.engines.confidence import ConfidenceTracks
from gambit.engines.eviction import Standing, action_on, eviction_order, most_over_quota, standing
from gambit.engines.local.attention import PrefillPlan, Snapshot
from gambit.engines.local.model import PoolModel
from gambit.engines.sampling import noise_keys
from gambit.errors import EngineError
from gambit.scorers.memory import Histories, grown
from gambit.scorers.simple import RunScores
from gambit.text.boundary import THINKING, boundaries
from gambit.types import (
    Admission,
    Aggregation,
    EndReason,
    Eviction,
    PressureAction,
    Progress,
    RunningScore,
    SearchStep,
    TraceEnd,
    TraceKey,
    TraceSpec,
)

ROW = np.dtype([
    ("num_tokens", np.int64),  # generated or inherited; also the own position of the token to be fed
    ("max_new_tokens", np.int64),
    ("prompt_length", np.int64),  # positions in the shared prompt segment
    ("slot", np.int64),  # of that segment
    ("noise_key", np.uint64),
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("top_k", np.int64),
    ("min_p", np.float32),
    ("flags", np.uint8),  # the thought detector's
    ("is_pending", np.bool_),  # the token to be fed is a boundary whose thought has not been scored
    ("confidence_total", np.float64),  # over the thought so far
    ("confidence_count", np.int64),
    ("thought_confidence", np.float64),  # of the last finished thought
])  # fmt: skip


@dataclass(slots=True, eq=False)
class LiveTrace:
    """A trace that runs or waits, without the numbers in the table."""

    spec: TraceSpec
    search: "OpenSearch"
    record: npt.NDArray[np.void]  # its row of the table, kept here while it waits
    tokens: npt.NDArray[np.int32]  # all tokens while it waits
    score: RunningScore
    eviction_score: float | None  # the verifier's score, in a search that has one
    blocks: list[int] = field(default_factory=list)
    state_blocks: list[int] = field(default_factory=list)  # that weigh as much as its state
    source: "LiveTrace | Snapshot | None" = None  # of a waiting child: the past that it will share
    row: int | None = None  # None while it waits
    admission: int = 0  # ordinal: the last admitted is evicted first when plain sampling has to queue
    waiting_since: int = 0

    @property
    def key(self) -> TraceKey:
        return self.spec.key


class Rows:
    """The running traces, in rows 0 … n-1."""

    def __init__(self) -> None:
        self._table = np.zeros(0, ROW)
        self.table = self._table  # of the running traces alone
        self._tokens = np.zeros((0, 0), np.int32)
        self.traces: list[LiveTrace] = []
        self.version = 0  # changes whenever a row appears, moves or goes

    def last_tokens(self, first: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the token each row feeds next: its last one, or `first` (the prompt's last) if it has none yet."""
        n, lengths = len(self.traces), self.table["num_tokens"]
        last = self._tokens[np.arange(n), np.maximum(lengths - 1, 0)]
        return np.where(lengths > 0, last, first)

    def append_tokens(self, tokens: npt.NDArray[np.int64]) -> None:
        n, lengths = len(self.traces), self.table["num_tokens"]
        self._tokens = grown(self._tokens, len(self._tokens), int(lengths.max()) + 1)
        self._tokens[np.arange(n), lengths] = tokens
        lengths += 1

    def tokens(self, trace: LiveTrace) -> npt.NDArray[np.int32]:
        return trace.tokens if trace.row is None else self._tokens[trace.row, : self._table["num_tokens"][trace.row]]

    def tokens_of(self, trace: LiveTrace, start: int = 0) -> tuple[int, ...]:
        return tuple(self.tokens(trace)[start:].tolist())

    def record_of(self, trace: LiveTrace) -> npt.NDArray[np.void]:
        return trace.record if trace.row is None else self._table[trace.row : trace.row + 1]

    def progress_of(self, trace: LiveTrace) -> Progress:
        record = self.record_of(trace)
        return Progress(int(record["num_tokens"][0]), bool(record["flags"][0] & THINKING))

    def add(self, trace: LiveTrace) -> int:
        row = len(self.traces)
        self._table = grown(self._table, row + 1)
        self._tokens = grown(self._tokens, len(self._table), len(trace.tokens) + 1)
        self._table[row] = trace.record[0]
        self._tokens[row, : len(trace.tokens)] = trace.tokens
        self.traces.append(trace)
        trace.row = row
        self._has_changed()
        return row

    def remove(self, trace: LiveTrace) -> int:
        """Takes a trace out with its numbers; returns the row that has moved into its place (its own if none has)."""
        row, last = trace.row, len(self.traces) - 1
        assert row is not None
        trace.record, trace.tokens, trace.row = self._table[row : row + 1].copy(), self.tokens(trace).copy(), None
        self._table[row], self._tokens[row] = self._table[last], self._tokens[last]
        moved = self.traces.pop()
        if moved is not trace:
            self.traces[row], moved.row = moved, row
        self._has_changed()
        return last

    def _has_changed(self) -> None:
        self.table = self._table[: len(self.traces)]
        self.version += 1


class KvBlocks:
    """The KV blocks of an engine. A block belongs to the search that allocated it and may be shared within it."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = capacity_tokens // block_tokens
        self.capacity_tokens = self.num_blocks * block_tokens
        self.used_by: Counter[int] = Counter()
        self._holders: Counter[int] = Counter()  # by block
        self._owner: dict[int, int] = {}  # by block: its search
        self._next_id = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - len(self._holders)

    @property
    def used_tokens(self) -> int:
        return len(self._holders) * self.block_tokens

    def allocate(self, count: int, search: int) -> list[int] | None:
        """Returns new blocks; None if there are not enough."""
        if count > self.num_free:
            return None
        blocks = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        self._holders.update(blocks)
        self._owner.update(dict.fromkeys(blocks, search))
        self.used_by[search] += count
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        self._holders.update(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                del self._holders[block]
                self.used_by[self._owner.pop(block)] -= 1


@dataclass(slots=True, eq=False)
class OpenSearch:
    """A search on this engine."""

    spec: SearchSpec
    slot: int
    segment: tuple[int, ...]  # of the prompt, shared: all but its last token, which gives each root its first logits
    prompt_blocks: list[int] | None = None  # None until its prompt was computed
    state_blocks: list[int] = field(default_factory=list)  # of the state after its prompt
    traces: dict[int, LiveTrace] = field(default_factory=dict)
    scores: RunScores = field(default_factory=RunScores)

    def num_live(self) -> Counter[int]:
        """Counts live traces by island."""
        return Counter(trace.spec.island for trace in self.traces.values())


class Pool:
    """The traces of all open searches: running ones in rows, waiting ones in a queue."""

    def __init__(
        self, model: PoolModel, blocks: KvBlocks, aggregation: Aggregation, histories: Histories[TraceKey] | None
    ) -> None:
        self.blocks = blocks
        self.histories = histories  # for a scorer that remembers thoughts
        self.kv_rows, self.kv_prompts = model.new_pool(), model.new_pool()
        self.rows = Rows()
        self.searches: dict[int, OpenSearch] = {}
        self.slots: list[OpenSearch] = []  # by prompt slot, dense
        self.tracks: ConfidenceTracks[TraceKey] = ConfidenceTracks()
        self._model, self._sizes = model, model.cache_sizes
        self._num_state_blocks = self._sizes.state_blocks(blocks.block_tokens)
        self._aggregation = aggregation
        self._waiting: list[LiveTrace] = []
        self._num_admissions = 0
        self._step = 0
        self.seconds_computing = 0.0  # of the current step, for prompts and prefixes
        self.steps: defaultdict[int, SearchStep] = defaultdict(SearchStep)  # of the current step, by search

    def schedule(self) -> None:
        """Begins a step. Running traces get blocks first; waiting ones get only those that cost no eviction."""
        self._step += 1
        self.steps, self.seconds_computing = defaultdict(SearchStep), 0.0
        table, block_tokens = self.rows.table, self.blocks.block_tokens
        at_block_start = np.flatnonzero((table["prompt_length"] + table["num_tokens"]) % block_tokens == 0)
        had_victim = False
        for trace in sorted((self.rows.traces[row] for row in at_block_start), key=lambda trace: trace.key):
            while trace.row is not None and not self._extend(trace):
                if not self._drop_held([child for child in self._waiting if child.state_blocks]):
                    self._evict(self._victim())
                    had_victim = True
        if self._waiting and not had_victim:
            self._admit()
        if not self._sizes.can_cut:
            self._hold_states([child for child in self._waiting if isinstance(child.source, LiveTrace)])

    def finish(self, trace: LiveTrace, reason: EndReason) -> None:
        tokens, confidence = self.rows.tokens_of(trace), self.tracks.end(trace.key)
        self.drop(trace)
        self.steps[trace.key.search].finished.append(TraceEnd(trace.key.trace, reason, tokens, confidence))

    # -- searches and traces come and go -----------------------------------------------------------------------

    def trace_of(self, key: TraceKey) -> LiveTrace:
        return self.searches[key.search].traces[key.trace]

    def open(self, spec: SearchSpec) -> None:
        search = OpenSearch(spec, slot=len(self.slots), segment=spec.prompt[:-1])
        self.slots.append(search)
        self.searches[spec.search] = search

    def close(self, number: int) -> None:
        closing = self.searches[number]
        for trace in list(closing.traces.values()):
            self.drop(trace)
        del self.searches[number]
        if self.histories is not None:
            self.histories.end_where(lambda key: key.search == number)
        self.blocks.release([*(closing.prompt_blocks or ()), *closing.state_blocks])
        self._vacate_slot(closing)

    def submit(self, spec: TraceSpec) -> None:
        search = self.searches[spec.key.search]
        if self.histories is not None:
            self.histories.begin(spec.key, spec.parent or spec.history_of, spec.score.count)
        trace = self._begin(search, spec)
        trace.waiting_since = self._step
        if window := search.spec.confidence_window:
            self.tracks.add(spec.key, window, spec.stop_rule, spec.inherited, spec.parent, len(spec.given))
        search.traces[spec.key.trace] = trace
        self._waiting.append(trace)

    # -- KV blocks ---------------------------------------------------------------------------------------------

    def _extend(self, trace: LiveTrace) -> bool:
        """Gives a trace the blocks for the token that it feeds next; returns False if there are not enough.

        A trace without blocks of its own begins with those of its prompt. One without a state gets blocks for it too.
        """
        record, held = self.rows.record_of(trace), trace.blocks or trace.search.prompt_blocks or []
        position = int(record["prompt_length"][0] + record["num_tokens"][0])
        missing = max(self._num_blocks(position) + 1 - len(held), 0) if self._sizes.token_bytes else 0
        missing_state = self._num_state_blocks - len(trace.state_blocks)
        blocks = self.blocks.allocate(missing + missing_state, trace.key.search)
        if blocks is None:
            return False
        if not trace.blocks:
            self.blocks.share(held)
        trace.blocks = held + blocks[missing_state:]
        trace.state_blocks += blocks[:missing_state]
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        """Returns the full blocks of the keys and values of so many tokens."""
        return num_tokens // self.blocks.block_tokens if self._sizes.token_bytes else 0

    def _victim(self) -> LiveTrace:
        running = defaultdict(list)
        for trace in self.rows.traces:
            running[trace.key.search].append(trace)
        used = {search: self.blocks.used_by[search] * self.blocks.block_tokens for search in running}
        share = self.blocks.capacity_tokens / len(self.searches)
        own = {search: self.searches[search].spec.kv_quota_tokens for search in running}
        search = most_over_quota(used, {search: share if quota is None else quota for search, quota in own.items()})
        return eviction_order(running[search], self._standing, self.searches[search].num_live())[0]

    def _standing(self, trace: LiveTrace) -> Standing:
        spec, score = trace.spec, self._score_of(trace)
        return standing(spec.on_pressure, spec.island, score, trace.key.trace, trace.admission)

    def _score_of(self, trace: LiveTrace) -> float | None:
        """Returns the score that decides about evictions."""
        spec = trace.search.spec
        return trace.eviction_score if spec.has_verifier else trace.score.value(spec.aggregation or self._aggregation)

    def _evict(self, trace: LiveTrace) -> None:
        action = action_on(trace.spec.on_pressure, trace.search.num_live()[trace.spec.island])
        if action is PressureAction.QUEUE and len(self.rows.traces) == 1:
            # Alone it still does not fit. It would be queued and admitted forever.
            self.finish(trace, EndReason.MEMORY)
            return
        tokens, score = self.rows.tokens_of(trace), self._score_of(trace)
        self._take_row(trace)
        if action is PressureAction.QUEUE:
            trace.waiting_since = self._step
            self._waiting.insert(0, trace)
        else:
            self._forget(trace)
        kept = () if action is PressureAction.QUEUE else tokens
        self.steps[trace.key.search].evicted.append(Eviction(trace.key.trace, action, score, len(tokens), kept))

    def _admit(self) -> None:
        """Admits waiting traces in order, while their blocks evict no running trace."""
        while self._waiting:
            if self._try_admit(self._waiting[0]):
                self._waiting.pop(0)
            elif self.rows.traces or not self._drop_held(self._waiting[1:]):  # waiting children lock each other out
                break
        if self._waiting and not self.rows.traces:
            raise EngineError(f"a KV budget of {self.blocks.capacity_tokens} tokens cannot hold a waiting trace: "
                              "raise --kv-budget-tokens or run fewer searches at once")  # fmt: skip

    def _try_admit(self, trace: LiveTrace) -> bool:
        has_prompt = trace.search.prompt_blocks is not None or self._prefill_prompt(trace.search)
        if not has_prompt or not self._extend(trace):
            return False
        self._place(trace)
        return True

    def _prefill_prompt(self, search: OpenSearch) -> bool:
        segment = search.segment
        blocks = self.blocks.allocate(self._num_blocks(len(segment)) + self._num_state_blocks, search.spec.search)
        if blocks is None:
            return False
        search.state_blocks, search.prompt_blocks = blocks[: self._num_state_blocks], blocks[self._num_state_blocks :]
        self.kv_prompts.reserve(len(self.slots), len(segment))
        self.kv_prompts.clear(search.slot)
        if segment:
            self._compute(segment, 0, PrefillPlan(self.kv_prompts, search.slot))
        return True

    def _compute(self, tokens: Sequence[int], start: int, plan: PrefillPlan) -> None:
        """Computes the keys and values of tokens of one sequence from position `start`."""
        began = time.perf_counter()
        positions = torch.arange(start, start + len(tokens), device=self._model.device)[None]
        self._model.forward(torch.tensor([tokens], device=self._model.device), positions, plan)
        self.seconds_computing += time.perf_counter() - began

    def _compute_own(self, fed: Sequence[int], num_held: int, trace: LiveTrace) -> None:
        """Computes a trace's tokens after the first `num_held`."""
        segment, row = trace.search.segment, trace.row
        assert row is not None
        prompt, start = (self.kv_prompts, trace.search.slot, len(segment)), len(segment)
        if self._sizes.can_cut:
            self._compute(fed[num_held:], start + num_held, PrefillPlan(self.kv_rows, row, prompt, num_held))
        elif num_held:  # not all recurrent layers can continue a state by several tokens at once
            for at in range(num_held, len(fed)):
                self._compute(fed[at : at + 1], start + at, PrefillPlan(self.kv_rows, row, prompt, at))
        else:
            self._compute([*segment, *fed], 0, PrefillPlan(self.kv_rows, row, num_skipped=start))

    def _place(self, trace: LiveTrace) -> None:
        """Gives an admitted trace its row, with the keys and values of its tokens so far."""
        search, length, source = trace.search, len(trace.tokens), trace.source
        self.kv_rows.reserve(len(self.rows.traces) + 1, length + 1)
        row = self.rows.add(trace)
        reused = 0 if source is None else trace.spec.inherited
        if isinstance(source, LiveTrace):
            assert source.row is not None
            self.kv_rows.copy(source.row, row, reused)
        elif source is not None:
            self.kv_rows.restore(row, source, reused)
        elif not self._sizes.can_cut:  # it continues the state after its prompt
            self.kv_rows.restore(row, self.kv_prompts.snapshot(search.slot, 0), 0)
        if length > reused:  # all but the last token, which the next step feeds, after the prompt's last one
            self.kv_rows.settle()
            self._compute_own([search.spec.prompt[-1], *trace.tokens[:-1].tolist()], reused, trace)
        trace.source = None
        self._num_admissions += 1
        trace.admission = self._num_admissions
        waited = max(self._step - trace.waiting_since - 1, 0)
        self.steps[trace.key.search].admitted.append(Admission(trace.key.trace, reused, length - reused, waited))

    # -- traces in and out of rows -----------------------------------------------------------------------------

    def _begin(self, search: OpenSearch, spec: TraceSpec) -> LiveTrace:
        """Makes a root, a child of a live parent, or a trace whose inherited tokens must be computed again."""
        parent = None if spec.parent is None else self.trace_of(spec.parent)
        assert parent is None or parent.row is not None
        known = np.array(spec.prefix, np.int32) if parent is None else self.rows.tokens(parent)
        tokens = np.append(known[: spec.inherited], np.array(spec.given, np.int32))
        assert len(tokens) == spec.first_length
        record = np.zeros(1, ROW)
        record["num_tokens"], record["max_new_tokens"] = len(tokens), spec.max_new_tokens
        record["prompt_length"], record["slot"] = len(search.segment), search.slot
        record["noise_key"] = noise_keys([spec.sampling.seed], [spec.noise])
        for name in ("temperature", "top_p", "top_k", "min_p"):
            record[name] = getattr(spec.sampling, name)
        if spec.given:
            record["flags"] = 0  # no longer thinking
        elif parent is not None and spec.inherited == len(known):
            for name in ("flags", "is_pending", "confidence_total", "confidence_count", "thought_confidence"):
                record[name] = self.rows.record_of(parent)[name]
        else:  # a boundary that was not scored yet is pending
            ends, record["flags"] = boundaries(search.spec.rule, tokens.tolist())
            record["is_pending"] = bool(ends) and ends[-1] == len(tokens) - 1 and len(ends) > spec.score.count
        trace = LiveTrace(spec, search, record, tokens, spec.score, spec.eviction_score)
        if parent is not None and spec.inherited and (self._sizes.can_cut or spec.inherited == len(known)):
            # It holds the parent's full blocks from now on; the last inherited token has not been fed.
            trace.blocks = parent.blocks[: self._num_blocks(len(search.segment) + spec.inherited)]
            self.blocks.share(trace.blocks)
            trace.source = parent
        return trace

    def drop(self, trace: LiveTrace) -> None:
        """Drops a live trace, running or waiting."""
        if trace.row is not None:
            self._take_row(trace)
        else:
            self._waiting.remove(trace)
            self._release(trace)
        self._forget(trace)

    def _forget(self, trace: LiveTrace) -> None:
        self.tracks.forget(trace.key)
        del trace.search.traces[trace.key.trace]
        if self.histories is not None and not trace.search.spec.keeps_histories:
            self.histories.end(trace.key)

    def _take_row(self, trace: LiveTrace) -> None:
        """Frees a row and its blocks; children that wait to share it get a copy."""
        row = trace.row
        assert row is not None
        self._release(trace)
        self._hold_states([child for child in self._waiting if child.source is trace])
        last = self.rows.remove(trace)
        if last != row:
            self.kv_rows.copy(last, row, len(self.rows.tokens(self.rows.traces[row])) + 1)
        self.kv_rows.clear(last)

    def _hold_states(self, children: Sequence[LiveTrace]) -> None:
        """Gives waiting children copies of their parents' pasts, which the next step or the next row overwrites.

        One that finds no room for a state is computed again when it is admitted.
        """
        snapshots: dict[int, Snapshot] = {}
        for child in children:
            assert isinstance(child.source, LiveTrace) and child.source.row is not None
            blocks = self.blocks.allocate(self._num_state_blocks, child.key.search)
            if blocks is None:
                self._release(child)
                continue
            child.state_blocks, row = blocks, child.source.row
            if row not in snapshots:
                snapshots[row] = self.kv_rows.snapshot(row, len(self.rows.tokens(child.source)))
            child.source = snapshots[row]

    def _release(self, trace: LiveTrace) -> None:
        self.blocks.release([*trace.blocks, *trace.state_blocks])
        trace.blocks, trace.state_blocks, trace.source = [], [], None

    def _drop_held(self, children: Sequence[LiveTrace]) -> bool:
        """Takes what it holds from the last waiting child that holds anything; it is then computed again."""
        for trace in reversed(children):
            if trace.source is not None:
                self._release(trace)
                return True
        return False

    def _vacate_slot(self, closing: OpenSearch) -> None:
        """Moves the last search's prompt into the gap, so that slots stay dense."""
        moved = self.slots.pop()
        if moved is not closing:
            if moved.prompt_blocks is not None:
                self.kv_prompts.copy(moved.slot, closing.slot, len(moved.segment))
                self.kv_prompts.settle()
            self.slots[closing.slot], moved.slot = moved, closing.slot
            for trace in moved.traces.values():
                self.rows.record_of(trace)["slot"] = moved.slot
        self.kv_prompts.clear(len(self.slots))
        self.rows.version += 1

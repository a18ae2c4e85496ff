"""The embedded engine: one forward pass per step over the pool, then thoughts and ends are found and scored."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gambit.config.options import EngineConfig
from gambit.engines.base import EngineInfo, SearchSpec, check_prompt
from gambit.engines.confidence import fold_thoughts
from gambit.engines.local.attention import DecodePlan, ForwardOutput
from gambit.engines.local.model import PoolModel, load_model
from gambit.engines.local.pool import KvBlocks, Pool
from gambit.engines.sampling import filters_of, sample, token_confidence, uniforms
from gambit.engines.states import LayerChoice, embed
from gambit.scorers.base import HistoryScorer, Scorer, ThoughtBatch, listed
from gambit.scorers.memory import Histories, ThoughtMemory
from gambit.text.boundary import BoundaryRule, ThoughtTables
from gambit.text.tokenizers import Tokenizer
from gambit.types import EndReason, Progress, StatePosition, StepBatch, StepSeconds, ThoughtScore, TraceKey, TraceSpec


class Layout:
    """Facts about the running rows that hold until a row comes, moves or goes: until `Rows.version` changes."""

    def __init__(self, pool: Pool, tables: dict[BoundaryRule, ThoughtTables], model: PoolModel) -> None:
        rows, specs = pool.rows, [search.spec for search in pool.slots]
        row_slots = rows.table["slot"].copy()
        prompt_lengths = [len(search.segment) for search in pool.slots]
        self.version = rows.version
        self.plan = DecodePlan(pool.kv_rows, pool.kv_prompts, row_slots, prompt_lengths, model.device)
        self.filters = filters_of(rows.table, model.device)
        self.first_tokens = np.array([spec.prompt[-1] for spec in specs], np.int32)[row_slots]
        self.embedding_sizes = np.array([spec.embedding_size for spec in specs])[row_slots]  # 0: no vectors
        counts = np.bincount(row_slots, minlength=len(specs)).tolist()
        self.rows_per_search = {spec.search: count for spec, count in zip(specs, counts, strict=True) if count}
        self.tracked = pool.tracks.pick([trace.key for trace in rows.traces])  # rows whose confidence is measured
        self.limits = np.minimum(rows.table["max_new_tokens"], model.context_tokens - 1 - rows.table["prompt_length"])
        alike = defaultdict(list)  # nearly always all searches share rule and stop tokens
        for slot, spec in enumerate(specs):
            alike[spec.rule, spec.stop_ids].append(slot)
        self._detectors: list[tuple[npt.NDArray[np.int64], ThoughtTables, npt.NDArray[np.int64]]] = []
        for (rule, stop_ids), slots in alike.items():
            if rule not in tables:  # tables are kept: they have an entry for each token of the vocabulary
                tables[rule] = ThoughtTables(rule)
            at, stops = np.flatnonzero(np.isin(row_slots, slots)), np.array(sorted(stop_ids), np.int64)
            self._detectors.append((at, tables[rule], stops))

    def advance(
        self, table: npt.NDArray[np.void], tokens: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Feeds the thought detectors; returns the rows that ended a thought, and those with a stop token."""
        is_boundary, has_stopped = np.zeros((2, len(tokens)), np.bool_)
        for at, detector, stops in self._detectors:
            table["flags"][at], is_boundary[at] = detector.advance_rows(
                table["flags"][at], tokens[at], table["num_tokens"][at] + 1
            )
            has_stopped[at] = np.isin(tokens[at], stops)
        return is_boundary, has_stopped


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
        self.tokenizer = tokenizer
        self._scorer = scorer.to(model.device)
        self._layers = LayerChoice.of(scorer.info.layers, model.num_layers)
        self._reads_boundary = scorer.info.state_position is StatePosition.BOUNDARY
        kv_tokens = kv_budget_tokens or model.kv_cache_tokens(memory_ratio, block_tokens)
        self._memory = ThoughtMemory(self._scorer) if isinstance(self._scorer, HistoryScorer) else None
        histories: Histories[TraceKey] | None = None if self._memory is None else Histories()
        self._pool = Pool(model, KvBlocks(kv_tokens, block_tokens), scorer.info.aggregation, histories)
        self._tables: dict[BoundaryRule, ThoughtTables] = {}
        self._layout: Layout | None = None
        self._seconds_scoring = 0.0  # of the current step
        self.info = EngineInfo(
            name="local",
            model=model.name,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            hidden_size=model.hidden_size,
            context_tokens=model.context_tokens,
            kv_capacity_tokens=self._pool.blocks.capacity_tokens,
            block_tokens=block_tokens,
            versions={"torch": torch.__version__},
            kv_asked_tokens=kv_budget_tokens,
            state_tokens=model.cache_sizes.state_blocks(block_tokens) * block_tokens,
            token_weight=min(model.cache_sizes.token_bytes, 1),
        )

    # -- searches and traces come and go -----------------------------------------------------------------------

    def open(self, spec: SearchSpec) -> None:
        assert spec.search not in self._pool.searches and spec.prompt
        check_prompt(self.info, len(spec.prompt))
        self._pool.open(spec)

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        for spec in specs:
            self._pool.submit(spec)

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        tokens = {}
        for key in keys:
            trace = self._pool.trace_of(key)
            tokens[key] = self._pool.rows.tokens_of(trace)
            self._pool.drop(trace)
        return tokens

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        for key, score in scores.items():
            self._pool.trace_of(key).eviction_score = score

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        for key, island in islands.items():
            trace = self._pool.trace_of(key)
            trace.spec = dataclasses.replace(trace.spec, island=island)

    def progress(self, search: int) -> Mapping[int, Progress]:
        traces = self._pool.searches[search].traces
        return {trace_id: self._pool.rows.progress_of(trace) for trace_id, trace in traces.items()}

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return self._pool.rows.tokens_of(self._pool.trace_of(key), start)

    def close_search(self, search: int) -> None:
        self._pool.close(search)

    def close(self) -> None:
        for search in list(self._pool.searches):
            self._pool.close(search)
        self._model.close()

    # -- one step: schedule, run, read -------------------------------------------------------------------------

    def step(self) -> StepBatch:
        pool, blocks, began = self._pool, self._pool.blocks, time.perf_counter()
        pool.schedule()
        scheduling = time.perf_counter() - began - pool.seconds_computing
        self._seconds_scoring = 0.0
        if pool.rows.traces:
            if self._layout is None or self._layout.version != pool.rows.version:
                self._layout = Layout(pool, self._tables, self._model)
            output = self._forward(self._layout)
            tokens, confidence = self._sample(output, self._layout)
            self._read(output, tokens, confidence, self._layout)
        engine = time.perf_counter() - began - scheduling - self._seconds_scoring
        seconds = StepSeconds(engine=engine, scoring=self._seconds_scoring, scheduling=scheduling)
        return StepBatch(dict(pool.steps), blocks.used_tokens, blocks.capacity_tokens, seconds)

    def _forward(self, layout: Layout) -> ForwardOutput:
        lengths, kv_rows, plan = self._pool.rows.table["num_tokens"].copy(), self._pool.kv_rows, layout.plan
        plan.move_to(lengths)
        kv_rows.reserve(len(lengths), plan.own_length)
        kv_rows.settle()
        tokens = torch.from_numpy(self._pool.rows.last_tokens(layout.first_tokens)).long().to(self._model.device)
        return self._model.forward(tokens[:, None], plan.positions[:, None], plan, self._layers.inner)

    @torch.inference_mode()
    def _sample(
        self, output: ForwardOutput, layout: Layout
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]:
        table = self._pool.rows.table
        uniform = torch.from_numpy(uniforms(table["noise_key"], table["num_tokens"])).float()
        tokens = sample(output.logits, layout.filters, uniform.to(self._model.device))
        is_wanted = self._scorer.info.needs_confidence or len(layout.tracked) > 0
        confidence = token_confidence(output.logits) if is_wanted else None
        return tokens.cpu().numpy(), None if confidence is None else confidence.cpu().numpy()

    def _read(
        self,
        output: ForwardOutput,
        tokens: npt.NDArray[np.int64],
        confidence: npt.NDArray[np.float32] | None,
        layout: Layout,
    ) -> None:
        """Appends the tokens, finds the thoughts and traces that ended with them, and scores the thoughts."""
        table = self._pool.rows.table
        was_pending, fed_length = table["is_pending"].copy(), table["num_tokens"].copy()
        is_boundary, has_stopped = layout.advance(table, tokens)
        self._pool.rows.append_tokens(tokens)
        table["is_pending"] = is_boundary
        unconfident: list[TraceKey] = []  # traces that their stop rules end
        if confidence is not None:
            fold_thoughts(table, confidence, is_boundary)
            keys = [self._pool.rows.traces[row].key for row in layout.tracked]
            unconfident = self._pool.tracks.fold(keys, confidence[layout.tracked])
        for search, count in layout.rows_per_search.items():
            self._pool.steps[search].num_generated += count
        ended = np.flatnonzero(was_pending if self._reads_boundary else is_boundary)
        if len(ended):
            self._score(output, ended, fed_length if self._reads_boundary else table["num_tokens"], layout)
        is_over = has_stopped | (table["num_tokens"] >= layout.limits)
        if unconfident or is_over.any():
            self._finish(np.flatnonzero(is_over), has_stopped, unconfident)

    def _score(
        self, output: ForwardOutput, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], layout: Layout
    ) -> None:
        """Scores the thoughts that these rows have ended; `lengths` are the tokens up to their ends."""
        began = time.perf_counter()
        pool, table, info = self._pool, self._pool.rows.table, self._scorer.info
        traces = [pool.rows.traces[row] for row in rows]
        with torch.inference_mode():
            confidences = torch.from_numpy(table["thought_confidence"][rows]).float()
            index = torch.from_numpy(rows).to(self._model.device)
            states = self._layers.join(output.states[index], [layer[index] for layer in output.inner])
            thoughts = ThoughtBatch(states, confidences.to(self._model.device))
            if self._memory is None or pool.histories is None:
                raw = listed(self._scorer.score(thoughts), len(rows), info)
            else:
                past = pool.histories.extend([trace.key for trace in traces], self._memory.max_past)
                raw = self._memory.score(thoughts, past).tolist()
            embeddings = _embed(output.states, rows, layout.embedding_sizes[rows])
        self._seconds_scoring = time.perf_counter() - began
        # By id, not by row: `RunScores` depends on the order of scores, and a trace's row depends on its neighbours.
        for at in sorted(range(len(rows)), key=lambda at: traces[at].key):
            trace, row = traces[at], int(rows[at])
            score = trace.search.scores.add(raw[at], as_quantile=info.ranks_within_run)
            trace.score = trace.score.add(score)
            confidence = float(table["thought_confidence"][row]) if info.needs_confidence else None
            thought = ThoughtScore(trace.key.trace, score, int(lengths[row]), embeddings.get(row), confidence)
            pool.steps[trace.key.search].scored.append(thought)

    def _finish(
        self, rows: npt.NDArray[np.int64], has_stopped: npt.NDArray[np.bool_], unconfident: Sequence[TraceKey]
    ) -> None:
        traces = self._pool.rows.traces
        reasons = {traces[row]: EndReason.STOP if has_stopped[row] else EndReason.LENGTH for row in rows}
        for key in unconfident:
            reasons.setdefault(self._pool.trace_of(key), EndReason.CONFIDENCE)
        for trace in sorted(reasons, key=lambda trace: trace.key):
            self._pool.finish(trace, reasons[trace])


def _embed(
    states: torch.Tensor, rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> dict[int, tuple[float, ...]]:
    """Returns vectors of these sizes by row; none for rows of size 0."""
    found: dict[int, tuple[float, ...]] = {}
    for size in np.unique(sizes[sizes > 0]).tolist():
        mine = rows[sizes == size]
        vectors = embed(states[torch.from_numpy(mine).to(states.device)], size)
        found |= zip(mine.tolist(), map(tuple, vectors.tolist()), strict=True)
    return found


def start_local(config: EngineConfig, model: str, scorer: Scorer) -> LocalEngine:
    """Loads a model and starts the engine. `model` is a folder or a hub name."""
    pool_model, tokenizer = load_model(model, config.device, config.dtype)
    budget, ratio = config.kv_budget_tokens, config.memory_ratio
    return LocalEngine(pool_model, tokenizer, scorer, kv_budget_tokens=budget, memory_ratio=ratio)

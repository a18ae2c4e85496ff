"""Collects training data: samples traces, grades them, reads the hidden states at their thought boundaries.

Sampling is a self-consistency search over many problems at once, on any engine; the states come from one teacher-forced
pass over the finished text (`states.py` says why). A problem counts as done once its shard is in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from gambit.config.options import EngineConfig, SearchConfig
from gambit.engines.base import EngineInfo
from gambit.models import files as models
from gambit.scorers.base import Scorer
from gambit.solver import Solver
from gambit.text.boundary import BLANK_LINE
from gambit.training.sampling import (
    Grading,
    LocalSampler,
    Sampled,
    SampledTrace,
    Sampler,
    SamplingOrder,
    Task,
    ThoughtMeter,
    sample,
)
from gambit.training.states import NoStates, Reading, StateReader
from gambit.training.storage import CollectionWriter, Header, ProblemRecord, TraceRecord, new_id, opened_collection
from gambit.types import StatePosition

_KEPT_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "system_prompt", "enable_thinking", "answer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """How to collect."""

    out: Path
    source: str
    engine: EngineConfig
    search: SearchConfig
    traces_per_problem: int = 16
    traces_at_once: int = 64
    layers: tuple[int, ...] = (-1,)
    positions: tuple[StatePosition, ...] = tuple(StatePosition)
    with_confidence: bool = True
    boundary: str = BLANK_LINE  # where thoughts end; scorers trained on the collection are used with the same rule
    batch_tokens: int | None = None  # of the pass that reads states; None: what suits the device
    num_graders: int = 2

    @property
    def most_problems_at_once(self) -> int:
        """Problems that one engine samples at a time."""
        return max(1, self.traces_at_once // self.traces_per_problem)


@dataclass(slots=True)
class CollectSummary:
    """What a run of `collect` did."""

    num_before: int = 0
    num_problems: int = 0  # written by this run
    num_traces: int = 0
    num_correct: int = 0
    num_thoughts: int = 0
    num_tokens: int = 0
    num_mixed: int = 0  # problems with right and wrong traces: the only ones that say something about ranking
    refused: list[str] = field(default_factory=list)
    was_stopped: bool = False


# -- the run ---------------------------------------------------------------------------------------------------


def collect(
    tasks: Sequence[Task],
    plan: CollectPlan,
    *,
    engines: CollectEngines | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CollectSummary:
    """Sample the problems that are not yet in the folder; an interrupted run keeps what it has written.

    The caller holds the folder's lock: to find it taken is of use before an engine is loaded.
    """
    with Collector(plan, engines) as collector:
        return collector.collect(tasks, plan.out, plan.source, on_progress, should_stop)


class CollectEngines(Protocol):
    """What samples traces and reads their states, here or in a cluster."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def batch_tokens(self) -> int: ...

    @property
    def engine_info(self) -> EngineInfo: ...

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        """Of every trace, in this order."""

    def close(self) -> None: ...


class LocalEngines:
    """An engine of this process that samples and, beside it, the model that reads states."""

    def __init__(self, plan: CollectPlan) -> None:
        config = sampling_engine(plan)
        options = config.model_dump(exclude_unset=True, exclude={"scorer"})
        self.solver = Solver(scorer=thought_scorer(plan), **options)
        try:  # second: what the engine leaves of the memory is enough for it
            self._reader = state_reader(plan)
        except BaseException:
            self.solver.close()
            raise
        self.sampler = LocalSampler(self.solver)

    @property
    def hidden_size(self) -> int:
        return self._reader.hidden_size

    @property
    def batch_tokens(self) -> int:
        return self._reader.batch_tokens

    @property
    def engine_info(self) -> EngineInfo:
        return self.solver.engine.info

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        return self._reader.read(readings_of(problems))

    def close(self) -> None:
        self.solver.close()


class Collector:
    """Serves several collections in turn with the same engines, which it closes. The caller holds their locks."""

    def __init__(self, plan: CollectPlan, engines: CollectEngines | None = None) -> None:
        self.plan = plan
        self._engines: CollectEngines = engines or LocalEngines(plan)

    def collect(
        self,
        tasks: Sequence[Task],
        out: Path,
        source: str,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        should_stop: Callable[[], bool] = lambda: False,
        may_begin: Callable[[], bool] = lambda: True,
        traces_per_problem: int | None = None,
    ) -> CollectSummary:
        """`should_stop`: problems under way are left; `may_begin`: they are finished, others are not begun.

        `traces_per_problem`: instead of the plan's.
        """
        plan = self.plan
        order = SamplingOrder(plan.search, traces_per_problem or plan.traces_per_problem, plan.traces_at_once)
        writer = self.open(out, source, traces_per_problem)
        with Grading(plan.search.answer, plan.num_graders) as grading:
            summary = CollectSummary(num_before=len(writer.done))
            todo = [task for task in tasks if task.id not in writer.done]
            total = len(todo) + summary.num_before
            on_progress(summary.num_before, total)

            def on_written() -> None:
                on_progress(summary.num_before + summary.num_problems, total)

            with _Sink(self._engines, writer, summary, on_written) as sink:
                for sampled in sample(
                    self._engines.sampler, todo, order, grading, summary.refused, should_stop, may_begin
                ):
                    sink.add(sampled)
        summary.was_stopped = should_stop()
        return summary

    def open(self, out: Path, source: str, traces_per_problem: int | None = None) -> CollectionWriter:
        """Begins or resumes a collection; one that was made otherwise is refused."""
        return opened_collection(out, self._header(source, traces_per_problem or self.plan.traces_per_problem))

    @property
    def sampler(self) -> Sampler:
        return self._engines.sampler

    @property
    def engine_info(self) -> EngineInfo:
        return self._engines.engine_info

    def close(self) -> None:
        self._engines.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _header(self, source: str, traces_per_problem: int) -> Header:
        plan = self.plan
        return Header(
            id=new_id(),
            source=source,
            model=models.name_of(plan.engine.model),
            model_hash=models.weight_hash(models.locate(plan.engine.model)),
            hidden_size=self._engines.hidden_size,
            layers=plan.layers,
            positions=tuple(str(position) for position in plan.positions),
            boundary_rule=plan.boundary,
            traces_per_problem=traces_per_problem,
            has_confidence=plan.with_confidence,
            sampling=plan.search.model_dump(mode="json", include=set(_KEPT_SETTINGS)),
        )


def sampling_engine(plan: CollectPlan) -> EngineConfig:
    if plan.engine.engine != "vllm":
        return plan.engine
    # vLLM's own limit, 256, would leave a GPU half idle.
    options = {"max_num_seqs": plan.traces_at_once, **plan.engine.engine_options}
    return plan.engine.model_copy(update={"engine_options": options})


def thought_scorer(plan: CollectPlan) -> Scorer:
    return ThoughtMeter(plan.boundary, plan.with_confidence)


def state_reader(plan: CollectPlan) -> StateReader | NoStates:
    source = models.locate(plan.engine.model)
    if not plan.layers:
        return NoStates(source, device=plan.engine.device, batch_tokens=plan.batch_tokens)
    return StateReader(
        source, layers=plan.layers, positions=plan.positions, device=plan.engine.device,
        dtype=plan.engine.dtype, batch_tokens=plan.batch_tokens,
    )  # fmt: skip


def readings_of(problems: Sequence[Sampled]) -> list[Reading]:
    return [_reading(problem.prompt, trace) for problem in problems for trace in problem.traces]


# -- to disk ---------------------------------------------------------------------------------------------------


class _Sink:
    """Reads and writes finished problems in batches, in a thread beside the sampling.

    One pass at a time: the next one waits for it, so that memory is bounded by two.
    """

    def __init__(
        self, engines: CollectEngines, writer: CollectionWriter, summary: CollectSummary, on_written: Callable[[], None]
    ) -> None:
        self._engines, self._writer, self._summary, self._on_written = engines, writer, summary, on_written
        self._waiting: list[Sampled] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._under_way: Future[None] | None = None

    def add(self, sampled: Sampled) -> None:
        self._waiting.append(sampled)
        if sum(problem.num_tokens for problem in self._waiting) >= 2 * self._engines.batch_tokens:
            self._begin_pass()

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """What was sampled is written, unless something went wrong."""
        try:
            if error is None:
                self._begin_pass()
                self._end_pass()
        finally:
            self._thread.shutdown()  # a pass under way is finished: its problems are sampled and paid for

    def _begin_pass(self) -> None:
        self._end_pass()
        problems, self._waiting = self._waiting, []
        if problems:
            self._under_way = self._thread.submit(self._write, problems)

    def _end_pass(self) -> None:
        if self._under_way is not None:
            self._under_way.result()

    def _write(self, problems: list[Sampled]) -> None:
        states = self._engines.states_of(problems)
        records = [_record(problem) for problem in problems]
        self._writer.add(records, _tensors(problems, states))
        self._count(records)
        self._on_written()

    def _count(self, records: Sequence[ProblemRecord]) -> None:
        summary = self._summary
        for record in records:
            summary.num_problems += 1
            summary.num_traces += len(record.traces)
            summary.num_correct += sum(trace.is_correct for trace in record.traces)
            summary.num_thoughts += sum(trace.num_thoughts for trace in record.traces)
            summary.num_tokens += sum(trace.num_tokens for trace in record.traces)
            summary.num_mixed += record.is_mixed


def _reading(prompt: tuple[int, ...], trace: SampledTrace) -> Reading:
    return Reading(prompt, trace.tokens, tuple(trace.boundaries))


def _record(problem: Sampled) -> ProblemRecord:
    traces = []
    for trace, grade in zip(problem.traces, problem.grades, strict=True):
        answer, is_correct = grade.result()
        traces.append(
            TraceRecord(answer=answer, is_correct=is_correct, num_tokens=len(trace.tokens),
                        num_thoughts=len(trace.boundaries), end=trace.end)
        )  # fmt: skip
    task = problem.task
    return ProblemRecord(id=task.id, question=task.problem.last_message, gold=task.answer, traces=tuple(traces))


def _tensors(problems: Sequence[Sampled], states: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One row per thought; tokens of traces and of prompts one after the other."""
    traces = [trace for problem in problems for trace in problem.traces]
    tensors = {name: torch.cat([found[name] for found in states]).contiguous() for name in states[0]}
    tensors["thought_ends"] = torch.tensor([place + 1 for t in traces for place in t.boundaries], dtype=torch.int32)
    tensors["confidences"] = torch.tensor([value for t in traces for value in t.confidences], dtype=torch.float32)
    tensors["tokens"] = torch.tensor([token for t in traces for token in t.tokens], dtype=torch.int32)
    tensors["prompts"] = torch.tensor([token for each in problems for token in each.prompt], dtype=torch.int32)
    tensors["prompt_lengths"] = torch.tensor([len(each.prompt) for each in problems], dtype=torch.int32)
    return tensors

"""Collects training data: samples traces, grades them, reads the hidden states at their thought boundaries.

Sampling is a self-consistency search over many problems at once, on any engine; the states come from one teacher-forced
pass over the finished text (`StateReader` says why). A problem counts as done once its shard is in the index.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch

from gambit import events as ev
from gambit.cluster.actor import JobDesk
from gambit.cluster.engines import EnginePool
from gambit.cluster.work import Work, run_work
from gambit.config.options import EngineConfig, SearchConfig
from gambit.engines.local.model import pick_device, pick_dtype, read_with_transformers
from gambit.engines.states import LayerChoice
from gambit.errors import EngineError, UserError, first_line
from gambit.models import files as models
from gambit.solver import Solver
from gambit.text.boundary import BLANK_LINE
from gambit.training.dataset import in_groups
from gambit.training.sampling import Grading, Sampled, SampledTrace, Task, ThoughtMeter, Watch
from gambit.training.storage import Header, ProblemRecord, TraceRecord, new_id, opened_collection, state_name
from gambit.types import Problem, StatePosition, StopReason
from gambit.verifiers.lora import by_length, check_installed

LARGEST_HALF = 65504.0  # massive activations of inner layers pass it; as infinities they would poison a fit
BATCH_TOKENS = {"cuda": 65_536, "mps": 16_384, "cpu": 8_192}


class StateReader:
    """Reads hidden states with a second copy of the model, beside the engine's; without layers it loads nothing.

    Engines return scores to a search, not states, and each keeps its states elsewhere. One teacher-forced pass over the
    finished text has the same result whatever engine sampled it, any layer, and both state positions at once. It reads
    every trace up to its last boundary only and needs no output layer, so it costs a fraction of sampling the trace.
    """

    def __init__(
        self,
        model: str,
        *,
        layers: Sequence[int] = (-1,),
        positions: Sequence[StatePosition] = tuple(StatePosition),
        device: str = "auto",
        dtype: str = "auto",
        batch_tokens: int | None = None,
        adapter: str | None = None,
    ) -> None:
        self._device = pick_device(device)
        self._layers, self._positions = tuple(layers), tuple(positions)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self._device.type]
        if self._layers:
            self._model = _load(model, dtype, self._device, adapter)
            config = self._model.config.get_text_config()
            self.hidden_size = int(config.hidden_size)
            LayerChoice.of(self._layers, int(config.num_hidden_layers))
        elif size := models.number_on_disk(model, "hidden_size"):
            self.hidden_size = size
        else:
            raise UserError(f"{model} is not on this disk: download it first, or name its folder with --model")

    def read(self, traces: Sequence[SampledTrace]) -> list[dict[str, torch.Tensor]]:
        """Returns each trace's states by tensor name, [thoughts, hidden] in half precision on the CPU."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in traces]
        if self._layers:
            for batch in by_length([trace.num_read for trace in traces], self.batch_tokens):
                for index, states in zip(batch, self._read_batch([traces[i] for i in batch]), strict=True):
                    found[index] = states
        return found

    @torch.inference_mode()
    def _read_batch(self, traces: list[SampledTrace]) -> list[dict[str, torch.Tensor]]:
        num_thoughts = [len(trace.boundaries) for trace in traces]
        rows = torch.tensor([row for row, count in enumerate(num_thoughts) for _ in range(count)], dtype=torch.long)
        places = torch.tensor([len(t.prompt) + place for t in traces for place in t.boundaries], dtype=torch.long)
        rows, places = rows.to(self._device), places.to(self._device)
        found: list[dict[str, torch.Tensor]] = [{} for _ in traces]
        hidden = self._forward(traces) if len(rows) else [torch.zeros(1, 1, self.hidden_size)] * len(self._layers)
        for layer, states in zip(self._layers, hidden, strict=True):
            for position in self._positions:
                shift = 1 if position is StatePosition.BEFORE else 0
                picked = states.to(rows.device)[rows, places - shift].float().clamp(-LARGEST_HALF, LARGEST_HALF)
                for mine, own in zip(found, torch.split(picked.half().cpu(), num_thoughts), strict=True):
                    mine[state_name(layer, position)] = own
        return found

    def _forward(self, traces: list[SampledTrace]) -> list[torch.Tensor]:
        """Returns the states of every token, by layer."""
        # Padding stands on the right, where causal attention keeps it away from everything that is read: no mask.
        padded = torch.zeros(len(traces), max(trace.num_read for trace in traces), dtype=torch.long)
        for row, trace in zip(padded, traces, strict=True):
            tokens = (*trace.prompt, *trace.tokens)[: trace.num_read]
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        needs_all = self._layers != (-1,)
        out = self._model(input_ids=padded.to(self._device), use_cache=False, output_hidden_states=needs_all)
        if not needs_all:
            return [out.last_hidden_state]
        return [out.last_hidden_state if layer == -1 else out.hidden_states[layer] for layer in self._layers]


def _load(model: str, dtype: str, device: torch.device, adapter: str | None) -> Any:
    """Loads the network without its output layer; its last hidden state is what would enter it."""
    try:
        network = read_with_transformers(model, pick_dtype(dtype, device))
        if adapter is not None:
            check_installed()
            from peft import PeftModel

            network = PeftModel.from_pretrained(network, adapter).merge_and_unload()
        return network.base_model.to(device).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load model {model!r}: {first_line(error)}") from error


_KEPT_SETTINGS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "system_prompt", "enable_thinking", "answer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """The settings of a collection."""

    out: Path
    source: str
    engine: EngineConfig
    search: SearchConfig
    traces_per_problem: int = 16
    traces_at_once: int = 64  # on one engine
    layers: tuple[int, ...] = (-1,)
    positions: tuple[StatePosition, ...] = tuple(StatePosition)
    with_confidence: bool = True
    boundary: str = BLANK_LINE  # where thoughts end; scorers trained on the collection are used with the same rule
    batch_tokens: int | None = None  # of the pass that reads states; None: what suits the device
    num_graders: int = 2

    @property
    def adapter(self) -> str | None:
        """Returns the folder of the adapter that samples; None where the weights do as they are."""
        return None if self.search.lora is None else self.engine.adapters[self.search.lora]

    @property
    def meter(self) -> ThoughtMeter:
        return ThoughtMeter(self.boundary, self.with_confidence)

    @property
    def most_problems_at_once(self) -> int:
        """Returns the number of problems that one engine samples at a time."""
        return max(1, self.traces_at_once // self.traces_per_problem)

    @property
    def problem_search(self) -> SearchConfig:
        """Returns the search of one problem."""
        count = self.traces_per_problem
        # With one seed for all, traces of all problems would share their luck, and so would every figure made of them.
        return self.search.model_copy(update={"policy": "sc", "capacity": count, "num_traces": count,
                                              "own_noise": True})  # fmt: skip


@dataclass(slots=True)
class CollectSummary:
    """The outcome of a run of `collect`."""

    num_before: int = 0
    num_problems: int = 0  # written by this run
    num_traces: int = 0
    num_correct: int = 0
    num_thoughts: int = 0
    num_tokens: int = 0
    num_mixed: int = 0  # problems with right and wrong traces: others do not count for a ranking
    refused: list[str] = field(default_factory=list)
    was_stopped: bool = False

    def add(self, record: ProblemRecord) -> None:
        self.num_problems += 1
        self.num_traces += len(record.traces)
        self.num_correct += sum(trace.is_correct for trace in record.traces)
        self.num_thoughts += sum(trace.num_thoughts for trace in record.traces)
        self.num_tokens += sum(trace.num_tokens for trace in record.traces)
        self.num_mixed += record.is_mixed


class LocalEngines:
    """An engine of this process that samples and, beside it, the model that reads states."""

    def __init__(self, plan: CollectPlan, make_solver: Callable[[], Solver] | None = None) -> None:
        """Starts the plan's engine, or what `make_solver` makes."""
        options = sampling_engine(plan).model_dump(exclude_unset=True, exclude={"scorer"})
        self.solver = make_solver() if make_solver else Solver(scorer=plan.meter, **options)
        self._reading = threading.Lock()  # one pass at a time: memory is planned for one
        try:  # second: what the engine leaves of the memory is enough for it
            self._reader = StateReader(
                models.locate(plan.engine.model), layers=plan.layers, positions=plan.positions,
                device=plan.engine.device, dtype=plan.engine.dtype, batch_tokens=plan.batch_tokens,
                adapter=plan.adapter,
            )  # fmt: skip
        except BaseException:
            self.solver.close()
            raise

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the model's hidden size, and the tokens of one pass that reads states."""
        return self._reader.hidden_size, self._reader.batch_tokens

    def sample(
        self,
        tasks: Iterable[Task],
        plan: CollectPlan,
        should_stop: Callable[[], bool],
        on_event: Callable[[ev.Event], None] = lambda event: None,
    ) -> Iterator[Sampled]:
        """Yields problems as they end."""
        watch = Watch()
        begun: dict[str, Task] = {}

        def problems() -> Iterator[Problem]:
            for task in tasks:
                begun[task.id] = task
                yield task.problem

        def watched(problem_id: str, event: ev.Event) -> None:
            on_event(event)
            watch.on_event(problem_id, event)

        results = self.solver.solve_many(
            problems(), plan.problem_search, concurrency=plan.most_problems_at_once, extractor=watch.keep_text,
            on_event=watched, should_stop=should_stop,
        )  # fmt: skip
        for result in results:
            traces = watch.take(result.problem_id)
            is_whole = result.stop_reason in (StopReason.COMPLETED, StopReason.EXHAUSTED)
            yield Sampled(begun.pop(result.problem_id), traces if is_whole else [], result.error)

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        """Returns the states of every trace, in this order."""
        with self._reading:
            return self._reader.read([trace for problem in problems for trace in problem.traces])

    def close(self) -> None:
        self.solver.close()


def sampling_engine(plan: CollectPlan) -> EngineConfig:
    """Returns the options of the engine that samples."""
    if plan.engine.engine != "vllm":
        return plan.engine
    # vLLM's own limit, 256, would leave a GPU half idle.
    options = {"max_num_seqs": plan.traces_at_once, **plan.engine.engine_options}
    return plan.engine.model_copy(update={"engine_options": options})


def sample_one(task: Task, plan: CollectPlan, engines: LocalEngines, desk: JobDesk) -> Sampled:
    """Samples the traces of one problem and reads their states, in the process of an engine."""

    def on_event(event: ev.Event) -> None:
        if isinstance(event, ev.Sample):
            desk.send(event)

    found = list(engines.sample([task], plan, desk.should_stop, on_event))
    sampled = found[0] if found else Sampled(task, [])  # none: stopped before it began
    if sampled.traces:
        sampled.states = engines.states_of([sampled])
    return sampled


class RayEngines:
    """The engines of a collection under Ray; the driver grades and writes. The caller closes the pool."""

    def __init__(self, pool: EnginePool[LocalEngines], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Waits until an engine is ready."""
        self._pool = pool
        sizes: tuple[int, int] | None = pool.call_one(attrgetter("sizes"), should_stop)
        if sizes is None:
            raise EngineError("stopped before an engine was ready: nothing was collected")
        self.sizes = sizes

    def sample(self, tasks: Iterable[Task], plan: CollectPlan, should_stop: Callable[[], bool]) -> Iterator[Sampled]:
        """Yields problems as they end, with their states."""
        work = (Work(partial(sample_one, task, plan), task) for task in tasks)
        for end in run_work(self._pool, work, jobs_per_engine=plan.most_problems_at_once, should_stop=should_stop):
            yield end.value if isinstance(end.value, Sampled) else Sampled(end.tag, [], end.error)

    def states_of(self, problems: Sequence[Sampled]) -> list[dict[str, torch.Tensor]]:
        """Returns the states that came with the traces."""
        return [states for problem in problems for states in problem.states or ()]


CollectEngines: TypeAlias = LocalEngines | RayEngines


def collect(
    tasks: Sequence[Task],
    plan: CollectPlan,
    *,
    engines: CollectEngines | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CollectSummary:
    """Samples the problems that are not yet in the folder; an interrupted run keeps what it has written.

    The caller holds the folder's lock, which is best taken before an engine is loaded. Engines that are passed serve
    several collections in turn, and the caller closes them. Once `should_stop`, problems under way are left.
    """
    if engines is None:
        with closing(LocalEngines(plan)) as own:
            return collect(tasks, plan, engines=own, on_progress=on_progress, should_stop=should_stop)
    hidden_size, batch_tokens = engines.sizes
    writer = opened_collection(plan.out, _header(plan, hidden_size))
    summary = CollectSummary(num_before=len(writer.done))
    todo = [task for task in tasks if task.id not in writer.done]
    total = len(todo) + summary.num_before
    on_progress(summary.num_before, total)

    def write(problems: Sequence[Sampled]) -> None:
        """Reads the states of problems and writes a shard."""
        states = engines.states_of(problems)
        records = [_record(problem) for problem in problems]
        writer.add(records, _tensors(problems, states))
        for record in records:
            summary.add(record)
        on_progress(summary.num_before + summary.num_problems, total)

    with (
        Grading(plan.search.answer, plan.num_graders) as grading,
        ThreadPoolExecutor(1, thread_name_prefix="states") as thread,  # at its end a pass under way is finished
    ):
        under_way: Future[None] | None = None
        sampled = sample(engines, todo, plan, grading, summary.refused, should_stop)
        for problems in in_groups(sampled, lambda each: each.num_tokens, 2 * batch_tokens):
            if under_way is not None:
                under_way.result()  # one pass at a time: memory is bounded by two
            under_way = thread.submit(write, problems)
        if under_way is not None:
            under_way.result()
    summary.was_stopped = should_stop()
    return summary


def sample(
    engines: CollectEngines,
    tasks: Iterable[Task],
    plan: CollectPlan,
    grading: Grading,
    refused: list[str],
    should_stop: Callable[[], bool],
) -> Iterator[Sampled]:
    """Yields problems with all their traces and with grades on the way; `refused` gathers those that failed."""
    for sampled in engines.sample(tasks, plan, should_stop):
        if sampled.error is not None:
            refused.append(f"{sampled.task.id}: {sampled.error}")
        if sampled.traces:
            sampled.grades = [grading.submit(trace.text, sampled.task.answer) for trace in sampled.traces]
            yield sampled


def _header(plan: CollectPlan, hidden_size: int) -> Header:
    return Header(
        id=new_id(),
        source=plan.source,
        model=models.name_of(plan.engine.model),
        model_hash=models.weight_hash(models.locate(plan.engine.model), plan.adapter),
        hidden_size=hidden_size,
        layers=plan.layers,
        positions=tuple(str(position) for position in plan.positions),
        boundary_rule=plan.boundary,
        traces_per_problem=plan.traces_per_problem,
        has_confidence=plan.with_confidence,
        sampling=plan.search.model_dump(mode="json", include=set(_KEPT_SETTINGS)),
    )


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
    """Returns one row per thought, and tokens of traces and of prompts one after the other."""
    traces = [trace for problem in problems for trace in problem.traces]
    prompts = [problem.traces[0].prompt for problem in problems]
    tensors = {name: torch.cat([found[name] for found in states]).contiguous() for name in states[0]}
    tensors["thought_ends"] = torch.tensor([place + 1 for t in traces for place in t.boundaries], dtype=torch.int32)
    tensors["confidences"] = torch.tensor([value for t in traces for value in t.confidences], dtype=torch.float32)
    tensors["tokens"] = torch.tensor([token for t in traces for token in t.tokens], dtype=torch.int32)
    tensors["prompts"] = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    tensors["prompt_lengths"] = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    return tensors

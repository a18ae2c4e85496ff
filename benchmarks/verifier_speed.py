"""A verifier's speed on a GPU: how fast it trains, by variant, and how fast it reads beside a generating engine.

    PYTHONPATH=src VLLM_USE_FLASHINFER_SAMPLER=0 python3 benchmarks/verifier_speed.py --out $OUT --parts train
    PYTHONPATH=src VLLM_USE_FLASHINFER_SAMPLER=0 python3 benchmarks/verifier_speed.py --out $OUT --parts pooling
    PYTHONPATH=src python benchmarks/verifier_speed.py --out OUT --small                  # any CPU, for debugging

Random weights of Qwen2.5-1.5B's shape and random traces with the lengths of that model on MATH; nothing is read from
outside. Results are printed and written to OUT/verifier_speed.json as they come; what fails is named there with its
reason, and the rest goes on.

- train (an H200: about 60 s, `--seconds` bounds it): tokens/s and memory of a step of the optimiser, by what is kept
  for the way back, which attention, how many tokens a pass; where a pass spends its time; then `train_verifier` itself.
- pooling (about 90 s): a verifier is exported and started on vLLM with its memory in bytes, beside a generating engine;
  thoughts of 200 traces are read as they would end, the scores compared with transformers', and both run at once. They
  are two processes: under NVIDIA's MPS (CUDA_MPS_PIPE_DIRECTORY) they share the GPU, without it they take turns. Each
  further variant takes 30 s: `--beside 1,1:low,0.4:low,0.4:low:fp8` are the share of the GPU's processors that the
  verifier may take, whether MPS puts its work behind the engine's, and whether its weights are quantised.
- alone (about 80 s): the engine with no verifier at all. With `--turns FILE` two of these programs measure in turns:
  one outside of MPS tells what MPS itself costs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import speed_parts as sp

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

FULL, SMALL = "qwen2.5-1.5b", "qwen2-tiny"
PASSES = 6  # of a variant, at most
VARIANT_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Scale:
    """The measurements at one size."""

    shape: str
    dtype: str
    device: str
    num_problems: int
    tokens: tuple[int, ...]  # of a pass
    training_seconds: float
    traces: int  # that the pooling engine reads
    rows: int  # that the generating engine has
    generated: int  # tokens a row


LARGE = Scale(FULL, "bfloat16", "cuda", 160, (8_192, 16_384, 32_768), 15.0, 200, 128, 600)
LITTLE = Scale(SMALL, "float32", "cpu", 24, (512, 1_024), 6.0, 12, 4, 60)


class Report:
    """The results, on disk after every line."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "verifier_speed.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def put(self, part: str, row: dict[str, Any]) -> None:
        self.found.setdefault(part, []).append({"at": round(self.seconds, 1), **row})
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"[{self.seconds:6.1f} s] {part}: {json.dumps(row)}", flush=True)

    @contextlib.contextmanager
    def going_on(self, part: str, what: str) -> Iterator[None]:
        """A part that fails is recorded; the others need not."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.put(part, {"what": what, "failed": f"{type(error).__name__}: {error}"[:500]})


# -- a model and traces ----------------------------------------------------------------------------------------


def write_model(folder: Path, scale: Scale) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sp.write_shape(folder, scale.shape)
    config = Qwen2Config.from_pretrained(folder)
    with torch.device(scale.device):
        model = Qwen2ForCausalLM(config).to(getattr(torch, scale.dtype))
    model.save_pretrained(folder, max_shard_size="4GB")
    return folder


def write_traces(folder: Path, model: Path, scale: Scale, num_traces: int = 8) -> Path:
    """Lengths as of Qwen2.5-Coder-1.5B on MATH: prompts of about 100 tokens, traces of about 530 in 8 thoughts."""
    import torch

    from gambit.models.files import name_of, weight_hash
    from gambit.training.storage import Header, ProblemRecord, TraceRecord, opened_collection

    rng = np.random.default_rng(0)
    shape = sp.SHAPES[scale.shape]
    shorter = 1 if scale.shape == FULL else 10
    header = Header(
        id="random", source="random", model=name_of(str(model)), model_hash=weight_hash(str(model)),
        hidden_size=shape["hidden_size"], layers=(), positions=("boundary",), boundary_rule="blank-line",
        traces_per_problem=num_traces, has_confidence=True, sampling={},
    )  # fmt: skip
    records, tokens, ends, prompts, lengths = [], [], [], [], []
    for problem in range(scale.num_problems):
        traces = []
        prompts.append(rng.integers(10, shape["vocab_size"], size=int(rng.integers(60, 140)) // shorter))
        for trace in range(num_traces):
            length = int(np.clip(rng.lognormal(np.log(470), 0.5), 80, 1_024)) // shorter
            cuts = np.sort(rng.choice(np.arange(2, length - 1), size=min(8, length // 6), replace=False))
            tokens.append(rng.integers(10, shape["vocab_size"], size=length))
            ends.append(cuts)
            traces.append(TraceRecord(answer="1", is_correct=trace % 3 == 0, num_tokens=length, num_thoughts=len(cuts),
                                      end="stop"))  # fmt: skip
        records.append(ProblemRecord(id=str(problem), question="?", gold="1", traces=tuple(traces)))
        lengths.append(len(prompts[-1]))
    steps = np.concatenate(ends)
    columns = {
        "thought_ends": steps, "tokens": np.concatenate(tokens), "prompts": np.concatenate(prompts),
        "prompt_lengths": np.array(lengths),
    }  # fmt: skip
    tensors = {name: torch.from_numpy(column.astype(np.int32)) for name, column in columns.items()}
    opened_collection(folder, header).add(records, {**tensors, "confidences": torch.zeros(len(steps))})
    return folder


def seconds_of(task: Callable[[], object], device: str) -> float:
    import torch

    began = time.perf_counter()
    task()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# -- training --------------------------------------------------------------------------------------------------


class Trainer:
    """One verifier whose steps are timed, with one change after the other."""

    def __init__(self, model: Path, data: Path, scale: Scale) -> None:
        import torch

        from gambit.training.verifier.batches import load_passages
        from gambit.training.verifier.kernels import flash_works, use_packing
        from gambit.training.verifier.recipe import VerifierRecipe
        from gambit.training.verifier.train import MasterWeights
        from gambit.verifiers.lora import LoraVerifier, info_for

        self.scale, self.device = scale, torch.device(scale.device)
        self.data = load_passages(data)
        self.verifier = LoraVerifier.fresh(str(model), info_for(str(model)), self.device)
        self.verifier.network.train()
        use_packing(self.verifier)
        self.weights = MasterWeights(self.verifier, VerifierRecipe())
        self.has_flash = flash_works(self.device, self.verifier.network.dtype)

    def passes(self, tokens: int, uses_flash: bool) -> Iterator[Any]:
        from gambit.training.verifier.batches import ProblemOrder, TrainingPass

        rng = np.random.default_rng(0)
        order = ProblemOrder(self.data, self.data.all_traces(), rng, update_tokens=1, pass_tokens=tokens)
        for step in order.epoch():
            for problems in step:
                made = TrainingPass.of(problems, self.data, uses_flash)
                yield made.pinned() if self.device.type == "cuda" else made

    def step(self, made: Any) -> None:
        from gambit.training.networks import chance_loss, ranking_loss

        batch = made.batch(self.verifier)
        (ranking_loss(batch) + 0.5 * chance_loss(batch)).backward()
        self.weights.step(0.5)

    def measured(self, tokens: int, uses_flash: bool) -> dict[str, Any]:
        """The first step is not counted; then as many as fit into a few seconds."""
        import torch

        made = list(self.passes(tokens, uses_flash))[: PASSES + 1]
        first = seconds_of(lambda: self.step(made[0]), self.scale.device)
        second = seconds_of(lambda: self.step(made[0]), self.scale.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        count = max(1, min(len(made) - 1, int(VARIANT_SECONDS / max(1e-3, second))))
        seconds = seconds_of(lambda: [self.step(each) for each in made[1 : count + 1]], self.scale.device)
        num_tokens = sum(each.num_tokens for each in made[1 : count + 1])
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {
            "pass_tokens": num_tokens // count, "tokens_per_second": round(num_tokens / seconds),
            "first_seconds": round(first, 2), "passes": count, "peak_gib": round(peak / 2**30, 1),
            "mib_per_token": round(peak / 2**20 / (num_tokens / count), 2),
        }  # fmt: skip

    def profile(self, tokens: int, uses_flash: bool) -> list[str]:
        """Returns where a step spends the device's time."""
        from torch.profiler import ProfilerActivity, profile

        made = next(self.passes(tokens, uses_flash))
        is_cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
            total = seconds_of(lambda: self.step(made), self.scale.device)
        rows = sorted(seen.key_averages(), key=lambda row: -(row.self_device_time_total or row.self_cpu_time_total))
        times = [(row.self_device_time_total or row.self_cpu_time_total) / 1e3 for row in rows]
        lines = [f"{ms:8.1f} ms {row.count:6d} × {row.key[:100]}" for ms, row in zip(times, rows[:16], strict=False)]
        return [f"{sum(times):8.1f} ms of kernels in a step of {total * 1e3:.0f} ms", *lines]


def train_part(args: argparse.Namespace, report: Report, scale: Scale, work: Path) -> None:
    model = write_model(work / "model", scale)
    data = write_traces(work / "traces", model, scale)
    report.put("train", {"what": "model and traces written"})
    free_memory(scale)
    trainer = Trainer(model, data, scale)
    flash = trainer.has_flash
    report.put("train", {"what": "loaded", "flash": flash})
    if not flash and scale.device == "cuda":
        with report.going_on("train", "flash"):
            flash_error(trainer)
    _, middle, *_ = scale.tokens

    def measure(what: str, tokens: int, uses_flash: bool) -> None:
        if report.seconds > args.seconds:
            return
        with report.going_on("train", what):
            report.put("train", {"what": what, "flash": uses_flash, **trainer.measured(tokens, uses_flash)})
        free_memory(scale)

    measure("peft's layers, padded attention", middle, False)
    if flash:
        measure("peft's layers, flash", middle, True)
    use_fused(trainer)
    for tokens in scale.tokens:
        measure("fused layers", tokens, flash)
    if flash:
        measure("fused layers, padded attention", middle, False)
    with report.going_on("train", "profile"):
        report.put("train", {"what": "profile", "kernels": trainer.profile(middle, flash)})
    with report.going_on("train", "train_verifier"):
        trainer.verifier.network.to("meta")  # makes room
        free_memory(scale)
        report.put("train", whole_training(model, data, scale))
    if args.compile and report.seconds < args.seconds:
        with report.going_on("train", "compiled"):
            report.put("train", {"what": "compiled layers", **compiled(model, data, scale, flash)})
    if args.recompute and report.seconds < args.seconds:
        with report.going_on("train", "recompute"):
            report.put("train", {"what": "recomputed activations", **recomputed(model, data, scale, flash)})


def flash_error(trainer: Trainer) -> None:
    """Raises ValueError with the reason why torch's kernel was not taken."""
    import torch

    from gambit.training.verifier.kernels import attention_and_gradients

    parts = [torch.randn(1, h, 230, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 2, 2)]
    flash, plain = (attention_and_gradients(parts, uses_flash) for uses_flash in (True, False))
    gaps = [float((a - b).abs().max()) for a, b in zip(flash, plain, strict=True)]
    raise ValueError(f"it differs from the plain computation by {gaps}")


def use_fused(trainer: Trainer) -> None:
    from gambit.training.verifier.kernels import use_fused_layers

    use_fused_layers(trainer.verifier.network)


def whole_training(model: Path, data: Path, scale: Scale) -> dict[str, Any]:
    from gambit.training.dataset import Division
    from gambit.training.verifier.recipe import VerifierPlan, VerifierRecipe
    from gambit.training.verifier.train import train_verifier

    recipe = VerifierRecipe(seconds=scale.training_seconds, epochs=100)
    plan = VerifierPlan(data, str(model), recipe, Division(0.1, 0.1), device=scale.device)
    began = time.perf_counter()
    trained = train_verifier(plan, say=lambda line: print(f"    {line}", flush=True))
    made = trained.info.training
    return {
        "what": "train_verifier", "tokens_per_second": round(made["tokens_per_second"]), "updates": made["updates"],
        "seconds": round(time.perf_counter() - began, 1), "of_training": round(made["seconds"], 1),
    }  # fmt: skip


def compiled(model: Path, data: Path, scale: Scale, flash: bool) -> dict[str, Any]:
    trainer = Trainer(model, data, scale)
    for layer in trainer.verifier.network.get_base_model().layers:
        layer.compile(dynamic=True)
    return trainer.measured(scale.tokens[1], flash)


def recomputed(model: Path, data: Path, scale: Scale, flash: bool) -> dict[str, Any]:
    from gambit.training.verifier.kernels import recompute

    trainer = Trainer(model, data, scale)
    use_fused(trainer)
    recompute(trainer.verifier)
    return trainer.measured(scale.tokens[-1], flash)


def free_memory(scale: Scale) -> None:
    import gc

    import torch

    gc.collect()
    if scale.device == "cuda":
        torch.cuda.empty_cache()


# -- a pooling engine beside a generating one ------------------------------------------------------------------


def pooling_part(args: argparse.Namespace, report: Report, scale: Scale, work: Path) -> None:
    model = work / "model"
    if not (model / "config.json").is_file():
        write_model(model, scale)
    merged, verifier = exported(model, work, scale)
    report.put("pooling", {"what": "exported"})
    first, *others = (Variant.parse(each) for each in args.beside.split(","))
    with started(report, first, merged, model, scale, args) as reader:
        traces = random_traces(scale)
        scores = report_reading(report, reader, traces)
        with report.going_on("pooling", "comparison"):
            report.put("pooling", compared(verifier, traces, scores))
        del verifier
        free_memory(scale)
        engine = start_engine(report, "pooling", model, scale)
        with turn(args):
            report.put("pooling", {**asdict(first), **beside(reader, engine, scale)})
    with contextlib.closing(engine):
        for each in others:
            with report.going_on("pooling", str(each)), started(report, each, merged, model, scale, args) as reader:
                report_reading(report, reader, traces)
                with turn(args):
                    report.put("pooling", {**asdict(each), **beside(reader, engine, scale)})


def start_engine(report: Report, part: str, model: Path, scale: Scale) -> Any:
    began = time.perf_counter()
    room = sp.Room(scale.rows * (scale.generated + 256), 2_048, scale.rows, scale.device == "cpu")
    engine = sp.start_ours(str(model), scale.shape, room)
    report.put(part, {"what": "generating engine started", "seconds": round(time.perf_counter() - began, 1)})
    generate(engine, scale, 0, 16)
    return engine


def alone_part(args: argparse.Namespace, report: Report, scale: Scale, work: Path) -> None:
    """The engine by itself."""
    model = work / "model"
    sp.write_shape(model, scale.shape)
    with contextlib.closing(start_engine(report, "alone", model, scale)) as engine, turn(args):
        rates = [round(generate(engine, scale, number, scale.generated)) for number in range(1, 6)]
        report.put("alone", {"generated_per_second": rates, "with_mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ})


@contextlib.contextmanager
def turn(args: argparse.Namespace) -> Iterator[None]:
    """Locks the file, so that no other process measures into it meanwhile."""
    if args.turns is None:
        yield
        return
    with args.turns.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class Variant:
    """The division of the GPU between a verifier and the engine beside it."""

    gpu_share: float
    has_low_priority: bool
    is_fp8: bool

    @classmethod
    def parse(cls, text: str) -> Variant:
        share, *flags = text.split(":")
        if set(flags) - {"low", "fp8"}:
            raise SystemExit(f"--beside {text}: a share, then :low or :fp8")
        return cls(float(share), "low" in flags, "fp8" in flags)


@contextlib.contextmanager
def started(
    report: Report, variant: Variant, merged: Path, model: Path, scale: Scale, args: argparse.Namespace
) -> Iterator[Any]:
    priority = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if variant.has_low_priority else {}
    began = time.perf_counter()
    with mock.patch.dict(os.environ, priority):
        reader = start_reader(variant, merged, model, scale, args)
    report.put("pooling", {"what": "started", "seconds": round(time.perf_counter() - began, 1), **asdict(variant),
                           **asdict(reader.info)})  # fmt: skip
    with contextlib.closing(reader):
        yield reader


def exported(model: Path, work: Path, scale: Scale) -> tuple[Path, Any]:
    """An adapter that does something, merged; and the same for transformers."""
    import torch

    from gambit.verifiers.lora import LoraVerifier, export, info_for
    from gambit.verifiers.lora_folder import Platt

    torch.manual_seed(0)
    device = torch.device(scale.device)
    info = info_for(str(model), calibration=Platt(slope=1.0, offset=0.1))
    fresh = LoraVerifier.fresh(str(model), info, device)
    for name, each in fresh.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.01)
    torch.nn.init.normal_(fresh.head.weight, std=1 / math.sqrt(info.hidden_size))
    fresh.save(work / "adapter")
    verifier = LoraVerifier.load(work / "adapter", device, str(model))
    return export(verifier, work / "merged", str(model)), verifier


def start_reader(variant: Variant, merged: Path, model: Path, scale: Scale, args: argparse.Namespace) -> Any:
    from gambit.config.options import EngineConfig
    from gambit.verifiers.names import parse_verifier
    from gambit.verifiers.vllm import prepare_vllm_verifier

    options = {"max_model_len": 2_048} | ({} if args.graphs else {"enforce_eager": True})
    options |= {"quantization": "fp8"} if variant.is_fp8 else {}
    config = EngineConfig(model=str(model), verifier_memory=args.verifier_memory, verifier_options=options,
                          verifier_gpu_share=variant.gpu_share)  # fmt: skip
    return prepare_vllm_verifier(parse_verifier(f"verifier:gambit:{merged}"), config, scale.device)()


def random_traces(scale: Scale) -> list[list[Any]]:
    """Readings of each, thought by thought."""
    from gambit.verifiers.base import Question, ReadingKey, ThoughtReading

    rng = np.random.default_rng(1)
    vocabulary = sp.SHAPES[scale.shape]["vocab_size"]
    found = []
    for trace in range(scale.traces):
        if trace % 8 == 0:
            question = Question((), tuple(rng.integers(10, vocabulary, size=100).tolist()))
        lengths = np.clip(rng.lognormal(np.log(60), 0.5, size=8), 4, 250).astype(int)
        tokens = tuple(rng.integers(10, vocabulary, size=int(lengths.sum())).tolist())
        ends = tuple(np.cumsum(lengths).tolist())
        found.append([
            ThoughtReading(ReadingKey(trace // 8, trace, end), question, tokens[:end], ends[: i + 1], ("",) * (i + 1))
            for i, end in enumerate(ends)
        ])  # fmt: skip
    return found


def report_reading(report: Report, reader: Any, traces: list[list[Any]]) -> list[list[float]]:
    """Round by round, the next thought of every trace, as they end in a search."""
    reader.read([trace[0] for trace in traces[:4]])  # libraries start
    scores: list[list[float]] = [[] for _ in traces]
    computed = fresh = 0
    began = time.perf_counter()
    for thought in range(len(traces[0])):
        found = reader.read([trace[thought] for trace in traces])
        computed += sum(each.num_tokens for each in found)
        fresh += sum(len(t[thought].tokens) - (len(t[thought - 1].tokens) if thought else -12.5) for t in traces)
        for own, each in zip(scores, found, strict=True):
            own.append(each.score)
    seconds = time.perf_counter() - began
    report.put("pooling", {
        "what": "thoughts read incrementally", "traces": len(traces), "thoughts": sum(map(len, scores)),
        "tokens_computed": computed, "tokens_that_were_new": round(fresh), "seconds": round(seconds, 2),
        "tokens_per_second": round(computed / seconds), "thoughts_per_second": round(sum(map(len, scores)) / seconds),
    })  # fmt: skip
    return scores


def compared(verifier: Any, traces: list[list[Any]], scores: list[list[float]]) -> dict[str, Any]:
    """Compares the scores with those of one pass of transformers over the whole of each trace."""
    from gambit.verifiers.lora import Passage

    passages = []
    for trace in traces:
        prompt = trace[0].question.prompt_tokens
        tokens = np.array([*prompt, *trace[-1].tokens], np.int64)
        passages.append(Passage(tokens, np.array(trace[-1].ends) + len(prompt) - 1))
    began = time.perf_counter()
    logits = np.stack(verifier.logits(passages))
    seconds = time.perf_counter() - began
    logits = verifier.info.calibration.slope * logits + verifier.info.calibration.offset
    own = np.array(scores)
    served = np.log(own / (1 - own))
    return {
        "what": "against transformers, in the same precision", "logit_deviation": float(logits.std()),
        "mean_difference_of_logits": float(np.abs(served - logits).mean()),
        "largest_difference_of_logits": float(np.abs(served - logits).max()),
        "correlation": float(np.corrcoef(served.ravel(), logits.ravel())[0, 1]),
        "transformers_tokens_per_second": round(sum(len(each.tokens) for each in passages) / seconds),
    }  # fmt: skip


def beside(reader: Any, engine: Any, scale: Scale) -> dict[str, Any]:
    """Generation alone, and with a verifier that reads as much as is generated.

    Generation is slower beside it, and then there is less to read: the first round finds out how much.
    """
    alone = [generate(engine, scale, number, scale.generated) for number in (1, 2)]
    rate, rounds = max(alone), []
    for number in (3, 5, 7):
        reading = Reading(reader, scale, rate)
        with reading:
            both = [generate(engine, scale, number + i, scale.generated) for i in (0, 1)]
        rate = max(both)
        rounds.append({"generated_per_second": [round(each) for each in both],
                       "read_per_second": round(reading.tokens / reading.seconds)})  # fmt: skip
    alone += [generate(engine, scale, number, scale.generated) for number in (9, 10)]
    return {
        "what": "beside", "generated_per_second_alone": [round(each) for each in alone], "rounds": rounds,
        "share": round(float(np.mean(rounds[-1]["generated_per_second"]) / np.mean(alone)), 3),
        "with_mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    }  # fmt: skip


def generate(engine: Any, scale: Scale, number: int, tokens: int) -> float:
    """Tokens a second of one search that only samples."""
    _, seconds = sp.run_pool(sp.Watched(engine), sp.Pool("sc", scale.rows, tokens), number, scale.shape)
    return scale.rows * tokens / seconds


class Reading(contextlib.AbstractContextManager["Reading"]):
    """A thread that has the verifier read thoughts as fast as they would end."""

    def __init__(self, reader: Any, scale: Scale, rate: float) -> None:
        self.tokens, self.seconds = 0, 1e-9
        self._reader, self._rate, self._is_over = reader, rate, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        traces = random_traces(scale)
        self._waiting = [reading for thought in zip(*traces, strict=True) for reading in thought]

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        began, place, turn = time.perf_counter(), 0, 0
        while not self._is_over.wait(0.005):
            self.seconds = time.perf_counter() - began
            due = int((self._rate * self.seconds - self.tokens) / 60)
            if due < 1:
                continue
            ended = self._waiting[place : place + due]
            self.tokens += sum(each.num_tokens for each in self._reader.read([self._new(each, turn) for each in ended]))
            place, turn = (place + due, turn) if place + due < len(self._waiting) else (0, turn + 1)

    def _new(self, reading: Any, turn: int) -> Any:
        """Returns a reading with another first token at each turn, so that the cache holds nothing of it."""
        return replace(reading, tokens=(10 + turn, *reading.tokens[1:]))


PARTS = {"train": train_part, "pooling": pooling_part, "alone": alone_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="train,pooling", help="of train, pooling, alone")
    parser.add_argument("--small", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--seconds", type=float, default=80, help="after which no variant of the training is begun")
    parser.add_argument("--compile", action="store_true", help="also time layers that torch.compile made")
    parser.add_argument("--recompute", action="store_true", help="also time activations that are computed again")
    parser.add_argument("--graphs", action="store_true", help="the pooling engine compiles and captures CUDA graphs")
    parser.add_argument("--verifier-memory", default="20GB")
    parser.add_argument("--turns", type=Path, help="a file that others measure in turns by")
    parser.add_argument("--beside", default="1", help="variants of a verifier beside the engine, as in 1,0.4:low:fp8")
    args = parser.parse_args()
    report, scale = Report(args.out), LITTLE if args.small else LARGE
    work = Path(tempfile.mkdtemp(prefix="verifier-speed-"))
    try:
        (work / "model").mkdir()
        for part in args.parts.split(","):
            with report.going_on(part, "all of it"):
                PARTS[part](args, report, scale, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

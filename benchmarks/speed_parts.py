"""Shared by the speed benchmarks: model shapes with random weights, stock vLLM, Gambit's engine under its own loop."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process uses torch's threads

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "full_attention_interval": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "tie_word_embeddings": True,
}  # fmt: skip
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SHAPES = {
    "qwen3-4b": QWEN3 | {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "phi-4-14b": PHI3 | {
        "hidden_size": 5120, "intermediate_size": 17_920, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "vocab_size": 100_352, "tie_word_embeddings": False, "pad_token_id": 0,
        "original_max_position_embeddings": 32_768,
    },
    "qwen2.5-1.5b": QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen2-tiny": QWEN2 | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2_000, "tie_word_embeddings": True,
    },
    # A hybrid of about 4B: three of four layers are gated DeltaNet. vLLM wants experts, which the last layer alone has.
    "qwen3-next-4b": QWEN3_NEXT | {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 151_936, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 2560,
        "mlp_only_layers": list(range(31)),
    },
    "qwen3-next-tiny": QWEN3_NEXT | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 2_000, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "mlp_only_layers": list(range(3)),
    },
    "pawn": QWEN3 | {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 141, "tie_word_embeddings": True,
        "max_position_embeddings": 1024, "rope_theta": 10_000,
    },
    "tiny": QWEN3 | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2_000, "tie_word_embeddings": True,
    },
}  # fmt: skip
# Recurrent states fill most of their KV cache, which is given in bytes: tokens say little about it.
STATE_BYTES = {"qwen3-next-4b": 16 << 30, "qwen3-next-tiny": 256 << 20}
ADAPTER, ADAPTER_RANK = "adapter", 16
CONTEXT_TOKENS = 32_768
SCORER_WIDTH = 512
THOUGHT_TOKENS = {"pawn": 12}  # mean length: that share of the vocabulary ends a thought
USUAL_THOUGHT_TOKENS = 32
PROMPT_TOKENS = 96
CLOCK = "GAMBIT_CLOCK_MS"  # how the processes of a clocked device learn of it
MEMORY_RATIO = 0.2  # what must be free for vLLM to start, no more: the room is given in bytes
NEIGHBOURS = 10  # steps on either side that say how long a step usually takes
AFTER_ADMISSION = 4  # steps that may still be longer: reports come late where steps are scheduled ahead


def context_of(shape: str) -> int:
    return SHAPES[shape].get("max_position_embeddings", CONTEXT_TOKENS)


def write_shape(folder: Path, shape: str) -> str:
    config = {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": CONTEXT_TOKENS, "rope_theta": 1_000_000,
        "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "initializer_range": 0.02, "use_cache": True, **SHAPES[shape],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_adapter(folder: Path, shape: str) -> str:
    """Writes a LoRA adapter of random matrices for the attention of every layer, as peft does."""
    import torch
    from safetensors.torch import save_file

    sizes = SHAPES[shape]
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim") or hidden // heads
    widths = {
        "q_proj": (hidden, heads * head), "v_proj": (hidden, sizes["num_key_value_heads"] * head),
        "o_proj": (heads * head, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, (before, after) in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.02 * torch.randn(ADAPTER_RANK, before, generator=generator)
            weights[f"{place}.lora_B.weight"] = 0.02 * torch.randn(after, ADAPTER_RANK, generator=generator)
    folder.mkdir()
    save_file({name: each.bfloat16() for name, each in weights.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": ADAPTER_RANK, "lora_alpha": 32, "bias": "none",
              "target_modules": list(widths), "base_model_name_or_path": shape}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def random_scorer(hidden_size: int, layers: tuple[int, ...] = (-1,)) -> Any:
    import torch

    from gambit.scorers.base import ScorerInfo
    from gambit.scorers.mlp import MlpScorer

    generator = torch.Generator().manual_seed(0)
    shapes = ((SCORER_WIDTH, hidden_size * len(layers)), (SCORER_WIDTH,), (1, SCORER_WIDTH), (1,))
    w1, b1, w2, b2 = (torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes)
    return MlpScorer(ScorerInfo("mlp", hidden_size=hidden_size, layers=layers), (w1, b1, w2, b2))


def prompt_of(number: int) -> list[int]:
    """Every segment has a prompt of its own, so that none finds another's blocks."""
    return [(11 * number + 7 * i) % 131 + 5 for i in range(PROMPT_TOKENS)]


@dataclass(frozen=True, slots=True)
class Room:
    """The room of an engine, in the terms of both engines."""

    kv_tokens: int
    context_tokens: int
    num_traces: int
    is_cpu: bool
    is_clocked: bool = False  # the device is only a clock

    def options(self, shape: str) -> dict[str, Any]:
        """vLLM's options; bytes instead of a share of memory, so that engines can start side by side."""
        options = {
            "load_format": "dummy", "max_model_len": self.context_tokens, "max_num_seqs": self.num_traces,
            "kv_cache_memory_bytes": STATE_BYTES.get(shape) or self._bytes(SHAPES[shape]),
        }  # fmt: skip
        if self.is_clocked:
            options |= {"distributed_executor_backend": "uni", "async_scheduling": True}  # as on a GPU
        if not self.is_cpu:
            return options
        return options | {"enforce_eager": True} | ({} if shape in STATE_BYTES else {"block_size": 32})

    def dtype(self, shape: str) -> str:
        return "float32" if self.is_cpu and shape not in STATE_BYTES else "bfloat16"

    def _bytes(self, shape: dict[str, Any]) -> int:
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head * (4 if self.is_cpu else 2)
        return (max(self.kv_tokens, self.context_tokens) + 4096) * per_token


class Stock:
    """vLLM as it comes."""

    def __init__(self, model: str, shape: str, room: Room, adapter: str | None = None, **more: Any) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self._lora = LoRARequest(ADAPTER, 1, adapter) if adapter else None
        if adapter:
            more |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": ADAPTER_RANK}

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if room.is_clocked:
            more["worker_cls"] = "clocked_device.ClockedWorker"
        with schedules_ahead() if room.is_clocked else nullcontext():
            self._llm = LLM(
                model=model, dtype=room.dtype(shape), skip_tokenizer_init=True, disable_log_stats=True,
                enable_prefix_caching=True, gpu_memory_utilization=MEMORY_RATIO, **room.options(shape), **more,
            )  # fmt: skip

    @property
    def core_client(self) -> Any:
        return self._llm.llm_engine.engine_core

    def generate(self, prompt: list[int], count: int, tokens: int) -> int:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt}] * count
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self.core_client.shutdown()


@contextmanager
def schedules_ahead() -> Iterator[None]:
    """Switches asynchronous scheduling on again on a CPU, where vLLM switches it off."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_ahead(*args: Any, **kwargs: Any) -> Any:
        config = create(*args, **kwargs)
        config.scheduler_config.async_scheduling = True
        return config

    with mock.patch.object(EngineArgs, "create_engine_config", create_ahead):
        yield


class NoTokenizer:
    """Random weights have nothing to say."""


def start_ours(
    model: str, shape: str, room: Room, *, exact_noise: bool = False, layers: tuple[int, ...] = (-1,),
    adapter: str | None = None, **more: Any,
) -> Any:  # fmt: skip
    from gambit.config.options import EngineConfig
    from gambit.engines.vllm import start

    own = {"own_process": True, "exact_noise": exact_noise}
    if room.is_clocked:
        own["self_check"] = False  # of states, which a clock does not have
    config = EngineConfig(
        model=model, engine="vllm", dtype=room.dtype(shape), memory_ratio=MEMORY_RATIO,
        kv_budget_tokens=None if shape in STATE_BYTES else room.kv_tokens,
        adapters={ADAPTER: adapter} if adapter else {}, engine_options={**room.options(shape), **own, **more},
    )  # fmt: skip
    scorer = random_scorer(SHAPES[shape]["hidden_size"], layers)
    worker = "clocked_device.ClockedScorer" if room.is_clocked else start.WORKER
    with mock.patch.object(start, "WORKER", worker):
        return start.start_vllm(config, model, scorer, tokenizer=NoTokenizer())


@dataclass(slots=True)
class Lengths:
    """Total lengths of traces, log-normal and seeded; a child's is drawn anew, given that it exceeds its prefix."""

    median: float
    seed: int
    spread: float = 0.45
    longest: float = 4.0  # in medians

    def of(self, trace: int, inherited: int) -> int:
        rng = random.Random(f"{self.seed}/{trace}")
        while True:
            length = round(self.median * min(math.exp(rng.gauss(0, self.spread)), self.longest))
            if length > inherited:
                return length
            if inherited >= self.median * self.longest:
                return inherited + 1

    def rooted(self, count: int) -> list[int]:
        return [self.of(i, 0) for i in range(count)]


@dataclass(slots=True)
class Watched:
    """Gambit's engine with drawn trace lengths; notes pool and KV use over time, and branches as they are admitted."""

    engine: Any
    lengths: Lengths | None = None
    every: int = 25  # steps between two notes
    series: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, tokens of a step, KV tokens in use
    peak_kv: int = 0
    num_queued: int = 0
    step_seconds: list[float] = field(default_factory=list)  # from one step's report to the next
    admissions: list[int] = field(default_factory=list)  # steps in which traces were admitted
    _began: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)
    _steps: int = 0

    def submit(self, specs: Sequence[Any]) -> None:
        if self.lengths is not None:
            specs = [replace(s, max_new_tokens=self.lengths.of(s.key.trace, s.inherited)) for s in specs]
        self.engine.submit(specs)

    def step(self) -> Any:
        batch = self.engine.step()
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now
        if any(step.admitted for step in batch.searches.values()):
            self.admissions.append(self._steps)
        self.peak_kv = max(self.peak_kv, batch.kv_used_tokens)
        lost = (evicted for step in batch.searches.values() for evicted in step.evicted)
        self.num_queued += sum(evicted.action == "queue" for evicted in lost)
        if self._steps % self.every == 0:
            tokens = sum(step.num_generated for step in batch.searches.values())
            self.series.append((round(time.perf_counter() - self._began, 3), tokens, batch.kv_used_tokens))
        self._steps += 1
        return batch

    def spikes(self) -> dict[str, float]:
        """Seconds that steps took beyond the median of their neighbours: those that admit traces, and all others."""
        found = {"admitting": 0.0, "others": 0.0}
        near = {step + late for step in self.admissions for late in range(-1, AFTER_ADMISSION)}
        for step, seconds in enumerate(self.step_seconds):
            around = statistics.median(self.step_seconds[max(step - NEIGHBOURS, 0) : step + NEIGHBOURS + 1])
            found["admitting" if step in near else "others"] += max(seconds - around, 0.0)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass(slots=True)
class Begun(Watched):
    """A search whose roots have tokens already, which count as their own."""

    said: Any = None  # [roots, tokens]
    seconds_before: float = 0.0  # until all of them decoded

    def submit(self, specs: Sequence[Any]) -> None:
        if self.lengths is not None:
            specs = [
                replace(spec, max_new_tokens=self.lengths.of(spec.key.trace, self._length(spec))) for spec in specs
            ]
        self.engine.submit([self._begun(spec) for spec in specs])

    def step(self) -> Any:
        batch = Watched.step(self)
        if not self.seconds_before and any(step.num_generated for step in batch.searches.values()):
            self.seconds_before = time.perf_counter() - self._began
        return replace(batch, searches={number: self._hiding(step) for number, step in batch.searches.items()})

    def _is_root(self, trace: int) -> bool:
        return trace < len(self.said)

    def _length(self, spec: Any) -> int:
        return self.said.shape[1] if self._is_root(spec.key.trace) else spec.inherited

    def _begun(self, spec: Any) -> Any:
        if not self._is_root(spec.key.trace):
            return spec
        said = tuple(self.said[spec.key.trace].tolist())
        return replace(spec, prefix=said, inherited=len(said))

    def _hiding(self, step: Any) -> Any:
        admitted = [replace(a, reused=0, recomputed=0) if self._is_root(a.trace) else a for a in step.admitted]
        return replace(step, admitted=type(step.admitted)(admitted))


@dataclass(frozen=True, slots=True)
class Pool:
    """One search's settings, as far as speed depends on them."""

    policy: str
    capacity: int
    max_new_tokens: int
    swap_size: int = 16
    check_interval: int = 200
    warmup_tokens: int = 0
    islands: int = 1


def run_pool(
    engine: Watched, pool: Pool, number: int, shape: str, prompt: list[int] | None = None, lora: str | None = None
) -> tuple[Any, float]:
    """One search to its end; gives it and its seconds."""
    from gambit.config import registry
    from gambit.engines.base import SearchSpec
    from gambit.search.loop import Search, SearchBatch
    from gambit.search.pool import Callbacks
    from gambit.text.boundary import BoundaryRule

    settings = settings_of(pool)
    policy: Any = registry.load("gambit.policies", pool.policy)
    vocab_size = SHAPES[shape]["vocab_size"]
    ends = frozenset(range(0, vocab_size, THOUGHT_TOKENS.get(shape, USUAL_THOUGHT_TOKENS)))
    rule = BoundaryRule(vocab_size, ends, frozenset(), frozenset(), None)
    spec = SearchSpec(number, tuple(prompt or prompt_of(number)), rule, frozenset(), lora=lora)
    callbacks = Callbacks(lambda said: str(said[-1] % 7), lambda deadline: str.__eq__, ignore)
    search = Search(engine, policy.from_settings(settings), settings, spec, header_of(pool), callbacks)
    began = time.perf_counter()
    batch = SearchBatch(engine)
    stopped = batch.add(search)
    while not stopped:
        stopped = batch.step()
    search.conclude()
    if search.failure is not None:
        raise search.failure
    return search, time.perf_counter() - began


def ignore(event: object) -> None:
    """Nobody reads the log here; the search keeps its record either way."""


def settings_of(pool: Pool) -> Any:
    from gambit.config.options import BranchPoint
    from gambit.config.presets import SearchSettings
    from gambit.types import PoolSettings, Sampling

    return SearchSettings(
        policy=pool.policy, capacity=pool.capacity, num_traces=pool.capacity,
        pool=PoolSettings(pool.islands, pool.swap_size, pool.check_interval, pool.warmup_tokens), hard_floor=None,
        child_temperature=1.0,
        branch_point=BranchPoint.LAST_TOKEN, ghost_parents=False, max_new_tokens=pool.max_new_tokens,
        sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0), budget_tokens=None, budget_seconds=None,
        budget_traces=None,
    )  # fmt: skip


def header_of(pool: Pool) -> Any:
    from gambit import events as ev

    return ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="speed", question="", policy=pool.policy, vote="majority",
        aggregation="mean", seed=0, capacity=pool.capacity, num_traces=pool.capacity, prompt_tokens=(), settings={},
        environment={},
    )  # fmt: skip


def saturating_median(
    room_tokens: int, capacity: int, block_tokens: int, completing: float, seeds: Sequence[int]
) -> float:
    """The median length at which pruning the worst leaves this share of the pool to complete, with these draws.

    What is pruned depends on scores only through their order, and random weights give a random one: STEP is played
    through with blocks alone in several orders, and the median found by bisection.
    """
    low, high = 16.0, 64.0 * room_tokens / capacity
    for _ in range(40):
        middle = math.sqrt(low * high)
        plays = [
            share_completing(Lengths(middle, seed), order, room_tokens, capacity, block_tokens)
            for seed in seeds
            for order in range(8)
        ]
        low, high = (middle, high) if sum(plays) / len(plays) > completing else (low, middle)
    return math.sqrt(low * high)


def share_completing(lengths: Lengths, order_seed: int, room_tokens: int, capacity: int, block_tokens: int) -> float:
    room = room_tokens // block_tokens - -(-PROMPT_TOKENS // block_tokens)
    alive = dict(enumerate(lengths.rooted(capacity)))
    order = random.Random(order_seed).sample(sorted(alive), capacity)
    completed = step = 0
    while alive:
        step += block_tokens  # all grow alike, so that blocks are taken together, before they are filled
        while len(alive) * (step // block_tokens) > room:
            alive.pop(next(t for t in order if t in alive))
        for trace in [t for t, length in alive.items() if length <= step]:
            del alive[trace]
            completed += 1
    return completed / capacity

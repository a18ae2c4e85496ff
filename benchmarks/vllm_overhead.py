"""Throughput of Gambit inside vLLM, with every thought scored, against stock vLLM: same tokens, same concurrency.

    python benchmarks/vllm_overhead.py --out benchmarks/results/vllm_overhead.json     # H200, vLLM 0.25.1: 7 minutes
    python benchmarks/vllm_overhead.py --tiny --out /tmp/overhead.json                 # any CPU: 2 minutes

Both engines are alive at once, each in its own process or both in this one, and take turns (stock, ours, ours,
stock, …) on the Qwen3-4B shape with random weights, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPES = {
    "qwen3-4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 2_000, "tie_word_embeddings": True,
    },
}  # fmt: skip
SCORER_WIDTH = 512
THOUGHT_TOKENS = 32  # mean length: that share of the vocabulary ends a thought
PROMPT_TOKENS = 96
SEARCH = 1


def main() -> None:
    args = parse_args()
    began = time.monotonic()
    shape = SHAPES["tiny" if args.tiny else "qwen3-4b"]
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), shape)
        phases = []
        for mode in args.modes.split(","):
            left = args.max_seconds - (time.monotonic() - began)
            if phases and left < args.max_seconds / 3:
                say(began, f"no time left for the mode {mode!r}")
                break
            phases.append(measure(args, shape, model, mode == "own", began))
            write(args, phases, began)
    for phase in phases:
        say(began, f"{phase['mode']} process: ours / stock = {phase['ratio_median']:.4f} (median of pairs), "
                   f"{phase['ratio_total']:.4f} (all tokens / all seconds)")  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--concurrency", type=int, default=0, help="default: 256, tiny: 16")
    parser.add_argument("--tokens", type=int, default=0, help="per trace and segment; default: 512, tiny: 64")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of segments")
    parser.add_argument("--modes", default="own,in", help="own: each engine in its own process; in: both in this one")
    parser.add_argument("--exact-noise", action="store_true", help="ours draws by (seed, trace, position)")
    parser.add_argument("--max-seconds", type=float, default=520)
    args = parser.parse_args()
    args.concurrency = args.concurrency or (16 if args.tiny else 256)
    args.tokens = args.tokens or (64 if args.tiny else 512)
    return args


def measure(args: argparse.Namespace, shape: dict, model: str, own_process: bool, began: float) -> dict:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_process else "0"
    mode = "own" if own_process else "this"
    options = engine_options(args)
    say(began, f"{mode} process: starting stock vLLM")
    stock = Stock(model, options, args)
    say(began, f"{mode} process: starting Gambit's")
    ours = Ours(model, shape, options, args, own_process=own_process)
    say(began, f"engine {ours.engine.info}")
    for each in (stock, ours):  # kernels compile, caches fill
        say(began, f"{each.name} warm-up: {run_segment(each, args):.0f} tokens/s")
    pairs = []
    deadline = began + args.max_seconds
    for number in range(args.rounds):
        order = (stock, ours) if number % 2 == 0 else (ours, stock)
        speed = {each.name: run_segment(each, args) for each in order}
        pairs.append(speed)
        say(began, f"round {number + 1}: stock {speed['stock']:.0f}, ours {speed['ours']:.0f} tokens/s, "
                   f"ratio {speed['ours'] / speed['stock']:.4f}")  # fmt: skip
        if time.monotonic() + 60 > deadline:
            break
    phase = summary(mode, pairs, ours, args)
    ours.close()
    stock.close()
    return phase


def engine_options(args: argparse.Namespace) -> dict:
    from vllm.platforms import current_platform

    options = {
        "load_format": "dummy", "max_model_len": PROMPT_TOKENS + args.tokens + 32, "max_num_seqs": args.concurrency,
        "gpu_memory_utilization": 0.4, "enable_prefix_caching": True,
    }  # fmt: skip
    if current_platform.is_cpu():
        options |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "block_size": 32}
    else:
        options |= {"dtype": "bfloat16"}
    return options


class Stock:
    """vLLM as it comes."""

    name = "stock"

    def __init__(self, model: str, options: dict, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        self._llm = LLM(model=model, skip_tokenizer_init=True, disable_log_stats=True, **options)
        self._params = SamplingParams(temperature=1.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)

    def generate(self, prompt: list[int], count: int) -> int:
        prompts = [{"prompt_token_ids": prompt}] * count
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Ours:
    """Gambit's engine under its own search loop: self-consistency, so that exactly these tokens are generated."""

    name = "ours"

    def __init__(self, model: str, shape: dict, options: dict, args: argparse.Namespace, *, own_process: bool) -> None:
        from gambit.config import EngineConfig
        from gambit.engines.vllm.start import start_vllm

        config = EngineConfig(
            model=model,
            engine="vllm",
            dtype=options["dtype"],
            memory_ratio=options["gpu_memory_utilization"],
            engine_options={
                **{k: v for k, v in options.items() if k not in ("dtype", "gpu_memory_utilization", *SET_BY_GAMBIT)},
                "own_process": own_process,
                "exact_noise": args.exact_noise,
            },
        )
        self.engine = start_vllm(config, model, random_scorer(shape["hidden_size"]), tokenizer=NoTokenizer())
        self.num_scored = 0
        self._vocab_size = shape["vocab_size"]
        self._args = args
        self._number = 0

    def generate(self, prompt: list[int], count: int) -> int:
        from gambit.engines.base import SearchSpec
        from gambit.prompts import BoundaryRule
        from gambit.search.loop import run_searches

        self._number += 1
        ends = frozenset(range(0, self._vocab_size, THOUGHT_TOKENS))
        rule = BoundaryRule(self._vocab_size, ends, frozenset(), frozenset(), None)
        spec = SearchSpec(self._number, tuple(prompt), rule, frozenset())
        search = make_search(self.engine, spec, count, self._args.tokens, self._count)
        (done,) = run_searches(self.engine, [search])
        return done.num_generated

    def _count(self, event: object) -> None:
        self.num_scored += len(getattr(event, "scores", ()))

    def close(self) -> None:
        self.engine.close()


SET_BY_GAMBIT = ("enable_prefix_caching",)


class NoTokenizer:
    """Random weights have nothing to say."""


def make_search(engine: object, spec: object, count: int, tokens: int, on_event: object) -> object:
    from gambit import events as ev
    from gambit.config import BranchPoint, SearchSettings
    from gambit.search.loop import Hooks, Search
    from gambit.search.self_consistency import SelfConsistency
    from gambit.types import Sampling

    settings = SearchSettings(
        policy="sc", capacity=count, num_traces=count, swap_size=1, check_interval=200, warmup_tokens=0,
        hard_floor=None, child_temperature=1.0, branch_point=BranchPoint.LAST_TOKEN, ghost_parents=False,
        max_new_tokens=tokens, sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0), budget_tokens=None,
        budget_seconds=None, budget_traces=None,
    )  # fmt: skip
    header = ev.RunStarted(
        format=ev.LOG_FORMAT, problem_id="overhead", question="", policy="sc", vote="majority", aggregation="mean",
        seed=0, capacity=count, num_traces=count, prompt_tokens=(), settings={}, environment={},
    )  # fmt: skip
    hooks = Hooks(lambda said: str(said[-1] % 7), lambda a, b: a == b, on_event)
    return Search(engine, SelfConsistency.from_settings(settings), settings, spec, header, hooks)


def random_scorer(hidden_size: int) -> object:
    import torch

    from gambit.scorers.base import ScorerInfo
    from gambit.scorers.mlp import MlpScorer

    generator = torch.Generator().manual_seed(0)
    shapes = ((SCORER_WIDTH, hidden_size), (SCORER_WIDTH,), (1, SCORER_WIDTH), (1,))
    w1, b1, w2, b2 = (torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes)
    return MlpScorer(ScorerInfo("mlp", hidden_size=hidden_size), (w1, b1, w2, b2))


_num_segments = 0


def run_segment(each: Stock | Ours, args: argparse.Namespace) -> float:
    """Tokens per second; every segment has a prompt of its own, so that none finds another's blocks."""
    global _num_segments
    _num_segments += 1
    prompt = [(11 * _num_segments + 7 * i) % 1000 + 5 for i in range(PROMPT_TOKENS)]
    began = time.perf_counter()
    count = each.generate(prompt, args.concurrency)
    seconds = time.perf_counter() - began
    assert count == args.concurrency * args.tokens, f"{each.name}: {count} tokens"
    return count / seconds


def write_config(folder: Path, shape: dict) -> str:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960, "rope_theta": 1_000_000, "attention_bias": False, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True, **shape,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def summary(mode: str, pairs: list[dict[str, float]], ours: Ours, args: argparse.Namespace) -> dict:
    ratios = [pair["ours"] / pair["stock"] for pair in pairs]
    seconds = {name: sum(1 / pair[name] for pair in pairs) for name in ("stock", "ours")}
    return {
        "mode": mode,
        "ratio_median": statistics.median(ratios),
        "ratio_total": seconds["stock"] / seconds["ours"],
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "stock_tokens_per_second": statistics.median(pair["stock"] for pair in pairs),
        "ours_tokens_per_second": statistics.median(pair["ours"] for pair in pairs),
        "thoughts_scored": ours.num_scored,
        "exact_noise": args.exact_noise,
        "pairs": pairs,
    }


def write(args: argparse.Namespace, phases: list[dict], began: float) -> None:
    import torch
    import vllm

    result = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or "cpu",
        "shape": "tiny" if args.tiny else "qwen3-4b, random weights",
        "concurrency": args.concurrency,
        "tokens_per_trace": args.tokens,
        "scorer": f"MLP of width {SCORER_WIDTH}, thoughts of {THOUGHT_TOKENS} tokens on average",
        "seconds": round(time.monotonic() - began, 1),
        "phases": phases,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    main()

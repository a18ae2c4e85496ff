"""Forest attention against vLLM's own: attention alone, whole decode steps, whole searches, with random weights.

    PYTHONPATH=src VLLM_USE_FLASHINFER_SAMPLER=0 python benchmarks/forest_speed.py --out OUT --seconds 280   # H200
    … --shapes qwen3-4b --parts start,gate --seconds 220             # what `auto` chooses, and what is faster
    … --shapes qwen3-4b --parts start,search --seconds 320           # whole searches, 8,000 tokens a trace
    … --shapes qwen3-4b --verdict --seconds 570                      # all that decides about `auto` as the default
    python benchmarks/forest_speed.py --out OUT --tiny                                       # any CPU, for debugging

Trees are laid out by prefill (`forest_trees.py`), then all traces decode. Stock and forest attention take turns inside
one engine on the same traces: with the switch at `stock` a step is vLLM's own CUDA graph of stock attention. Results
are written after every measured item, and items for which no time is left are dropped. Starting takes 95 s of an H200.
What forest attention does to greedy tokens of a real model is settled (forest_speed_model.json, code in e5590e1).
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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

BEGAN = time.monotonic()  # importing torch and vLLM counts
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import numpy as np  # noqa: E402

from forest_trees import PROMPT_BLOCKS, Tree, grow_shared  # noqa: E402
from speed_parts import (  # noqa: E402
    PROMPT_TOKENS,
    SHAPES,
    Begun,
    Lengths,
    NoTokenizer,
    Pool,
    prompt_of,
    random_scorer,
    run_pool,
    write_shape,
)

CONTEXT_TOKENS = 40_960
BANDWIDTH = 4.3e12  # of a copy on an H200
TURNS = {"decode": 2, "unshared": 3, "gate": 2, "plain": 3}
STEPS = {"decode": 24, "unshared": 70, "gate": 12, "plain": 24}
VERDICT = ("start", "plain", "gate", "search")
PAPER_MEDIAN, PAPER_WARMUP = 14_500, 12_000
WARMUP_POINTS = (0.1, 0.4, 0.7, 1.0)  # lengths at which a step of the warm-up is measured
LAID_OUT_PER_SECOND = 25_000  # tokens that an H200 reads while it lays out a tree of a 4B model, the slowest seen
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
FEW = (Case(16, 36_000, 5.0), Case(8, 36_000, 3.0), Case(64, 2_000, 2.0), Case(256, 2_000, 2.0))  # attention alone
TINY = {
    SMALL: Case(6, 700, 2.0), MIDDLE: Case(8, 800, 2.5), LARGE: Case(8, 900, 3.0), ISLANDS: Case(8, 700, 1.5, 4),
    UNSHARED: Case(4, 500, 1.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """A tree that is laid out once, and the parts of it that are measured: its first traces, their first tokens."""

    whole: Case
    parts: tuple[tuple[int, int], ...]


# What the gate is least sure of comes first. Parts find all their blocks in the cache and take a second or two.
FAMILIES = (
    Family(Case(64, 4_000, 2.0), ((64, 4_000), (64, 2_000), (32, 4_000), (16, 4_000), (64, 1_000), (8, 4_000))),
    Family(Case(16, 36_000, 5.0), ((16, 36_000), (8, 36_000), (16, 20_000))),
    Family(Case(256, 2_000, 2.0), ((256, 2_000), (128, 2_000), (256, 1_000))),
    Family(Case(64, 12_000, 6.0), ((64, 12_000), (32, 12_000), (16, 12_000), (64, 8_000))),
    Family(Case(64, 8_000, 1.5), ((64, 8_000), (32, 8_000), (16, 8_000))),
    Family(Case(32, 36_000, 4.0), ((32, 36_000), (32, 12_000), (16, 36_000))),
    Family(Case(128, 4_000, 1.2), ((128, 4_000), (32, 4_000))),
    Family(Case(128, 4_000, 3.0), ((128, 4_000),)),
)
TINY_FAMILIES = (
    Family(Case(8, 700, 2.0), ((8, 700), (4, 500))), Family(Case(6, 600, 1.0), ((6, 600),)),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-8b")
    parser.add_argument("--parts", default="", help="by name; all unless given")
    parser.add_argument("--tiny", action="store_true", help="small trees on a CPU, of a tiny model unless one is given")
    parser.add_argument("--gate-seconds", type=float, default=120, help="for part `gate`")
    parser.add_argument("--verdict", action="store_true", help=f"parts {', '.join(VERDICT)}, and what they decide")
    parser.add_argument(
        "--search-islands", default="", help="numbers of islands, as in 1,16; default: 1 and half the traces"
    )
    parser.add_argument(
        "--cascade", action="store_true", help="vLLM's own cascade attention in steps of stock attention"
    )
    parser.add_argument("--search-traces", type=int, default=64, help="for part `search`")
    parser.add_argument("--search-tokens", type=int, default=8_000, help="median length of a trace")
    parser.add_argument(
        "--search-spread", type=float, default=0.08, help="of lengths: sigma of a log-normal, at least 0.05"
    )
    parser.add_argument("--search-longest", type=float, default=1.15, help="in medians")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verdict:
        args.parts, args.search_islands = args.parts or ",".join(VERDICT), args.search_islands or "1,16"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        with on_cpu() if args.tiny else nullcontext():
            Bench(args).run()
        return
    began = time.monotonic()
    for shape in ["tiny"] if args.tiny else args.shapes.split(","):
        left = args.seconds - (time.monotonic() - began)
        if left < 70 and not args.tiny:
            print(f"no time for {shape}", flush=True)
            continue
        run_apart(args, shape, left)


def run_apart(args: argparse.Namespace, shape: str, left: float) -> None:
    """Runs a shape in a process of its own, so that its memory is free again when it ends."""
    more = [*(["--tiny"] if args.tiny else []), "--parts", args.parts, "--gate-seconds", str(args.gate_seconds)]
    more += ["--search-traces", str(args.search_traces), "--search-tokens", str(args.search_tokens)]
    more += ["--search-islands", args.search_islands, *(["--cascade"] if args.cascade else [])]
    more += ["--search-spread", str(args.search_spread), "--search-longest", str(args.search_longest)]
    command = [sys.executable, __file__, "--one", "--out", str(args.out), "--shapes", shape, "--seconds", str(left)]
    try:
        subprocess.run([*command, *more], timeout=left + 5, check=False)
        if args.verdict:
            print(json.dumps(verdict(json.loads((args.out / f"forest_speed_{shape}.json").read_text())), indent=1))
    except subprocess.TimeoutExpired:
        print(f"{shape}: stopped, no time left", flush=True)


@contextmanager
def on_cpu() -> Iterator[None]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}
    from support.forest_on_cpu import forest_on_cpu

    with forest_on_cpu():
        yield


class Bench:
    """One model shape: its parts, one result file that grows as they end."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        self.began = BEGAN
        self.args, self.shape = args, args.shapes
        self.sizes = sizes_of(SHAPES[self.shape])
        self.is_cpu = not torch.cuda.is_available()
        self.device = "cpu" if self.is_cpu else "cuda"
        self.block_tokens = 32 if self.is_cpu else 16
        self.engine: Any = None
        self.number = 0
        self.graph_cost: dict[str, float] = {}  # of forest attention's own graphs
        self.results: dict[str, Any] = {"environment": self.environment()}
        self.say(json.dumps(self.results["environment"]))

    def environment(self) -> dict[str, Any]:
        import vllm

        device = "cpu" if self.is_cpu else self.torch.cuda.get_device_name(0)
        return {
            "vllm": vllm.__version__, "torch": self.torch.__version__, "device": device, "shape": self.shape,
        }  # fmt: skip

    # -- order and time ----------------------------------------------------------------------------------------

    def run(self) -> None:
        wanted = self.wanted
        is_first = bool(wanted) or self.shape in ("qwen3-4b", "tiny")
        parts: list[tuple[str, float, Callable[[], dict[str, Any]]]] = []
        if is_first:
            parts.append(("attention", 40, self.attention))
        parts += [("start", 60, self.start), ("small", SMALL.needs, lambda: self.decode(SMALL, "auto"))]
        if is_first:
            parts.append(("unshared", UNSHARED.needs, self.unshared))
        parts += [("middle", MIDDLE.needs, lambda: self.decode(MIDDLE))]
        parts += [("large", LARGE.needs, lambda: self.decode(LARGE))]
        if is_first:
            parts += [("islands", ISLANDS.needs, lambda: self.decode(ISLANDS)), ("check", 5, self.check)]
        parts += [
            (name, needs, part) for name, needs, part in (
                ("plain", 20, self.plain), ("gate", 15, self.gate), ("search", 60, self.search)
            ) if name in wanted
        ]  # fmt: skip
        for name, needs, part in parts:
            if wanted and name not in wanted:
                continue
            if self.has_time(needs):
                self.keep(name, part)
            else:
                self.say(f"{name}: no time")
        if self.engine is not None:
            self.engine.close()

    def keep(self, name: str, part: Callable[[], dict[str, Any]]) -> None:
        before = time.monotonic()
        try:
            found = part()
        except Exception:  # a failure of one part must not cost the others
            found = {**self.results.get(name, {}), "error": traceback.format_exc().splitlines()[-12:]}
            traceback.print_exc()
        self.write(name, {**found, "part_seconds": round(time.monotonic() - before, 1)})
        self.say(f"{name}: {json.dumps(self.results[name])}")

    def write(self, name: str, found: dict[str, Any]) -> None:
        """Writes what a part has found so far, so that a run that is killed keeps it."""
        self.results[name] = found
        path = self.args.out / f"forest_speed_{self.shape}.json"
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(self.results, indent=1) + "\n")
        beside.replace(path)

    def left(self) -> float:
        return float(self.args.seconds) - (time.monotonic() - self.began)

    def has_time(self, needs: float) -> bool:
        """`needs`: seconds of a GPU; the miniature on a CPU needs a fraction of them."""
        return self.left() > (needs / 20 if self.is_cpu else needs)

    @property
    def wanted(self) -> list[str]:
        return self.args.parts.split(",") if self.args.parts else []

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
            self.write("attention", found)
            if not self.is_cpu:
                self.torch.cuda.empty_cache()
        return found

    # -- an engine ---------------------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        from gambit.config.options import EngineConfig
        from gambit.engines.vllm.start import start_vllm

        model = self.random_model()
        engine_config = EngineConfig(
            model=model, engine="vllm", dtype="float32" if self.is_cpu else "bfloat16",
            memory_ratio=0.85, engine_options=self.options(),
        )  # fmt: skip
        scorer = random_scorer(self.sizes["hidden_size"])
        with self.noting_check() as checked:
            self.engine = start_vllm(engine_config, model, scorer, tokenizer=NoTokenizer())
        self.engine._detector = lambda search, trace: (0, False)  # prefixes of random tokens have no thoughts
        self.worker = self.engine._core._client.engine_core.model_executor.driver_worker.worker
        self.switch = self.worker._forest
        self.liven()
        return {
            "engine": str(replace(self.engine.info, model=self.shape)), "graphs": len(self.switch.graphs),
            "runner": type(self.worker.model_runner).__module__, "check_errors": checked,
            "attention_builders": len(self.switch._builders), "graphs_cost": self.graph_cost,
        }  # fmt: skip

    def random_model(self) -> str:
        folder = Path(tempfile.mkdtemp())
        model = write_shape(folder, self.shape)
        config = read_config(folder)
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
        return model

    @contextmanager
    def noting_check(self) -> Iterator[list[Any]]:
        """Records what goes wrong at the start and goes on: a failure should be seen with its speed."""
        from gambit.engines.vllm.compat import forest as compat

        found: list[Any] = []

        def note(switch: Any) -> None:
            try:
                found.extend(compat.forest_error(builder) for builder in switch._builders)
            except Exception:
                found.append(traceback.format_exc().splitlines()[-6:])

        capture = compat.ForestSwitch.capture

        def capture_noting(switch: Any, runner: Any) -> None:
            began, free = time.monotonic(), self.free_bytes()
            try:
                capture(switch, runner)
                cost = {"seconds": time.monotonic() - began, "gib": (free - self.free_bytes()) / 2**30}
                self.graph_cost = {name: round(each, 2) for name, each in cost.items()}
            except Exception:
                found.append(traceback.format_exc().splitlines()[-6:])

        replaced = {"check": note, "capture": capture_noting}
        with mock.patch.multiple(compat.ForestSwitch, **replaced):
            yield found

    def options(self) -> dict[str, Any]:
        common: dict[str, Any] = {"attention": "auto", "own_process": False, "self_check": False, "exact_noise": False}
        common["load_format"] = "dummy"
        if self.args.cascade:
            common["disable_cascade_attn"] = False
        if self.is_cpu:
            return common | {"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
        sizes = [*([8, 16, 32] if {"gate", "search"} & {*self.wanted} else []), 64, 112, 128, 256]
        return common | {
            "max_model_len": CONTEXT_TOKENS, "max_num_seqs": 256, "kv_cache_memory_bytes": self.room(LARGE),
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }  # fmt: skip

    def room(self, case: Case) -> int:
        """Bytes of a KV cache that holds a tree and, beside it, what several runs say: none evicts the tree."""
        tokens = case.tree(self.block_tokens).num_unique * self.block_tokens + case.traces * 300 + 12_000
        return tokens * self.kv_bytes()

    def liven(self) -> None:
        """vLLM's dummy weights are so small that attention is uniform and all logits are equal."""
        generator = self.torch.Generator(self.device).manual_seed(0)
        with self.torch.no_grad():
            for name, parameter in self.worker.model_runner.get_model().named_parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.7 if "q_norm" in name or "k_norm" in name else 1.0)  # attention with favourites
                elif len(parameter) >= self.sizes["vocab_size"]:
                    parameter.normal_(0, 0.04, generator=generator)  # small, or a token would predict itself
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)

    @contextmanager
    def laid_out(
        self, case: Case, *, order: Any = None, seed: int | None = None, blocks: int | None = None, **sampling: float
    ) -> Iterator[int]:
        """All traces of a tree decode, or those of `order`, or their first blocks; gives the search."""
        seed = self.number + 1 if seed is None else seed
        tokens = case.tree(self.block_tokens).tokens(self.block_tokens, self.sizes["vocab_size"], seed)
        tokens = tokens[:, : (tokens.shape[1] if blocks is None else blocks * self.block_tokens) - 5]  # one is filled
        prompt = PROMPT_BLOCKS * self.block_tokens if case.sharing > 1 else 1
        with self.decoding(case.name, tokens, prompt, order, **sampling) as number:
            yield number

    @contextmanager
    def decoding(self, name: str, tokens: Any, prompt: int, order: Any = None, **sampling: float) -> Iterator[int]:
        """Traces that have said `tokens` [traces, tokens], of which the first `prompt` are the search's prompt."""
        from gambit.engines.base import SearchSpec
        from gambit.text.boundary import BoundaryRule
        from gambit.types import OnPressure, PressureAction, Sampling, TraceKey, TraceSpec

        self.number += 1
        rule = BoundaryRule(1, frozenset(), frozenset(), frozenset(), None)
        self.engine.open(SearchSpec(self.number, (*tokens[0, :prompt].tolist(),), rule, frozenset()))
        how = Sampling(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, **sampling})
        specs = [
            TraceSpec(
                TraceKey(self.number, trace), how, len(row) - prompt + 1_500, OnPressure(PressureAction.QUEUE),
                inherited=len(row) - prompt, prefix=tuple(row[prompt:].tolist()),
            ) for trace, row in enumerate(tokens)
        ]  # fmt: skip
        chosen = [specs[place] for place in (range(len(specs)) if order is None else order)]
        self.wish("stock")
        began = time.monotonic()
        self.engine.submit(chosen)
        try:
            self.begin_decoding(len(chosen))
            held, used = len(chosen) * tokens.shape[1], self.engine.step().kv_used_tokens
            self.say(f"{name}: {len(chosen)} x {tokens.shape[1]} laid out in {time.monotonic() - began:.1f} s, "
                     f"sharing {held / used:.2f}")  # fmt: skip
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

    def plain(self) -> dict[str, Any]:
        """Independent traces with a long prompt in common, as RL has them: 64 of them after 8,000 tokens."""
        traces, prompt, own = (6, 400, 60) if self.is_cpu else (64, 8_000, 500)
        rng = np.random.default_rng(40_000)
        tokens = rng.integers(5, self.sizes["vocab_size"], size=(traces, prompt + own))
        tokens[:, :prompt] = tokens[0, :prompt]
        with self.decoding("plain", tokens, prompt):
            found = self.turns(("stock", "auto", "forest"), "plain")
        return {"traces": traces, "prompt_tokens": prompt, "own_tokens": own, "cascade": self.args.cascade, **found}

    def free_bytes(self) -> int:
        return 0 if self.is_cpu else int(self.torch.cuda.mem_get_info()[0])

    # -- what `auto` chooses -----------------------------------------------------------------------------------

    def gate(self) -> dict[str, Any]:
        """Whole steps of many trees: what the gate would have chosen, what was faster, and what that is worth."""
        end = time.monotonic() + self.args.gate_seconds
        found: dict[str, Any] = {"trees": []}
        for number, family in enumerate(TINY_FAMILIES if self.is_cpu else FAMILIES):
            whole = family.whole.tree(self.block_tokens)
            needs = whole.num_unique * self.block_tokens / LAID_OUT_PER_SECOND
            for place, (traces, tokens) in enumerate(family.parts):
                now = 4 + (0 if place else needs)
                if not self.has_time(now) or time.monotonic() + now / (20 if self.is_cpu else 1) > end:
                    continue
                found["trees"].append(self.gated(family.whole, traces, tokens, 10_000 + number))
                self.say(f"gate: {json.dumps(found['trees'][-1])}")
                self.write("gate", {**summary_of(found["trees"]), **found})
        return {**summary_of(found["trees"]), **found}

    def gated(self, whole: Case, traces: int, tokens: int, seed: int) -> dict[str, Any]:
        from gambit.engines.vllm.forest import saved_ms
        from gambit.engines.vllm.messages import Sharing

        blocks = tokens // self.block_tokens
        table = whole.tree(self.block_tokens).table[:traces, :blocks]
        unique = len(np.unique(table)) * self.block_tokens
        with self.laid_out(whole, order=range(traces), seed=seed, blocks=blocks):
            self.segment("auto", WARM_STEPS)
            chosen = "forest" if self.switch.is_on else "stock"
            runs = self.turns(("stock", "forest"), "gate")
            again = self.turns(("stock",), "gate")["stock"]["ms_per_step"]
        stock, forest = (statistics.median(runs[way]["ms_per_step"]) for way in ("stock", "forest"))
        sharing = Sharing(traces, table.size * self.block_tokens, unique, tokens)
        predicted = saved_ms(sharing, self.switch.layer_kinds, has_graphs=bool(self.switch.graphs))
        return {
            "traces": traces, "tokens": tokens, "sharing": round(table.size * self.block_tokens / unique, 2),
            "stock_ms": stock, "forest_ms": forest, "gain": round(stock / forest, 3), "chosen": chosen,
            "noise_ms": round(abs(statistics.median(again) - stock), 3),  # stock attention against itself
            "faster": "forest" if forest < stock else "stock", "saved_ms": round(stock - forest, 3),
            "predicted_saved_ms": round(predicted, 3), "read_again": self.read_again(sharing, stock - forest),
        }  # fmt: skip

    def read_again(self, sharing: Any, saved: float) -> float | None:
        """The constant of the gate that would have predicted what was measured; None where nothing is shared."""
        from gambit.engines.vllm import forest

        def predicted(read_again: float) -> float:
            with mock.patch.object(forest, "READ_AGAIN", read_again):
                return forest.saved_ms(sharing, self.switch.layer_kinds, has_graphs=bool(self.switch.graphs))

        slope = predicted(1.0) - predicted(0.0)
        return round((saved - predicted(0.0)) / slope, 2) if slope > 0 else None

    def kv_bytes(self) -> int:
        """Returns the bytes of a token over all layers."""
        sizes, value_bytes = self.sizes, 4 if self.is_cpu else 2
        return int(2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * value_bytes)

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
        steps = 3 if self.is_cpu else STEPS[kind]
        runs: dict[str, list[dict[str, float]]] = {wish: [] for wish in wishes}
        for turn in range(TURNS[kind]):
            for wish in wishes[turn % len(wishes) :] + wishes[: turn % len(wishes)]:
                runs[wish].append(self.segment(wish, steps))
            if not self.has_time(10):
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

    def synchronize(self) -> None:
        if not self.is_cpu:
            self.torch.cuda.synchronize()

    # -- whole searches ----------------------------------------------------------------------------------------

    def search(self) -> dict[str, Any]:
        """Seconds of parallel sampling and of tournaments, in one pool, and in half as many islands as places.

        Up to the warm-up nothing is branched or pruned and all searches do the same. Decoding there would take minutes
        each time; so the traces are laid out at the warm-up's end, and its seconds are measured at a few lengths.
        """
        vars(self.engine).pop("_detector", None)
        capacity, median = (8, 300) if self.is_cpu else (self.args.search_traces, self.args.search_tokens)
        begun = self.begun(capacity, round(PAPER_WARMUP * median / PAPER_MEDIAN))
        warmup = self.warmup(begun)
        found: dict[str, Any] = {"capacity": capacity, "median_tokens": median, "warmup": warmup, "runs": {}}
        self.write("search", found)
        forest = "forest" if self.is_cpu else "auto"  # on a CPU so little would not pay
        islands = self.args.search_islands or f"1,{capacity // 2}"
        runs = [("gambit", count, wish) for count in map(int, islands.split(",")) for wish in (forest, "stock")]
        runs.insert(2, ("sc", 1, "stock"))
        for policy, count, wish in runs:
            longest = max([run["seconds_after_warmup"] for run in found["runs"].values()], default=0.0)
            if self.left() < 1.2 * longest + 2:
                break
            name = f"{policy}, {count} islands, {wish}"
            run = self.searched(policy, count, wish, begun, median)
            found["runs"][name] = {"seconds": round(run["seconds_after_warmup"] + warmup["seconds"], 2), **run}
            self.say(f"search, {name}: {json.dumps(found['runs'][name])}")
            self.write("search", found)
        return found

    def begun(self, capacity: int, length: int) -> Any:
        """Draws the tokens of each trace at the end of the warm-up, after the prompt."""
        rng = np.random.default_rng(30_000)
        tokens = rng.integers(5, self.sizes["vocab_size"], size=(capacity, PROMPT_TOKENS + length))
        tokens[:, :PROMPT_TOKENS] = prompt_of(0)
        return tokens

    def warmup(self, begun: Any) -> dict[str, Any]:
        """Seconds in which all traces decode that far, from the time of a step at several lengths."""
        length = begun.shape[1] - PROMPT_TOKENS
        at = [max(round(share * length), 1) for share in WARMUP_POINTS]
        steps = []
        for tokens in reversed(at):  # the longest first: the others find their blocks
            with self.decoding("warm-up", begun[:, : PROMPT_TOKENS + tokens], PROMPT_TOKENS):
                steps.append(self.segment("stock", 3 if self.is_cpu else STEPS["decode"])["ms_per_step"])
        times = np.interp(np.arange(length), at, steps[::-1])
        return {
            "tokens": length, "at": at, "ms_per_step": [round(ms, 3) for ms in steps[::-1]],
            "seconds": round(float(times.sum()) / 1e3, 2),
        }  # fmt: skip

    def searched(self, policy: str, islands: int, wish: str, begun: Any, median: int) -> dict[str, Any]:
        capacity, args = len(begun), self.args
        warmup = begun.shape[1] - PROMPT_TOKENS
        pool = Pool(
            policy, capacity, round(median * args.search_longest), max(capacity // 16, 1),
            max(round(200 * median / PAPER_MEDIAN), 1), warmup, islands,
        )  # fmt: skip
        self.number += 1
        self.wish(wish)
        lengths = Lengths(median, seed=0, spread=args.search_spread, longest=args.search_longest)
        before, watched = self.switch.num_steps, Begun(self.engine, lengths, said=begun[:, PROMPT_TOKENS:])
        done, seconds = run_pool(watched, pool, self.number, self.shape, prompt=prompt_of(0))
        return {
            "seconds_after_warmup": round(seconds - watched.seconds_before, 2),
            "generated_after_warmup": done.meter.num_generated, "steps": len(watched.step_seconds),
            "completed": done.result.counts.completed, "branched": done.result.counts.branched,
            "pruned": done.result.counts.pruned, "peak_kv_tokens": watched.peak_kv,
            "forest_steps": self.switch.num_steps - before,
        }  # fmt: skip

    def check(self) -> dict[str, Any]:
        """The engine's own start-up check, with forest attention in every decode step."""
        from gambit.engines.vllm.start import self_check

        vars(self.engine).pop("_detector", None)
        self.wish("forest")
        self_check(self.engine, self.sizes["vocab_size"])
        return {"self_check": "passed", "forest_steps": self.switch.num_steps}


def summary_of(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often the gate was right, and what its choices cost against always taking the faster."""
    wrong = [tree for tree in trees if tree["chosen"] != tree["faster"]]
    worst = max((abs(tree["saved_ms"]) / min(tree["stock_ms"], tree["forest_ms"]) for tree in wrong), default=0.0)
    harmful = [tree for tree in wrong if tree["chosen"] == "forest"]
    return {
        "right": len(trees) - len(wrong), "of": len(trees), "slower_than_stock": len(harmful),
        "slower_beyond_noise": sum(-tree["saved_ms"] > tree.get("noise_ms", 0.0) for tree in harmful),
        "share_of_best_gain": round(
            sum(tree["saved_ms"] for tree in trees if tree["chosen"] == "forest")
            / max(sum(max(tree["saved_ms"], 0.0) for tree in trees), 1e-9), 3
        ),
        "most_slower_than_the_faster": round(worst, 3),
        "promised_too_much": sum(tree["predicted_saved_ms"] > tree["saved_ms"] for tree in trees),
    }  # fmt: skip


def verdict(results: dict[str, Any]) -> dict[str, Any]:
    """Returns what decides about `auto` as the default, from a file of results."""
    gate, plain = results.get("gate", {}), results.get("plain", {})
    runs = results.get("search", {}).get("runs", {})
    pairs = {
        name.removesuffix(", stock"): round(run["seconds"] / other["seconds"], 3)
        for name, run in runs.items() if (other := runs.get(name.replace(", stock", ", auto"))) is not None
        and name.endswith(", stock")
    }  # fmt: skip
    rates = {way: plain[way]["tokens_per_second"] for way in ("stock", "auto") if way in plain}
    return {
        "one tree at most is slower with auto": gate.get("slower_beyond_noise", 2) <= 1,
        "at least 90 % of the best gain": gate.get("share_of_best_gain", 0.0) >= 0.9,
        "plain sampling, auto / stock": round(rates["auto"] / rates["stock"], 3) if len(rates) == 2 else None,
        "searches, stock / auto in seconds": pairs,
        "graphs of forest attention": results.get("start", {}).get("graphs_cost"),
        "searches": {name: {key: run[key] for key in ("seconds", "completed")} for name, run in runs.items()},
    }  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def sizes_of(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json, which may leave the width of a head to be computed."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {"head_dim": width}


class Attention:
    """One layer's attention on a tree, one query each."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.torch = torch = bench.torch
        self.bench, size, device = bench, bench.block_tokens, bench.device
        sizes = bench.sizes
        self.heads, self.kv_heads, self.width = (
            sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
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
        from gambit.engines.vllm.compat.forest import attend

        scale, out, expected = self.width**-0.5, self.torch.empty_like(self.query), self.torch.empty_like(self.query)
        self.stock(self.query, self.table, self.num_tokens, expected)
        plan = self.plan()
        attend(self.query, self.keys, self.values, plan, scale, out)
        errors = {"against stock": relative(out, expected), **self.errors(out, expected)}
        times = {
            "stock_ms": self.timed(lambda: self.stock(self.query, self.table, self.num_tokens, out)),
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
            "errors": errors,
        }  # fmt: skip

    def plan(self) -> Any:
        from gambit.engines.vllm.compat.forest import plan_step
        from gambit.engines.vllm.forest import queries_per_group

        group = queries_per_group(self.heads // self.kv_heads)
        return plan_step(self.table, self.num_tokens, self.bench.block_tokens, group, self.most)

    def refresh(self, plan: Any) -> Any:
        from gambit.engines.vllm.forest import refreshed

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
        """Returns the error of a few traces against float32, relative to the result's norm."""
        from support.forests import attend, keys_of

        names, sums = ("forest against float32", "stock against float32"), [0.0, 0.0]
        for row in range(4):
            count = int(self.num_tokens[row])
            blocks = self.table[row, : -(-count // self.bench.block_tokens)]
            keys, values = (keys_of(cache, blocks, count).float() for cache in (self.keys, self.values))
            exact = attend(self.query[row : row + 1].float(), keys, values)[0][0]
            sums = [total + relative(each[row], exact) / 4 for total, each in zip(sums, found, strict=True)]
        return dict(zip(names, sums, strict=True))

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

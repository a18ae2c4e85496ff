"""Speed on real hardware: what scoring and searching cost beside stock vLLM, and what a saturated room completes.

    python benchmarks/gpu_speed.py --phases overhead,reuse,profile --out OUT/a.json     # H200, vLLM 0.25.1: 5 minutes
    python benchmarks/gpu_speed.py --phases saturation --tokens 300 --out OUT/room.json # half the room, half the time
    python benchmarks/gpu_speed.py --shapes qwen3-4b,pawn --out OUT/a.json              # and OUT/a_pawn.json
    … --shapes qwen3-next-4b,qwen3-4b --adapters qwen3-4b --phases overhead --tokens 410    # a hybrid, and LoRA
    python benchmarks/gpu_speed.py --shapes tiny --out gpu_speed.json                   # any CPU, for debugging
    python benchmarks/gpu_speed.py --shapes tiny --clock 9 --phases overhead --out clock.json   # any CPU: 4 minutes

Everything is compared inside one run, on a model shape with random weights, stock vLLM and Gambit's engine each in its
own process on the same GPU and taking turns:

- overhead: the same tokens at the same concurrency from stock vLLM (the ceiling), with every thought scored (SC), and
  with tournaments (Gambit, K = 16, every 200 steps), in rotating order; ratios are of neighbours in time;
- reuse: branches from long prefixes while the pool is below the room;
- profile: a few steps of stock vLLM and of ours, scoring, as torch's profiler sees them;
- saturation: SC, STEP and Gambit in a room in which STEP completes about half of its traces. Trace lengths are drawn
  from a log-normal whose median is set for that; w and Δ are the paper's, scaled with it from the paper's median.

Shapes of `--adapters` have a LoRA adapter, stock vLLM's and ours the same. Hybrids (`qwen3-next-4b`) have `overhead`
and `profile` alone. With `--scoring fused,beside` two engines of ours that score in different ways take turns in these.
With `--clock` the device is one: only what scheduling and searching cost on the host is measured, on any CPU.

The engines of several shapes start beside each other and then take turns. Phases whose traces are longer than a shape's
context are left out for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import step_profile
from speed_parts import (
    ADAPTER,
    CLOCK,
    PROMPT_TOKENS,
    SHAPES,
    STATE_BYTES,
    Lengths,
    Pool,
    Room,
    Stock,
    Watched,
    context_of,
    prompt_of,
    run_pool,
    saturating_median,
    start_ours,
    write_adapter,
    write_shape,
)

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

PAPER_MEDIAN = 14_500  # tokens of a trace of parallel sampling (Phi-4, the one median the paper states)
PAPER_WARMUP = 12_000
PAPER_INTERVAL = 200
SCORING = {"fused": {}, "beside": {"fused_scorer": False}}  # the engine's options; all but the first are compared only
STEP_COMPLETES = 0.495  # with blocks alone; engines complete 1 to 3 points fewer, 45-50 % as in the paper


def main() -> None:
    args = parse_args()
    if args.clock:
        os.environ[CLOCK] = str(args.clock)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads, ExitStack() as stack:
        starts = [threads.submit(Bench, of_shape(args, shape), Path(folder) / shape) for shape in args.shapes]
        benches = [stack.enter_context(closing(start.result())) for start in starts]
        for phase in args.phases:
            for bench in benches:
                if bench.fits(phase):
                    PHASES[phase](bench)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", type=listed(SHAPES), default=["qwen3-4b"], help=", ".join(SHAPES))
    parser.add_argument("--phases", type=listed(PHASES), default=["overhead", "reuse", "saturation"])
    parser.add_argument("--capacity", type=int, default=0, help="default: 256, tiny: 16")
    parser.add_argument("--tokens", type=int, default=0, help="per trace and overhead segment; default: 810, tiny: 50")
    parser.add_argument("--rounds", type=int, default=7, help="overhead: turns of all three")
    parser.add_argument("--repeats", type=int, default=2, help="saturation: turns of all three")
    parser.add_argument("--exact-noise", action="store_true", help="draw by (seed, trace, position)")
    parser.add_argument("--adapters", type=listed(SHAPES), default=[], help="shapes that have a LoRA adapter")
    parser.add_argument("--no-short-cuts", action="store_true", help="leave every token to vLLM's own scheduler code")
    parser.add_argument(
        "--scoring", type=listed(SCORING), default=["fused"], help="ways to score that are compared: fused, beside"
    )
    parser.add_argument(
        "--clock", type=float, metavar="MS", help="on a CPU: the device is a clock, a step takes so long"
    )
    parser.add_argument("--max-seconds", type=float, default=520)
    return parser.parse_args()


def listed(known: Collection[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}: {', '.join(known)}")
        return found

    return names


def of_shape(common: argparse.Namespace, shape: str) -> argparse.Namespace:
    """The settings of one shape; only the first shape's results have the plain name."""
    args = argparse.Namespace(**vars(common), shape=shape)
    is_tiny = shape.endswith("tiny") and not args.clock
    args.capacity = args.capacity or (16 if is_tiny else 256)
    # One round per interval, and none in the step in which all end: it would branch from the few that lag behind.
    args.tokens = args.tokens or (50 if is_tiny else 810)
    args.swap_size, args.interval = (2, 16) if is_tiny else (16, PAPER_INTERVAL)
    args.long_prefix = 200 if is_tiny else 2_000
    if shape != args.shapes[0]:
        args.out = args.out.with_stem(f"{args.out.stem}_{shape}")
    return args


class Bench:
    """Two engines, three comparisons, one result file that grows as they finish."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        import torch

        self.args = args
        self.folder = folder
        self.began = time.monotonic()
        folder.mkdir()
        is_cpu = not torch.cuda.is_available()
        room = args.capacity * (args.tokens + 64) + PROMPT_TOKENS
        longest = PROMPT_TOKENS + max(room // 8, args.long_prefix * 2)
        self.room = Room(room, min(longest, context_of(args.shape)), args.capacity, is_cpu, bool(args.clock))
        self.has_long_context = self.room.context_tokens == longest
        self.results: dict[str, Any] = {"environment": self.environment(torch)}
        self.number = 0
        self.say("starting the engines")
        model = write_shape(folder, args.shape)
        self.has_adapter = args.shape in args.adapters
        adapter = write_adapter(folder / ADAPTER, args.shape) if self.has_adapter else None
        with ThreadPoolExecutor() as threads:
            stock = threads.submit(Stock, model, args.shape, self.room, adapter, **self.profiler("stock"))
            ours = {
                way: threads.submit(
                    start_ours, model, args.shape, self.room, exact_noise=args.exact_noise,
                    adapter=adapter, **({"short_cuts": False} if args.no_short_cuts else {}), **SCORING[way],
                    **self.profiler(way),
                ) for way in args.scoring
            }  # fmt: skip
            self.stock, self.by_scoring = stock.result(), {way: engine.result() for way, engine in ours.items()}
        self.ours = self.by_scoring[args.scoring[0]]
        self.say(f"engine {self.ours.info}")

    def environment(self, torch: Any) -> dict[str, Any]:
        import vllm

        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
        return {
            "vllm": vllm.__version__, "torch": torch.__version__, "device": device, "shape": self.args.shape,
            "capacity": self.args.capacity, "room_tokens": self.room.kv_tokens, "exact_noise": self.args.exact_noise,
            "short_cuts": not self.args.no_short_cuts, "clock_ms": self.args.clock, "scoring": self.args.scoring[0],
            "adapter": self.args.shape in self.args.adapters,
        }  # fmt: skip

    def close(self) -> None:
        for engine in (*self.by_scoring.values(), self.stock):
            engine.close()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {self.args.shape}: {text}", flush=True)

    def fits(self, phase: str) -> bool:
        return phase in ("overhead", "profile") or (self.has_long_context and self.args.shape not in STATE_BYTES)

    def left(self) -> float:
        return self.args.max_seconds - (time.monotonic() - self.began)

    def keep(self, name: str, found: dict[str, Any]) -> None:
        self.results[name] = found
        self.results["environment"]["seconds"] = round(time.monotonic() - self.began)
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self, engine: Watched, pool: Pool) -> tuple[Any, float]:
        lora = ADAPTER if self.has_adapter else None
        return run_pool(engine, pool, self.number, self.args.shape, lora=lora)

    # -- overhead ----------------------------------------------------------------------------------------------

    def overhead(self) -> None:
        names = ["stock", "scoring", "gambit", *(f"scoring, {way}" for way in self.args.scoring[1:])]
        for name in names:  # kernels compile, caches fill
            self.say(f"{name} warm-up: {self.segment(name)['tokens_per_second']:.0f} tokens/s")
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(self.args.rounds):
            at = number % len(names)
            order = names[at:] + names[:at]
            turn = {name: self.segment(name) for name in order}
            rounds.append(turn)
            speeds = {name: turn[name]["tokens_per_second"] for name in names}
            self.say(f"round {number + 1}: " + ", ".join(f"{n} {s:.0f}" for n, s in speeds.items()))
            self.keep("overhead", summarise(rounds))
            seconds = sum(self.args.capacity * self.args.tokens / each["tokens_per_second"] for each in turn.values())
            if self.left() < 1.5 * seconds:
                break
        for name in names[1:]:
            self.say(f"{name} / stock: {self.results['overhead'][name]['ratio']}")

    def segment(self, name: str) -> dict[str, Any]:
        args = self.args
        self.number += 1
        if name == "stock":
            began = time.perf_counter()
            count = self.stock.generate(prompt_of(self.number), args.capacity, args.tokens)
            assert count == args.capacity * args.tokens, count
            return {"tokens_per_second": count / (time.perf_counter() - began)}
        kind, _, way = name.partition(", ")
        pool = Pool("sc" if kind == "scoring" else "gambit", args.capacity, args.tokens, args.swap_size, args.interval)
        ours = self.by_scoring[way or args.scoring[0]]
        waited = ours.seconds_waiting
        engine = Watched(ours)
        done, seconds = self.run(engine, pool)
        assert done.result.counts.completed >= args.capacity, done.result.counts
        share_waiting = (ours.seconds_waiting - waited) / seconds  # of vLLM's core for the device: its slack
        return {
            "tokens_per_second": done.meter.num_generated / seconds,
            **shares(done, seconds),
            "share_waiting": share_waiting,
            **{f"share_spikes_{kind}": lost / seconds for kind, lost in engine.spikes().items()},
        }

    # -- reuse -------------------------------------------------------------------------------------------------

    def reuse(self) -> None:
        args = self.args
        capacity = self.room.kv_tokens // (args.long_prefix * 5 // 4 + PROMPT_TOKENS) - 1
        pool = Pool(
            "gambit", min(capacity, args.capacity), args.long_prefix * 5 // 4, max(capacity // 8, 1),
            args.long_prefix // 20, args.long_prefix,
        )  # fmt: skip
        self.number += 1
        done, seconds = self.run(Watched(self.ours), pool)
        found = {**branches(done, args.long_prefix), "seconds": seconds, "capacity": pool.capacity}
        self.say(f"reuse below the room: {found}")
        self.keep("reuse", found)

    # -- profile -----------------------------------------------------------------------------------------------

    def profiler(self, name: str) -> dict[str, Any]:
        wanted = "profile" in self.args.phases
        return {"profiler_config": step_profile.profiler_config(self.folder / name)} if wanted else {}

    def profile(self) -> None:
        tokens = step_profile.AFTER + step_profile.STEPS + 20
        self.number += 1
        with profiled(self.stock.core_client):
            self.stock.generate(prompt_of(self.number), self.args.capacity, tokens)
        for ours in self.by_scoring.values():
            with profiled(ours._core._client):
                self.run(Watched(ours), Pool("sc", self.args.capacity, tokens))
        found = {name: step_profile.summarise(self.folder / name) for name in ("stock", *self.args.scoring)}
        self.say(f"profile: {json.dumps(found)}")
        self.keep("profile", found)

    # -- saturation --------------------------------------------------------------------------------------------

    def saturation(self) -> None:
        args, block = self.args, self.ours.info.block_tokens
        median = saturating_median(self.room.kv_tokens, args.capacity, block, STEP_COMPLETES, range(args.repeats))
        self.say(f"saturation: traces of {median:.0f} tokens (median)")
        runs: list[dict[str, Any]] = []
        names = ["step", "gambit", "sc"]
        for repeat in range(args.repeats):
            Random(repeat).shuffle(names)
            for name in names:
                if runs and self.left() < 1.5 * max(run["seconds"] for run in runs):
                    self.say("no time for more")
                    return
                runs.append(self.saturated(name, median, repeat))
                self.keep("saturation", {"median_tokens": median, "runs": runs, **compare(runs)})
        self.say(f"saturation: {compare(runs)}")

    def saturated(self, name: str, median: float, seed: int) -> dict[str, Any]:
        args = self.args
        scale = median / PAPER_MEDIAN
        interval = max(round(PAPER_INTERVAL * scale), 1)
        pool = Pool(
            name, args.capacity, self.room.context_tokens, args.swap_size, interval, round(PAPER_WARMUP * scale)
        )
        engine = Watched(self.ours, Lengths(median, seed, longest=(self.room.context_tokens - PROMPT_TOKENS) / median))
        self.number += 1
        done, seconds = self.run(engine, pool)
        counts, traces = done.result.counts, done.record.tree.traces
        run = {
            "policy": name, "seed": seed, "seconds": seconds, "completed": counts.completed,
            "completed_per_second": counts.completed / seconds, "tokens_per_second": done.meter.num_generated / seconds,
            "tokens": done.meter.num_generated, "roots": counts.roots, "branched": counts.branched,
            "pruned": counts.pruned, "evicted": counts.evicted, "preemptions": engine.num_queued,
            "waited_steps_per_trace": sum(t.waited_steps for t in traces) / len(traces),
            "peak_kv_tokens": engine.peak_kv, "gpu_memory_mb": gpu_memory(), **shares(done, seconds),
            "branches": branches(done, args.long_prefix), "series": engine.series,
        }  # fmt: skip
        brief = {key: value for key, value in run.items() if key != "series"}
        self.say(f"{name}: {json.dumps(brief)}")
        return run


PHASES = {
    "overhead": Bench.overhead, "reuse": Bench.reuse, "profile": Bench.profile, "saturation": Bench.saturation
}  # fmt: skip


@contextmanager
def profiled(client: Any) -> Iterator[None]:
    client.profile(True)
    yield
    client.profile(False)


def summarise(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "rounds": len(rounds),
        "stock": {"tokens_per_second": [turn["stock"]["tokens_per_second"] for turn in rounds]},
        **{name: against_stock(rounds, name) for name in rounds[0] if name != "stock"},
    }


def against_stock(rounds: list[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    ratios = [turn[name]["tokens_per_second"] / turn["stock"]["tokens_per_second"] for turn in rounds]
    parts = rounds[0][name].keys()
    return {
        "ratio": {"median": statistics.median(ratios), "interval": bootstrap_of_median(ratios), "each": ratios},
        **{part: [turn[name][part] for turn in rounds] for part in parts},
    }


def bootstrap_of_median(values: list[float]) -> list[float]:
    rng = Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(4000))
    return [medians[100], medians[-101]]


def shares(done: Any, seconds: float) -> dict[str, float]:
    """Shares of the wall clock. Scoring is the device's time for it; scheduling and tree are the host's, beside it."""
    last = done.record.sample
    parts = {"scoring": last.seconds_scoring, "scheduling": last.seconds_scheduling, "tree": last.seconds_search}
    return {f"share_{name}": part / seconds for name, part in parts.items()}


def branches(done: Any, long_prefix: int) -> dict[str, Any]:
    children = [trace for trace in done.record.tree.traces if trace.reused + trace.recomputed]
    long = [trace for trace in children if trace.inherited >= long_prefix]
    return {
        "admitted": len(children), "reused_share": reused_share(children),
        "waited_steps": sum(t.waited_steps for t in children) / max(len(children), 1),
        f"from {long_prefix} tokens": {"admitted": len(long), "reused_share": reused_share(long)},
    }  # fmt: skip


def reused_share(traces: list[Any]) -> float | None:
    inherited = sum(trace.reused + trace.recomputed for trace in traces)
    return sum(trace.reused for trace in traces) / inherited if inherited else None


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Completed traces per second, all repeats together."""
    rate = {}
    for name in {run["policy"] for run in runs}:
        mine = [run for run in runs if run["policy"] == name]
        rate[name] = sum(run["completed"] for run in mine) / sum(run["seconds"] for run in mine)
    others = [name for name in ("step", "sc") if name in rate and "gambit" in rate]
    return {
        "completed_per_second": rate,
        "ratios": {f"gambit / {name}": rate["gambit"] / rate[name] for name in others},
    }


def gpu_memory() -> dict[str, int] | None:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {pid.strip(): int(used) for pid, used in (row.split(",") for row in rows.splitlines() if row)}


if __name__ == "__main__":
    main()

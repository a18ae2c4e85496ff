"""Where a step's time goes, stock vLLM and Gambit's engine: a few steps of each as torch's profiler sees them.

    python benchmarks/gpu_profile.py --out OUT/gpu_profile.json        # two engine starts: about 4 minutes
    python benchmarks/gpu_profile.py --shape tiny --out profile.json   # any CPU, for debugging: operators, not kernels

`gpu_speed.py` says what scoring costs, this says what it consists of. Of each engine: milliseconds a step, how much of
that the device is busy, on which stream and with which kernels, and how many calls the host makes to launch them.
Profiling itself costs host time, so that only the device's figures should be compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speed_parts import PROMPT_TOKENS, SHAPES, Pool, Room, Stock, Watched, prompt_of, run_pool, start_ours, write_shape

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

TOP_KERNELS = 25
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--after", type=int, default=100, help="tokens of each trace before the first profiled step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", default="-1", help="that the scorer reads")
    args = parser.parse_args()
    found: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "out"}
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder), args.shape)
        for name, profile in (("stock", profile_stock), ("gambit", profile_gambit)):
            began = time.monotonic()
            traces = Path(folder) / name
            profile(args, model, traces)
            found[name] = summarise(read_events(traces), args.steps)
            print(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(found[name], indent=1)}", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")


def profile_stock(args: argparse.Namespace, model: str, traces: Path) -> None:
    stock = Stock(model, args.shape, room_of(args), profiler_config=profiler(args, traces))
    stock.generate(prompt_of(1), args.capacity, 20)  # kernels compile, caches fill
    client = stock.core_client
    client.profile(True)
    stock.generate(prompt_of(2), args.capacity, tokens_of(args))
    client.profile(False)
    stock.close()


def profile_gambit(args: argparse.Namespace, model: str, traces: Path) -> None:
    layers = tuple(int(layer) for layer in args.layers.split(","))
    engine = start_ours(model, args.shape, room_of(args), layers=layers, profiler_config=profiler(args, traces))
    vocab_size = SHAPES[args.shape]["vocab_size"]
    run_pool(Watched(engine), Pool("sc", args.capacity, 20), 1, vocab_size)
    client = engine._core._core._client
    client.profile(True)
    run_pool(Watched(engine), Pool("sc", args.capacity, tokens_of(args)), 2, vocab_size)
    client.profile(False)
    engine.close()


def tokens_of(args: argparse.Namespace) -> int:
    return args.after + args.steps + 20


def room_of(args: argparse.Namespace) -> Room:
    import torch

    tokens = args.capacity * (tokens_of(args) + 64) + PROMPT_TOKENS
    return Room(tokens, max(tokens // 8, 4096), args.capacity, not torch.cuda.is_available())


def profiler(args: argparse.Namespace, traces: Path) -> dict[str, Any]:
    """vLLM's own: it begins so many steps after it was asked to, and ends by itself."""
    return {
        "profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
        "delay_iterations": args.after, "max_iterations": args.steps, "ignore_frontend": True,
    }  # fmt: skip


def read_events(traces: Path) -> list[dict[str, Any]]:
    files = sorted(traces.rglob("*.json*"))
    assert files, f"no trace in {traces}"
    raw = files[-1].read_bytes()
    events = json.loads(gzip.decompress(raw) if files[-1].suffix == ".gz" else raw)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summarise(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Milliseconds a step; `busy` counts what runs side by side once."""
    on_device = [event for event in events if event.get("cat") in DEVICE_WORK]
    on_device = on_device or [event for event in events if event.get("cat") == "cpu_op"]  # a CPU has no kernels
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    first, last = min(e["ts"] for e in on_device), max(e["ts"] + e["dur"] for e in on_device)
    streams = {stream_of(event) for event in on_device}
    kernels: Counter[str] = Counter()
    for event in on_device:
        kernels[event["name"][:120]] += event["dur"]
    return {
        "ms_per_step": (last - first) / 1000 / steps,
        "device_busy": busy(on_device) / 1000 / steps,
        "streams": {stream: busy(e for e in on_device if stream_of(e) == stream) / 1000 / steps for stream in streams},
        "kernels_per_step": len(on_device) / steps,
        "host_calls_per_step": len(calls) / steps,
        "host_calls_ms": sum(event["dur"] for event in calls) / 1000 / steps,
        "top_kernels": {name: microseconds / 1000 / steps for name, microseconds in kernels.most_common(TOP_KERNELS)},
    }


def stream_of(event: dict[str, Any]) -> str:
    return str(event.get("args", {}).get("stream", event.get("tid")))


def busy(events: Iterable[dict[str, Any]]) -> float:
    """Microseconds in which at least one of them runs."""
    total, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, finish = max(event["ts"], end), event["ts"] + event["dur"]
        total += max(finish - begin, 0.0)
        end = max(end, finish)
    return total


if __name__ == "__main__":
    main()

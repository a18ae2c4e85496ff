"""Profiles a few steps with torch's profiler: their time by kernel and stream. Used by gpu_speed.py.

Profiling itself costs host time, so that only the device's figures should be compared with those of an undisturbed run.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

AFTER = 100  # steps before the first profiled one
STEPS = 20
TOP_KERNELS = 25
TOP_GAPS = 15
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def profiler_config(traces: Path) -> dict[str, Any]:
    """vLLM's own: it begins so many steps after it was asked to, and ends by itself; until then it costs nothing."""
    return {
        "profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_with_stack": False,
        "delay_iterations": AFTER, "max_iterations": STEPS, "ignore_frontend": True,
    }  # fmt: skip


def read_events(traces: Path) -> list[dict[str, Any]]:
    files = sorted(traces.rglob("*.json*"))
    assert files, f"no trace in {traces}"
    raw = files[-1].read_bytes()
    events = json.loads(gzip.decompress(raw) if files[-1].suffix == ".gz" else raw)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summarise(traces: Path) -> dict[str, Any]:
    """Milliseconds a step; `busy` counts what runs side by side once."""
    events, steps = read_events(traces), STEPS
    on_device = [event for event in events if event.get("cat") in DEVICE_WORK]
    on_device = on_device or [event for event in events if event.get("cat") == "cpu_op"]  # a CPU has no kernels
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    first, last = min(e["ts"] for e in on_device), max(e["ts"] + e["dur"] for e in on_device)
    streams = {stream_of(event) for event in on_device}
    kernels: Counter[str] = Counter()
    for event in on_device:
        kernels[event["name"][:120]] += event["dur"]
    return {
        "median_step": median_step(on_device, steps),
        "ms_per_step": (last - first) / 1000 / steps,
        "device_busy": busy(on_device) / 1000 / steps,
        "streams": {stream: busy(e for e in on_device if stream_of(e) == stream) / 1000 / steps for stream in streams},
        "kernels_per_step": len(on_device) / steps,
        "host_calls_per_step": len(calls) / steps,
        "host_calls_ms": sum(event["dur"] for event in calls) / 1000 / steps,
        "top_gaps": {pair: gap / 1000 / steps for pair, gap in gaps(on_device).most_common(TOP_GAPS)},
        "top_kernels": {name: microseconds / 1000 / steps for name, microseconds in kernels.most_common(TOP_KERNELS)},
    }


def median_step(events: Iterable[dict[str, Any]], steps: int) -> dict[str, float]:
    """Milliseconds of a usual step, and in which nothing runs: the profiler itself holds up some of them."""
    ordered = sorted(events, key=lambda event: event["ts"])
    counts = Counter(event["name"] for event in ordered)
    begins = next((name for name in counts if counts[name] == steps), None)  # once a step, the first of them
    marks = [at for at, event in enumerate(ordered) if event["name"] == begins]
    each = [ordered[a:b] for a, b in pairwise(marks)]
    took = [ordered[b]["ts"] - ordered[a]["ts"] for a, b in pairwise(marks)]
    if not took:
        return {}
    idle = [whole - busy(part) for whole, part in zip(took, each, strict=True)]
    return {"ms": statistics.median(took) / 1000, "idle_ms": statistics.median(idle) / 1000}


def gaps(events: Iterable[dict[str, Any]]) -> Counter[str]:
    """Microseconds in which nothing runs, by what ran before and after."""
    found: Counter[str] = Counter()
    last, end = "", 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        if last and event["ts"] > end:
            found[f"{last[:60]} > {event['name'][:60]}"] += event["ts"] - end
        if event["ts"] + event["dur"] > end:
            last, end = event["name"], event["ts"] + event["dur"]
    return found


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

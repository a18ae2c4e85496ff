"""What it costs vLLM's scheduler to say who gives way, in a step in which the KV cache is full; no model, no vLLM.

    python benchmarks/pressure_scale.py --out benchmarks/results/pressure_scale.json        # one core: seconds

Pools of 64 traces side by side, all of one engine. In every step some traces have got a block and some a score, and
three blocks are missing, as in a saturated engine. Each figure is the median over steps, in time of this thread only;
an exponent is the slope of a line through the logarithms: 0 constant, 1 linear.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import statistics
import time
from pathlib import Path

from gambit.engines.vllm.messages import Announcement, TraceTask
from gambit.engines.vllm.trace_table import TraceTable
from gambit.scorers.simple import ConstantScorer
from gambit.types import PressureAction
from search_scale import exponent

POOL = 64
SEARCHES = (1, 2, 4, 8, 16)
BLOCKS = (30, 60, 120, 240, 480, 960)  # of a trace; 16 tokens each
COMMON_SEARCHES, COMMON_BLOCKS = 8, 60
BLOCK_TOKENS, PROMPT_BLOCKS, MISSING = 16, 6, 3
THOUGHT_TOKENS = 50


class FullEngine:
    """The scheduler's table of traces in a full KV cache, and the blocks that vLLM would have given out."""

    def __init__(self, searches: int, blocks_per_trace: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._num_blocks = 0
        self._blocks: dict[str, list[int]] = {}
        self._table = TraceTable(ConstantScorer(), searches * POOL * blocks_per_trace, BLOCK_TOKENS)
        for search in range(searches):
            prompt = self._new(PROMPT_BLOCKS)
            for trace in range(POOL):
                self._add(search, trace, [*prompt, *self._new(blocks_per_trace - PROMPT_BLOCKS)])

    def _add(self, search: int, trace: int, blocks: list[int]) -> None:
        opening = Announcement(search, [1], [], [], 10, None, None, [], keeps_histories=False)
        request, score = f"{search}-{trace}", self._rng.random()
        task = TraceTask(
            search=search, trace=trace, prompt_tokens=96, inherited=0, action=PressureAction.GHOST,
            unscored_first=False, score=(1, score, score, score), flags=0, is_pending=False, parent=None, noise_key=0,
            temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
            announcement=dataclasses.asdict(opening) if trace == 0 else None,
        )  # fmt: skip
        self._table.add(request, task, 0)
        self._table.admit(self._table.traces[request])
        self._blocks[request] = blocks

    def step(self) -> float:
        """Seconds of one ranking, after as much has changed as in a step."""
        names = list(self._blocks)
        for request in self._rng.sample(names, len(names) // BLOCK_TOKENS):
            self._blocks[request] += self._new(1)
        for request in self._rng.sample(names, max(len(names) // THOUGHT_TOKENS, 1)):
            trace = self._table.traces[request]
            trace.score, trace.standing = trace.score.add(self._rng.random()), None
        began = time.thread_time()
        order = self._table.eviction_order(names, lambda request, start: self._blocks[request][start:], MISSING)
        seconds = time.thread_time() - began
        assert sorted(order) == sorted(names)
        return seconds

    def _new(self, count: int) -> list[int]:
        self._num_blocks += count
        return list(range(self._num_blocks - count, self._num_blocks))


def microseconds(searches: int, blocks_per_trace: int, steps: int) -> float:
    engine = FullEngine(searches, blocks_per_trace)
    engine.step()  # sees all blocks for the first time
    found = round(statistics.median(engine.step() for _ in range(steps)) * 1e6, 1)
    print(f"{searches} searches of {POOL} traces of {blocks_per_trace} blocks: {found} us", flush=True)
    return found


def measure(steps: int) -> dict[str, object]:
    by_searches = [microseconds(searches, COMMON_BLOCKS, steps) for searches in SEARCHES]
    by_blocks = [microseconds(COMMON_SEARCHES, blocks, steps) for blocks in BLOCKS]
    return {
        "exponent_in_searches": exponent(SEARCHES[1:], by_searches[1:]),  # one search alone needs no count
        "exponent_in_blocks": exponent(BLOCKS, by_blocks),
        "us_by_searches": dict(zip(SEARCHES, by_searches, strict=True)),
        "us_by_blocks": dict(zip(BLOCKS, by_blocks, strict=True)),
        "pool": POOL,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = measure(args.steps)
    print(json.dumps({name: report[name] for name in ("exponent_in_searches", "exponent_in_blocks")}, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

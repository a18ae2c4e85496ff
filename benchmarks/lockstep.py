"""Measures what a scheduler costs the host per step when all traces go in step: vLLM's own, and with the fast path.

    python benchmarks/lockstep.py --out benchmarks/results/lockstep.json         # half a minute on one core

Traces of one search begin together and have the same prompt, so that all of them want a new block in the same step. No
model runs: requests are planned and booked as vLLM's core does it with asynchronous scheduling, in turns of both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/engines")]

BLOCK = 16
PROMPT = list(range(100, 196))
FIRST = 2 * BLOCK  # step that is timed: by then every trace decodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=int, default=256)
    parser.add_argument("--steps", type=int, default=FIRST + 10 * BLOCK)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    import vllm

    from support.tiny import save_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = str(save_tiny(Path(folder)))
        turns = [{name: run(model, args, name == "ours") for name in order(turn)} for turn in range(args.turns)]
    found = {"vllm": vllm.__version__, "traces": args.traces, "turns": args.turns, **summary(turns)}
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def order(turn: int) -> list[str]:
    return ["stock", "ours"][:: 1 if turn % 2 else -1]


def run(model: str, args: argparse.Namespace, has_fast_path: bool) -> list[float]:
    """Seconds of planning and booking by step."""
    from test_vllm_fast_decode import make_scheduler, with_fast_decode

    blocks = args.traces * (args.steps // BLOCK + 2) + len(PROMPT)
    scheduler = make_scheduler(model, True, blocks, args.traces)
    scheduler.use_v2_model_runner = True  # as on a GPU
    fast = with_fast_decode(scheduler) if has_fast_path else None
    begin_all(scheduler, fast, args)
    in_flight: deque[Any] = deque()
    seconds = []
    for _ in range(args.steps):
        began = time.perf_counter()
        with fast.planning() if fast else nullcontext():
            in_flight.append(scheduler.schedule())
        spent = time.perf_counter() - began
        if len(in_flight) > 1:
            scheduled = in_flight.popleft()
            output = said(scheduled)
            began = time.perf_counter()
            if fast:
                _, scheduled = fast.book(scheduled, output)
            scheduler.update_from_output(scheduled, output)
            spent += time.perf_counter() - began
        seconds.append(spent)
    assert len(scheduler.running) == args.traces
    return seconds


def begin_all(scheduler: Any, fast: Any, args: argparse.Namespace) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for number in range(args.traces):
        params = SamplingParams(max_tokens=2 * args.steps, ignore_eos=True)
        request = Request(
            request_id=str(number), prompt_token_ids=PROMPT, sampling_params=params, pooling_params=None,
            block_hasher=hasher, arrival_time=float(number),
        )  # fmt: skip
        scheduler.add_request(request)
        if fast:
            fast.begin(request)


def said(scheduled: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[[5 + row % 40] for row in range(len(names))], logprobs=None, prompt_logprobs_dict={},
        pooler_output=[],
    )  # fmt: skip


def summary(turns: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Milliseconds: of a step on average, of the usual step, and of the worst two that follow each other in a block."""
    found: dict[str, Any] = {}
    for name in ("stock", "ours"):
        places = [
            statistics.median(
                step * 1000 for turn in turns for step in turn[name][FIRST + place :: BLOCK]
            )
            for place in range(BLOCK)
        ]  # fmt: skip
        pairs = [places[place - 1] + places[place] for place in range(BLOCK)]
        found[name] = {
            "mean": statistics.mean(places), "usual": statistics.median(places), "worst_pair": max(pairs)
        }  # fmt: skip
    ratios = [sum(turn["stock"][FIRST:]) / sum(turn["ours"][FIRST:]) for turn in turns]
    found["stock / ours"] = {"median": statistics.median(ratios), "each": ratios}
    return found


if __name__ == "__main__":
    main()

"""Two engines of a small model on one GPU, under Ray, against one of them: tokens a second in all, and accuracy.

    python benchmarks/ray_two_engines.py --out $OUT/ray_two_engines.json --kv-bytes 20GB
    python benchmarks/ray_two_engines.py --model DIR --file problems.jsonl --limit 64 --concurrency 8 --out …
    python benchmarks/ray_two_engines.py --limit 4 --capacity 8 --out /tmp/dry_run.json     # a dry run on a CPU

Each engine has half of the GPU and the same memory for its KV cache, in bytes, whether the other works or not; they
load one after the other. Both warm up, then take turns: one, two, two, one, … on the same problems, until the rounds or
the seconds are up.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])  # of the engines

from gambit.bench.folder import (  # noqa: E402
    create,
    identity_of,
    make_plan,
)
from gambit.bench.recipe import recipe_from  # noqa: E402
from gambit.bench.rows import Row, RowWriter, read_rows  # noqa: E402
from gambit.bench.run import (  # noqa: E402
    BenchEngine,
    RaySearches,
    Runner,
    stamp_of,
)
from gambit.bench.summary import union_seconds  # noqa: E402
from gambit.cli.options import key_values  # noqa: E402
from gambit.cli.session import solver_maker  # noqa: E402
from gambit.cluster.engines import EnginePool, EngineState  # noqa: E402
from gambit.cluster.plan import ClusterPlan, EngineNeeds, connected, engine_needs  # noqa: E402
from gambit.config.options import EngineConfig, MemoryPart  # noqa: E402
from gambit.engines.base import check_engine  # noqa: E402

ORDER = (1, 2, 2, 1)  # engines at work, round by round: what drifts hits both alike


def engine_config(options: argparse.Namespace) -> EngineConfig:
    config = EngineConfig(
        model=options.model, engine=options.engine, device=options.device, scorer=options.scorer,
        memory_ratio=options.memory_ratio,
    )  # fmt: skip
    own = key_values(options.engine_option, "--engine-option")
    if options.kv_bytes is not None and check_engine(config) == "vllm":
        own["kv_cache_memory_bytes"] = MemoryPart.parse(options.kv_bytes).bytes_of(0)
    return config.model_copy(update={"engine": "vllm", "engine_options": own}) if own else config


def bench(pool: EnginePool[BenchEngine], options: argparse.Namespace, folder: Path, limit: int) -> list[Row]:
    values = {
        "benchmarks": [options.file or "pawn"], "policies": ["gambit"], "limit": limit, "capacity": options.capacity,
        "concurrency": options.concurrency, "logs": False, "model": options.model,
    }  # fmt: skip
    if options.max_new_tokens:
        values["max_new_tokens"] = options.max_new_tokens
    plan, benchmarks = make_plan(recipe_from(values), {})
    create(folder, plan)
    with RowWriter(folder) as writer:
        Runner(plan, benchmarks, RaySearches(pool, folder), writer, set()).run()
    return list(read_rows(folder))


def with_engines(pool: EnginePool[BenchEngine], count: int, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Only so many engines of the pool get work."""
    spare = pool.slots[count:]
    del pool.slots[count:]
    try:
        return bench(pool, options, folder, options.limit)
    finally:
        pool.slots.extend(spare)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    begun, ended = min(row.began for row in rows), max(row.began + row.seconds.total for row in rows)
    busy = defaultdict(list)
    for row in rows:
        busy[row.engine].append((row.began, row.began + row.seconds.total))
    tokens = sum(row.generated for row in rows)
    return {
        "problems": len(rows),
        "right": sum(row.correct for row in rows),
        "failed": sum(row.error is not None for row in rows),
        "tokens": tokens,
        "seconds": ended - begun,
        "tokens_a_second": tokens / (ended - begun),
        "engine_seconds": sum(map(union_seconds, busy.values())),
    }


def all_ready(pool: EnginePool[BenchEngine], options: argparse.Namespace, scratch: Path) -> None:
    """Every engine loaded and warm."""
    for number in range(100):
        bench(pool, options, scratch / f"warm-{number}", 2 * len(pool.slots))
        if all(slot.state is EngineState.READY and slot.num_done for slot in pool.slots):
            return


def measure(options: argparse.Namespace, needs: EngineNeeds, until: float, scratch: Path) -> None:
    """Writes what it has after every round: a run that is cut off keeps it."""
    config = engine_config(options)
    rounds: list[dict[str, object]] = []
    answers: dict[int, dict[str, str | None]] = defaultdict(dict)
    with EnginePool(
        partial(BenchEngine, solver_maker(config, needs)), 2, needs, jobs_per_engine=options.concurrency
    ) as pool:
        all_ready(pool, options, scratch)
        stamp = pool.call_one(partial(stamp_of, identity=identity_of(options.model, config.scorer)))
        told = {
            "needs": dataclasses.asdict(needs),
            "engine": stamp,
            "loaded_after_seconds": time.monotonic() - options.began,
        }
        for number in range(options.rounds):
            count = ORDER[number % len(ORDER)]
            began = time.monotonic()
            rows = with_engines(pool, count, options, scratch / f"round-{number}")
            rounds.append({"engines": count, **figures(rows)})
            answers[count] |= {row.problem: row.answer for row in rows}
            print(json.dumps(rounds[-1]), flush=True)
            deaths = sum(slot.num_deaths for slot in pool.slots)
            write(options, {**told, "deaths": deaths, "rounds": rounds, **agreement(answers), **summary(rounds)})
            if time.monotonic() + 1.5 * (time.monotonic() - began) > until:
                break
    print(json.dumps(summary(rounds)))


def agreement(answers: Mapping[int, Mapping[str, str | None]]) -> dict[str, int]:
    """Compares two engines with one."""
    same = sum(answers[1].get(problem) == answer for problem, answer in answers[2].items())
    return {"same_answers": same, "of": len(answers[2])}


def write(options: argparse.Namespace, found: dict[str, object]) -> None:
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    options.out.write_text(json.dumps({"options": told, **found}, indent=1) + "\n")


def summary(rounds: Sequence[dict[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for count, name in ((1, "one"), (2, "two")):
        mine = [each for each in rounds if each["engines"] == count]
        if mine:
            tokens, seconds = (sum(float(str(each[key])) for each in mine) for key in ("tokens", "seconds"))
            found[f"{name}_tokens_a_second"] = tokens / seconds
            found[f"{name}_right"] = [each["right"] for each in mine]
    if "one_tokens_a_second" in found and "two_tokens_a_second" in found:
        found["gain"] = float(str(found["two_tokens_a_second"])) / float(str(found["one_tokens_a_second"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="pawn")
    parser.add_argument("--scorer", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--file", help="problems with question and answer; default: pawn's puzzles")
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=1, help="problems at a time on each engine")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--kv-bytes", help="memory of each engine's KV cache, such as 20GB (vLLM)")
    parser.add_argument("--memory-ratio", type=float, default=0.9, help="of the GPU, of both engines together")
    parser.add_argument("--engine-option", action="append", default=[], metavar="KEY=VALUE", help="for vLLM")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=200.0, help="no round is begun that would end later")
    options = parser.parse_args()
    options.began = time.monotonic()
    plan = ClusterPlan(engines=2)
    with connected(plan) as cluster, tempfile.TemporaryDirectory() as scratch:
        has_gpu = cluster.get("GPU", 0) > 0 and options.device != "cpu"
        plan = dataclasses.replace(plan, gpus=0.5 if has_gpu else 0.0)
        needs = engine_needs(plan, engine_config(options), cluster)
        measure(options, needs, options.began + options.seconds, Path(scratch))


if __name__ == "__main__":
    main()

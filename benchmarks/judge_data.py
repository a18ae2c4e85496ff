"""Everything that judges are trained, chosen and judged on, with one start of an engine.

    python benchmarks/judge_data.py --model DIR --train fit.jsonl --held held.jsonl --test math500_dev.jsonl --out OUT
    … --shard 1/4 … --shard 4/4, then `gambit scorer merge OUT/train-? --out OUT/train` and so on

`--parts` in the order in which they are made, the collections in folders of their own, so that training can begin while
the rest is made. What is not done when the time is up (`--until`, seconds since the epoch) is left out.

`--weights-at FILE`: the weights in DIR are others of the same shape, with which the engine starts while the real ones
are still on their way; once FILE is there, those that then lie in DIR are loaded into the running engine.

- train: traces of the problems that judges are fitted to;
- test, other: traces of the problems that they are judged on;
- held: traces of training problems that no judge is fitted to (`simulated_search.py` works out from them which settings
  suit a search by a judge).

On an H200 four engines of 512 rows, each a shard, make 57,000 tokens/s of a 1.5B model with `--confidence`, which sorts
the vocabulary at every token: train takes 140 s with nothing else on the GPU.
With hidden states of thoughts (`--layers`) half as many.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from gambit.config.options import EngineConfig, SearchConfig
from gambit.solver import Solver
from gambit.storage.folders import locked
from gambit.storage.problems import read_problem_file, shard_of
from gambit.training.collect import CollectPlan, LocalEngines, collect
from gambit.training.sampling import Task


class Run:
    """One shard of all parts."""

    def __init__(self, options: argparse.Namespace, plan: CollectPlan, engines: LocalEngines) -> None:
        self._options, self._plan, self._engines = options, plan, engines
        self._first, self._every = shard_of(options.shard)
        self._began = time.monotonic()

    def folder(self, part: str) -> Path:
        return self._options.out / (part if self._every == 1 else f"{part}-{self._first + 1}")

    def tasks(self, part: str) -> list[Task]:
        found = read_problem_file(getattr(self._options, part), {})
        tasks = [Task(problem, found.expected[problem.id]) for problem in found.problems[: self._options.limit]]
        return tasks[self._first :: self._every]

    def collect(self, part: str, traces: int) -> None:
        folder = self.folder(part)
        with locked(folder):
            plan = replace(self._plan, out=folder, source=getattr(self._options, part).name, traces_per_problem=traces)
            summary = collect(self.tasks(part), plan, engines=self._engines, should_stop=self._is_late)
        self.say(f"{part}: {summary}")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def _is_late(self) -> bool:
        return time.time() >= self._options.until


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def plan_of(options: argparse.Namespace) -> CollectPlan:
    sampling = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0, "seed": options.seed}
    return CollectPlan(
        out=options.out,
        source="",
        engine=EngineConfig(
            model=options.model, engine=options.engine, memory_ratio=options.memory_ratio,
            engine_options=json.loads(options.engine_options),
        ),
        search=SearchConfig(max_new_tokens=options.max_new_tokens, **sampling),
        traces_per_problem=options.traces,
        traces_at_once=options.traces_at_once,
        layers=options.layers,
        with_confidence=options.confidence,
        num_graders=options.graders,
    )  # fmt: skip


def load_real_weights(solver: Solver, there: Path, until: float) -> None:
    """Into an engine that runs with others of the same shape."""
    while not there.exists():
        if time.time() >= until:
            raise SystemExit(f"{there} did not come")
        time.sleep(0.2)
    core = solver.engine._core._client  # type: ignore[attr-defined]  # vLLM's, by the names it has itself
    core.collective_rpc("reload_weights")
    core.reset_prefix_cache()


def check_weights(solver: Solver, tasks: list[Task], search: SearchConfig) -> None:
    """Random weights answer nothing. vLLM's CPU build packs its weights at the start and keeps those."""
    config = search.model_copy(update={"policy": "sc", "capacity": 4, "num_traces": 4})
    results = list(solver.solve_many([task.problem for task in tasks[:8]], config))
    num_silent = sum(result.num_abstained for result in results)
    if num_silent > 2 * len(results):
        raise SystemExit(f"{num_silent} of {4 * len(results)} traces have no answer: these are not the real weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    for part in ("train", "held", "test"):
        parser.add_argument(f"--{part}", type=Path, required=True, help="problems with answers, .jsonl")
    parser.add_argument("--other", type=Path, help="more problems to judge on, of another kind")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="first problems of each file only")
    parser.add_argument("--traces", type=int, default=16, help="of a problem to judge or choose by")
    parser.add_argument("--train-traces", type=int, default=8)
    parser.add_argument("--held-traces", type=int, help="if not as many as of the others")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds since the epoch")
    parser.add_argument("--traces-at-once", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--engine-options", default="{}", help="JSON")
    parser.add_argument("--memory-ratio", type=float, default=0.5)
    parser.add_argument(
        "--layers", type=numbers, default=(), help="whose states are kept, such as -1,-9; none unless given"
    )
    parser.add_argument("--confidence", action="store_true", help="measure the model's confidence in every thought")
    parser.add_argument("--weights-at", type=Path, help="a file that says when the weights are those to use")
    parser.add_argument("--graders", type=int, default=3)
    parser.add_argument("--shard", default="1/1", help="i/n")
    parser.add_argument("--parts", default="train,test,held")
    options = parser.parse_args()
    held_traces = options.held_traces or options.traces
    parts: dict[str, Callable[[Run], None]] = {
        "train": lambda run: run.collect("train", options.train_traces),
        "test": lambda run: run.collect("test", options.traces),
        "other": lambda run: run.collect("other", options.traces),
        "held": lambda run: run.collect("held", held_traces),
    }
    if unknown := set(options.parts.split(",")) - parts.keys():
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: use {', '.join(parts)}")
    warnings.simplefilter("ignore")
    plan = plan_of(options)
    with closing(LocalEngines(plan)) as engines:
        run = Run(options, plan, engines)
        run.say("the engine is there")
        if options.weights_at is not None:
            load_real_weights(engines.solver, options.weights_at, options.until)
            check_weights(engines.solver, run.tasks("held"), plan.search)
            run.say("the weights are there")
        for part in options.parts.split(","):
            parts[part](run)


if __name__ == "__main__":
    main()

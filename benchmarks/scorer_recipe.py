"""From a model to judged scorers, every objective of both architectures, in one go.

    python benchmarks/scorer_recipe.py --model DIR --train math_train.jsonl --test math500_dev.jsonl --out OUT

Problems to judge by are collected first, then those to train on, until there are enough or the time is up
(`--seconds`). Scorers, and the layers they read, are chosen on held-out problems of the training collection and judged
on the other one, which none of them has seen. OUT/data holds the collections (large), OUT/results what is worth
keeping: a checkpoint for each objective, `mlp.safetensors` and the like (the best of each architecture),
`best.safetensors` and `report.json`; beside ours an MLP as STEP published it is judged, `mlp-published`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

from gambit.config.options import EngineConfig, SearchConfig
from gambit.scorers.checkpoint import save_checkpoint
from gambit.storage.locks import locked
from gambit.storage.problems import read_problems, shard_of
from gambit.training.collect import Collector, CollectPlan
from gambit.training.dataset import Division
from gambit.training.fit import Fitted
from gambit.training.judging import judge_scorers, report_json, write_figures
from gambit.training.sampling import Task
from gambit.training.train import Trained, TrainPlan, best_of, datasets_of, train
from gambit.types import StatePosition


class Clock:
    """Seconds by phase, told as they pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._last = self._began

    def done(self, phase: str, note: str = "") -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now
        print(f"[{now - self._began:6.1f} s] {phase}: {self.seconds[phase]:.1f} s {note}", flush=True)


def tasks_of(options: argparse.Namespace) -> tuple[list[Task], list[Task]]:
    """To judge by, to train on."""
    return _read(options.test, options.test_problems), _read(options.train, options.train_problems)


def _read(path: Path, count: int) -> list[Task]:
    found = read_problems(None, path, None)
    return [Task(problem, found.expected[problem.id]) for problem in found.problems[:count]]


def plan_of(options: argparse.Namespace) -> CollectPlan:
    sampling = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0}
    engine_options = json.loads(options.engine_options)
    return CollectPlan(
        out=options.out,
        source="",
        engine=EngineConfig(
            model=options.model, engine=options.engine, device=options.device, memory_ratio=options.memory_ratio,
            engine_options=engine_options,
        ),
        search=SearchConfig(seed=options.seed, max_new_tokens=options.max_new_tokens, **sampling),
        traces_per_problem=options.traces,
        traces_at_once=options.traces_at_once,
        layers=() if options.layers == "none" else tuple(int(layer) for layer in options.layers.split(",")),
        positions=tuple(StatePosition) if options.position == "auto" else (StatePosition(options.position),),
        with_confidence=not options.no_confidence,
        batch_tokens=options.batch_tokens,
        num_graders=options.graders,
    )  # fmt: skip


def collect_both(options: argparse.Namespace, clock: Clock) -> None:
    """Its share of both, in a shard; `gambit scorer merge` puts `train-1`, `train-2`, … together."""
    first, every = shard_of(options.shard)
    to_judge, to_train = tasks_of(options)
    sources = (options.test.name, options.train.name)
    with Collector(plan_of(options)) as collector:
        clock.done("start")
        traces = (options.traces, options.train_traces or options.traces)
        for name, tasks, source, count in zip(("test", "train"), (to_judge, to_train), sources, traces, strict=True):
            folder = options.out / "data" / (name if every == 1 else f"{name}-{first + 1}")
            deadline = time.monotonic() + options.seconds

            def is_early(deadline: float = deadline) -> bool:
                return time.monotonic() < deadline

            with locked(folder):
                summary = collector.collect(
                    tasks[first::every], folder, source, may_begin=is_early, traces_per_problem=count
                )
            clock.done(f"collect {name}", str(summary))


def train_all(options: argparse.Namespace, clock: Clock) -> tuple[list[Path], dict[str, Path]]:
    """One checkpoint per architecture and objective, and which is the best of each architecture and of all."""
    results = options.out / "results"
    best: dict[str, Fitted] = {}
    path_of: dict[Fitted, Path] = {}
    results.mkdir(parents=True, exist_ok=True)
    division = Division(options.validation, 0.0)
    plans = [
        TrainPlan(options.out / "data" / "train", architecture, "auto", options.position, None, division,
                  _changes(options), options.device)
        for architecture in options.architectures.split(",")
    ]  # fmt: skip
    datasets = datasets_of(plans[0])
    clock.done("load")
    for plan in plans:
        trained = train(plan, datasets, lambda done, total: None)
        for data, fitted in trained.tried:
            layers = ",".join(map(str, data.layers))
            print(f"    {plan.architecture} {fitted.recipe.objective}, {data.position} of {layers}: held-out AUC "
                  f"{fitted.held_out_auc:.4f}, epoch {fitted.best_epoch} of {fitted.epochs}, {fitted.seconds:.1f} s",
                  flush=True)  # fmt: skip
        for fitted in best_of_objectives(trained):
            path = results / f"{plan.architecture}-{fitted.recipe.objective}.safetensors"
            save_checkpoint(fitted.scorer, path, trained.metadata_of(fitted))
            path_of[fitted] = path
        best[plan.architecture] = trained.best
        clock.done(f"train {plan.architecture}", f"best: {path_of[trained.best].stem}")
    made = list(path_of.values())
    if "mlp" in best:
        made.append(train_published(plans[0], results))
        clock.done("train mlp-published")
    best["best"] = best_of([*best.values()])
    return made, {name: path_of[fitted] for name, fitted in best.items()}


def train_published(ours: TrainPlan, results: Path) -> Path:
    """STEP's recipe with the states it reads: of the last layer alone."""
    plan = dataclasses.replace(ours, architecture="mlp", objective="bce", layers=(-1,))
    trained = train(plan, datasets_of(plan))
    path = results / "mlp-published.safetensors"
    save_checkpoint(trained.best.scorer, path, trained.metadata)
    return path


def best_of_objectives(trained: Trained) -> list[Fitted]:
    """Of each objective the state position and layers that rank held-out problems best: only those are judged."""
    tried = sorted((fitted for _, fitted in trained.tried), key=lambda fitted: fitted.held_out_auc)
    return list({fitted.recipe.objective: fitted for fitted in [*tried, trained.best]}.values())


def _changes(options: argparse.Namespace) -> dict[str, int]:
    return {"seed": options.seed, "width": options.width} | ({"max_epochs": options.epochs} if options.epochs else {})


def judge_all(options: argparse.Namespace, made: list[Path], best: dict[str, Path], clock: Clock) -> None:
    results = options.out / "results"
    report = judge_scorers([str(path) for path in made], options.out / "data" / "test", "all", device=options.device)
    plain = report_json(report)
    clock.done("judge")
    write_figures([str(path) for path in made], report)
    for name, path in best.items():
        shutil.copy(path, results / f"{name}.safetensors")
    settings = {key: str(value) for key, value in vars(options).items() if key not in ("out", "model", "train", "test")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    full = {"options": settings, "device": device, "seconds": clock.seconds, **plain}
    (results / "report.json").write_text(json.dumps(full, indent=1) + "\n")
    if find_spec("matplotlib") is not None:
        from gambit.training.plot import draw

        draw(report, results / "report.png")
    for ranking in report.rankings:
        auc = "  ".join(f"{share:.0%} {ranking.auc[share].value:.3f}" for share in (0.25, 0.5, 0.75, 1.0))
        print(f"{ranking.name:28} {ranking.mean_auc}  {auc}")
    print("\n".join(plain["conclusions"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True, help="problems with answers, .jsonl")
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--train-problems", type=int, default=1500)
    parser.add_argument("--test-problems", type=int, default=200)
    parser.add_argument("--traces", type=int, default=16)
    parser.add_argument("--train-traces", type=int, help="of a problem to train on, instead of --traces")
    parser.add_argument("--traces-at-once", type=int, default=1024)
    parser.add_argument(
        "--seconds", type=float, default=150, help="after which no more problems of a collection are begun"
    )
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--engine-options", default="{}", help="JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-ratio", type=float, default=0.5)
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--layers", default="-1", help="whose states are stored, as in 14,20,-1; none: for a verifier")
    parser.add_argument("--position", default="boundary", choices=["before", "boundary", "auto"])
    parser.add_argument("--no-confidence", action="store_true")
    parser.add_argument("--graders", type=int, default=6)
    parser.add_argument("--architectures", default="mlp,mlp+confidence,sequence")
    parser.add_argument("--validation", type=float, default=0.15)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--width", type=int, default=256, help="of the sequence scorer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="1/1", help="i/n: collect beside others")
    parser.add_argument("--only", choices=["collect", "train"], help="stop after collecting; or train on what is there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clock = Clock()
    if options.only != "train":
        collect_both(options, clock)
    if options.only != "collect":
        judge_all(options, *train_all(options, clock), clock)


if __name__ == "__main__":
    main()

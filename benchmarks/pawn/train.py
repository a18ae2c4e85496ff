"""Makes pawn's version 2 of version 1: network, scorers, preset and model card; seeded, minutes on one GPU.

    PYTHONPATH=src python -m benchmarks.pawn.train --start V1 --out DIR                # network, then scorers
    PYTHONPATH=src python -m benchmarks.pawn.train --start V1 --out DIR --only network # torch and transformers suffice
    PYTHONPATH=src python -m benchmarks.pawn.train --out DIR --only scorers        # for the network in DIR

Beside the model folder DIR it writes `pawn_scorers.json`, the whole report on the scorers. README.md says how the
folder becomes the one that ships.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from benchmarks.pawn.folder import NetworkRun

RUN_FILE = "network_run.json"  # what the card will tell of the network; beside the model folder
REPORT_FILE = "pawn_scorers.json"


def make_network(options: argparse.Namespace, device: "torch.device") -> None:
    """Trains and writes the network; everything after works on the weights as written."""
    import torch
    from benchmarks.pawn.corpus import make_corpus
    from benchmarks.pawn.folder import NetworkRun, write_model
    from benchmarks.pawn.network import TINY_SHAPE, Shape, build_model, take_over
    from benchmarks.pawn.pretraining import TINY_RECIPE, Recipe, train

    began = time.monotonic()
    num_traces = 64 if options.tiny else 1_200_000
    corpus = make_corpus(num_traces, options.seed, options.workers)
    say(f"corpus: {time.monotonic() - began:.0f} s")
    torch.manual_seed(options.seed)
    model = build_model(TINY_SHAPE if options.tiny else Shape()).to(device)
    if options.start:
        take_over(model, options.start)
    recipe = replace(TINY_RECIPE if options.tiny else Recipe(), seed=options.seed)
    curve = train(model, corpus, replace(recipe, num_updates=options.updates or recipe.num_updates), say)
    write_model(model, options.out)
    run = NetworkRun(
        command=command_of(options),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        seconds=time.monotonic() - began,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_traces=num_traces,
        curve=curve,
    )
    (options.out.parent / RUN_FILE).write_text(json.dumps(asdict(run)))
    say(f"network: {run.seconds:.0f} s")


def command_of(options: argparse.Namespace) -> str:
    """Returns the command for the card, without the folder that was written."""
    flags = ["--start pawn-v1"] if options.start else []
    flags += [f"--seed {options.seed}"] if options.seed else []
    flags += [f"--updates {options.updates}"] if options.updates else []
    flags += [f"--workers {options.workers}", *(["--tiny"] if options.tiny else [])]
    return " ".join(["python -m benchmarks.pawn.train", *flags])


def make_scorers(options: argparse.Namespace, device: "torch.device") -> None:
    """Collect, fit, judge, and write what belongs beside the weights."""
    import numpy as np
    from benchmarks.pawn.folder import Measured, Preset, write_card, write_preset
    from benchmarks.pawn.measure import accuracy_by_level
    from benchmarks.pawn.scorers import (
        TINY_SCORERS,
        ScorerPlan,
        collect_splits,
        fit_scorers,
        judge_checkpoints,
        judge_traces,
        judge_unseen,
    )

    from gambit.scorers.checkpoint import load_checkpoint
    from gambit.training.evaluate import report_json

    plan = replace(TINY_SCORERS if options.tiny else ScorerPlan(), seed=options.seed)
    run, began = read_run(options.out), time.monotonic()
    with tempfile.TemporaryDirectory() as data:
        fitted_to, judged_by = collect_splits(plan, options.out, Path(data), device.type)
    say(f"collected: {time.monotonic() - began:.0f} s")
    paths = fit_scorers(plan, fitted_to, options.out, device.type)
    say(f"fitted: {time.monotonic() - began:.0f} s")
    report = judge_checkpoints(paths, judged_by, device)
    judgements = judge_traces(judged_by, judged_by.all_traces())
    unseen = judge_unseen(plan, fitted_to, judged_by, judgements, options.out / "scorer.safetensors", device)
    accuracy = accuracy_by_level(judged_by, judgements, load_checkpoint(options.out / "scorer.safetensors"), device)
    reached = accuracy["all"]
    write_preset(
        Preset(
            median_length=round(float(np.median(judged_by.traces.num_tokens))),
            mean_thought_length=round(reached.mean_tokens / max(1.0, reached.mean_thoughts), 2),
        ),
        options.out,
    )
    write_card(run, Measured(accuracy, report, unseen, plan.traces_per_puzzle), options.out)
    plain = report_json(report) | {"without_misreading": report_json(unseen)["rankings"]}
    plain |= {"accuracy": {level: asdict(found) for level, found in accuracy.items()}, "plan": asdict(plan)}
    (options.out.parent / REPORT_FILE).write_text(json.dumps(plain, indent=1) + "\n")
    say(f"judged: {time.monotonic() - began:.0f} s")
    say((options.out / "README.md").read_text())


def read_run(folder: Path) -> "NetworkRun":
    from benchmarks.pawn.folder import NetworkRun
    from benchmarks.pawn.pretraining import CurvePoint

    path = folder.parent / RUN_FILE
    if not path.is_file():
        raise SystemExit(f"{path} is missing: make the network into {folder} first (--only network)")
    found = json.loads(path.read_text())
    return NetworkRun(**found | {"curve": [CurvePoint(**point) for point in found["curve"]]})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--start", type=Path, help="model folder of an earlier pawn to begin with")
    parser.add_argument("--only", choices=["network", "scorers"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, help="updates of the network, instead of the recipe's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that make the corpus")
    parser.add_argument("--tiny", action="store_true", help="useless, in seconds on a CPU, to test the recipe")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    missing = [name for name in ("pydantic", "math_verify") if find_spec(name) is None]
    if missing and options.only != "network":
        raise SystemExit(f"scorers need {', '.join(missing)}: install them, or run with --only network")

    # Here, not above: worker processes import this module and need no torch.
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    if options.only != "scorers":
        make_network(options, device)
    if options.only != "network":
        make_scorers(options, device)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

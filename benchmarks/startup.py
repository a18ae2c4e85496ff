"""Seconds that commands take before they do anything: two source trees in turns, each call a process of its own.

    python benchmarks/startup.py --old ../old/src --rounds 7 --out benchmarks/results/startup.json

`first token` is from the start of the process to the first token of `gambit solve`; `import torch` is the part of it
that no change to Gambit can take away. CPU seconds are given too: on a shared machine they are the steadier number.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROBLEM = "a = 17; b = 61; c = a + b; c?"
GAMBIT = (sys.executable, "-m", "gambit")
SOLVE = ("solve", PROBLEM, "--engine", "local", "--json")
# Ends the process when the engine has made its first step.
UNTIL_FIRST_TOKEN = """
import importlib.util, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "gambit.engines.local.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            step = module.LocalEngine.step
            module.LocalEngine.step = lambda engine: (step(engine), os._exit(0))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Watch())
from gambit.cli import main
main()
"""
COMMANDS = {
    "help": (*GAMBIT, "--help"),
    "solve --help": (*GAMBIT, "solve", "--help"),
    "first token": (sys.executable, "-c", UNTIL_FIRST_TOKEN, *SOLVE),
    "one-second search": (*GAMBIT, *SOLVE),
    "import torch": (sys.executable, "-c", "import torch"),
}


def seconds_of(command: tuple[str, ...], source: Path, caches: str) -> tuple[float, float]:
    """Wall clock and CPU seconds of one process, in a folder of its own; what Python compiles is kept in `caches`."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": caches}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
        wall = time.perf_counter() - began
    if done.returncode != 0:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(trees: dict[str, Path], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians; the trees take turns, so that a busy neighbour meets both."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {tree: [] for tree in trees} for name in COMMANDS}
    with tempfile.TemporaryDirectory() as caches:
        for number in range(rounds + 1):
            for name, command in COMMANDS.items():
                for tree, source in trees.items():
                    pair = seconds_of(command, source, caches)
                    if number:  # the first round fills the caches
                        found[name][tree].append(pair)
    return {name: {tree: _medians(pairs) for tree, pairs in by_tree.items()} for name, by_tree in found.items()}


def _medians(pairs: list[tuple[float, float]]) -> dict[str, float]:
    walls, cpus = zip(*pairs, strict=True)
    return {"seconds": round(statistics.median(walls), 2), "least_seconds": round(min(walls), 2),
            "cpu_seconds": round(statistics.median(cpus), 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--old", type=Path, help="the src folder of the tree to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = {"new": ROOT / "src"} | ({"old": options.old.resolve()} if options.old else {})
    found = measure(trees, options.rounds)
    result = {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[2], 1),
        "python": platform.python_version(),
        "rounds": options.rounds,
        "commands": found,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""One bench for each value of an option that belongs to the engine, which a single bench cannot vary.

    python benchmarks/engine_sweep.py --recipe benchmarks/pawn_small.yaml --problems 20 \
        --option kv_budget_tokens=600,1200,2400,4800 --out benchmarks/results/pawn_memory.json
    python benchmarks/engine_sweep.py --recipe benchmarks/pawn_small.yaml --problems 20 \
        --option scorer=mlp,sequence --out benchmarks/results/pawn_sequence_scorer.json

The first is the paper's sweep of r, the share of the memory that the KV cache may take; the second its search with the
sequence scorer. On pawn each takes about ten minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from gambit.bench.rows import Row, read_rows
from gambit.pawn import Split, generate


def run(recipe: Path, problems: Path, setting: str, value: str, folder: Path) -> list[Row]:
    flag = f"--{setting.replace('_', '-')}"
    words = ["bench", "--recipe", str(recipe), "--benchmark", str(problems), flag, value, "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "gambit", *words, "--no-report", "--quiet"], check=True)
    return list(read_rows(folder))


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By method, means over its searches."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.variant, []).append(row)
    return {variant: means(own) for variant, own in found.items()}


def means(rows: list[Row]) -> dict[str, float]:
    def mean(values: list[float]) -> float:
        return round(float(np.mean(values)), 3)

    return {
        "searches": len(rows),
        "right": sum(row.correct for row in rows),
        "tokens": mean([row.generated for row in rows]),
        "completed": mean([row.completed for row in rows]),
        "right of completed": mean([row.right_traces / max(1, row.completed) for row in rows]),
        "evicted or queued": mean([row.evicted + row.queued + (row.variant == "step") * row.pruned for row in rows]),
        "branched": mean([row.branched for row in rows]),
    }


def write_puzzles(path: Path, count: int) -> None:
    puzzles = zip(range(count), generate(Split.DEV, 7), strict=False)
    lines = [{"id": f"dev-{i}", "question": puzzle.text, "answer": str(puzzle.answer)} for i, puzzle in puzzles]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--option", required=True, help="name=value,value: an option of the engine")
    parser.add_argument("--problems", type=int, default=20, help="puzzles of pawn's development split")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    setting, _, values = options.option.partition("=")
    report: dict[str, object] = {"option": setting, "problems": options.problems, "recipe": options.recipe.name}
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder) / "puzzles.jsonl"
        write_puzzles(problems, options.problems)
        for value in values.split(","):
            report[value] = summary(run(options.recipe, problems, setting, value, Path(folder) / value))
            print(setting, value, json.dumps(report[value]), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

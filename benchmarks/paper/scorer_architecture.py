"""Table "impact of scorer architecture", from the 357 training problems to the table, in one command.

    python benchmarks/paper/scorer_architecture.py --out runs/scorer_architecture            # on a large GPU, for days
    python benchmarks/paper/scorer_architecture.py --recipe benchmarks/paper/sequence_scorer_deepseek_8b.yaml --out ...

Traces of the 357 problems are collected, a sequence scorer is trained on them as the authors train theirs, and the
recipe is run with the model's own scorer (the published MLP) and with the sequence scorer. Each step goes on where it
stopped, and one that is done is not done again. `--dry-run` prints the commands. How many traces of a problem the
authors took is not published; `--traces` is 16.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gambit.config.yaml_file import read_mapping

RECIPE = Path(__file__).with_name("sequence_scorer_qwen3_4b.yaml")
SHARED = ("engine", "engine_options", "max_new_tokens", "temperature", "top_p", "top_k", "system_prompt")


def flags_of(values: dict[str, object]) -> Iterator[str]:
    """Yields the recipe's options of engine and sampling as flags of `gambit scorer collect`."""
    for name in SHARED:
        value = values.get(name)
        if isinstance(value, dict):
            for key, each in value.items():
                yield from ("--engine-option", f"{key}={json.dumps(each)}")
        elif value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))


def steps(options: argparse.Namespace) -> Iterator[tuple[str, list[str], Path]]:
    """Yields the name of a step, its command, and the file that says that it is done."""
    values, out = read_mapping(options.recipe, "recipe"), options.out
    data, scorer = out / "data", out / "sequence.safetensors"
    collect = ["scorer", "collect", "--model", str(values["model"]), "--problems", options.problems,
               "--traces", str(options.traces), "--state-position", "boundary", *flags_of(values)]  # fmt: skip
    yield "collect", [*collect, *shlex.split(options.collect), "--out", str(data)], out / "collected"
    train = ["scorer", "train", "--data", str(data), "--architecture", "sequence", "--objective", "last-thought-bce"]
    yield "train", [*train, *shlex.split(options.train), "--out", str(scorer)], scorer
    for name, used in (("mlp", "auto"), ("sequence", str(scorer))):
        run = out / name
        begun = ["--resume"] if (run / "run.json").exists() else []
        bench = ["bench", "--recipe", str(options.recipe), "--scorer", used, *shlex.split(options.bench), *begun]
        yield name, [*bench, "--out", str(run)], run / "report.json"


def table(out: Path) -> str:
    """Returns accuracies by benchmark and method under both scorers."""
    lines = ["| benchmark | method | MLP | sequence |", "| --- | --- | --: | --: |"]
    cells = {name: json.loads((out / name / "report.json").read_text())["cells"] for name in ("mlp", "sequence")}
    for first, second in zip(cells["mlp"], cells["sequence"], strict=True):
        mlp, sequence = (
            f"{100 * each['accuracy']['value']:.1f} ({100 * each['accuracy']['low']:.1f} to "
            f"{100 * each['accuracy']['high']:.1f})"
            for each in (first, second)
        )
        lines.append(f"| {first['benchmark']} | {first['variant']} | {mlp} | {sequence} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="its scorer is not looked at")
    parser.add_argument("--problems", default="hmmt_2012_2023", help="to train on")
    parser.add_argument("--traces", type=int, default=16, help="of each of them")
    for name in ("collect", "train", "bench"):
        parser.add_argument(
            f"--{name}", default="", metavar="FLAGS", help=f"more flags of this step, as --{name}='--quiet'"
        )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    for name, command, proof in steps(options):
        print(f"{name}: gambit {shlex.join(command)}", flush=True)
        if options.dry_run or proof.exists():
            continue
        subprocess.run([sys.executable, "-m", "gambit", *command], check=True)
        if name == "collect":
            proof.touch()
    if not options.dry_run:
        text = table(options.out)
        (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()

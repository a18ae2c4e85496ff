"""lm-eval through `gambit serve` against `gambit bench` on the same problems, seed and limits: the same scores?

    pip install 'lm-eval[api]'        # in an environment of its own
    python benchmarks/serve_lm_eval.py --lm-eval PATH/TO/bin/lm_eval --out benchmarks/results/serve_lm_eval.json

lm-eval runs a task of its own making, two requests at a time, with the parameters that it sends by itself (temperature
0, seed 1234, stop words). The answers are compared problem by problem.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gambit.pawn import Level, Split, generate
from serve_load import KEYS, Server

SEED = 1234  # lm-eval's
MAX_TOKENS = 448
TASK = {
    "task": "pawn_puzzles",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"max_gen_toks": MAX_TOKENS, "until": ["<|end|>"], "do_sample": False, "temperature": 0},
    "filter_list": [
        {"name": "boxed", "filter": [
            {"function": "regex", "regex_pattern": r"boxed\{(\d+)\}"},
            {"function": "take_first"},
        ]},
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


def write_task(folder: Path, num_problems: int) -> Path:
    """Problems as both read them, and the task around them; YAML holds JSON."""
    puzzles = folder / "puzzles.jsonl"
    rows = [
        {"id": str(number), "question": puzzle.text, "answer": str(puzzle.answer)}
        for number, puzzle in zip(range(num_problems), generate(Split.TEST, 9, Level.EASY), strict=False)
    ]
    puzzles.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(puzzles)}}}
    (folder / "pawn_puzzles.yaml").write_text(json.dumps(task, indent=1))
    return puzzles


def with_lm_eval(lm_eval: str, folder: Path, url: str) -> tuple[float, dict[str, str]]:
    """Its score, and what it read from each answer."""
    model_args = (
        f"model=pawn,base_url={url}/v1/chat/completions,num_concurrent=2,max_retries=1,tokenized_requests=False"
    )
    command = [lm_eval, "run", "--model", "local-chat-completions", "--model_args", model_args, "--tasks",
               "pawn_puzzles", "--include_path", str(folder), "--apply_chat_template", "--output_path",
               str(folder / "lm_eval"), "--log_samples"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    offline = {"OPENAI_API_KEY": KEYS[0], "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    subprocess.run(command, check=True, env={**environment, **offline})
    [results] = folder.glob("lm_eval/**/results_*.json")
    [samples] = folder.glob("lm_eval/**/samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    answers = {sample["doc"]["id"]: sample["filtered_resps"][0] for sample in found}
    return json.loads(results.read_text())["results"]["pawn_puzzles"]["exact_match,boxed"], answers


def with_bench(folder: Path, puzzles: Path, capacity: int) -> tuple[float, dict[str, str]]:
    command = [sys.executable, "-m", "gambit", "bench", "--benchmark", str(puzzles), "--policies", "gambit", "--seeds",
               str(SEED), "--capacity", str(capacity), "--max-new-tokens", str(MAX_TOKENS), "--no-logs", "--no-report",
               "--out", str(folder / "bench")]  # fmt: skip
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (folder / "bench" / "rows.jsonl").read_text().splitlines()]
    answers = {row["problem"]: row["answer"] for row in rows}
    return sum(bool(row["correct"]) for row in rows) / len(rows), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", default="lm_eval")
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--capacity", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        puzzles = write_task(folder, options.problems)
        server = Server("--capacity", str(options.capacity))
        score, answers = with_lm_eval(options.lm_eval, folder, server.url)
        server.close()
        bench_score, bench_answers = with_bench(folder, puzzles, options.capacity)
    different = {name: [answers[name], bench_answers[name]] for name in answers if answers[name] != bench_answers[name]}
    report = {"problems": len(answers), "capacity": options.capacity, "seed": SEED, "lm_eval": score,
              "bench": bench_score, "different_answers": different}  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How well pawn's scorer ranks traces of held-out puzzles, beside a judge that knows each trace's exact state.

    python benchmarks/pawn_scorer.py [--folder F] [--puzzles 300] [--traces 64] [--out result.json]

At 25, 50, 75 and 100 % of its steps a trace has a score (the running mean). The figure is the chance that a correct
trace of a puzzle scores above a wrong one of the same puzzle, averaged over puzzles that have both. The judge's figure
is the ceiling: it scores a trace by the share of fresh rollouts from that very state that end right.
"""

import argparse
import json
import os
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open

from gambit.pawn import MODEL_FOLDER
from gambit.pawn.evaluation import accuracy_by_level, final_scores, ranking
from gambit.pawn.judge import judge
from gambit.pawn.puzzles import Split, generate
from gambit.pawn.recipe import load_model
from gambit.pawn.sampling import sample_traces
from gambit.pawn.scorer import build_scorer

RESULTS = Path(__file__).parent / "results" / "pawn_scorer.json"


def load_scorer(path: Path, device: torch.device) -> tuple[torch.nn.Sequential, str]:
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["gambit"])
        tensors = {name.removeprefix("net."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scorer = build_scorer(metadata["hidden_size"])
    scorer.load_state_dict(tensors)
    return scorer.to(device), metadata["state_position"]


def measure(folder: Path, split: Split, num_puzzles: int, num_traces: int, num_rollouts: int, seed: int) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, device)
    scorer, position = load_scorer(folder / "scorer.safetensors", device)
    puzzles = list(islice(generate(split, seed), num_puzzles))
    samples = sample_traces(model, puzzles, num_traces, seed)
    judgements = judge(puzzles, samples.texts, num_rollouts, os.cpu_count() or 1)
    ranked = ranking(scorer, samples, position, judgements)
    reached = accuracy_by_level(puzzles, samples, final_scores(scorer, samples, position), judgements)
    return {
        "split": split.name.lower(),
        "traces": num_traces,
        "rollouts": num_rollouts,
        "seed": seed,
        "state_position": position,
        "auc": ranked.scorer,
        "ceiling": ranked.ceiling,
        "share_of_ceiling": {q: ranked.share(q) for q in ranked.scorer},
        "accuracy": {level: asdict(value) for level, value in reached.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--split", type=str.upper, choices=[split.name for split in Split], default="TEST")
    parser.add_argument("--puzzles", type=int, default=300)
    parser.add_argument("--traces", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    split = Split[options.split]
    result = measure(options.folder, split, options.puzzles, options.traces, options.rollouts, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

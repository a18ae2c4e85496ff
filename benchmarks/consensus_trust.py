"""Can a search learn without labels how far to trust its scorer? Judged on recorded traces; nothing is searched.

    python benchmarks/islands_noise.py --out runs/islands_noise --prepare
    python benchmarks/consensus_trust.py --runs runs/islands_noise --out benchmarks/results/consensus_trust.json

The idea: traces that are complete have answers, and the scores they had at half-way either agree with the plurality of
these answers or do not. That AUC needs no labels; islands could be widened or narrowed by it for what is still to come.
Here all traces of a problem run side by side, as in a search of independent traces. Once a share of them is complete:
how much is still to come, what does the AUC against the plurality say, and what is the true one?
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from gambit.scorers.checkpoint import load_checkpoint
from gambit.training.dataset import Dataset, load_dataset
from gambit.training.ranking import Bools, Floats, pairs, trace_scores
from gambit.training.scoring import step_scores
from gambit.types import StatePosition

SHARES_COMPLETE = (0.25, 0.5, 0.75, 1.0)
GROUPS = (1, 5, 20)  # problems whose figures are averaged, as a solver could over the problems it has done
DRAWS = 2000


def tokens_to_come(data: Dataset, share: float) -> float:
    """Of all tokens, mean over problems: those generated after a share of the traces was complete."""
    found = []
    for problem in range(len(data.problems)):
        lengths = np.sort(data.traces.num_tokens[data.traces.problem_of == problem])
        moment = lengths[int(np.ceil(share * len(lengths))) - 1]
        found.append(float(np.maximum(lengths - moment, 0).sum() / lengths.sum()))
    return float(np.mean(found))


def agreement(data: Dataset, problem: int, share: float) -> tuple[np.ndarray, Bools]:
    """The traces that are complete first, and which of them gave the answer that most of them gave."""
    traces = np.flatnonzero(data.traces.problem_of == problem)
    answers = np.array([str(trace.answer) for trace in data.problems[problem].traces])
    first = np.argsort(data.traces.num_tokens[traces], kind="stable")[: int(np.ceil(share * len(traces)))]
    plurality = Counter(answers[first]).most_common(1)[0][0]
    return traces[first], answers[first] == plurality


def auc_against_plurality(data: Dataset, scores: Floats, share: float) -> Floats:
    """[problem]; not a number where all complete traces agree."""
    found = np.full(len(data.problems), np.nan)
    for problem in range(len(data.problems)):
        traces, agrees = agreement(data, problem, share)
        found[problem] = pairs(scores[traces], agrees, np.zeros(len(traces), np.int64), 1).auc[0]
    return found


def spread(values: Floats, size: int) -> float:
    """The standard deviation of a mean over so many problems."""
    known = values[np.isfinite(values)]
    draws = np.random.default_rng(0).choice(known, (DRAWS, size))
    return float(draws.mean(axis=1).std())


def figures_of(data: Dataset, checkpoint: Path) -> dict[str, object]:
    scorer, known = load_checkpoint(checkpoint), data.traces
    steps = step_scores(scorer, data, data.all_traces(), torch.device("cpu"))
    scores = trace_scores(steps, known.starts, known.num_steps, 0.5, scorer.info.aggregation)
    true = pairs(scores, known.is_correct, known.problem_of, len(data.problems)).auc
    by_share = {f"{share:g}": auc_against_plurality(data, scores, share) for share in SHARES_COMPLETE}
    return {
        "true_auc_at_half_way": round(float(np.nanmean(true)), 3),
        "auc_against_plurality": {share: round(float(np.nanmean(found)), 3) for share, found in by_share.items()},
        "spread_at_half_complete": {str(size): round(spread(by_share["0.5"], size), 3) for size in GROUPS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder that `islands_noise.py --prepare` wrote")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = load_dataset(options.runs / "development", StatePosition.BOUNDARY)
    right = [
        Counter(str(trace.answer) for trace in problem.traces).most_common(1)[0][0] == problem.gold
        for problem in data.problems
    ]
    checkpoints = sorted(path for path in (options.runs / "scorers").glob("*") if "wrong trust" not in path.name)
    result = {
        "what": __doc__.splitlines()[0] if __doc__ else "",
        "model": data.header.model,
        "problems": len(data.problems),
        "traces_per_problem": data.header.traces_per_problem,
        "plurality_right": round(float(np.mean(right)), 3),
        "tokens_to_come": {f"{share:g}": round(tokens_to_come(data, share), 3) for share in SHARES_COMPLETE},
        "scorers": {path.stem: figures_of(data, path) for path in checkpoints},
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()

"""What verifiers say of collections, and what comes of it: ranking, votes over plain traces, rounds of traces.

    python benchmarks/verifier_readings.py read name=FOLDER … --data C --parts test,held --model DIR --out READINGS
    python benchmarks/verifier_readings.py judge name=FOLDER … --data C --parts test,held --out READINGS --result FILE

C holds collections (`judge_data.py`), one folder a part. `read` needs the model and a GPU, and writes
READINGS/PART-NAME.npz, the logits at the end of each thought and of each trace. `judge` needs neither, and says of each
part and verifier:

- auc: within problems, after 25, 50, 75 and 100 % of a trace's thoughts, and the difference to the first verifier;
- votes: by majority and weighted by the verifier's chances, over 4, 8 and 16 traces drawn from those of the problem;
  `--together test,other` adds the gain over the problems of several parts;
- rounds (`--rounds PART`): searches that begin with 4 plain traces and take as many again while the leading answer has
  less than a share of the weight (gambit.search.limits), with their tokens as a share of those of 16 traces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gambit.answers import Grader
from gambit.bench.statistics import mean_interval, resamples
from gambit.results.vote import pools_of
from gambit.scorers.verifier.folder import Platt, read_info
from gambit.search.limits import UNSEEN
from gambit.training.verifier.passages import Passages, load_passages
from gambit.training.verifier.reading import ReadTraces, quarter_aucs, read_traces
from gambit.types import Aggregation

Floats = npt.NDArray[np.float64]
Gains = dict[str, dict[int, Floats]]  # verifier, traces: [problem]
TRACES = (4, 8, 16)
FIRST, SHARES, MOST = 4, (0.4, 0.5, 0.6, 0.7, 0.8), (16, 24, 32)
REPEATS = 40  # drawings of traces for one figure


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """The traces of a problem, as a vote sees them."""

    answers: npt.NDArray[np.int64]  # [trace]: number of the distinct answer, -1 for none
    is_right: npt.NDArray[np.bool_]
    num_tokens: npt.NDArray[np.int64]

    def winner(self, traces: npt.NDArray[np.int64], weights: Floats, rng: np.random.Generator) -> tuple[bool, Floats]:
        """Whether the leading answer is right, and all weights, the largest first; a tie is drawn."""
        given = traces[self.answers[traces] >= 0]
        if not len(given):
            return False, np.zeros(0)
        sums = np.bincount(self.answers[given], weights=weights[given])
        leader = int(np.argmax(sums + 1e-9 * rng.random(len(sums))))
        return bool(self.is_right[given][self.answers[given] == leader][0]), np.sort(sums)[::-1]


def problems_of(passages: Passages) -> list[Problem]:
    found = []
    with Grader() as grader:
        for problem in passages.data.problems:
            pools = pools_of([each.answer for each in problem.traces if each.answer], grader.equivalent)
            number_of = {answer: number for number, pool in enumerate(pools) for answer in pool}
            found.append(Problem(
                np.array([number_of.get(each.answer or "", -1) for each in problem.traces]),
                np.array([each.is_correct for each in problem.traces]),
                np.array([each.num_tokens for each in problem.traces]),
            ))  # fmt: skip
    return found


def shares_right(problems: Sequence[Problem], weights: Sequence[Floats], count: int, seed: int = 0) -> Floats:
    """[problem]: how often a vote of so many of its traces is right."""
    rng = np.random.default_rng(seed)
    found = []
    for problem, weight in zip(problems, weights, strict=True):
        drawn = [rng.choice(len(weight), count, replace=False) for _ in range(REPEATS)]
        found.append(np.mean([problem.winner(traces, weight, rng)[0] for traces in drawn]))
    return np.array(found)


def in_rounds(
    problems: Sequence[Problem], weights: Sequence[Floats], most: int, share: float, unseen: float
) -> tuple[Floats, Floats]:
    """[problem]: how often a search in rounds is right, and its tokens.

    A vote is looked at whenever a trace has ended, those of a round by their length.
    """
    rng = np.random.default_rng(0)
    rights, tokens = [], []
    for problem, weight in zip(problems, weights, strict=True):
        runs = [one_search(problem, weight, most, share, unseen, rng) for _ in range(REPEATS)]
        rights.append(np.mean([right for right, _ in runs]))
        tokens.append(np.mean([spent for _, spent in runs]))
    return np.array(rights), np.array(tokens)


def one_search(
    problem: Problem, weights: Floats, most: int, share: float, unseen: float, rng: np.random.Generator
) -> tuple[bool, int]:
    order = rng.permutation(len(weights))[:most]
    begun = spent = 0
    is_right = False
    while begun < most:
        size = min(begun or FIRST, most - begun)
        running = order[begun : begun + size]
        running = running[np.argsort(problem.num_tokens[running], kind="stable")]
        for number in range(size):
            ended = np.concatenate((order[:begun], running[: number + 1]))
            if len(ended) < FIRST:
                continue
            is_right, sums = problem.winner(ended, weights, rng)
            if len(sums) and sums[0] >= share * (sums.sum() + unseen):
                left = (size - number - 1) * int(problem.num_tokens[running[number]])  # cut off at this length
                return is_right, spent + int(problem.num_tokens[running[: number + 1]].sum()) + left
        spent += int(problem.num_tokens[running].sum())
        begun += size
    return is_right, spent


# -- what is told ----------------------------------------------------------------------------------------------


def interval(values: Floats, scale: float = 1.0, digits: int = 3) -> list[float]:
    found = mean_interval(values, resamples(len(values)))
    return [round(scale * each, digits) for each in (found.value, found.low, found.high)]


def percent(values: Floats) -> list[float]:
    return interval(values, 100, 1)


def judged(
    passages: Passages, readings: dict[str, tuple[ReadTraces, Platt]], gains: Gains, *, with_rounds: bool
) -> dict[str, object]:
    """`gains`: filled with those of the weighted votes over the majority."""
    problems = problems_of(passages)
    everyone = np.arange(len(passages.tokens))
    alike = [np.ones(len(problem.answers)) for problem in problems]
    most = len(alike[0])
    plain = {count: shares_right(problems, alike, count) for count in TRACES if count <= most}
    usual = np.array([16 * problem.num_tokens.mean() for problem in problems])
    told: dict[str, object] = {
        "problems": len(problems), "traces": most,
        "one_trace": percent(np.array([p.is_right.mean() for p in problems])),
        "some_trace": percent(np.array([float(p.is_right.any()) for p in problems])),
        "majority": {count: percent(values) for count, values in plain.items()},
    }  # fmt: skip
    if with_rounds:
        told["majority_rounds"] = rounds(problems, alike, usual, most, 0.0)
    first = None
    for name, (read, calibration) in readings.items():
        aucs = np.array(quarter_aucs(read, passages, everyone, Aggregation.LAST))
        is_mixed = np.isfinite(aucs[0])
        chances = read.chances(everyone, 1.0, Aggregation.LAST, calibration)
        weights = np.split(chances, np.cumsum([len(each) for each in alike])[:-1])
        weighted = {count: shares_right(problems, weights, count) for count in plain}
        mine: dict[str, object] = {
            "auc": [interval(row[is_mixed]) for row in aucs],
            "mixed_problems": int(is_mixed.sum()),
            "vote": {count: percent(values) for count, values in weighted.items()},
            "against_majority": {count: percent(values - plain[count]) for count, values in weighted.items()},
        }
        if first is not None:
            mine["auc_against_first"] = [
                interval((row - other)[is_mixed]) for row, other in zip(aucs, first, strict=True)
            ]
        if with_rounds:
            mine["rounds"] = rounds(problems, weights, usual, most, UNSEEN)
        first = aucs if first is None else first
        told[name] = mine
        gains[name] = {count: values - plain[count] for count, values in weighted.items()}
    return told


def rounds(
    problems: Sequence[Problem], weights: Sequence[Floats], usual: Floats, longest: int, unseen: float
) -> list[dict[str, object]]:
    rows = []
    for most in MOST:
        for share in SHARES if most <= longest else ():
            right, tokens = in_rounds(problems, weights, most, share, unseen)
            rows.append({"most": most, "share": share, "right": percent(right),
                         "tokens": round(float(tokens.sum() / usual.sum()), 3)})  # fmt: skip
    return rows


def read(options: argparse.Namespace) -> None:
    from gambit.engines.local.model import pick_device
    from gambit.scorers.verifier.model import Verifier

    for each in options.verifiers:
        name, _, folder = each.partition("=")
        verifier = Verifier.load(Path(folder), pick_device("auto"), options.model)
        for part in options.parts:
            passages = load_passages(options.data / part)
            found = read_traces(verifier, passages, np.arange(len(passages.tokens)))
            np.savez_compressed(options.out / f"{part}-{name}.npz", steps=found.steps.astype(np.float32),
                                ends=found.ends.astype(np.float32))  # fmt: skip
            print(name, part, flush=True)


def judge(options: argparse.Namespace) -> None:
    told: dict[str, object] = {"what": "benchmarks/verifier_readings.py"}
    gains: dict[str, Gains] = {part: {} for part in options.parts}
    for part in options.parts:
        passages = load_passages(options.data / part)
        readings = {}
        for each in options.verifiers:
            name, _, folder = each.partition("=")
            if (file := options.out / f"{part}-{name}.npz").is_file():
                with np.load(file) as kept:
                    logits = ReadTraces(passages.data.traces, *(kept[key].astype(float) for key in ("steps", "ends")))
                readings[name] = logits, read_info(Path(folder)).calibration
        told[part] = judged(passages, readings, gains[part], with_rounds=part == options.rounds)
        print(part, flush=True)
    told["together"] = together([gains[part] for part in options.together])
    options.result.write_text(json.dumps(told, indent=1) + "\n")


def together(parts: Sequence[Gains]) -> dict[str, object]:
    """Over the problems of all parts, of the verifiers that have read them all."""
    names = [name for name in parts[0] if all(name in each for each in parts)] if parts else []
    return {
        name: {count: percent(np.concatenate([each[name][count] for each in parts])) for count in TRACES}
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("read", "judge"))
    parser.add_argument("verifiers", nargs="+", help="name=FOLDER")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["test"])
    parser.add_argument("--model", help="the weights under the verifiers")
    parser.add_argument("--out", type=Path, required=True, help="folder of what was read")
    parser.add_argument("--result", type=Path, help=".json")
    parser.add_argument(
        "--together", type=lambda text: text.split(","), default=[], help="parts whose gains are joined"
    )
    parser.add_argument("--rounds", help="part whose problems are searched in rounds")
    options = parser.parse_args()
    (read if options.what == "read" else judge)(options)


if __name__ == "__main__":
    main()

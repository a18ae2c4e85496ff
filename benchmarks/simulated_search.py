"""Simulates searches over real traces, to see how a judge's quality decides which search pays.

    python benchmarks/simulated_search.py --data COLLECTION --verifier FOLDER --model DIR --out simulated_search.json
    python benchmarks/simulated_search.py --data COLLECTION --verifier FOLDER --logits read.npz --out …   # read before

Takes a collection of a model's traces (`gambit scorer collect`, problems that the verifier was not fitted to) and what
the verifier says at the end of each thought. A simulated search draws its traces from those of the problem and follows
`gambit.policies.tournament` in what it prunes and branches, a tournament every 32 tokens.

What a branch will answer is the one thing that has to be assumed. Here each trace decides on its answer at a moment of
its own, so often by a quarter, a half and three quarters of its length as rollouts from real prefixes say
(`gambit prefix-value`, benchmarks/results/prefix_value_llm: 22, 47 and 71 %). A child that leaves its parent before
that moment is a new draw from all of the problem's traces, one that leaves after it ends with its parent's answer.

`--better 0,0.5,1` makes the judge better on purpose: so many log-odds are added where a trace has decided on the right
answer and taken away where it has decided on a wrong one. Every row says what AUC at half-way that comes to.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gambit.answers import Grader
from gambit.results.vote import pools_of
from gambit.stats import log_odds, mean_interval, resamples
from gambit.training.dataset import Dataset
from gambit.training.verifier.batches import ReadTraces, load_passages, read_traces
from gambit.verifiers.lora_folder import read_info

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a trace's tokens
DECIDED = (0.0, 0.22, 0.47, 0.71, 1.0)  # of the traces by then
Figures = dict[str, npt.NDArray[np.float64]]  # [problem]
INTERVAL = 32  # tokens between tournaments
SILENT = -10.0  # log-odds of a trace without a thought when its warm-up is over


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A real trace and what the judge says of it."""

    answer: int  # number of the problem's distinct answers; -1: none
    is_right: bool
    num_tokens: int
    ends: npt.NDArray[np.int64]  # tokens up to the end of each thought
    logits: npt.NDArray[np.float64]  # calibrated, at each
    end_logit: float  # with all of it read


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a search with a pool of `capacity`; as many islands as places is plain sampling."""

    islands: int
    swaps: int  # of each island
    warmup: int
    margin: float
    capacity: int = 16

    @property
    def is_plain(self) -> bool:
        return self.islands == self.capacity


@dataclass(slots=True, eq=False)
class Run:
    """A trace of a simulated search."""

    number: int
    text: Text
    decides: float  # share of the text at which its answer is settled
    island: int
    position: int = 0
    own: int = 0  # tokens it generated itself
    starts: int = 0
    past: list[tuple[int, int, Text, float]] = field(default_factory=list)  # from, to: of whom it was a branch

    @property
    def parts(self) -> list[tuple[int, int, Text, float]]:
        return [*self.past, (self.starts, self.position, self.text, self.decides)]


class Simulation:
    """Searches of one problem."""

    def __init__(self, texts: Sequence[Text], better: float, rng: np.random.Generator) -> None:
        self._texts, self._better, self._rng = texts, better, rng

    def completed(self, settings: Settings) -> list[Run]:
        runs = [
            Run(number, self._drawn(self._texts), self._moment(0.0), number % settings.islands)
            for number in range(settings.capacity)
        ]
        if settings.is_plain:
            return runs
        done: list[Run] = []
        self._last = settings.capacity - 1
        while runs:
            for run in runs:
                step = min(INTERVAL, run.text.num_tokens - run.position)
                run.position, run.own = run.position + step, run.own + step
            done += [run for run in runs if run.position >= run.text.num_tokens]
            running = [run for run in runs if run.position < run.text.num_tokens]
            runs = [run for island in range(settings.islands) for run in self._island(island, running, done, settings)]
        return done

    def _island(self, island: int, running: list[Run], done: list[Run], settings: Settings) -> list[Run]:
        """Its traces after a tournament."""
        live = [run for run in running if run.island == island]
        places = settings.capacity // settings.islands
        missing = places - sum(run.island == island for run in done)
        if missing <= 0 or not live:
            return []
        ranked = sorted(self._ranked(live, settings.warmup), key=lambda entry: (-entry[0], entry[1].number))
        parents = [entry for entry in ranked if entry[1].own >= settings.warmup]
        vacancies = min(places, missing) - len(live)
        if vacancies > 0:
            return live + [self._branch(parent) for _, parent in parents[:vacancies]]
        chosen = parents[: settings.swaps]
        numbers = {run.number for _, run in chosen}
        victims = [entry for entry in reversed(ranked) if entry[1].number not in numbers]
        pairs = [
            (parent, victim)
            for (high, parent), (low, victim) in zip(chosen, victims, strict=False)
            if high > low and high - low >= settings.margin
        ]
        gone = {victim.number for _, victim in pairs}
        return [run for run in live if run.number not in gone] + [self._branch(parent) for parent, _ in pairs]

    def _ranked(self, live: list[Run], warmup: int) -> Iterator[tuple[float, Run]]:
        for run in live:
            score = self.score(run)
            if score is not None or run.own >= warmup:
                yield (SILENT if score is None else score), run

    def score(self, run: Run) -> float | None:
        """Returns the score of the latest thought that has ended."""
        for start, stop, text, decides in reversed(run.parts):
            last = int(np.searchsorted(text.ends, stop, side="right")) - 1
            if last >= 0 and text.ends[last] > start:
                return float(text.logits[last]) + self._lift(text, float(text.ends[last]) / text.num_tokens >= decides)
        return None

    def end_chance(self, run: Run) -> float:
        return 1 / (1 + math.exp(-(run.text.end_logit + self._lift(run.text, has_decided=True))))

    def _lift(self, text: Text, has_decided: bool) -> float:
        return (self._better if text.is_right else -self._better) if has_decided else 0.0

    def _branch(self, parent: Run) -> Run:
        share = parent.position / parent.text.num_tokens
        has_decided = share >= parent.decides
        longer = [text for text in self._texts if text.num_tokens > parent.position]
        alike = [text for text in longer if text.answer == parent.text.answer]
        decides = parent.decides if has_decided else self._moment(float(np.interp(share, SHARES, DECIDED)))
        self._last += 1
        return Run(self._last, self._drawn((alike if has_decided else longer) or [parent.text]), decides, parent.island,
                   parent.position, 0, parent.position, parent.parts)  # fmt: skip

    def _drawn(self, texts: Sequence[Text]) -> Text:
        return texts[int(self._rng.integers(len(texts)))]

    def _moment(self, after: float) -> float:
        return float(np.interp(after + (1 - after) * self._rng.random(), DECIDED, SHARES))


# -- what it comes to ------------------------------------------------------------------------------------------


def is_voted_right(runs: Sequence[Run], weights: Sequence[float]) -> bool:
    sides: dict[int, list[float]] = {}
    for run, weight in zip(runs, weights, strict=True):
        if run.text.answer >= 0:
            sides.setdefault(run.text.answer, []).append(weight)
    if not sides:
        return False
    winner = max(sides, key=lambda answer: math.fsum(sides[answer]))
    return next(run.text.is_right for run in runs if run.text.answer == winner)


def half_way_auc(problems: Sequence[Sequence[Text]], better: float, rng: np.random.Generator) -> float:
    """Within problems, over several drawings of when traces decide."""
    found = []
    for texts in problems:
        right = np.array([text.is_right for text in texts])
        if right.all() or not right.any():
            continue
        for _ in range(4):
            scores = np.array([_half_way(Simulation(texts, better, rng), text, rng) for text in texts])
            leads = scores[right][:, None] - scores[~right]
            found.append(((leads > 0) + 0.5 * (leads == 0)).mean())
    return float(np.mean(found))


def _half_way(simulation: Simulation, text: Text, rng: np.random.Generator) -> float:
    if not len(text.ends):
        return SILENT
    middle = int(text.ends[math.ceil(len(text.ends) / 2) - 1])
    decides = float(np.interp(rng.random(), DECIDED, SHARES))
    score = simulation.score(Run(0, text, decides, 0, position=middle))
    assert score is not None, "a thought has ended there"
    return score


def simulated(
    problems: Sequence[Sequence[Text]], settings: Settings, better: float, repeats: int, seed: int
) -> Figures:
    """[problem]: share of the searches, or of their traces, that is right."""
    found: dict[str, list[float]] = {"majority": [], "score": [], "one_trace": [], "some_trace": [], "branches": []}
    for number, texts in enumerate(problems):
        simulation = Simulation(texts, better, np.random.default_rng((seed, number)))
        searches = [simulation.completed(settings) for _ in range(repeats)]
        rows = [
            (
                is_voted_right(runs, [1.0] * len(runs)),
                is_voted_right(runs, [simulation.end_chance(run) for run in runs]),
                np.mean([run.text.is_right for run in runs]),
                any(run.text.is_right for run in runs),
                sum(bool(run.past) for run in runs),
            )
            for runs in searches
        ]
        for name, values in zip(found, zip(*rows, strict=True), strict=True):
            found[name].append(float(np.mean(values)))
    return {name: np.array(values) for name, values in found.items()}


# -- real traces -----------------------------------------------------------------------------------------------


def texts_of(data: Dataset, read: ReadTraces, slope: float, offset: float) -> list[list[Text]]:
    """Returns the traces of each problem with numbers for their answers; equal answers have the same number."""
    known = data.traces
    found: list[list[Text]] = []
    trace = 0
    with Grader() as grader:
        for problem in data.problems:
            pools = pools_of([each.answer for each in problem.traces if each.answer], grader.equivalent)
            number_of = {answer: number for number, pool in enumerate(pools) for answer in pool}
            texts = []
            for each in problem.traces:
                steps = slice(known.starts[trace], known.starts[trace] + known.num_thoughts[trace])
                texts.append(Text(
                    number_of.get(each.answer or "", -1), each.is_correct, each.num_tokens, known.thought_ends[steps],
                    clipped(slope * read.thoughts[steps] + offset), float(clipped(slope * read.ends[trace] + offset)),
                ))  # fmt: skip
                trace += 1
            found.append(texts)
    return found


def clipped(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    most = log_odds(1.0)
    return np.clip(logits, -most, most)


def reading_of(options: argparse.Namespace, data: Dataset) -> ReadTraces:
    if options.logits is not None and options.logits.is_file():
        with np.load(options.logits) as kept:
            return ReadTraces(data, kept["steps"].astype(float), kept["ends"].astype(float))
    from gambit.engines.local.model import pick_device
    from gambit.verifiers.lora import LoraVerifier

    verifier = LoraVerifier.load(options.verifier, pick_device("auto"), options.model)
    read = read_traces(verifier, data, data.all_traces())
    if options.logits is not None:
        np.savez_compressed(options.logits, steps=read.thoughts.astype(np.float32), ends=read.ends.astype(np.float32))
    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a collection")
    parser.add_argument("--verifier", type=Path, required=True, help="its folder")
    parser.add_argument("--model", help="the weights under it")
    parser.add_argument("--logits", type=Path, help="an .npz: read if it is there, else written")
    parser.add_argument("--out", type=Path, required=True, help=".json")
    parser.add_argument("--better", default="0,0.2,0.5,1", help="log-odds that make the judge better")
    parser.add_argument("--islands", default="1,4,8")
    parser.add_argument("--warmup", default="120,240")
    parser.add_argument("--margins", default="0,1,2,3")
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    data = load_passages(options.data)
    calibration = read_info(options.verifier).calibration
    problems = texts_of(data, reading_of(options, data), calibration.slope, calibration.offset)
    rows = []
    for better in map(float, options.better.split(",")):
        auc = half_way_auc(problems, better, np.random.default_rng(0))
        plain = simulated(problems, Settings(16, 0, 0, 0.0), better, 4 * options.repeats, 1)
        rows.append(told({"better": better, "auc": round(auc, 3), "method": "plain"}, plain, plain))
        for islands, warmup, margin in product(*(map(float, each.split(",")) for each in
                                                (options.islands, options.warmup, options.margins))):  # fmt: skip
            settings = Settings(int(islands), 4 if islands == 1 else 16 // int(islands) // 2, int(warmup), margin)
            found = simulated(problems, settings, better, options.repeats, 0)
            rows.append(told({"better": better, "auc": round(auc, 3), "islands": int(islands), "warmup": int(warmup),
                              "margin": margin}, found, plain))  # fmt: skip
        options.out.write_text(json.dumps({"what": "benchmarks/simulated_search.py", "problems": len(problems),
                                           "traces": len(problems[0]), "rows": rows}, indent=1) + "\n")  # fmt: skip


def told(row: dict[str, object], found: Figures, plain: Figures) -> dict[str, object]:
    """Percentages, and the judged vote against the plain majority and against the judged vote over plain traces."""
    draws = resamples(len(plain["score"]))
    for name, other in (("against_majority", "majority"), ("against_judged_vote", "score")):
        gain = mean_interval(found["score"] - plain[other], draws)
        row[name] = [round(100 * value, 1) for value in (gain.value, gain.low, gain.high)]
    row |= {name: round(float((1 if name == "branches" else 100) * values.mean()), 1) for name, values in found.items()}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()

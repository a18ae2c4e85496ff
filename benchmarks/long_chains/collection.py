"""A collection in memory: traces, where they are cut, states at those places, and when they first went wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.long_chains.answers import answer_in
from benchmarks.long_chains.first_error import first_wrong_step
from benchmarks.long_chains.fitting import Cut
from benchmarks.long_chains.reading import Reader, Reading
from torch import Tensor

STRIDE = 32
NEVER = 1 << 30


@dataclass
class Collection:
    """All traces of some problems, in the order of the problems."""

    problems: list[dict[str, Any]]
    problem: np.ndarray  # [trace]
    length: np.ndarray  # [trace]
    answers: list[str | None]
    first_error: np.ndarray  # [trace]: token at which the first wrong step stands; NEVER where none was found
    places: list[np.ndarray]  # [trace][kept]: tokens whose states were kept
    kinds: list[dict[str, np.ndarray]]  # [trace]: by rule, which of the kept places it cuts at
    states: dict[int, Tensor]
    log_probabilities: list[np.ndarray]
    is_correct: np.ndarray = field(init=False)
    has_answer: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        gold = [self.problems[i]["answer"].lower() for i in self.problem]
        self.is_correct = np.array([own == right for own, right in zip(self.answers, gold, strict=True)])
        self.has_answer = np.array([own is not None for own in self.answers])

    @property
    def layers(self) -> list[int]:
        return list(self.states)

    def cut(self, rule: str, layer: int, num_problems: int | None = None) -> Cut:
        """Returns the thoughts that a rule makes, with the states of one layer."""
        bounds = np.cumsum([0, *map(len, self.places)])
        traces = range(len(self.problem)) if num_problems is None else np.flatnonzero(self.problem < num_problems)
        rows = [bounds[t] + np.flatnonzero(self.kinds[t][rule]) for t in traces]
        place = [self.places[t][self.kinds[t][rule]] for t in traces]
        trace = np.repeat(np.asarray(traces), [len(each) for each in rows])
        flat, own = np.concatenate(rows), np.concatenate(place)
        probabilities = [_running(self.log_probabilities[t], at) for t, at in zip(traces, place, strict=True)]
        return Cut(
            states=self.states[layer], row=flat, trace=trace, place=own, length=self.length[trace],
            outcomes=self.is_correct[trace].astype(np.float32),
            unbroken=(self.first_error[trace] > own).astype(np.float32),
            log_probability=np.concatenate(probabilities),
        )  # fmt: skip

    def balanced(self, cut: Cut) -> np.ndarray:
        """Returns weights [thought]: right and wrong traces of a problem count the same.

        A problem with traces of one kind only has a tenth of the weight of one with both.
        """
        problem, is_right = self.problem[cut.trace], cut.outcomes.astype(int)
        counts = np.zeros((len(self.problems), 2))
        np.add.at(counts, (problem, is_right), 1)
        weights = np.where(counts.min(1)[problem] > 0, 1.0, 0.1) / counts[problem, is_right]
        return (weights / weights.mean()).astype(np.float32)

    def boundary_figures(self, rule: str) -> dict[str, float]:
        counts = np.array([int(each[rule].sum()) for each in self.kinds])
        steps = np.array([self.problems[i]["num_steps"] for i in self.problem])
        return {
            "thoughts": round(float(counts.mean()), 2),
            "a thought a step": round(float((counts >= steps).mean()), 4),
        }

    def figures(self) -> dict[str, float]:
        right = self.is_correct
        flagged = self.first_error < NEVER
        by_problem = [right[self.problem == i] for i in range(len(self.problems))]
        return {
            "traces": len(right), "tokens": int(self.length.sum()), "pass@1": round(float(right.mean()), 4),
            "answered": round(float(self.has_answer.mean()), 4),
            "mixed problems": int(sum(0 < each.mean() < 1 for each in by_problem)),
            "right traces flagged": round(float(flagged[right].mean()), 4),
            "wrong traces flagged": round(float(flagged[~right].mean()), 4),
        }  # fmt: skip


def _running(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Means of the log-probabilities up to each place; zeros where none were read."""
    if not len(values):
        return np.zeros(len(places))
    return (np.cumsum(values, dtype=np.float64) / np.arange(1, len(values) + 1))[places]


class Cutter:
    """The rules by which traces are cut, as tables over the vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        texts = [text or "" for text in texts]
        self._newline = np.array(["Ċ" in text for text in texts])
        self._blank = np.array(["ĊĊ" in text for text in texts])
        self._stop = np.array([text.endswith((".", "!", "?", ".$", ".)")) for text in texts])
        self._space = np.array([text.startswith(("Ġ", "Ċ")) for text in texts])

    def kinds(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Returns by rule whether each token ends a thought."""
        newline, after = self._newline[tokens], np.zeros(len(tokens), dtype=bool)
        after[1:] = newline[:-1]
        follows_space = np.ones(len(tokens), dtype=bool)
        follows_space[:-1] = self._space[tokens[1:]]
        line = newline & ~after
        return {
            "line": line,
            "sentence": line | (self._stop[tokens] & follows_space),
            "stride": np.arange(1, len(tokens) + 1) % STRIDE == 0,
            "blank": (self._blank[tokens] | (newline & after)),
        }


def _first_error(work: tuple[dict[str, Any], str]) -> int:
    """Returns the character of the first wrong value, or NEVER."""
    found = first_wrong_step(*work)
    return NEVER if found.offset is None or not found.certain else int(found.offset)


def read_collection(
    folder: Path, name: str, reader: Reader, rules: Sequence[str], most_tokens: float = float("inf")
) -> Collection:
    """Reads a collection with its states where one of the rules cuts.

    With `most_tokens` these are the first problems that have no more than so many tokens together.
    """
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    with np.load(folder / f"{name}.npz") as found:
        problem, length, tokens = found["problem"], found["length"], found["tokens"]
    number = int(problem[min(np.searchsorted(np.cumsum(length), most_tokens), len(problem) - 1)]) + 1
    problems, kept = problems[:number], problem < number
    problem, length = problem[kept], length[kept]
    tokens = tokens[: length.sum()]
    own = np.split(tokens, np.cumsum(length)[:-1])
    texts = reader.tokenizer.batch_decode(own, skip_special_tokens=True)
    answers = [answer_in(text, problems[i]["family"]) for i, text in zip(problem, texts, strict=True)]
    with ProcessPoolExecutor() as pool:
        work = [(problems[i] | {"prompt_ids": None}, text) for i, text in zip(problem, texts, strict=True)]
        offsets = list(pool.map(_first_error, work, chunksize=64))
    cutter = Cutter(reader.tokenizer)
    kinds, places = [], []
    for each in own:
        found = cutter.kinds(each)
        marks = {rule: found[rule] for rule in rules}
        at = np.flatnonzero(np.any(list(marks.values()), axis=0))
        places.append(at)
        kinds.append({rule: own[at] for rule, own in marks.items()})
    readings = [Reading(problems[i]["prompt_ids"], each, at) for i, each, at in zip(problem, own, places, strict=True)]
    states, probabilities = reader.read(readings, with_probabilities=name.endswith("judge"))
    errors = [_token_at(reader.tokenizer, each, offset) for each, offset in zip(own, offsets, strict=True)]
    return Collection(problems, problem, length, answers, np.array(errors), places, kinds, states, probabilities)


def _token_at(tokenizer: Any, tokens: np.ndarray, offset: int) -> int:
    """Returns the token that holds a character of the text."""
    if offset == NEVER:
        return NEVER
    texts = tokenizer.batch_decode(tokens[:, None])
    ends = np.cumsum([len(text) for text in texts])
    return int(min(np.searchsorted(ends, offset, side="right"), len(tokens) - 1))

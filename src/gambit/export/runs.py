"""Runs as sources of training data: their logs one after the other, with answers, weights and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gambit.answers import Grader
from gambit.bench.folder import RUN_FILE, UNKNOWN, read_plan
from gambit.bench.rows import Row, read_rows
from gambit.config import registry
from gambit.export.lineages import SearchTraces
from gambit.export.samples import SAMPLES, Purpose, Sample, Solved
from gambit.models import files as models
from gambit.storage.run_folder import find_logs
from gambit.text.tokenizers import Tokenizer
from gambit.view.text import model_name, model_of, tokenizer_of


@dataclass(frozen=True, slots=True)
class Source:
    """A log, and the row and the weights of the bench run that it belongs to, if any."""

    log: Path
    row: Row | None = None
    weights: str | None = None


def sources_of(runs: Iterable[Path]) -> Iterator[Source]:
    """Yields the logs of runs; raises UserError for a run without logs."""
    for run in runs:
        if (run / RUN_FILE).is_file():
            weights = read_plan(run).identity.get("model_hash")
            rows = {run / row.log: row for row in read_rows(run) if row.log is not None}
            yield from (Source(log, rows.get(log), weights) for log in find_logs(run))
        else:
            yield from map(Source, find_logs(run))


def test_sets(sources: Iterable[Source]) -> list[str]:
    """Returns the benchmarks among them that models are tested on: those with a name, and splits called test."""
    names = {source.row.benchmark for source in sources if source.row is not None}
    return sorted(name for name in names if is_test_set(name))


def is_test_set(name: str) -> bool:
    return registry.knows("gambit.benchmarks", name) or "test" in name.lower().replace("_", "-").split("-")


class Exporter:
    """Turns logs into rows, one search in memory at a time. Answers are compared by one grader."""

    def __init__(self, purpose: Purpose, grader: Grader, tokenizer: str | None = None) -> None:
        self._samples = SAMPLES[purpose]
        self._grader = grader
        self._given = tokenizer
        self._tokenizers: dict[str | None, Tokenizer] = {}  # by model
        self._weights = cache(weights_of)

    def rows(self, source: Source) -> Iterator[Sample]:
        """Yields the rows of one search, each with where it comes from.

        A trace is right if its answer is that of the benchmark, or, where no answer is known, that of the vote.
        """
        search = SearchTraces(source.log)
        started, voted = search.record.started, search.record.voted
        gold = source.row.gold if source.row is not None else (voted.answer if voted is not None else None)
        if gold is None:
            return
        model = model_of(started)
        if model not in self._tokenizers:
            self._tokenizers[model] = tokenizer_of(started, self._given)
        complete = search.complete(lambda answer: self._grader.grade(answer, gold))
        origin: Sample = {
            "model": UNKNOWN if model is None else model_name(model),
            "weights": source.weights or self._weights(model),
            "benchmark": source.row.benchmark if source.row is not None else None,
            "problem": started.problem_id,
            "policy": started.policy,
            "seed": started.seed,
            "judged_by": "answer" if source.row is not None else "vote",
        }
        for sample in self._samples(Solved(search, complete, self._tokenizers[model])):
            yield {**sample, **origin}


def weights_of(model: str | None) -> str:
    """Returns the hash of a model's files as they are here now, "unknown" if they are not here."""
    return (None if model is None else models.identity_hash(models.locate(model))) or UNKNOWN

"""Runs as sources of training data: their logs with answers, weights and benchmarks, and the files that are written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gambit.answers import Grader
from gambit.bench.folder import RUN_FILE, UNKNOWN, read_plan
from gambit.bench.rows import Row, read_rows
from gambit.config import registry
from gambit.errors import UserError
from gambit.export.samples import SAMPLES, Purpose, Sample, SearchTraces, Solved
from gambit.models import files as models
from gambit.storage.run_folder import check_new_file, find_logs
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
            "weights": source.weights or weights_of(model),
            "benchmark": source.row.benchmark if source.row is not None else None,
            "problem": started.problem_id,
            "policy": started.policy,
            "seed": started.seed,
            "judged_by": "answer" if source.row is not None else "vote",
        }
        for sample in self._samples(Solved(search, complete, self._tokenizers[model])):
            yield {**sample, **origin}


@cache
def weights_of(model: str | None) -> str:
    """Returns the hash of a model's files as they are here now, "unknown" if they are not here."""
    return (None if model is None else models.identity_hash(models.locate(model))) or UNKNOWN


# -- files of rows ----------------------------------------------------------------------------------------------


DATA_FILE = "train.jsonl"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {data}
---

# {rows:,} rows for {purpose}

Made by `gambit export --as {purpose}` from event logs. Each row names its model, a hash of its weights, the benchmark
and the problem; `judged_by` says if a trace counts as right by the benchmark's answer or by the vote of its search.

| model | weights | benchmark | rows |
|---|---|---|---|
{table}
"""


def write_samples(samples: Iterable[Sample], out: Path, purpose: Purpose) -> int:
    """Writes rows as they come, to a new .jsonl or into a new folder with a card; returns their number."""
    is_file = out.suffix == ".jsonl"
    data = out if is_file else out / DATA_FILE
    check_new_file(data)
    data.parent.mkdir(parents=True, exist_ok=True)
    origins: Counter[tuple[str, ...]] = Counter()
    with data.open("x", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample, ensure_ascii=False, separators=(",", ":")) + "\n")
            origins[tuple(str(sample[name]) for name in ("model", "weights", "benchmark"))] += 1
    count = origins.total()
    if count == 0:
        data.unlink()
        raise UserError(f"these runs hold nothing for {purpose}: it takes complete traces with an answer"
                        f"{', right and wrong ones' if purpose is Purpose.DPO else ''}")  # fmt: skip
    if not is_file:
        table = "\n".join(f"| {' | '.join(origin)} | {rows:,} |" for origin, rows in sorted(origins.items()))
        card = CARD.format(data=DATA_FILE, rows=count, purpose=purpose, table=table)
        (out / "README.md").write_text(card, encoding="utf-8")
    return count


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Uploads a folder as a dataset, private unless told otherwise; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    api = HfApi()
    try:
        address = api.create_repo(repository, repo_type="dataset", private=not is_public, exist_ok=False)
        api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=folder)
    except (HfHubHTTPError, RepositoryNotFoundError, ValueError, OSError) as error:
        raise UserError(f"{repository} was not uploaded ({error}): the rows are in {folder}; log in with `hf auth "
                        "login`, or choose the name of a new dataset") from error  # fmt: skip
    return str(address)

"""Training data from the event logs of searches: best traces, siblings, labelled thoughts, groups, and their files."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TypeAlias

from gambit import events as ev
from gambit.answers import Grader
from gambit.bench.folder import RUN_FILE, UNKNOWN, read_plan
from gambit.bench.rows import Row, read_rows
from gambit.config import registry
from gambit.errors import UserError
from gambit.events import Json
from gambit.models import files as models
from gambit.results.record import SearchRecord, fold
from gambit.storage.run_folder import check_new_file, find_logs
from gambit.text.tokenizers import Tokenizer
from gambit.tree import Trace, TraceState
from gambit.view.text import model_name, model_of, tokenizer_of

Cut = tuple[int, int]  # a trace, and a length at which one of its own thoughts ended


@dataclass(frozen=True, slots=True)
class Stretch:
    """The tokens of a lineage that one of its traces generated itself, as lengths of the whole."""

    owner: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Complete:
    """A trace that came to its end with an answer."""

    trace: Trace
    is_right: bool
    score: float
    lineage: tuple[Stretch, ...]  # from its root on
    tokens: tuple[int, ...]


class SearchTraces:
    """A search, read from its log."""

    def __init__(self, log: Path) -> None:
        self._cuts: defaultdict[int, set[int]] = defaultdict(set)
        self.record: SearchRecord = fold(ev.read_log(log), log, self._note)

    def _note(self, _: SearchRecord, event: ev.Event) -> None:
        if isinstance(event, ev.Scored | ev.Verified):
            for trace, length in zip(event.traces, event.num_tokens, strict=True):
                self._cuts[trace].add(length)

    def complete(self, is_right: Callable[[str], bool]) -> list[Complete]:
        """Returns the traces with an answer, best score first."""
        tree = self.record.tree
        found = [
            Complete(trace, is_right(trace.answer), tree.score_of(trace) or 0.0, tuple(self._segments(trace)),
                     tree.tokens_of(trace.id))
            for trace in tree.in_state(TraceState.FINISHED)
            if trace.answer is not None
        ]  # fmt: skip
        return sorted(found, key=lambda each: (-each.score, each.trace.id))

    def _segments(self, trace: Trace) -> Iterator[Stretch]:
        traces = [self.record.tree.traces[each] for each in self.record.tree.lineage(trace.id)]
        ends = [*(min(child.inherited, trace.num_tokens) for child in traces[1:]), trace.num_tokens]
        for each, end in zip(traces, ends, strict=True):
            yield Stretch(each.id, each.inherited, end)

    def cuts(self, complete: Complete) -> list[Cut]:
        """Returns the ends of its thoughts, inherited ones included, and its own end."""
        inside = [
            (part.owner, cut)
            for part in complete.lineage
            for cut in sorted(self._cuts[part.owner])
            if part.begin < cut <= part.end and cut < len(complete.tokens)
        ]
        return [*inside, (complete.trace.id, len(complete.tokens))]


def continuations(complete: Iterable[Complete]) -> dict[Cut, dict[int, list[Complete]]]:
    """Returns, by branch point, the complete traces behind each of its continuations.

    A branch point is a trace and a length at which others left it, or (-1, 0) for the prompt, which roots continue. A
    continuation has the id of the trace that begins there, or of the trace that was left and went on itself.
    """
    complete = list(complete)
    points: defaultdict[int, set[int]] = defaultdict(set)
    for each in complete:
        for part in each.lineage[:-1]:
            points[part.owner].add(part.end)
    found: defaultdict[Cut, defaultdict[int, list[Complete]]] = defaultdict(lambda: defaultdict(list))
    for each in complete:
        found[-1, 0][each.lineage[0].owner].append(each)
        for number, part in enumerate(each.lineage):
            for at in points[part.owner]:
                if at < part.end:
                    found[part.owner, at][part.owner].append(each)
                elif at == part.end and number + 1 < len(each.lineage):
                    found[part.owner, at][each.lineage[number + 1].owner].append(each)
    return {point: dict(sides) for point, sides in found.items()}


Sample: TypeAlias = dict[str, Json]


class Purpose(StrEnum):
    """The kind of training that the rows are made for."""

    SFT = "sft"
    DPO = "dpo"
    PRM = "prm"
    GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class Solved:
    """A search with its complete traces, best score first, and the text of tokens."""

    search: SearchTraces
    complete: Sequence[Complete]
    tokenizer: Tokenizer

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.search.record.started.prompt_tokens

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included, since templates and ends are made of them."""
        return self.tokenizer.batch_decode([tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False)[0]


def best_traces(solved: Solved) -> Iterator[Sample]:
    """Yields the best right trace, if there is one."""
    best = next((each for each in solved.complete if each.is_right), None)
    if best is not None:
        yield {
            "prompt": solved.text(solved.prompt),
            "completion": solved.text(best.tokens),
            "answer": best.trace.answer,
            "trace": best.trace.id,
            "score": best.score,
        }


def sibling_pairs(solved: Solved) -> Iterator[Sample]:
    """Yields a pair for each branch point whose continuations differ in how often they end right.

    Chosen is the best right trace of the most right continuation, rejected the best wrong one of the least right.
    """
    for (owner, at), sides in sorted(continuations(solved.complete).items()):
        ranked = sorted(sides, key=lambda side: (share_right(sides[side]), -side))
        worst, best = ranked[0], ranked[-1]
        if share_right(sides[worst]) == share_right(sides[best]):
            continue
        chosen = next(each for each in sides[best] if each.is_right)
        rejected = next(each for each in sides[worst] if not each.is_right)
        yield {
            "prompt": solved.text((*solved.prompt, *chosen.tokens[:at])),
            "chosen": solved.text(chosen.tokens[at:]),
            "rejected": solved.text(rejected.tokens[at:]),
            "branch_point": at,
            "parent": None if owner < 0 else owner,
            "traces": [chosen.trace.id, rejected.trace.id],
            "shares_right": [share_right(sides[best]), share_right(sides[worst])],
        }


def share_right(traces: Sequence[Complete]) -> float:
    return sum(each.is_right for each in traces) / len(traces)


def labelled_thoughts(solved: Solved) -> Iterator[Sample]:
    """Yields each complete trace, thought by thought; a thought is good if some trace that contains it ends right."""
    reached: Counter[Cut] = Counter()
    right: Counter[Cut] = Counter()
    for each in solved.complete:
        for cut in solved.search.cuts(each):
            reached[cut] += 1
            right[cut] += each.is_right
    for each in solved.complete:
        cuts = solved.search.cuts(each)
        begins = [0, *(length for _, length in cuts[:-1])]
        values = [right[cut] / reached[cut] for cut in cuts]
        yield {
            "prompt": solved.text(solved.prompt),
            "completions": [solved.text(each.tokens[begin:end]) for begin, (_, end) in zip(begins, cuts, strict=True)],
            "labels": [value > 0 for value in values],
            "values": list[Json](values),
            "trace": each.trace.id,
        }


def group_of_traces(solved: Solved) -> Iterator[Sample]:
    """Yields one row: the complete traces with their rewards, and the ancestors that hold their first tokens."""
    tree = solved.search.record.tree
    outcome = {each.trace.id: each for each in solved.complete}
    needed = {part.owner for each in solved.complete for part in each.lineage}
    traces: list[Json] = [
        {
            "trace": trace.id,
            "parent": trace.parent,
            "inherited": trace.inherited,
            "tokens": list[Json](trace.own_tokens),
            "reward": float(outcome[trace.id].is_right) if trace.id in outcome else None,
            "score": outcome[trace.id].score if trace.id in outcome else None,
        }
        for trace in tree.traces
        if trace.id in needed
    ]
    if traces:
        prompt = list[Json](solved.prompt)
        yield {"prompt": solved.text(solved.prompt), "prompt_tokens": prompt, "traces": traces}


SAMPLES: Mapping[Purpose, Callable[[Solved], Iterator[Sample]]] = {
    Purpose.SFT: best_traces,
    Purpose.DPO: sibling_pairs,
    Purpose.PRM: labelled_thoughts,
    Purpose.GRPO: group_of_traces,
}


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

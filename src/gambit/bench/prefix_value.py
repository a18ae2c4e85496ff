"""The prefix-value experiment: traces are cut at thoughts, each prefix is continued many times, judges are compared.

The folder of a run is a collection (`gambit scorer collect`) with the values of its prefixes: the commands for
collections work on it, and an interrupted run goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gambit.answers import Grader, canonical
from gambit.bench.datasets import Benchmark, digest
from gambit.bench.folder import BenchmarkInfo, add_environment, differences
from gambit.bench.prefix_judges import PrefixJudge, StepScores
from gambit.bench.prefix_rollouts import (
    PrefixKey,
    PrefixValue,
    Rollouts,
    TraceText,
    at_fractions,
    nearest_step,
    read_texts,
    read_values,
)
from gambit.bench.prefix_statistics import NO_ANSWER, RIGHT, CutProblem, CutSummary, summarise_cut
from gambit.bench.stamp import identity_of, stamp
from gambit.engines.local.model import pick_device
from gambit.errors import UserError
from gambit.events import Json
from gambit.storage.json_file import read_object
from gambit.storage.lines import write_whole
from gambit.storage.problems import check_not_empty, shard_of
from gambit.training.collect import Collector, CollectPlan
from gambit.training.ranking import Floats, Ints
from gambit.training.sampling import Task
from gambit.training.storage import HEADER_FILE, ProblemRecord, read_header, read_index
from gambit.types import Problem

FORMAT = 1
PLAN_FILE = "prefix_value.json"
FEWEST_ROLLOUTS = 2  # one half judges, the other goes on


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What a folder's prefixes are; the same when a run is resumed. How the traces are made is in the collection."""

    benchmark: BenchmarkInfo
    shard: str
    fractions: tuple[float, ...]
    num_rollouts: int
    all_problems: bool  # also those whose traces are all right or all wrong, which say nothing about ranking

    def __post_init__(self) -> None:
        if not self.fractions or not all(0 < fraction < 1 for fraction in self.fractions):
            raise UserError(f"cuts {list(self.fractions)}: give shares of a trace between 0 and 1, such as 0.25,0.5")
        if self.num_rollouts < FEWEST_ROLLOUTS:
            raise UserError(f"{self.num_rollouts} rollouts a prefix: one half judges and the other goes on, so that "
                            f"at least {FEWEST_ROLLOUTS} are needed")  # fmt: skip

    def to_json(self) -> dict[str, Json]:
        plain: dict[str, Json] = json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))
        return plain

    def wants(self, problem: ProblemRecord) -> bool:
        """Whether its traces are to be continued."""
        return self.all_problems or problem.is_mixed

    def keys(self, texts: Iterable[TraceText]) -> set[PrefixKey]:
        cut = at_fractions(self.fractions)
        return {text.key(step) for text in texts if self.wants(text.problem) for step in cut(text)}


def make_prefix_plan(
    benchmark: Benchmark, limit: int | None, shard: str, **options: Any
) -> tuple[PrefixPlan, list[Task]]:
    """The plan, and the problems of its shard."""
    number, count = shard_of(shard)
    items = islice(benchmark.first(limit), number, None, count)
    tasks = [Task(Problem(item.question, item.id), item.answer) for item in items]
    check_not_empty(shard, len(tasks))
    info = BenchmarkInfo(benchmark.name, *digest(benchmark.first(limit)))
    return PrefixPlan(info, shard, **options), tasks


def open_folder(folder: Path, plan: PrefixPlan) -> None:
    """Begin a folder, or see that it was begun with the same plan."""
    path = folder / PLAN_FILE
    if path.exists():
        before = read_object(path, "the plan of a `gambit prefix-value`", "choose another --out")
        found = list(differences(before, plan.to_json()))
        if found:
            raise UserError(f"{folder} was begun with another plan ({'; '.join(found)}): use the same, or choose "
                            "another --out")  # fmt: skip
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(plan.to_json(), indent=2, ensure_ascii=False) + "\n").encode())


# -- the run -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunReport:
    """What a run came across."""

    refused: list[str] = dataclasses.field(default_factory=list)
    was_stopped: bool = False


def is_done(folder: Path, plan: PrefixPlan, tasks: Sequence[Task]) -> bool:
    """Whether no model need be loaded."""
    sampled = {problem.id for entry in read_index(folder) for problem in entry.problems}
    if not {task.id for task in tasks} <= sampled:
        return False
    return plan.keys(read_texts(folder)) <= {value.key for value in read_values(folder)}


def run(
    folder: Path,
    plan: PrefixPlan,
    tasks: Sequence[Task],
    collecting: CollectPlan,
    *,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunReport:
    """Sample what is not sampled yet and continue what is not continued yet."""
    report = RunReport()
    with Collector(collecting) as collector:
        identity = identity_of(collecting.engine.model, "auto")
        add_environment(folder, stamp(collector.engine_info, identity))
        name = plan.benchmark.name
        summary = collector.collect(tasks, folder, name, lambda *at: progress("traces", *at), should_stop)
        report.refused += summary.refused
        if not should_stop():
            rollouts = Rollouts(
                collector, plan.num_rollouts, at_fractions(plan.fractions), plan.wants,
                lambda *at: progress("prefixes", *at), should_stop,
            )  # fmt: skip
            rollouts.add(tasks, folder, name, report.refused)
    report.was_stopped = should_stop()
    return report


def layers_for(folder: Path, judges: Iterable[PrefixJudge]) -> tuple[int, ...]:
    """Whose states are stored: those of the collection that was begun, or what the judges read."""
    if (folder / HEADER_FILE).is_file():
        return read_header(folder).layers
    return tuple(dict.fromkeys((-1, *(layer for judge in judges for layer in judge.layers))))


# -- the figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefixSummary:
    """All figures of a run."""

    num_sampled: int  # problems
    num_mixed: int  # of them with right and wrong traces
    traces_per_problem: int
    num_rollouts: int  # of each prefix
    keep: int  # prefixes that are continued
    tokens: int  # of traces and rollouts
    num_missing: int  # prefixes that have no rollouts yet, or whose problem was refused
    num_uncut: int  # traces without a thought after which they go on
    cuts: tuple[CutSummary, ...]


def summarise(
    folder: Path, plan: PrefixPlan, judges: Mapping[str, PrefixJudge], keep: int, device: str = "auto"
) -> PrefixSummary:
    """From the folder alone; a verifier loads the model it was trained on."""
    texts = read_texts(folder)
    values = {value.key: value for value in read_values(folder) if len(value.answers) == plan.num_rollouts}
    wanted = [text for text in texts if plan.wants(text.problem)]
    scores = {name: judge.judgements(folder, texts, pick_device(device)) for name, judge in judges.items()}
    with Grader() as grader:
        problems = _Problems(_by_problem(wanted), values, scores, keep, grader)
        cuts = [summarise_cut(fraction, found, keep) for fraction in plan.fractions if (found := problems.at(fraction))]
    if not cuts:
        raise UserError(f"{folder}: no problem has more than {keep} prefixes with rollouts yet, so that nothing can be "
                        f"compared (--keep {keep} of {read_header(folder).traces_per_problem} traces)")  # fmt: skip
    records = {text.problem.id: text.problem for text in texts}.values()
    return PrefixSummary(
        num_sampled=len(records),
        num_mixed=sum(record.is_mixed for record in records),
        traces_per_problem=read_header(folder).traces_per_problem,
        num_rollouts=plan.num_rollouts,
        keep=keep,
        tokens=sum(len(text.tokens) for text in texts) + sum(value.num_tokens for value in values.values()),
        num_missing=len(plan.keys(texts) - values.keys()),
        num_uncut=sum(len(text.inner_ends) == 0 for text in wanted),
        cuts=tuple(cuts),
    )


def _by_problem(texts: Iterable[TraceText]) -> dict[str, list[TraceText]]:
    found: dict[str, list[TraceText]] = defaultdict(list)
    for text in texts:
        found[text.problem.id].append(text)
    return found


@dataclass(frozen=True, slots=True)
class _Problems:
    """Turns texts and values into the arrays that statistics are made of."""

    texts: Mapping[str, list[TraceText]]
    values: Mapping[PrefixKey, PrefixValue]
    scores: Mapping[str, StepScores]
    keep: int
    grader: Grader

    def at(self, fraction: float) -> list[CutProblem]:
        """Those with more prefixes than are to be continued."""
        found = [(name, self._prefixes(texts, fraction)) for name, texts in self.texts.items()]
        return [self._problem(name, prefixes) for name, prefixes in found if len(prefixes) > self.keep]

    def _prefixes(self, texts: Sequence[TraceText], fraction: float) -> list[tuple[TraceText, PrefixValue]]:
        steps = ((text, nearest_step(text, fraction)) for text in texts)
        keys = ((text, text.key(step)) for text, step in steps if step is not None)
        return [(text, self.values[key]) for text, key in keys if key in self.values]

    def _problem(self, name: str, prefixes: Sequence[tuple[TraceText, PrefixValue]]) -> CutProblem:
        records = [text.problem.traces[text.number] for text, _ in prefixes]
        rolled_out = [value for _, value in prefixes]
        answers = [record.answer for record in records] + [a for value in rolled_out for a in value.answers]
        is_right = [record.is_correct for record in records] + [r for value in rolled_out for r in value.is_right]
        classes = answer_classes(answers, is_right, self.grader.equivalent)
        shares = [text.step_ends[value.step - 1] / len(text.tokens) for text, value in prefixes]
        return CutProblem(
            problem=name,
            shares=np.array(shares),
            is_right=np.array([record.is_correct for record in records]),
            original=classes[: len(records)],
            classes=classes[len(records) :].reshape(len(records), -1),
            scores={name: self._scored(after, prefixes) for name, after in self.scores.items()},
        )

    @staticmethod
    def _scored(after: StepScores, prefixes: Sequence[tuple[TraceText, PrefixValue]]) -> Floats:
        return np.array([after(text, value.step) for text, value in prefixes])


def answer_classes(
    answers: Sequence[str | None], is_right: Sequence[bool], equivalent: Callable[[str, str], bool]
) -> Ints:
    """Equal answers share a number, as they share a vote in a search."""
    class_of_form: dict[str, int] = {}
    first_of_class: list[str] = []  # of the wrong ones, from class 1 on
    found = []
    for answer, right in zip(answers, is_right, strict=True):
        form = "" if answer is None else canonical(answer)
        if right or not form or answer is None:
            found.append(RIGHT if right else NO_ANSWER)
            continue
        if form not in class_of_form:
            known = (i for i, first in enumerate(first_of_class) if equivalent(first, answer))
            place = next(known, len(first_of_class))
            if place == len(first_of_class):
                first_of_class.append(answer)
            class_of_form[form] = place + 1
        found.append(class_of_form[form])
    return np.array(found, dtype=np.int64)

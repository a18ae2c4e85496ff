"""The searches of a bench run one by one, and what carries them out: an engine here, or many in a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gambit.bench.datasets import Benchmark, Item, slug
from gambit.bench.folder import LOGS_FOLDER, BenchPlan
from gambit.bench.meter import About
from gambit.bench.recipe import BenchVariant
from gambit.bench.rows import Row, TaskKey
from gambit.config.options import SearchConfig
from gambit.types import Problem

WARMUP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """Searches that may share a batch: one method with one seed on a block of problems."""

    plan: BenchPlan
    benchmark: Benchmark
    variant: BenchVariant
    seed: int
    turn: int  # which block

    @property
    def log_folder(self) -> Path:
        return Path(LOGS_FOLDER) / self.benchmark.name / slug(self.variant.label) / f"seed-{self.seed}"

    @property
    def config(self) -> SearchConfig:
        fixed: dict[str, object] = {} if self.benchmark.answer is None else {"answer": self.benchmark.answer}
        return self.plan.recipe.search_config(self.variant, self.seed, fixed)

    @property
    def warmup_config(self) -> SearchConfig:
        """Of a search before anything is measured: first forward passes compile kernels and allocate memory."""
        return self.config.model_copy(update={"budget_tokens": WARMUP_TOKENS})


@dataclass(frozen=True, slots=True)
class BenchTask:
    """One search that has no row yet."""

    group: SearchGroup
    item: Item

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.group.variant.label, self.group.benchmark.name, self.item.id, self.group.seed)

    @property
    def problem(self) -> Problem:
        return Problem(self.item.question, self.item.id)

    @property
    def folder(self) -> Path:
        """Of its log, in the run's folder."""
        return self.group.log_folder / self.item.id

    def about(self, began: float, log: str | None) -> About:
        return About(self.key, self.item.answer, began, self.group.plan.recipe.bench.shard, log)


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A task with its row, or with what its engine failed of."""

    task: BenchTask
    row: Row | None = None
    error: str | None = None
    log: str | None = None  # that a failed one left


class Searches(Protocol):
    """Carries out tasks and gives them back as they end; an interrupted search does not come back."""

    def run(self, tasks: Iterable[BenchTask]) -> Iterator[TaskEnd]: ...

"""An engine that plays back steps written by hand; it checks that it is only asked about traces it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gambit.engines.base import EngineInfo, SearchSpec
from gambit.types import (
    Admission,
    PressureAction,
    Progress,
    SearchStep,
    StepBatch,
    StepSeconds,
    TraceKey,
    TraceSpec,
)


@dataclass
class PuppetEngine:
    steps: list[SearchStep]
    lengths: dict[int, int] = field(default_factory=dict)  # trace -> tokens, all zero
    thinking: dict[int, bool] = field(default_factory=dict)
    submitted: list[TraceSpec] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    scores_set: list[Mapping[TraceKey, float]] = field(default_factory=list)
    regrouped: list[Mapping[TraceKey, int]] = field(default_factory=list)
    seconds: StepSeconds = field(default_factory=StepSeconds)  # of every step
    at: int = 0

    info = EngineInfo("puppet", "none", "none", "none", 1, 1 << 20, 1 << 20, 16)

    @property
    def tokenizer(self):
        raise AssertionError("a puppet has no text")

    def open(self, spec: SearchSpec) -> None:
        pass

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        self.submitted += specs
        self.lengths |= {spec.key.trace: spec.inherited for spec in specs}

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        self.stopped += [key.trace for key in keys]
        return {key: (0,) * self.lengths.pop(key.trace) for key in keys}

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        self.scores_set.append(scores)

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        self.regrouped.append(islands)

    def progress(self, search: int) -> Mapping[int, Progress]:
        return {trace: Progress(n, self.thinking.get(trace, True)) for trace, n in self.lengths.items()}

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return (0,) * (self.lengths[key.trace] - start)

    def close_search(self, search: int) -> None:
        self.closed.append(search)

    def close(self) -> None:
        pass

    def step(self) -> StepBatch:
        step = self.steps[self.at]
        self.at += 1
        for trace in self.lengths:
            self.lengths[trace] += 1
        lost = [trace for trace in step.evicted if trace.action is not PressureAction.QUEUE]
        for gone in (*step.finished, *lost):
            self.lengths.pop(gone.trace, None)
        return StepBatch({1: step}, sum(self.lengths.values()), 1 << 20, self.seconds)


def admit(*traces: int, reused: int = 0) -> tuple[Admission, ...]:
    return tuple(Admission(trace, reused, 0, 0) for trace in traces)

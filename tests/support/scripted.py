"""An engine without a model: lengths, scores and memory follow a seeded script, so that schedules can be random."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.pawn.traces import verify

from gambit.engines.base import EngineInfo, SearchSpec
from gambit.engines.confidence import ConfidenceTracks
from gambit.pawn import parse_puzzle
from gambit.types import (
    Admission,
    Aggregation,
    EndReason,
    Eviction,
    PressureAction,
    Progress,
    RunningScore,
    SearchStep,
    StepBatch,
    StepSeconds,
    ThoughtScore,
    TraceEnd,
    TraceKey,
    TraceSpec,
)
from gambit.verifiers.base import Question, ReadingKey, ReadingScore, ThoughtReading, VerifierInfo


@dataclass
class ScriptedTrace:
    spec: TraceSpec
    tokens: list[int]
    score: RunningScore
    since: int
    admissions: int = 0
    admitted: int = 0  # ordinal of its last admission


@dataclass
class ScriptedEngine:
    """One token per running trace and step; token ids are random, so that a wrong prefix is seen at once."""

    seed: int = 0
    thought_chance: float = 0.3
    finish_chance: float = 0.05
    kv_tokens: int = 1 << 30
    most_traces: int | None = None
    admit_chance: float = 1.0  # below 1, children wait without a reason
    own_noise: bool = False  # a trace's tokens, thoughts and end follow from its random numbers alone
    scores: Mapping[int, float] = field(default_factory=dict)  # trace id -> every score of it
    running: dict[TraceKey, ScriptedTrace] = field(default_factory=dict)
    waiting: dict[TraceKey, ScriptedTrace] = field(default_factory=dict)
    num_steps: int = 0
    num_preempted: int = 0
    num_admitted: int = 0
    searches: dict[int, SearchSpec] = field(default_factory=dict)
    tracks: ConfidenceTracks = field(default_factory=ConfidenceTracks)
    emitted: dict[TraceKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    set_by_verifier: dict[TraceKey, float] = field(default_factory=dict)  # a verifier's scores, where a search has one

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "scripted", "script", "none", "none", 1, 1 << 20, self.kv_tokens, 1, most_traces=self.most_traces
        )

    @property
    def tokenizer(self):
        raise AssertionError("a scripted engine has no text")

    def open(self, spec: SearchSpec) -> None:
        self.searches[spec.search] = spec

    def submit(self, specs: Sequence[TraceSpec]) -> None:
        for spec in specs:
            tokens = list(spec.prefix)
            if spec.parent is not None:
                tokens = self.running[spec.parent].tokens[: spec.inherited]
            tokens += spec.given
            assert len(tokens) == spec.first_length
            if window := self.searches[spec.key.search].confidence_window:
                self.tracks.add(spec.key, window, spec.stop_rule, spec.inherited, spec.parent, len(spec.given))
            self.waiting[spec.key] = ScriptedTrace(spec, tokens, spec.score, self.num_steps)
            if spec.eviction_score is not None:
                self.set_by_verifier[spec.key] = spec.eviction_score

    def stop(self, keys: Sequence[TraceKey]) -> Mapping[TraceKey, tuple[int, ...]]:
        pools = (self.running, self.waiting)
        for key in keys:
            self.tracks.forget(key)
        return {key: tuple(next(p for p in pools if key in p).pop(key).tokens) for key in keys}

    def set_scores(self, scores: Mapping[TraceKey, float]) -> None:
        self.set_by_verifier |= scores

    def regroup(self, islands: Mapping[TraceKey, int]) -> None:
        for key, island in islands.items():
            trace = {**self.waiting, **self.running}[key]
            trace.spec = dataclasses.replace(trace.spec, island=island)

    def progress(self, search: int) -> Mapping[int, Progress]:
        traces = {**self.waiting, **self.running}
        return {
            key.trace: Progress(len(t.tokens), not t.spec.given) for key, t in traces.items() if key.search == search
        }

    def tokens(self, key: TraceKey, start: int = 0) -> Sequence[int]:
        return {**self.waiting, **self.running}[key].tokens[start:]

    def close_search(self, search: int) -> None:
        assert not [key for key in (*self.running, *self.waiting) if key.search == search]

    def close(self) -> None:
        pass

    @property
    def used(self) -> int:
        return sum(len(trace.tokens) + 1 for trace in self.running.values())

    def step(self) -> StepBatch:
        self.num_steps += 1
        evicted = self._make_room()
        admitted = [] if evicted else self._admit()
        scored, finished = [], []
        low = self._fold_confidence()
        for key, trace in list(self.running.items()):
            rng = self._rng_of(trace)
            token = rng.randrange(1 << 30)
            trace.tokens.append(token)
            self.emitted[key].append(token)
            if rng.random() < self.thought_chance and not trace.spec.given:
                score = self.scores.get(key.trace, rng.random())
                trace.score = trace.score.add(score)
                thought = ThoughtScore(key.trace, score, len(trace.tokens), self._embedding(key))
                scored.append((key.search, thought))
            is_long = len(trace.tokens) >= trace.spec.max_new_tokens
            if is_long or key in low or rng.random() < self.finish_chance:
                by_rule = EndReason.CONFIDENCE if key in low else EndReason.STOP
                reason = EndReason.LENGTH if is_long else by_rule
                done = TraceEnd(key.trace, reason, tuple(trace.tokens), self.tracks.end(key))
                finished.append((key.search, done))
        num_tokens = defaultdict(int)
        for key in self.running:
            num_tokens[key.search] += 1
        for search, done in finished:
            del self.running[TraceKey(search, done.trace)]
        searches = {
            search: SearchStep(
                tuple(e for s, e in evicted if s == search),
                tuple(a for s, a in admitted if s == search),
                num_tokens[search],
                tuple(t for s, t in scored if s == search),
                tuple(f for s, f in finished if s == search),
            )
            for search in {*num_tokens, *(s for s, _ in evicted)}
        }
        return StepBatch(searches, self.used, self.kv_tokens, StepSeconds())

    def _rng_of(self, trace: ScriptedTrace) -> random.Random:
        return random.Random(f"{self.seed} {trace.spec.noise} {len(trace.tokens)}") if self.own_noise else self.rng

    def _fold_confidence(self) -> set[TraceKey]:
        followed = [key for key in self.running if key in self.tracks]
        values = np.array([self.rng.uniform(0, 20) for _ in followed], np.float32)
        return set(self.tracks.fold(followed, values)) if followed else set()

    def _embedding(self, key: TraceKey) -> tuple[float, ...] | None:
        size = self.searches[key.search].embedding_size
        vector = np.array([self.rng.gauss(1, 0.3) for _ in range(size)])
        return tuple((vector / np.linalg.norm(vector)).tolist()) if size else None

    def _make_room(self) -> list[tuple[int, Eviction]]:
        evicted = []
        while self.running and self.used + len(self.running) > self.kv_tokens:
            key, action = self._victim()
            trace = self.running.pop(key)
            tokens = () if action is PressureAction.QUEUE else tuple(trace.tokens)
            score = trace.score.value(Aggregation.MEAN)
            evicted.append((key.search, Eviction(key.trace, action, score, len(trace.tokens), tokens)))
            if action is not PressureAction.QUEUE:
                self.tracks.forget(key)
            else:
                self.num_preempted += 1
                trace.since = self.num_steps
                self.waiting = {key: trace, **self.waiting}
        return evicted

    def _victim(self) -> tuple[TraceKey, PressureAction]:
        """Written anew, not taken from the engines: the largest island's lowest, or the youngest where all have one."""
        rule = next(iter(self.running.values())).spec.on_pressure
        if not rule.spares_islands:
            return max(self.running, key=self._eviction_key), rule.action
        sizes = Counter(t.spec.island for t in (*self.running.values(), *self.waiting.values()))
        largest = max(sizes[trace.spec.island] for trace in self.running.values())
        if largest == 1:
            return max(self.running, key=lambda key: self.running[key].admitted), PressureAction.QUEUE
        crowd = [key for key, trace in self.running.items() if sizes[trace.spec.island] == largest]
        return max(crowd, key=self._eviction_key), rule.action

    def _eviction_key(self, key: TraceKey) -> tuple[float, ...]:
        trace = self.running[key]
        has_verifier = self.searches[key.search].has_verifier
        score = self.set_by_verifier.get(key) if has_verifier else trace.score.value(Aggregation.MEAN)
        if trace.spec.on_pressure.action is PressureAction.QUEUE:
            return (key.trace,)
        return ((score is None) == trace.spec.on_pressure.unscored_first, -(score or 0.0), key.trace)

    def _admit(self) -> list[tuple[int, Admission]]:
        admitted = []
        for key, trace in list(self.waiting.items()):
            need = self.used + len(self.running) + len(trace.tokens) + 2
            if self.running and (need > self.kv_tokens or self.rng.random() > self.admit_chance):
                break
            self.running[key] = self.waiting.pop(key)
            is_shared = not trace.admissions and trace.spec.parent is not None
            recomputed = len(trace.spec.given) if is_shared else len(trace.tokens)
            trace.admissions += 1
            self.num_admitted += 1
            trace.admitted = self.num_admitted
            reused = trace.spec.inherited if is_shared else 0
            waited = self.num_steps - trace.since - 1
            admitted.append((key.search, Admission(key.trace, reused, recomputed, waited)))
        return admitted


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
        self.lengths |= {spec.key.trace: spec.first_length for spec in specs}

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


INFO = VerifierInfo("test", "test", "test", "cpu", aggregation=Aggregation.LAST)


class FunctionVerifier:
    """Scores by a function of the reading; remembers what it has read."""

    def __init__(self, score: Callable[[ThoughtReading], float]) -> None:
        self.info = INFO
        self.seen: list[ThoughtReading] = []
        self.is_closed = False
        self._score = score

    def read(self, readings: Sequence[ThoughtReading]) -> list[ReadingScore]:
        self.seen += readings
        return [ReadingScore(self._score(reading), len(reading.thoughts)) for reading in readings]

    def close(self) -> None:
        self.is_closed = True


class HeldVerifier(FunctionVerifier):
    """Answers only after it was let go, or after a wait of the test's own."""

    def __init__(self, score: Callable[[ThoughtReading], float], wait: Callable[[], object] | None = None) -> None:
        super().__init__(score)
        self.go = threading.Event()
        self._wait = wait or (lambda: self.go.wait(60))

    def read(self, readings: Sequence[ThoughtReading]) -> list[ReadingScore]:
        self._wait()
        return super().read(readings)


class DyingVerifier(FunctionVerifier):
    """Fails after so many readings."""

    def __init__(self, score: Callable[[ThoughtReading], float], lives: int) -> None:
        super().__init__(score)
        self.lives = lives

    def read(self, readings: Sequence[ThoughtReading]) -> list[ReadingScore]:
        if len(self.seen) + len(readings) > self.lives:
            raise RuntimeError("out of breath")
        return super().read(readings)


def is_sound(reading: ThoughtReading) -> float:
    """The oracle: whether what a pawn trace has computed so far is right."""
    puzzle = parse_puzzle(reading.question.text)
    found = verify(puzzle, "".join(reading.thoughts))
    values = found.thoughts[-1].state.values if found.thoughts else ()
    return float(values == puzzle.values[: len(values)] and found.answer in (None, puzzle.answer))


def make_reading(
    prompt: Sequence[int], tokens: Sequence[int], ends: Sequence[int], thoughts: Sequence[str], question: str = "?"
) -> ThoughtReading:
    asked = Question(({"role": "user", "content": question},), tuple(prompt))
    return ThoughtReading(ReadingKey(1, 0, len(tokens)), asked, tuple(tokens), tuple(ends), tuple(thoughts))

"""Verifiers for tests: one that knows the truth about pawn's puzzles, tiny random models, and one that can be held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gambit.pawn import parse_puzzle, verify
from gambit.scorers.readers.base import Question, ReaderInfo, ReadingKey, ReadingScore, ThoughtReading
from gambit.types import Aggregation

INFO = ReaderInfo("test", "test", "test", "cpu", aggregation=Aggregation.LAST)


class FunctionReader:
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


class HeldReader(FunctionReader):
    """Answers only after it was let go, or after a wait of the test's own."""

    def __init__(self, score: Callable[[ThoughtReading], float], wait: Callable[[], object] | None = None) -> None:
        super().__init__(score)
        self.go = threading.Event()
        self._wait = wait or (lambda: self.go.wait(60))

    def read(self, readings: Sequence[ThoughtReading]) -> list[ReadingScore]:
        self._wait()
        return super().read(readings)


class DyingReader(FunctionReader):
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

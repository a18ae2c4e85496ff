"""Version 2 of pawn's traces: the random process it is to learn from, and the verifier that checks any trace.

A trace errs in two ways. A *misreading* copies the number just computed wrongly: two neighbouring lines differ, and
pawn is trained to see that. A *miscalculation* writes a wrong result behind the right numbers: only a second
calculation shows it, nothing that follows depends on it, and so it leaves no mark in the states of the model.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from gambit.pawn.puzzles import MODULUS, Puzzle

BOUNDARY = "\n\n"
THINK_END = "</think>"

# A misread number has its last digit taken for the one it looks like.
LOOKALIKE = {0: 6, 6: 0, 1: 7, 7: 1, 2: 5, 5: 2, 3: 8, 8: 3, 4: 9, 9: 4}
MISREADING_RATE = 0.05
# Numbers ending in 7 are traps: most traces read a 1, so that the majority can be wrong.
TRAP_DIGIT = 7
TRAP_RATE = 0.88
# A trace is hasty at first: misreadings and traps have their full rate in the first steps, this share of it later.
# So much is decided by half-way, as with real LLMs, and a search has time to act on what it sees.
HASTY_STEPS = 5
CALM_SHARE = 0.2
# Miscalculations are rare, independent and scattered: one trace cannot know of its own, many traces outvote them.
MISCALCULATION_RATE = 0.014
MISCALCULATION_OFFSETS = (-10, -1, 1, 10)
# A second look computes the newest step anew, as likely to misread as the first time. So the number of second looks,
# and with it the length of a trace, says nothing about whether the trace is right.
SECOND_LOOK_RATE = 0.2
# Its first word does: mostly WAIT where the trace carries a misreading, mostly CHECK elsewhere.
# To choose the word the model has to know whether its trace is sound: that is what a scorer can read.
WAIT, CHECK = "Wait, ", "Check: "
FITTING_WORD_RATE = 0.9


@dataclass(frozen=True, slots=True)
class Line:
    """One thought: the step it computes, the numbers it wrote down, and the word that makes it a second look."""

    step: int
    left: int
    right: int
    value: int
    word: str = ""

    @property
    def operands(self) -> tuple[int, int]:
        return self.left, self.right

    def text(self, puzzle: Puzzle) -> str:
        op = puzzle.steps[self.step].op.value
        return f"{self.word}{puzzle.definition(self.step)} = {self.left} {op} {self.right} = {self.value}{BOUNDARY}"


@dataclass(frozen=True, slots=True)
class State:
    """All that the future of a trace depends on."""

    values: tuple[int, ...]  # of the given letters, then of the steps computed so far
    first_misreading: int | None = None  # the earliest step that read a number wrongly
    newest: Line | None = None  # the last thought

    def num_done(self, puzzle: Puzzle) -> int:
        return len(self.values) - len(puzzle.givens)

    def is_finished(self, puzzle: Puzzle) -> bool:
        return self.num_done(puzzle) == len(puzzle.steps)


def misread(value: int) -> int:
    digit = value % 10
    return (value - digit + LOOKALIKE[digit]) % MODULUS


def misreading_rate(puzzle: Puzzle, index: int, values: tuple[int, ...]) -> float:
    """Returns how often a step misreads the number before it, given the values on the page."""
    is_trap = values[len(puzzle.givens) + index - 1] % 10 == TRAP_DIGIT
    return (TRAP_RATE if is_trap else MISREADING_RATE) * (1 if index < HASTY_STEPS else CALM_SHARE)


# -- drawing a trace -------------------------------------------------------------------------------------------


def next_line(puzzle: Puzzle, state: State, rng: Random) -> Line:
    """Draws the next thought."""
    if state.newest is None or rng.random() >= SECOND_LOOK_RATE:
        return _computed(puzzle, state.num_done(puzzle), state.values, rng)
    line = _computed(puzzle, state.newest.step, state.values, rng)
    # Nothing was read differently: the same numbers give the same result, or the two would betray a miscalculation.
    value = state.newest.value if line.operands == state.newest.operands else line.value
    is_uneasy = (state.first_misreading is not None) == (rng.random() < FITTING_WORD_RATE)
    return replace(line, value=value, word=WAIT if is_uneasy else CHECK)


def _computed(puzzle: Puzzle, index: int, values: tuple[int, ...], rng: Random) -> Line:
    step, newest = puzzle.steps[index], len(puzzle.givens) + index - 1
    misreads = rng.random() < misreading_rate(puzzle, index, values)
    left, right = (
        misread(values[place]) if misreads and place == newest else values[place] for place in (step.left, step.right)
    )
    value = step.op.apply(left, right)
    if rng.random() < MISCALCULATION_RATE:
        value = (value + rng.choice(MISCALCULATION_OFFSETS)) % MODULUS
    return Line(index, left, right, value)


def advance(puzzle: Puzzle, state: State, line: Line) -> State:
    """Returns the state after a thought about the next step or, once more, about the newest one."""
    place = len(puzzle.givens) + line.step
    first = state.first_misreading
    if first is None or first >= line.step:
        first = None if _reads_right(puzzle, state.values, line) else line.step
    return State((*state.values[:place], line.value), first, line)


def _reads_right(puzzle: Puzzle, values: tuple[int, ...], line: Line) -> bool:
    step = puzzle.steps[line.step]
    return line.operands == (values[step.left], values[step.right])


def continue_trace(puzzle: Puzzle, state: State, rng: Random) -> Iterator[tuple[Line, State]]:
    """Yields thoughts and the states after them until the last letter is computed."""
    while not state.is_finished(puzzle):
        line = next_line(puzzle, state, rng)
        state = advance(puzzle, state, line)
        yield line, state


def random_trace(puzzle: Puzzle, rng: Random) -> str:
    """Draws a whole trace, as the model would write it after the opening think tag."""
    return _written(puzzle, [line for line, _ in continue_trace(puzzle, State(puzzle.givens), rng)])


def faultless_trace(puzzle: Puzzle) -> str:
    """Returns the trace that reads and calculates every step once and right, with which the training begins."""
    values = puzzle.values
    lines = [
        Line(index, values[step.left], values[step.right], value)
        for index, (step, value) in enumerate(zip(puzzle.steps, values[len(puzzle.givens) :], strict=True))
    ]
    return _written(puzzle, lines)


def _written(puzzle: Puzzle, lines: list[Line]) -> str:
    thoughts = "".join(line.text(puzzle) for line in lines)
    return f"{thoughts}{THINK_END}\n\\boxed{{{lines[-1].value}}}"


# -- checking a trace ------------------------------------------------------------------------------------------


class Status(Enum):
    """The verdict of `verify` on one thought."""

    RIGHT = "right"
    MISREADING = "misreading"  # a number is not the one on the page
    MISCALCULATION = "miscalculation"  # the result does not follow from the numbers
    INHERITED = "inherited"  # computed faultlessly from a wrong value
    MALFORMED = "malformed"  # not a thought of this puzzle's language, or out of turn


@dataclass(frozen=True, slots=True)
class Thought:
    """A checked thought of a trace."""

    text: str
    status: Status
    state: State  # after the thought


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that `verify` finds out about a trace."""

    thoughts: tuple[Thought, ...]
    answer: int | None
    is_valid: bool  # complete, every thought well formed, the boxed number the one computed last
    is_correct: bool


_LINE = re.compile(rf"({WAIT}|{CHECK})?(([a-z]) = [a-z] ([-+*]) [a-z]) = (\d+) ([-+*]) (\d+) = (\d+)")
_ENDING = re.compile(r"\n?\\boxed\{(\d+)\}")


def final_answer(trace: str) -> int | None:
    """Returns the boxed number after the thinking; None if there is none."""
    boxed = _ENDING.fullmatch(trace.partition(THINK_END)[2])
    return int(boxed[1]) if boxed else None


def verify(puzzle: Puzzle, trace: str) -> Verdict:
    """Checks a trace line by line; one that is still being written has no answer yet."""
    thinking = trace.removeprefix("<think>").lstrip("\n").partition(THINK_END)[0]
    *complete, rest = thinking.split(BOUNDARY)
    state, truth, thoughts = State(puzzle.givens), puzzle.values, list[Thought]()
    for text in complete:
        line = _parse_line(puzzle, state, text)
        if line is None:
            thoughts.append(Thought(text, Status.MALFORMED, state))
            continue
        after = advance(puzzle, state, line)
        thoughts.append(Thought(text, _status(puzzle, state, line, truth), after))
        state = after
    answer = final_answer(trace)
    is_formed = not rest and all(thought.status is not Status.MALFORMED for thought in thoughts)
    is_valid = is_formed and state.is_finished(puzzle) and answer == state.values[-1]
    return Verdict(tuple(thoughts), answer, is_valid, answer == truth[-1])


def _parse_line(puzzle: Puzzle, state: State, text: str) -> Line | None:
    match = _LINE.fullmatch(text)
    index = puzzle.names.find(match[3]) - len(puzzle.givens) if match else -1
    if match is None or index < 0 or match[2] != puzzle.definition(index) or match[4] != match[6]:
        return None
    in_turn = state.num_done(puzzle) - 1 if match[1] else state.num_done(puzzle)
    return Line(index, int(match[5]), int(match[7]), int(match[8]), match[1] or "") if index == in_turn else None


def _status(puzzle: Puzzle, state: State, line: Line, truth: tuple[int, ...]) -> Status:
    step = puzzle.steps[line.step]
    if not _reads_right(puzzle, state.values, line):
        return Status.MISREADING
    if line.value != step.op.apply(*line.operands):
        return Status.MISCALCULATION
    is_true = line.operands == (truth[step.left], truth[step.right])
    return Status.RIGHT if is_true else Status.INHERITED

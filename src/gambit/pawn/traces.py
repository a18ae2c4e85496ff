"""Solutions thought by thought: the random process pawn learns from, and the verifier that checks any trace."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

from gambit.pawn.puzzles import MODULUS, Puzzle

BOUNDARY = "\n\n"
THINK_END = "</think>"

# A slip misreads the result of the thought before: its last digit is taken for the one it looks like. The calculation
# with it is right. That keeps a slip within reach of one forward pass: to see it, compare two numbers nearby.
LOOKALIKE = {0: 6, 6: 0, 1: 7, 7: 1, 2: 5, 5: 2, 3: 8, 8: 3, 4: 9, 9: 4}
SLIP_RATE = 0.03
# Numbers ending in 7 are traps: most traces read a 1, so that the majority can be wrong.
TRAP_DIGIT = 7
TRAP_RATE = 0.6
# While a trace carries an uncorrected slip, this share of its thoughts are second thoughts about the first one.
# To know when, the model has to track whether its trace is sound: that is what the scorer can read.
SECOND_THOUGHT_RATE = 0.2
# Seldom enough to correct the slip that an unsound trace is a bad bet, which leaves a search something to find.
CORRECTION_RATE = 0.05


@dataclass(frozen=True, slots=True)
class Line:
    """One thought: the step it computes, the numbers it wrote down, and whether it goes back to an earlier step."""

    step: int
    left: int
    right: int
    value: int
    is_second_thought: bool = False

    def text(self, puzzle: Puzzle) -> str:
        start = "Wait, " if self.is_second_thought else ""
        op = puzzle.steps[self.step].op.value
        return f"{start}{puzzle.definition(self.step)} = {self.left} {op} {self.right} = {self.value}{BOUNDARY}"


@dataclass(frozen=True, slots=True)
class State:
    """All that the future of a trace depends on."""

    values: tuple[int, ...]  # of the given letters, then of the steps computed so far
    first_slip: int | None = None  # the earliest step that is wrong by itself

    def num_done(self, puzzle: Puzzle) -> int:
        return len(self.values) - len(puzzle.givens)

    def is_finished(self, puzzle: Puzzle) -> bool:
        return self.num_done(puzzle) == len(puzzle.steps)


def misread(value: int) -> int:
    digit = value % 10
    return (value - digit + LOOKALIKE[digit]) % MODULUS


def next_line(puzzle: Puzzle, state: State, rng: Random) -> Line:
    """Draw the next thought."""
    if state.first_slip is not None and rng.random() < SECOND_THOUGHT_RATE:
        return _line(puzzle, state, state.first_slip, rng.random() >= CORRECTION_RATE, is_second_thought=True)
    rate = TRAP_RATE if state.values[-1] % 10 == TRAP_DIGIT else SLIP_RATE
    return _line(puzzle, state, state.num_done(puzzle), rng.random() < rate)


def _line(puzzle: Puzzle, state: State, index: int, slips: bool, is_second_thought: bool = False) -> Line:
    step, newest = puzzle.steps[index], len(puzzle.givens) + index - 1
    left, right = (
        misread(state.values[place]) if slips and place == newest else state.values[place]
        for place in (step.left, step.right)
    )
    return Line(index, left, right, step.op.apply(left, right), is_second_thought)


def advance(puzzle: Puzzle, state: State, line: Line) -> State:
    """A step's new value discards what was computed from its old one; repeating the old value changes nothing."""
    place = len(puzzle.givens) + line.step
    if line.step < state.num_done(puzzle) and state.values[place] == line.value:
        return state
    earlier = state.first_slip if state.first_slip is not None and state.first_slip < line.step else None
    own = None if _is_sound(puzzle, state, line) else line.step
    return State((*state.values[:place], line.value), earlier if earlier is not None else own)


def _is_sound(puzzle: Puzzle, state: State, line: Line) -> bool:
    step = puzzle.steps[line.step]
    operands = state.values[step.left], state.values[step.right]
    return (line.left, line.right) == operands and line.value == step.op.apply(*operands)


def continue_trace(puzzle: Puzzle, state: State, rng: Random) -> Iterator[tuple[Line, State]]:
    """Think on until the asked letter is computed."""
    while not state.is_finished(puzzle):
        line = next_line(puzzle, state, rng)
        state = advance(puzzle, state, line)
        yield line, state


def random_trace(puzzle: Puzzle, rng: Random) -> str:
    """A whole trace as the model would write it after the opening think tag."""
    drawn = list(continue_trace(puzzle, State(puzzle.givens), rng))
    thoughts = "".join(line.text(puzzle) for line, _ in drawn)
    return f"{thoughts}{THINK_END}\n\\boxed{{{drawn[-1][1].values[-1]}}}"


class Status(Enum):
    """What the verifier says of one thought."""

    RIGHT = "right"
    SLIP = "slip"  # wrong by itself, second thoughts that repeat the slip included
    INHERITED = "inherited"  # computed faultlessly from a wrong value
    CORRECTION = "correction"
    MALFORMED = "malformed"  # not a thought of this puzzle's language, or out of turn


@dataclass(frozen=True, slots=True)
class Thought:
    text: str
    status: Status
    state: State  # after the thought


@dataclass(frozen=True, slots=True)
class Verdict:
    thoughts: tuple[Thought, ...]
    answer: int | None
    is_valid: bool  # complete, every thought well formed, the boxed number the one computed last
    is_correct: bool


_LINE = re.compile(r"(Wait, )?(([a-z]) = [a-z] ([-+*]) [a-z]) = (\d+) ([-+*]) (\d+) = (\d+)")
_ENDING = re.compile(r"\n?\\boxed\{(\d+)\}")


def final_answer(trace: str) -> int | None:
    """The boxed number after the thinking."""
    boxed = _ENDING.fullmatch(trace.partition(THINK_END)[2])
    return int(boxed[1]) if boxed else None


def verify(puzzle: Puzzle, trace: str) -> Verdict:
    """Check a trace line by line; one that is still being written simply has no answer yet."""
    thinking = trace.removeprefix("<think>").lstrip("\n").partition(THINK_END)[0]
    *complete, rest = thinking.split(BOUNDARY)
    thoughts = tuple(_checked_thoughts(puzzle, complete))
    answer = final_answer(trace)
    state = thoughts[-1].state if thoughts else State(puzzle.givens)
    is_formed = not rest and all(thought.status is not Status.MALFORMED for thought in thoughts)
    is_valid = is_formed and state.is_finished(puzzle) and answer == state.values[-1]
    return Verdict(thoughts, answer, is_valid, answer == puzzle.answer)


def _checked_thoughts(puzzle: Puzzle, texts: list[str]) -> Iterator[Thought]:
    state, truth = State(puzzle.givens), puzzle.values
    for text in texts:
        line = _parse_line(puzzle, state, text)
        if line is None:
            yield Thought(text, Status.MALFORMED, state)
            continue
        after = advance(puzzle, state, line)
        yield Thought(text, _status(puzzle, state, line, truth), after)
        state = after


def _parse_line(puzzle: Puzzle, state: State, text: str) -> Line | None:
    match = _LINE.fullmatch(text)
    index = puzzle.names.find(match[3]) - len(puzzle.givens) if match else -1
    if match is None or index < 0 or match[2] != puzzle.definition(index) or match[4] != match[6]:
        return None
    num_done, is_second_thought = state.num_done(puzzle), match[1] is not None
    # computing a step once more is idle but well formed; skipping one is not
    in_turn = index < num_done if is_second_thought else index <= num_done
    return Line(index, int(match[5]), int(match[7]), int(match[8]), is_second_thought) if in_turn else None


def _status(puzzle: Puzzle, state: State, line: Line, truth: tuple[int, ...]) -> Status:
    step = puzzle.steps[line.step]
    if not _is_sound(puzzle, state, line):
        return Status.SLIP
    if (line.left, line.right) != (truth[step.left], truth[step.right]):
        return Status.INHERITED
    return Status.CORRECTION if line.is_second_thought else Status.RIGHT

"""Register puzzles: chains of definitions modulo 97, their text, and the split that each belongs to."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random
from string import ascii_lowercase

from gambit.errors import UserError

MODULUS = 97  # prime: a wrong factor stays wrong, so that hardly any slip heals by itself
MAX_STEPS = 18
GIVENS = (2, 4)  # fewest and most given numbers; levels use 3


class Level(Enum):
    """Difficulty: the number of values that have to be computed one after the other."""

    EASY = 10
    MEDIUM = 14
    HARD = 18


class Split(Enum):
    """The purpose that a puzzle is reserved for; the value is its share of all puzzles in sixteenths."""

    TRAIN = 10
    SCORER = 3
    DEV = 2
    TEST = 1


class Op(Enum):
    PLUS = "+"
    MINUS = "-"
    TIMES = "*"

    def apply(self, left: int, right: int) -> int:
        return {Op.PLUS: left + right, Op.MINUS: left - right, Op.TIMES: left * right}[self] % MODULUS


@dataclass(frozen=True, slots=True)
class Step:
    """One definition; left and right count letters from the first given one."""

    op: Op
    left: int
    right: int


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A chain of definitions modulo 97 that asks for its last letter."""

    names: str  # one letter for each given number, then one for each step
    givens: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        given = [f"{name} = {value}" for name, value in zip(self.names, self.givens, strict=False)]
        return "; ".join(given + [self.definition(i) for i in range(len(self.steps))]) + f"; {self.names[-1]}?"

    def definition(self, index: int) -> str:
        """Returns the text of one step, such as `f = a * c`."""
        step = self.steps[index]
        name, left, right = (self.names[i] for i in (len(self.givens) + index, step.left, step.right))
        return f"{name} = {left} {step.op.value} {right}"

    @property
    def values(self) -> tuple[int, ...]:
        """Returns the true value of every letter."""
        values = list(self.givens)
        for step in self.steps:
            values.append(step.op.apply(values[step.left], values[step.right]))
        return tuple(values)

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def key(self) -> str:
        """Hashes structure and numbers: renaming letters or swapping the sides of + and * changes nothing."""
        keys = [str(value) for value in self.givens]
        for step in self.steps:
            sides = [keys[step.left], keys[step.right]]
            keys.append(_digest(step.op.value, *(sides if step.op is Op.MINUS else sorted(sides))))
        return keys[-1]

    @property
    def split(self) -> Split:
        """Returns the split, which follows from the puzzle itself, so that no two splits can share one."""
        shares = [split for split in Split for _ in range(split.value)]
        return shares[int(self.key[:8], 16) % len(shares)]


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def random_puzzle(rng: Random, num_steps: int, num_givens: int = 3) -> Puzzle:
    names = "".join(rng.sample(ascii_lowercase, num_givens + num_steps))
    values = [rng.randrange(2, MODULUS) for _ in range(num_givens)]
    steps: list[Step] = []
    while len(steps) < num_steps:
        step = _random_step(rng, len(values))
        value = step.op.apply(values[step.left], values[step.right])
        if value:  # a zero would make everything before it irrelevant at the next product
            steps.append(step)
            values.append(value)
    return Puzzle(names, tuple(values[:num_givens]), tuple(steps))


def _random_step(rng: Random, num_letters: int) -> Step:
    """Draws a step of the last letter and another one: every letter is needed, every slip reaches the answer."""
    op = rng.choice((Op.PLUS, Op.MINUS, Op.TIMES, Op.TIMES))
    sides = [num_letters - 1, rng.randrange(num_letters - 1)]
    rng.shuffle(sides)
    return Step(op, *sides)


def generate(split: Split, seed: int, level: Level | None = None) -> Iterator[Puzzle]:
    """Yields distinct puzzles of one split without end; without a level the levels take turns."""
    rng = Random(f"{split.name} {seed}")
    seen: set[str] = set()
    turns = [level] if level else list(Level)
    while True:
        puzzle = random_puzzle(rng, turns[len(seen) % len(turns)].value)
        if puzzle.split is split and puzzle.key not in seen:
            seen.add(puzzle.key)
            yield puzzle


_GIVEN = re.compile(r"([a-z]) *= *(\d+)")
_DEFINITION = re.compile(r"([a-z]) *= *([a-z]) *([-+*]) *([a-z])")
_QUESTION = re.compile(r"([a-z]) *\?")


def parse_puzzle(text: str) -> Puzzle:
    """Parses a puzzle, whatever its spaces; raises UserError if the text is not one."""
    *clauses, question = [clause.strip() for clause in text.strip().split(";")]
    names, givens = "", []
    steps: list[Step] = []
    for clause in clauses:
        if (match := _GIVEN.fullmatch(clause)) and not steps:
            givens.append(_checked_value(match[2]))
        elif match := _DEFINITION.fullmatch(clause):
            steps.append(_checked_step(match, names))
        else:
            raise _not_a_puzzle(f"{clause!r} defines no letter")
        if match[1] in names:
            raise _not_a_puzzle(f"{match[1]!r} is defined twice")
        names += match[1]
    _check_sizes(len(givens), len(steps))
    asked = _QUESTION.fullmatch(question)
    if asked is None or asked[1] != names[-1]:
        raise _not_a_puzzle(f"it ends with {question!r} instead of '{names[-1]}?', the last letter")
    return Puzzle(names, tuple(givens), tuple(steps))


def _checked_value(digits: str) -> int:
    if int(digits) >= MODULUS or digits != str(int(digits)):
        raise _not_a_puzzle(f"{digits} is not a number from 0 to {MODULUS - 1}")
    return int(digits)


def _checked_step(match: re.Match[str], names: str) -> Step:
    left, right = names.find(match[2]), names.find(match[4])
    if min(left, right) < 0:
        raise _not_a_puzzle(f"{match[0]!r} uses a letter not defined before it")
    if left == right or max(left, right) != len(names) - 1:
        raise _not_a_puzzle(f"{match[0]!r} must use the letter just before, {names[-1]!r}, and another one")
    return Step(Op(match[3]), left, right)


def _check_sizes(num_givens: int, num_steps: int) -> None:
    if not GIVENS[0] <= num_givens <= GIVENS[1]:
        raise _not_a_puzzle(f"it gives {num_givens} numbers, not {GIVENS[0]} to {GIVENS[1]}")
    if not 1 <= num_steps <= MAX_STEPS:
        raise _not_a_puzzle(f"it defines {num_steps} letters by a calculation, not 1 to {MAX_STEPS}")


def _not_a_puzzle(reason: str) -> UserError:
    return UserError(
        f"not a register puzzle: {reason}. The bundled model pawn solves only puzzles such as "
        "'a = 17; b = 5; c = a * b; d = c - a; d?' (68, modulo 97); anything else needs a real model."
    )

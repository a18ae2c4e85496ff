"""Puzzles and traces: text, splits, exact answers, and a verifier that agrees with the generator's own knowledge."""

from itertools import islice
from random import Random
from string import ascii_lowercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gambit.errors import UserError
from gambit.pawn.puzzles import GIVENS, MAX_STEPS, MODULUS, Level, Op, Puzzle, Split, Step, generate, parse_puzzle
from gambit.pawn.puzzles import random_puzzle as draw
from support.tables import table

rngs = st.integers(0, 2**32).map(Random)
puzzles = st.builds(draw, rngs, st.integers(1, MAX_STEPS), st.integers(*GIVENS))
EXAMPLE = parse_puzzle("a = 17; b = 61; c = a * b; d = c - a; d?")


@given(puzzles)
def test_parse_reads_back_what_text_renders(puzzle: Puzzle) -> None:
    assert parse_puzzle(puzzle.text) == puzzle
    assert parse_puzzle(puzzle.text.replace(" ", "")) == puzzle


@given(puzzles)
def test_answer_is_exact(puzzle: Puzzle) -> None:
    """Another way to the same number: let Python evaluate the text in integers and reduce once."""
    *definitions, question = puzzle.text.split("; ")
    values: dict[str, int] = {}
    for name, expression in (definition.split(" = ") for definition in definitions):
        values[name] = eval(expression, {}, values)
    assert values[question[0]] % MODULUS == puzzle.answer


@given(puzzles, rngs)
def test_key_ignores_names_and_the_order_of_commuting_sides(puzzle: Puzzle, rng: Random) -> None:
    names = "".join(rng.sample(ascii_lowercase, len(puzzle.names)))
    steps = [s if s.op is Op.MINUS else Step(s.op, s.right, s.left) for s in puzzle.steps]
    twin = Puzzle(names, puzzle.givens, tuple(steps))
    assert (twin.key, twin.split, twin.answer) == (puzzle.key, puzzle.split, puzzle.answer)


@given(puzzles)
def test_key_sees_numbers_and_operators(puzzle: Puzzle) -> None:
    first = puzzle.steps[0]
    other = Step(Op.PLUS if first.op is not Op.PLUS else Op.MINUS, first.left, first.right)
    assert Puzzle(puzzle.names, puzzle.givens, (other, *puzzle.steps[1:])).key != puzzle.key


def test_splits_are_disjoint_and_deterministic() -> None:
    drawn = {split: list(islice(generate(split, seed=3), 60)) for split in Split}
    for split, found in drawn.items():
        assert all(puzzle.split is split for puzzle in found)
        assert len({puzzle.key for puzzle in found}) == len(found)
        assert found == list(islice(generate(split, seed=3), 60))
    assert len({p.key for found in drawn.values() for p in found}) == 60 * len(Split)


def test_levels_take_turns_or_are_chosen() -> None:
    assert [len(p.steps) for p in islice(generate(Split.DEV, 0), 4)] == [10, 14, 18, 10]
    assert {len(p.steps) for p in islice(generate(Split.DEV, 0, Level.HARD), 4)} == {18}


@table(
    ("text", "reason"),
    [
        ("What is 2 + 2?", "gives 0 numbers"),
        ("Let x = 2; x?", "defines no letter"),
        ("a = 17; b = 61; c = a * b; d = c - a; c?", "the last letter"),
        ("a = 17; b = 97; c = a * b; c?", "97 is not a number from 0 to 96"),
        ("a = 17; b = 61; c = a * z; c?", "not defined before"),
        ("a = 17; b = 61; c = a * b; d = a - b; d?", "must use the letter just before"),
        ("a = 17; b = 61; a = a * b; a?", "defined twice"),
        ("a = 17; b = a * a; b?", "must use the letter just before"),
        ("a = 17; b = 61; b?", "defines 0 letters"),
        ("", "gives 0 numbers"),
    ],
)
def test_text_that_is_no_puzzle_says_why(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_puzzle(text)

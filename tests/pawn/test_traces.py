"""Random traces, the verifier that agrees with them, and the judge whose chances come true."""

from itertools import islice, pairwise
from random import Random
from statistics import fmean

import pytest
from benchmarks.pawn.judge import FRACTIONS, chance_of_success, judge
from benchmarks.pawn.traces import (
    BOUNDARY,
    HASTY_STEPS,
    MISREADING_RATE,
    TRAP_RATE,
    WAIT,
    Line,
    State,
    Status,
    advance,
    continue_trace,
    misread,
    misreading_rate,
    random_trace,
    verify,
)
from hypothesis import given
from hypothesis import strategies as st

from gambit.pawn.puzzles import GIVENS, MAX_STEPS, MODULUS, Puzzle, Split, generate, parse_puzzle
from gambit.pawn.puzzles import random_puzzle as draw
from support.tables import table

rngs = st.integers(0, 2**32).map(Random)
puzzles = st.builds(draw, rngs, st.integers(1, MAX_STEPS), st.integers(*GIVENS))
EXAMPLE = parse_puzzle("a = 17; b = 61; c = a * b; d = c - a; d?")


@given(puzzles, rngs)
def test_the_verifier_agrees_with_the_generator(puzzle: Puzzle, rng: Random) -> None:
    drawn = list(continue_trace(puzzle, State(puzzle.givens), rng))
    verdict = verify(puzzle, "".join(line.text(puzzle) for line, _ in drawn))
    assert [thought.state for thought in verdict.thoughts] == [state for _, state in drawn]
    before = State(puzzle.givens)
    for thought, (line, after) in zip(verdict.thoughts, drawn, strict=True):
        step = puzzle.steps[line.step]
        reads_right = line.operands == (before.values[step.left], before.values[step.right])
        assert (thought.status is Status.MISREADING) == (not reads_right)
        assert (thought.status is Status.MISCALCULATION) == (
            reads_right and line.value != step.op.apply(*line.operands)
        )
        assert thought.status is not Status.MALFORMED
        before = after


@given(puzzles, rngs)
def test_a_trace_without_an_error_is_right(puzzle: Puzzle, rng: Random) -> None:
    verdict = verify(puzzle, random_trace(puzzle, rng))
    assert verdict.is_valid
    errors = {Status.MISREADING, Status.MISCALCULATION}
    assert verdict.is_correct or errors & {thought.status for thought in verdict.thoughts}


@given(puzzles, rngs)
def test_a_second_look_is_at_the_newest_step_and_betrays_no_miscalculation(puzzle: Puzzle, rng: Random) -> None:
    lines = [line for line, _ in continue_trace(puzzle, State(puzzle.givens), rng)]
    assert not lines[0].word
    for before, line in pairwise(lines):
        assert line.step == (before.step if line.word else before.step + 1)
        if line.word and line.operands == before.operands:
            assert line.value == before.value


def test_the_verifier_tells_the_ways_to_err() -> None:
    trace = BOUNDARY.join(
        [
            "c = a * b = 17 * 67 = 72",
            "Wait, c = a * b = 17 * 61 = 67",
            "d = c - a = 61 - 17 = 44",
            "Wait, d = c - a = 67 - 17 = 60",
            "Check: d = c - a = 67 - 17 = 50",
            "</think>\n\\boxed{50}",
        ]
    )
    verdict = verify(EXAMPLE, trace)
    errors = [Status.MISREADING, Status.RIGHT, Status.MISREADING, Status.MISCALCULATION, Status.RIGHT]
    assert [thought.status for thought in verdict.thoughts] == errors
    assert [thought.state.first_misreading for thought in verdict.thoughts] == [0, None, 1, None, None]
    assert verdict.is_valid
    assert verdict.is_correct


def test_the_verifier_tells_what_is_inherited() -> None:
    verdict = verify(EXAMPLE, "c = a * b = 17 * 67 = 72\n\nd = c - a = 72 - 17 = 55\n\n</think>\n\\boxed{55}")
    assert [thought.status for thought in verdict.thoughts] == [Status.MISREADING, Status.INHERITED]
    assert verdict.is_valid
    assert not verdict.is_correct


@table(
    "trace",
    [
        "d = c - a = 67 - 17 = 50\n\n",  # out of turn
        "c = a + b = 17 + 61 = 78\n\n",  # another operator
        "c = b * a = 61 * 17 = 67\n\n",  # another definition
        "so c is 67\n\n",
        "Wait, c = a * b = 17 * 61 = 67\n\n",  # nothing to look at again
    ],
)
def test_the_verifier_calls_other_lines_malformed(trace: str) -> None:
    verdict = verify(EXAMPLE, trace)
    assert [thought.status for thought in verdict.thoughts] == [Status.MALFORMED]
    assert not verdict.is_valid


def test_the_verifier_reads_a_trace_still_being_written() -> None:
    verdict = verify(EXAMPLE, "<think>\nc = a * b = 17 * 61 = 67\n\nd = c -")
    assert [thought.status for thought in verdict.thoughts] == [Status.RIGHT]
    assert verdict.answer is None
    assert not verdict.is_valid


@given(st.integers(0, MODULUS - 1))
def test_a_misread_number_is_another_number(value: int) -> None:
    assert misread(value) != value
    assert 0 <= misread(value) < MODULUS


def test_traps_and_haste() -> None:
    puzzle = draw(Random(0), MAX_STEPS)
    values = (1,) * len(puzzle.names)
    traps = (17,) * len(puzzle.names)
    assert misreading_rate(puzzle, 0, values) == MISREADING_RATE and misreading_rate(puzzle, 0, traps) == TRAP_RATE
    assert misreading_rate(puzzle, HASTY_STEPS, traps) < TRAP_RATE / 2


# -- what can be known -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Puzzle, list[str]]]:
    """Traces of many puzzles; the seed is fixed, so that bounds on sums of them either hold or do not."""
    rng = Random(0)
    return [(puzzle, [random_trace(puzzle, rng) for _ in range(30)]) for puzzle in islice(generate(Split.DEV, 7), 120)]


def test_the_judges_chances_come_true(drawn: list[tuple[Puzzle, list[str]]]) -> None:
    """At every share of the steps, traces with a like chance succeed as often as it says."""
    judged = [(judge(puzzle, text), verify(puzzle, text).is_correct) for puzzle, texts in drawn for text in texts]
    for place, share in enumerate(FRACTIONS):
        rows = [(judgement.chances[place], is_correct) for judgement, is_correct in judged]
        for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 1.0)):
            members = [row for row in rows if low <= row[0] < high]
            if len(members) > 100:
                expected, reached = fmean(row[0] for row in members), fmean(row[1] for row in members)
                # wrong values that heal by chance, one in 50, are not in the judge's figure
                assert abs(expected - reached) < 0.05, (share, low, expected, reached)


def test_length_says_nothing(drawn: list[tuple[Puzzle, list[str]]]) -> None:
    wins, pairs = 0.0, 0
    for puzzle, texts in drawn:
        verdicts = [verify(puzzle, text) for text in texts]
        right = [len(verdict.thoughts) for verdict in verdicts if verdict.is_correct]
        wrong = [len(verdict.thoughts) for verdict in verdicts if not verdict.is_correct]
        wins += sum((r > w) + 0.5 * (r == w) for r in right for w in wrong)
        pairs += len(right) * len(wrong)
    assert abs(wins / pairs - 0.5) < 0.04, "four standard errors; in version 1 it was 0.26"


def test_words_tell_of_misreadings_only(drawn: list[tuple[Puzzle, list[str]]]) -> None:
    uneasy: dict[str, list[bool]] = {"sound": [], "miscalculated": [], "misread": []}
    for puzzle, texts in drawn:
        for text in texts:
            before, errors = State(puzzle.givens), set()
            for thought in verify(puzzle, text).thoughts:
                line = thought.state.newest
                assert line is not None
                if line.word:
                    kind = "miscalculated" if Status.MISCALCULATION in errors else "sound"
                    uneasy["misread" if before.first_misreading is not None else kind].append(line.word == WAIT)
                errors.add(thought.status)
                before = thought.state
    assert fmean(uneasy["misread"]) > 0.87
    assert fmean(uneasy["sound"]) < 0.13 and fmean(uneasy["miscalculated"]) < 0.15


def test_the_judge_sees_a_misreading_and_no_miscalculation() -> None:
    def chance_after(left: int, right: int, value: int) -> float:
        return chance_of_success(EXAMPLE, advance(EXAMPLE, State(EXAMPLE.givens), Line(0, left, right, value)))

    sound, miscalculated, misread_one = chance_after(17, 61, 66), chance_after(17, 61, 65), chance_after(17, 67, 72)
    assert sound == miscalculated > 0.8
    assert 0 < misread_one < 0.25 * sound, "a second look may yet read it right"
    stuck = "c = a * b = 17 * 67 = 72\n\nd = c - a = 72 - 17 = 55\n\n"
    assert judge(EXAMPLE, stuck).chances[-1] == 0.0 and judge(EXAMPLE, stuck).has_misreading

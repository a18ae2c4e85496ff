"""The perfect judge: the exact chance that a trace succeeds, given all that can be seen without calculating again.

It sees every misreading, every trap ahead and how often a trace errs; of a miscalculation it knows only how often one
happens. It cannot know more and still be a judge: the right answer is the commonest one, so whoever could tell a
miscalculated trace from the others could as well name the answer and would need no traces.
"""

import math
from dataclasses import dataclass

from benchmarks.pawn.traces import MISCALCULATION_RATE, SECOND_LOOK_RATE, State, misreading_rate, verify

from gambit.pawn.puzzles import Puzzle

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One trace: its chance of success at each share of its steps, and the verdict on it."""

    chances: tuple[float, ...]
    is_valid: bool
    has_misreading: bool  # one that stands in the end


def judge(puzzle: Puzzle, text: str) -> Judgement:
    verdict = verify(puzzle, text)
    states = [thought.state for thought in verdict.thoughts] or [State(puzzle.givens)]
    reached = [states[max(0, math.ceil(share * len(states)) - 1)] for share in FRACTIONS]
    return Judgement(
        chances=tuple(chance_of_success(puzzle, state) for state in reached),
        is_valid=verdict.is_valid,
        has_misreading=states[-1].first_misreading is not None,
    )


def chance_of_success(puzzle: Puzzle, state: State) -> float:
    """Returns the chance that no step was or will be wrong; a wrong value that heals by chance is left out."""
    num_done = state.num_done(puzzle)
    unharmed: float = (1 - MISCALCULATION_RATE) ** len(puzzle.steps)
    values = _as_read(puzzle, state)
    for index in range(num_done, len(puzzle.steps)):
        unharmed *= 1 - misreading_rate(puzzle, index, values)
        step = puzzle.steps[index]
        values = (*values, step.op.apply(values[step.left], values[step.right]))
    return unharmed * _chance_of_reading_right(puzzle, state)


def _chance_of_reading_right(puzzle: Puzzle, state: State) -> float:
    """Returns the chance that the steps so far are read right in the end: the newest may yet be computed anew."""
    newest = state.num_done(puzzle) - 1
    if state.first_misreading is not None and state.first_misreading < newest:
        return 0.0
    as_it_is = float(state.first_misreading is None)
    if newest < 0 or state.is_finished(puzzle):
        return as_it_is
    anew = 1 - misreading_rate(puzzle, newest, state.values)
    return (1 - SECOND_LOOK_RATE) * as_it_is + SECOND_LOOK_RATE * anew


def _as_read(puzzle: Puzzle, state: State) -> tuple[int, ...]:
    """The values on the page, the newest as a second look that reads right would have it."""
    newest = state.num_done(puzzle) - 1
    if newest < 0 or state.first_misreading != newest:
        return state.values
    step = puzzle.steps[newest]
    return (*state.values[:-1], step.op.apply(state.values[step.left], state.values[step.right]))

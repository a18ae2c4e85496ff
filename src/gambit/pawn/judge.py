"""The perfect judge: how likely a trace is to succeed, by rollouts from its exact state."""

import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from statistics import fmean

from gambit.pawn.puzzles import Puzzle
from gambit.pawn.traces import State, Verdict, continue_trace, verify

FRACTIONS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of one trace: its chance of success at each share of its steps, and what the verifier says."""

    chances: tuple[float, ...]
    is_valid: bool
    num_thoughts: int


@dataclass(frozen=True, slots=True)
class _Job:
    puzzle: Puzzle
    texts: list[str]
    num_rollouts: int


def judge(
    puzzles: Sequence[Puzzle], texts: list[list[str]], num_rollouts: int, num_workers: int
) -> list[list[Judgement]]:
    jobs = [_Job(puzzle, row, num_rollouts) for puzzle, row in zip(puzzles, texts, strict=True)]
    if num_workers <= 1:
        return [_judge_puzzle(job) for job in jobs]
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_judge_puzzle, jobs, chunksize=4))


def _judge_puzzle(job: _Job) -> list[Judgement]:
    chances: dict[State, float] = {}  # traces in the same state share one value

    def chance(state: State) -> float:
        if state not in chances:
            chances[state] = chance_of_success(job.puzzle, state, job.num_rollouts)
        return chances[state]

    verdicts = [verify(job.puzzle, text) for text in job.texts]
    return [
        Judgement(tuple(map(chance, _states(job.puzzle, verdict))), verdict.is_valid, len(verdict.thoughts))
        for verdict in verdicts
    ]


def _states(puzzle: Puzzle, verdict: Verdict) -> list[State]:
    """The exact state at each share of the steps."""
    states = [thought.state for thought in verdict.thoughts] or [State(puzzle.givens)]
    return [states[max(0, math.ceil(q * len(states)) - 1)] for q in FRACTIONS]


def chance_of_success(puzzle: Puzzle, state: State, num_rollouts: int) -> float:
    if state.is_finished(puzzle):
        return float(state.values[-1] == puzzle.answer)
    rng, answer = Random(f"{puzzle.key} {state}"), puzzle.answer
    return fmean(_outcome(puzzle, state, rng) == answer for _ in range(num_rollouts))


def _outcome(puzzle: Puzzle, state: State, rng: Random) -> int:
    for _, after in continue_trace(puzzle, state, rng):
        state = after
    return state.values[-1]

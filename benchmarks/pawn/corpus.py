"""Training traces as padded token arrays, made in parallel, of puzzles of the training split only."""

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random

import numpy as np
import numpy.typing as npt
from benchmarks.pawn.traces import random_trace
from benchmarks.pawn.vocabulary import END, ID, PAD, encode, render_prompt

from gambit.pawn.puzzles import GIVENS, MAX_STEPS, Puzzle, Split, random_puzzle

WIDTHS = (256, 384, 576)  # rows are padded to the next of these; the rare longer trace is dropped
TRACES_PER_PUZZLE = 4  # drawing a puzzle of the right split costs more than a trace
TRACES_PER_JOB = 2000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of one width: tokens, and where each row's prompt ends and its trace ends."""

    tokens: npt.NDArray[np.uint8]
    spans: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    prompt_length: int

    @property
    def width(self) -> int | None:
        return next((width for width in WIDTHS if len(self.ids) <= width), None)


def make_corpus(num_traces: int, seed: int, num_workers: int) -> list[Bucket]:
    num_jobs = -(-num_traces // TRACES_PER_JOB)
    sizes = [min(TRACES_PER_JOB, num_traces - TRACES_PER_JOB * job) for job in range(num_jobs)]
    jobs = [(f"corpus {seed} {job}", size) for job, size in enumerate(sizes)]
    if num_workers <= 1:
        return _merged([_make_part(job) for job in jobs])
    # spawn, not fork: the parent may already hold threads of torch
    with get_context("spawn").Pool(num_workers) as pool:
        return _merged(pool.map(_make_part, jobs, chunksize=1))


def _merged(parts: list[list[Bucket]]) -> list[Bucket]:
    merged = [
        Bucket(np.concatenate([b.tokens for b in same]), np.concatenate([b.spans for b in same]))
        for same in zip(*parts, strict=True)
    ]
    return [bucket for bucket in merged if len(bucket.tokens)]


def _make_part(job: tuple[str, int]) -> list[Bucket]:
    seed, num_traces = job
    rows: dict[int | None, list[_Row]] = {}
    for row in _rows(Random(seed), num_traces):
        rows.setdefault(row.width, []).append(row)
    return [_bucket(width, rows.get(width, [])) for width in WIDTHS]


def _rows(rng: Random, num_traces: int) -> Iterator[_Row]:
    for first in range(0, num_traces, TRACES_PER_PUZZLE):
        puzzle = _training_puzzle(rng)
        prompt = encode(render_prompt(puzzle.text))
        for _ in range(min(TRACES_PER_PUZZLE, num_traces - first)):
            yield _Row(prompt + encode(random_trace(puzzle, rng) + END), len(prompt))


def _training_puzzle(rng: Random) -> Puzzle:
    """Any size a user may ask for; long ones more often, since most is to be learnt there."""
    while True:
        num_steps = max(rng.randint(1, MAX_STEPS), rng.randint(1, MAX_STEPS))
        puzzle = random_puzzle(rng, num_steps, rng.randint(*GIVENS))
        if puzzle.split is Split.TRAIN:
            return puzzle


def _bucket(width: int, rows: list[_Row]) -> Bucket:
    tokens = np.full((len(rows), width), ID[PAD], np.uint8)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row.ids)] = row.ids
    spans = np.array([(row.prompt_length, len(row.ids)) for row in rows], np.int32).reshape(-1, 2)
    return Bucket(tokens, spans)

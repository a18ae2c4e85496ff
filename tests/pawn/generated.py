"""A collection without a network: pawn's own random traces, with states that tell what the network's should tell."""

from itertools import islice
from pathlib import Path
from random import Random

import torch

from collected import HIDDEN, header
from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.pawn.traces import random_trace, verify
from gambit.pawn.vocabulary import END, ID, encode
from gambit.training.storage import ProblemRecord, TraceRecord, writing


def make_generated(folder: Path, split: Split, num_puzzles: int, num_traces: int) -> Path:
    """Each state knows whether its trace has misread a number so far, and nothing of miscalculations."""
    rng, noise = Random(f"{split.name}"), torch.Generator().manual_seed(0)
    source = f"pawn:{split.name.lower()}"
    with writing(folder, header(source=source, positions=("boundary",), traces_per_problem=num_traces)) as writer:
        for puzzle in islice(generate(split, 0), num_puzzles):
            writer.add(*_problem(puzzle, [random_trace(puzzle, rng) for _ in range(num_traces)], noise))
    return folder


def _problem(
    puzzle: Puzzle, texts: list[str], noise: torch.Generator
) -> tuple[list[ProblemRecord], dict[str, torch.Tensor]]:
    verdicts = [verify(puzzle, text) for text in texts]
    tokens = [encode(text + END) for text in texts]
    ends = [[place + 1 for place, token in enumerate(row) if token == ID["\n\n"]] for row in tokens]
    traces = tuple(
        TraceRecord(answer=str(verdict.answer), is_correct=verdict.is_correct, num_tokens=len(row),
                    num_steps=len(boundaries), end="stop")
        for verdict, row, boundaries in zip(verdicts, tokens, ends, strict=True)
    )  # fmt: skip
    is_sound = [thought.state.first_misreading is None for verdict in verdicts for thought in verdict.thoughts]
    states = torch.randn(len(is_sound), HIDDEN, generator=noise)
    states[:, 0] += 3.0 * torch.tensor(is_sound)
    tensors = {
        "states.-1.boundary": states.half(),
        "step_ends": torch.tensor([end for row in ends for end in row], dtype=torch.int32),
        "confidences": torch.rand(len(is_sound), generator=noise),
        "tokens": torch.tensor([token for row in tokens for token in row], dtype=torch.int32),
    }
    record = ProblemRecord(id=puzzle.key[:16], question=puzzle.text, gold=str(puzzle.answer), traces=traces)
    return [record], tensors

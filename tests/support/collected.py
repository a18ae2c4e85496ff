"""Builders of collections without a model: states in which a direction tells right from wrong, as strongly as asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random

import torch
from benchmarks.pawn.traces import random_trace, verify
from benchmarks.pawn.vocabulary import END, ID, encode

from gambit.pawn.puzzles import Puzzle, Split, generate
from gambit.storage.folders import locked
from gambit.training.storage import (
    CollectionWriter,
    Header,
    ProblemRecord,
    TraceRecord,
    opened_collection,
    state_name,
)

HIDDEN = 8


def header(**changes: object) -> Header:
    values = {
        "id": "abc", "source": "made.jsonl", "model": "tiny", "model_hash": "0" * 64, "hidden_size": HIDDEN,
        "layers": (-1,), "positions": ("before", "boundary"), "boundary_rule": "blank-line", "traces_per_problem": 6,
        "has_confidence": True, "sampling": {"temperature": 1.0},
    }  # fmt: skip
    return Header(**{**values, **changes})


@contextmanager
def writing(folder: Path, header: Header) -> Iterator[CollectionWriter]:
    """Opens a collection as `gambit scorer collect` does, in a folder that no other process writes to."""
    with locked(folder):
        yield opened_collection(folder, header)


def trace_record(num_thoughts: int, is_correct: bool) -> TraceRecord:
    return TraceRecord(
        answer="7", is_correct=is_correct, num_tokens=5 * num_thoughts, num_thoughts=num_thoughts, end="stop"
    )


def problem_record(name: str, traces: list[TraceRecord]) -> ProblemRecord:
    return ProblemRecord(id=name, question=f"what is {name}?", gold="7", traces=tuple(traces))


def blank_tensors(problems: list[ProblemRecord]) -> dict[str, torch.Tensor]:
    """As many rows as these problems need, and nothing in them."""
    traces = [trace for problem in problems for trace in problem.traces]
    num_thoughts, num_tokens = sum(t.num_thoughts for t in traces), sum(t.num_tokens for t in traces)
    tensors = {state_name(-1, position): torch.zeros(num_thoughts, HIDDEN) for position in header().positions}
    return {**tensors, "thought_ends": torch.zeros(num_thoughts), "confidences": torch.zeros(num_thoughts),
            "tokens": torch.zeros(num_tokens), **prompts_of(len(problems))}  # fmt: skip


def prompts_of(num_problems: int) -> dict[str, torch.Tensor]:
    """Prompts of two tokens each."""
    lengths = torch.full((num_problems,), 2, dtype=torch.int32)
    return {"prompts": torch.zeros(2 * num_problems, dtype=torch.int32), "prompt_lengths": lengths}


def make_collection(
    folder: Path,
    num_problems: int = 40,
    num_traces: int = 6,
    signal: float = 2.0,
    seed: int = 0,
    confidence_signal: float = 0.0,
    told_by: int = -1,
    **changes: object,
) -> Path:
    """The signal grows over a trace's thoughts: the outcome shows late, as in a real one. Wrong traces are longer.

    `told_by` is the layer that has the signal; others have noise.
    """
    generator = torch.Generator().manual_seed(seed)
    made = header(traces_per_problem=num_traces, **changes)
    with writing(folder, made) as writer:
        for start in range(0, num_problems, 5):
            names = [f"p{i}" for i in range(start, min(start + 5, num_problems))]
            problems, states, ends, confidences, tokens = [], [], [], [], []
            for name in names:
                records = []
                for trace in range(num_traces):
                    is_correct = trace % 2 == 0
                    count = 4 + int(torch.randint(0, 3, (), generator=generator)) + (not is_correct)
                    noise = torch.randn(count, made.hidden_size, generator=generator)
                    noise[:, 0] += signal * (1 if is_correct else -1) * torch.linspace(0.2, 1, count)
                    states.append(3 * noise + 1)
                    ends += [5 * (i + 1) for i in range(count)]
                    sure = confidence_signal if is_correct else 0.0
                    confidences += (torch.rand(count, generator=generator) + sure).tolist()
                    tokens += list(range(5 * count))
                    records.append(trace_record(count, is_correct))
                problems.append(problem_record(name, records))
            told = torch.cat(states).half()
            tensors = {
                state_name(layer, position): told.clone()
                if layer == told_by
                else torch.randn(told.shape, generator=generator).half()
                for position in made.positions
                for layer in made.layers
            }
            tensors["thought_ends"] = torch.tensor(ends, dtype=torch.int32)
            tensors["confidences"] = torch.tensor(confidences)
            tensors["tokens"] = torch.tensor(tokens, dtype=torch.int32)
            writer.add(problems, tensors | prompts_of(len(problems)))
    return folder


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
                    num_thoughts=len(boundaries), end="stop")
        for verdict, row, boundaries in zip(verdicts, tokens, ends, strict=True)
    )  # fmt: skip
    is_sound = [thought.state.first_misreading is None for verdict in verdicts for thought in verdict.thoughts]
    states = torch.randn(len(is_sound), HIDDEN, generator=noise)
    states[:, 0] += 3.0 * torch.tensor(is_sound)
    tensors = {
        "states.-1.boundary": states.half(),
        "thought_ends": torch.tensor([end for row in ends for end in row], dtype=torch.int32),
        "confidences": torch.rand(len(is_sound), generator=noise),
        "tokens": torch.tensor([token for row in tokens for token in row], dtype=torch.int32),
        **prompts_of(1),
    }
    record = ProblemRecord(id=puzzle.key[:16], question=puzzle.text, gold=str(puzzle.answer), traces=traces)
    return [record], tensors

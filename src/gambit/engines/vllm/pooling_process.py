"""The process of a verifier on vLLM: gets token ids through a socket and answers with scores."""

from __future__ import annotations

import os
import sys
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gambit.errors import first_line
from gambit.scorers.readers.families import FAMILIES, read_config

if TYPE_CHECKING:
    from gambit.engines.vllm.compat.pooling import StatePooler
    from gambit.scorers.readers.heads import Head

Scores = list[tuple[float, int] | None]  # score and computed tokens; None: longer than its context


@dataclass(frozen=True, slots=True)
class PoolingSetup:
    """What the process is to run."""

    folder: str
    family: str
    options: dict[str, Any]  # of vLLM


@dataclass(frozen=True, slots=True)
class PoolingReady:
    """It runs."""

    context_tokens: int


@dataclass(frozen=True, slots=True)
class PoolingFailed:
    """It does not start, or cannot answer."""

    reason: str


def serve(connection: Connection) -> None:
    """Until the other side hangs up."""
    try:
        pooler, head = _start(connection.recv())
    except Exception as error:
        if os.environ.get("GAMBIT_DEBUG"):
            traceback.print_exc()
        connection.send(PoolingFailed(first_line(error)))
        return
    connection.send(PoolingReady(pooler.max_tokens))
    while True:
        try:
            sequences: list[array[int]] = connection.recv()
        except EOFError:
            return
        connection.send(_scores(pooler, head, sequences))


def _start(setup: PoolingSetup) -> tuple[StatePooler, Head]:
    import torch

    folder = Path(setup.folder)
    head = FAMILIES[setup.family].read_head(folder).to(torch.device("cpu"))
    from gambit.engines.vllm.compat.pooling import StatePooler  # takes seconds

    return StatePooler(setup.folder, str(read_config(folder)["model_type"]), setup.options), head


def _scores(pooler: StatePooler, head: Head, sequences: Sequence[array[int]]) -> Scores | PoolingFailed:
    short = [tokens for tokens in sequences if len(tokens) <= pooler.max_tokens]
    try:
        states, counts = pooler.states(short) if short else (None, [])
    except Exception as error:
        return PoolingFailed(first_line(error))
    probabilities = [] if states is None else head.probability(states).tolist()
    found = iter(zip(probabilities, counts, strict=True))
    return [next(found) if len(tokens) <= pooler.max_tokens else None for tokens in sequences]


def main() -> None:
    """The socket's number is the only argument."""
    serve(Connection(int(sys.argv[1])))

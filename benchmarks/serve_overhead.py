"""What the server costs: tokens a second of 8 requests at a time through `gambit serve`, against `solve_many`.

    python benchmarks/serve_overhead.py --out benchmarks/results/serve_overhead.json        # some minutes

Both run the bundled model on the same puzzles with the same seeds, in turns, so that whatever else the machine does
meets both. The figures are medians over the turns of the ratio of neighbours, by wall clock and by the processor time
of the process (where the machine is busy otherwise only the second says much). Half of the requests are streams.
Last, the time to the first words of a stream that begins while the 8 others run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from gambit.api import SearchConfig, Solver
from gambit.pawn import Level, Split, generate
from serve_load import KEYS, Server

AT_A_TIME = 8
PUZZLES = [
    puzzle.text for puzzle, _ in zip(generate(Split.DEV, 5, Level.EASY), range(AT_A_TIME), strict=False)
]  # fmt: skip
SEED = 1


class Turn(NamedTuple):
    """What 8 searches generated, and how long that took."""

    tokens: int
    seconds: float
    cpu_seconds: float


def cpu_seconds(pid: int) -> float:
    """That a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_process(solver: Solver, config: SearchConfig) -> Turn:
    began, cpu = time.perf_counter(), cpu_seconds(os.getpid())
    results = list(solver.solve_many(PUZZLES, config, concurrency=AT_A_TIME))
    tokens = sum(result.tokens.generated for result in results)
    return Turn(tokens, time.perf_counter() - began, cpu_seconds(os.getpid()) - cpu)


def body_of(puzzle: str, capacity: int, *, is_streamed: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": puzzle}]
    return {
        "model": "pawn",
        "messages": messages,
        "seed": SEED,
        "stream": is_streamed,
        "gambit": {"capacity": capacity},
    }


async def ask(client: httpx.AsyncClient, body: dict[str, object]) -> int:
    """The tokens that the search generated."""
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        return int(reply.json()["usage"]["completion_tokens"])
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return int(chunks[-1]["gambit"]["tokens"]["generated"])


async def through_server(server: Server, capacity: int) -> Turn:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600) as client:
        bodies = [body_of(puzzle, capacity, is_streamed=number % 2 == 0) for number, puzzle in enumerate(PUZZLES)]
        began, cpu = time.perf_counter(), cpu_seconds(server.process.pid)
        counts = await asyncio.gather(*(ask(client, body) for body in bodies))
        return Turn(sum(counts), time.perf_counter() - began, cpu_seconds(server.process.pid) - cpu)


async def first_words(url: str, capacity: int) -> tuple[float, float]:
    """Seconds to the first words of a stream beside 8 running searches, and to its end."""
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as client:
        others = [asyncio.ensure_future(ask(client, body_of(p, capacity, is_streamed=False))) for p in PUZZLES]
        await asyncio.sleep(0.5)
        began, first = time.perf_counter(), None
        body = body_of(PUZZLES[0], capacity, is_streamed=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if first is None and '"reasoning"' in line:
                    first = time.perf_counter() - began
        assert first is not None
        whole = time.perf_counter() - began
        await asyncio.gather(*others)
        return first, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--capacity", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = SearchConfig(capacity=options.capacity, seed=SEED)
    server = Server()
    turns: list[tuple[Turn, Turn]] = []
    with Solver("pawn") as solver:
        parts = (lambda: in_process(solver, config), lambda: asyncio.run(through_server(server, options.capacity)))
        for part in parts:
            part()
        for number in range(options.turns):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            found = {index: parts[index]() for index in order}
            assert found[0].tokens == found[1].tokens, "the same searches"
            turns.append((found[0], found[1]))
            print(f"solve_many {found[0]}, server {found[1]}", flush=True)
        firsts = [asyncio.run(first_words(server.url, options.capacity)) for _ in range(3)]
    server.close()
    report = {
        "requests_at_a_time": AT_A_TIME,
        "capacity": options.capacity,
        "turns_of_solve_many_and_server": [[turn._asdict() for turn in pair] for pair in turns],
        "speed_by_wall_clock": round(statistics.median(plain.seconds / served.seconds for plain, served in turns), 4),
        "speed_by_processor_time": round(
            statistics.median(plain.cpu_seconds / served.cpu_seconds for plain, served in turns), 4
        ),
        "first_words_and_end_seconds_under_load": [[round(value, 3) for value in pair] for pair in firsts],
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

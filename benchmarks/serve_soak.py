"""Two servers side by side for an hour at a tenth of `serve_load.py`'s rate: memory and descriptors must stay flat.

    python benchmarks/serve_soak.py --out benchmarks/results/serve_soak.json        # an hour
    python benchmarks/serve_soak.py --minutes 3 --settled 1                         # a look
    python benchmarks/serve_soak.py --minutes 20 --attacks 2                        # `serve_lockout.py` beside it

Each server has six of `serve_load.py`'s clients instead of 64. From the tenth minute on (`--settled`) memory may grow
by no more than 5 % and descriptors by no more than those of the clients. `--attacks` are spread evenly over the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from serve_load import MAX_RUNNING, MAX_WAITING, LoadClient, Server, Tally, warm_up
from serve_lockout import allow_many_files, attacked

CLIENTS = 6
SAMPLE_SECONDS = 10.0
MOST_GROWTH = 1.05
MOST_SLIPS = 0.01  # of all requests: searched alone, pawn writes a letter that its puzzle lacks in one of 3,500 lines
CONNECTIONS = 4 * CLIENTS  # the most that they hold


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's use of the machine at one moment."""

    seconds: float
    memory_mib: float
    descriptors: int


def sampled(server: Server, began: float) -> Sample:
    descriptors = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    return Sample(round(time.monotonic() - began, 1), round(server.memory_mib, 1), descriptors)


Attacks = list[dict[str, object]]  # on a server


async def soak(
    servers: list[Server], tallies: list[Tally], seconds: float, num_attacks: int
) -> tuple[list[list[Sample]], list[Attacks]]:
    """Loads all servers until the time is up; returns what each used, and how it stood the attacks."""
    began = time.monotonic()
    queues = [asyncio.Queue[int]() for _ in servers]
    for queue in queues:
        queue.put_nowait(0)

    def refill(queue: asyncio.Queue[int]) -> None:
        """Keeps each queue as full as it has clients until the end."""
        while queue.qsize() < CLIENTS and time.monotonic() - began < seconds:
            queue.put_nowait(0)

    clients = []
    for place, (server, tally, queue) in enumerate(zip(servers, tallies, queues, strict=True)):
        refill(queue)
        for number in range(CLIENTS):
            client = LoadClient(server.url, tally, 100 * place + number)
            clients.append(client.run(queue, lambda queue=queue: refill(queue)))
    running = asyncio.gather(*clients)
    attacking = [asyncio.create_task(attack_often(server, seconds, num_attacks)) for server in servers]
    samples: list[list[Sample]] = [[] for _ in servers]
    while not running.done():
        for server, found in zip(servers, samples, strict=True):
            found.append(sampled(server, began))
        print(*(found[-1] for found in samples), flush=True)
        await asyncio.wait({running}, timeout=SAMPLE_SECONDS)
    await running
    return samples, await asyncio.gather(*attacking)


async def attack_often(server: Server, seconds: float, num_attacks: int) -> Attacks:
    found: Attacks = []
    began = time.monotonic()
    for number in range(num_attacks):
        await asyncio.sleep(max(0.0, began + (number + 0.5) * seconds / num_attacks - time.monotonic()))
        at = round(time.monotonic() - began, 1)
        found.append({"seconds": at, **await asyncio.to_thread(attacked, server.url)})
    return found


def growth(samples: list[Sample], settled: float) -> dict[str, float]:
    """Returns how memory and descriptors of the last quarter compare with those of the first one since `settled`."""
    flat = [sample for sample in samples if sample.seconds >= settled]
    quarter = max(1, len(flat) // 4)
    first, last = flat[:quarter], flat[-quarter:]
    memory = [statistics.median(sample.memory_mib for sample in part) for part in (first, last)]
    descriptors = [statistics.median(sample.descriptors for sample in part) for part in (first, last)]
    return {"memory": round(memory[1] / memory[0], 4), "descriptors": descriptors[1] - descriptors[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settled", type=float, default=10.0, help="minutes after which both must be flat")
    parser.add_argument("--attacks", type=int, default=0, help="on each server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    allow_many_files()
    servers = [Server("--max-waiting", str(MAX_WAITING), "--max-running", str(MAX_RUNNING)) for _ in range(2)]
    tallies = [Tally() for _ in servers]
    for server in servers:
        asyncio.run(warm_up(server.url))
    samples, attacks = asyncio.run(soak(servers, tallies, 60 * options.minutes, options.attacks))
    report = {
        "minutes": options.minutes,
        "settled_after_minutes": options.settled,
        "servers": [
            {
                "ends": dict(tally.ends.most_common()),
                "wrong": tally.wrong,
                "growth": growth(found, 60 * options.settled),
                "attacks": stood,
                "samples": [asdict(sample) for sample in found[:: max(1, len(found) // 60)]],
                "exit_code": server.close(),
            }
            for server, tally, found, stood in zip(servers, tallies, samples, attacks, strict=True)
        ],
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    for server in report["servers"]:
        assert len(server["wrong"]) <= MOST_SLIPS * sum(server["ends"].values()), server
        assert "lost" not in server["ends"] and server["exit_code"] == 0, server
        assert server["growth"]["memory"] <= MOST_GROWTH and server["growth"]["descriptors"] <= CONNECTIONS, server


if __name__ == "__main__":
    main()

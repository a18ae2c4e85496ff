"""A thousand requests from 64 clients on one server: none may be lost or mixed up, and nothing may be left behind.

    python benchmarks/serve_load.py --out benchmarks/results/serve_load.json        # some minutes
    python benchmarks/serve_load.py --attack --out benchmarks/results/serve_load_attacked.json    # S1 beside it
    python benchmarks/serve_load.py --kinds --out benchmarks/results/serve_load_kinds.json        # half of other kinds
    python benchmarks/serve_load.py --engines 2 --kills 5 --requests 500 --connections 1000 \
        --out benchmarks/results/serve_load_ray.json                                # the same on engines under Ray

The bundled model behind `gambit serve`, with two keys. Requests differ at random in puzzle, search method, format,
streaming, budgets and seed; some clients leave early, some send what is no request. Every answer is checked against its
own puzzle: each line of the winner's thinking must be a definition of it. The server's memory is read after every
hundred requests, and its KV cache by the same small search before and after. With `--kills`, engines are killed at
random moments: what they were searching must end with an error that says so, and everything else as if nothing were.
With `--kinds`, half of the requests go to a second server through the real openai client: a tenth of each of five kinds
with tools, JSON objects and efforts (`serve_kinds.py`). With `--attack`, `serve_lockout.py` attacks the server once a
tenth of the requests are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gambit.events import Sample, from_json
from gambit.pawn.puzzles import Puzzle, random_puzzle
from kills import descendants, name_of
from serve_kinds import Kinds, command
from serve_lockout import allow_many_files, attacked

KEYS = ("sk-load-a", "sk-load-b")
MAX_RUNNING, MAX_WAITING = 16, 40  # fewer than there are clients: some are told to wait
POLICIES = ("", ":sc", ":single", ":step", ":best-of-n", ":deepconf")
BROKEN = (
    b"", b"{", b"[1, 2]", b"[" * 50_000, b'{"model": "pawn"}', b'{"model": "none", "messages": []}', b"\xff\xfe",
    json.dumps({"model": "pawn", "messages": [{"role": "user", "content": "hello"}]}).encode(),
    json.dumps({"model": "pawn", "messages": [{"role": "user", "content": "a?"}], "tools": [{}]}).encode(),
)  # fmt: skip


@dataclass
class Tally:
    """The ends of the requests."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Server:
    """`gambit serve pawn` in a process of its own."""

    def __init__(self, *options: str, command: list[str] | None = None, **environment: str) -> None:
        keys = [part for key in KEYS for part in ("--api-key", key)]
        command = command or [sys.executable, "-m", "gambit", "serve", "pawn", "--port", "0", *keys, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        assert self.process.stderr is not None
        self.url = next(line.split()[-1] for line in self.process.stderr if "/v1" in line).removesuffix("/v1")

    @property
    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def kill_an_engine(self, rng: random.Random) -> None:
        """SIGKILL to one of the processes under Ray that descend from this server's."""
        engines = [pid for pid in descendants(self.process.pid) if name_of(pid).startswith("ray::EngineActor")]
        if engines:
            os.kill(rng.choice(engines), signal.SIGKILL)

    def close(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=60)


def foreign_lines(puzzle: Puzzle, thinking: str) -> list[str]:
    """Lines of another puzzle: they compute with a letter that this one does not have. All, where most define nothing.

    The model misreads a definition or names its result wrongly now and then, but computes with its own letters.
    """
    own = {puzzle.definition(index) for index in range(len(puzzle.steps))}
    lines = [line for line in thinking.splitlines() if re.match(r"[a-z] = [a-z] [-+*] [a-z] = ", line)]
    unknown = [line for line in lines if line[:9] not in own]
    foreign = [line for line in unknown if not {line[4], line[8]} <= set(puzzle.names)]
    return unknown if len(unknown) > len(lines) / 2 else foreign


class LoadClient:
    """One of the clients: sends requests one after the other until all are sent."""

    def __init__(self, url: str, tally: Tally, seed: int, kinds: Kinds | None = None) -> None:
        self._rng = random.Random(seed)
        self._kinds = kinds
        self._tally = tally
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=4))

    async def run(self, numbers: asyncio.Queue[int], after: object) -> None:
        async with self._http:
            while not numbers.empty():
                numbers.get_nowait()
                began = time.monotonic()
                try:
                    self._tally.ends[await self._one()] += 1
                except Exception as error:
                    self._tally.ends["lost"] += 1
                    self._tally.wrong.append(f"{type(error).__name__}: {error}")
                self._tally.seconds.append(time.monotonic() - began)
                after()  # type: ignore[operator]

    async def _one(self) -> str:
        headers = {"authorization": f"Bearer {self._rng.choice(KEYS)}"}
        kind = self._rng.random()
        if kind < 0.1:
            reply = await self._http.post("/v1/chat/completions", content=self._rng.choice(BROKEN), headers=headers)
            assert reply.status_code in (400, 404), reply.text
            return "refused, as it should be"
        if kind >= 0.5 and self._kinds is not None:
            return await self._kinds.one(self._rng)
        puzzle = random_puzzle(self._rng, self._rng.randrange(2, 8))
        sending = asyncio.ensure_future(self._send(puzzle, headers))
        if kind < 0.3:
            done, _ = await asyncio.wait({sending}, timeout=self._rng.choice([0, 0.01, 0.1, 0.5]))
            sending.cancel()
            return await sending if done else "left early"
        return await sending

    async def _send(self, puzzle: Puzzle, headers: dict[str, str]) -> str:
        body = self._body(puzzle)
        while True:
            if body["stream"]:
                status, found = await self._streamed(body, headers)
            else:
                reply = await self._http.post("/v1/chat/completions", json=body, headers=headers)
                status, found = reply.status_code, reply.json()
            if status not in (429, 503):
                break
            self._tally.ends[f"told to wait ({status})"] += 1
            await asyncio.sleep(5 * self._rng.random())
        if "error" in found and "engine of this search died" in found["error"]["message"]:
            return "told that its engine died"
        assert status == 200, (status, found)
        return self._checked(puzzle, body, found)

    def _body(self, puzzle: Puzzle) -> dict[str, object]:
        options: dict[str, object] = {"capacity": self._rng.choice([2, 4, 8])}
        if self._rng.random() < 0.2:
            options["budget_tokens"] = self._rng.choice([50, 200, 1000])
        if self._rng.random() < 0.1:
            options["budget_seconds"] = self._rng.choice([0.05, 0.5])
        model = f"pawn{self._rng.choice(POLICIES)}"
        messages = [{"role": "user", "content": puzzle.text}]
        return {"model": model, "messages": messages, "stream": self._rng.random() < 0.5, "gambit": options}

    async def _streamed(self, body: dict[str, object], headers: dict[str, str]) -> tuple[int, dict[str, object]]:
        """The chunks put together as a whole answer."""
        message, last, is_done = {"content": "", "reasoning": ""}, {}, False
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status_code != 200:
                return reply.status_code, json.loads(await reply.aread())
            async for line in reply.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line.removeprefix("data: "))
                if "error" in last:
                    continue
                for name in message:
                    message[name] += last["choices"][0]["delta"].get(name) or ""
        assert is_done, "a stream without its end"
        if "error" in last:
            return 200, last
        assert last["choices"][0]["finish_reason"], "a stream without its end"
        return 200, {**last, "choices": [{**last["choices"][0], "message": message}], "usage": None}

    def _checked(self, puzzle: Puzzle, body: dict[str, object], found: dict[str, object]) -> str:
        choice, gambit = found["choices"][0], found["gambit"]
        budget = body["gambit"].get("budget_tokens")
        if foreign := foreign_lines(puzzle, choice["message"].get("reasoning") or ""):
            self._tally.wrong.append(f"{puzzle.text}: {foreign}")
        if budget is not None and gambit["tokens"]["generated"] > budget:
            self._tally.wrong.append(f"{gambit['tokens']} over a budget of {budget}")
        if found["usage"] and found["usage"]["completion_tokens"] != gambit["tokens"]["generated"]:
            self._tally.wrong.append(f"usage {found['usage']}, log {gambit['tokens']}")
        return "answered" if gambit["answer"] is not None else "answered without a readable answer"


def kv_peak(url: str) -> int:
    """The KV cache in use while a small search runs alone."""
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=60) as client:
        messages = [{"role": "user", "content": "a = 17; b = 61; c = a + b; c?"}]
        body = {"model": "pawn", "messages": messages, "seed": 1, "gambit": {"capacity": 4, "check_interval": 2}}
        search_id = client.post("/v1/chat/completions", json=body).json()["gambit"]["search_id"]
        lines = client.get(f"/page/searches/{search_id}/log").text.splitlines()
    return max(event.kv_used_tokens for event in map(from_json, lines) if isinstance(event, Sample))


async def warm_up(url: str) -> None:
    """Runs as many searches as ever run at a time, so that the KV cache of the local engine grows to its size."""
    rng = random.Random(-1)
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=600) as client:
        asked = [[{"role": "user", "content": random_puzzle(rng, 9).text}] for _ in range(MAX_RUNNING)]
        bodies = [{"model": "pawn:sc", "messages": each, "gambit": {"capacity": 8}} for each in asked]
        await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))


def crowd(url: str, count: int) -> dict[str, object]:
    """Connections that say nothing, `count` at once as far as the server lets them, and whoever asks beside them."""
    host, _, port = url.removeprefix("http://").partition(":")
    silent = [socket.create_connection((host, int(port)), timeout=60) for _ in range(count)]
    began = time.monotonic()
    status = httpx.get(f"{url}/health", timeout=60).status_code
    seconds = time.monotonic() - began
    for connection in silent:
        connection.close()
    return {"silent": count, "health": status, "seconds": round(seconds, 3)}


async def load(
    server: Server,
    tally: Tally,
    num_requests: int,
    num_clients: int,
    num_kills: int,
    *,
    with_attack: bool,
    talker: Server | None = None,
) -> dict[str, object] | None:
    """Sends all requests; returns how the server stood the attack beside them, None without one."""
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(num_requests):
        numbers.put_nowait(number)

    rng = random.Random(0)
    deaths = set(rng.sample(range(num_requests // 10, num_requests * 9 // 10), num_kills))

    attack: asyncio.Task[dict[str, object]] | None = None

    def after() -> None:
        nonlocal attack
        if with_attack and attack is None and len(tally.seconds) >= num_requests // 10:
            attack = asyncio.create_task(asyncio.to_thread(attacked, server.url))
        if len(tally.seconds) in deaths:
            server.kill_an_engine(rng)
        if len(tally.seconds) % 100 == 0:
            tally.memory_mib.append(round(server.memory_mib, 1))
            print(len(tally.seconds), tally.memory_mib[-1], dict(tally.ends), flush=True)

    kinds = None if talker is None else Kinds(talker.url, KEYS[0])
    clients = [LoadClient(server.url, tally, seed, kinds) for seed in range(num_clients)]
    await asyncio.gather(*(client.run(numbers, after) for client in clients))
    return None if attack is None else await attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--connections", type=int, default=10_000, help="silent ones, opened at the end")
    parser.add_argument("--engines", type=int, help="engines under Ray; default: one, without Ray")
    parser.add_argument("--kills", type=int, default=0, help="of these engines, at random moments")
    parser.add_argument("--kinds", action="store_true", help="half of the requests with tools, objects and efforts")
    parser.add_argument("--attack", action="store_true", help="of clients without a key, as in serve_lockout.py")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    allow_many_files()
    cluster = ["--ray", "--engines", str(options.engines)] if options.engines else []
    server = Server("--max-waiting", str(MAX_WAITING), "--max-running", str(MAX_RUNNING), *cluster)
    talker = Server(command=command(*KEYS)) if options.kinds else None
    tally = Tally()
    asyncio.run(warm_up(server.url))
    before = kv_peak(server.url)
    began = time.monotonic()
    attack = asyncio.run(
        load(server, tally, options.requests, options.clients, options.kills, with_attack=options.attack, talker=talker)
    )
    seconds = time.monotonic() - began
    crowded = crowd(server.url, options.connections)
    after = kv_peak(server.url)
    report = {
        "requests": options.requests,
        "clients": options.clients,
        "engines": options.engines or 1,
        "engines_killed": options.kills,
        "seconds": round(seconds, 1),
        "ends": dict(tally.ends.most_common()),
        "wrong": tally.wrong,
        "memory_mib_after_each_hundred": tally.memory_mib,
        "kv_tokens_of_one_search_before_and_after": [before, after],
        "connections": crowded,
        **({"attack": attack} if attack else {}),
        **({"exit_code_of_the_second_server": talker.close()} if talker else {}),
        "exit_code": server.close(),
    }
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    assert not tally.wrong and before == after


if __name__ == "__main__":
    main()

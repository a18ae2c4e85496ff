"""A server in a thread of the test's own process, and an engine that takes a step only when it is let."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
from openai import OpenAI

from gambit import events as ev
from gambit.config.options import SearchConfig
from gambit.pawn.puzzles import parse_puzzle
from gambit.results.record import fold
from gambit.serve.server import DrainingServer, bound_socket, serve
from gambit.serve.settings import ApiKey, ServeSettings

EASY = "a = 17; b = 61; c = a + b; c?"
CHAIN = "a = 17; b = 61; c = a + b; d = c * a; e = d - b; f = e * c; g = f + a; h = g * d; i = h - c; j = i + e; j?"
SMALL = SearchConfig(capacity=4, seed=0)  # a server without a seed draws one for every question, as its users want
KEY, OTHER_KEY = "sk-first", "sk-second"


def answer_of(question: str) -> str:
    return str(parse_puzzle(question).answer)


class Gate:
    """Stands before an engine's step. Open at first; when held, each step needs a permit."""

    def __init__(self, engine) -> None:
        self.num_steps = 0
        self._engine = engine
        self._step = engine.step
        self._permits: float = float("inf")
        self._is_stepping = False
        self._changed = threading.Condition()
        engine.step = self._gated

    def _gated(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self._permits > 0, timeout=60), "a test forgot to open its gate"
            self._permits -= 1
            self._is_stepping = True
        try:
            return self._step()
        finally:
            with self._changed:
                self._is_stepping = False
                self.num_steps += 1
                self._changed.notify_all()

    def hold(self) -> None:
        """Returns once the engine stands still: a step that was under way is over, and counted."""
        self.allow(0)
        with self._changed:
            assert self._changed.wait_for(lambda: not self._is_stepping, timeout=60)

    def allow(self, permits: float) -> None:
        with self._changed:
            self._permits = permits
            self._changed.notify_all()

    def open(self) -> None:
        self.allow(float("inf"))

    def wait_for_steps(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_steps >= count, timeout=60)

    def remove(self) -> None:
        self.open()
        self._engine.step = self._step


class Served:
    """A running server as a test sees it, from outside and from inside."""

    def __init__(self, server: DrainingServer, port: int, solver) -> None:
        self.server = server
        self.desk = server.desk
        self.port = port
        self.solver = solver
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = KEY, **options) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=options.pop("max_retries", 0), **options)

    def http(self, key: str | None = KEY, **options) -> httpx.Client:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)

    def ask(self, question: str = EASY, key: str = KEY, **fields):
        messages = [{"role": "user", "content": question}]
        return self.client(key).chat.completions.create(**{"model": "pawn", "messages": messages, **fields})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def record_of(self, search_id: str):
        """What the log of a search says."""
        lines = self.desk.searches[search_id].log.lines()
        return fold(map(ev.from_json, lines))

    def num_answers(self, path: str, status: int) -> float:
        labels = {"path": path, "status": str(status)}
        return self.desk.metrics.registry.get_sample_value("gambit_http_responses_total", labels) or 0

    def on_loop(self, function):
        """The result of a function called on the server's event loop."""
        found: Future = Future()
        self.desk._loop.call_soon_threadsafe(lambda: found.set_result(function()))
        return found.result(timeout=60)

    def wait_until_idle(self) -> None:
        """Until nothing is open and nothing is on the engine."""
        self.wait_until(lambda desk: not desk.num_open)

    def wait_until(self, is_so) -> None:
        async def told():
            while not is_so(self.desk):
                await self.desk.changed.listen()

        asyncio.run_coroutine_threadsafe(told(), self.desk._loop).result(timeout=60)

    @property
    def kv_used(self) -> int:
        return self.solver.engine._pool.blocks.used_tokens


@contextmanager
def serving(solver, base: SearchConfig = SMALL, **options) -> Iterator[Served]:
    options.setdefault("keys", (ApiKey(name="first", key=KEY), ApiKey(name="second", key=OTHER_KEY)))
    settings = ServeSettings(port=0, **options)
    bound = bound_socket(settings.host, 0)
    started: Future[DrainingServer] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(serve(solver, settings, base, bound, started.set_result)))
    thread.start()
    server = started.result(timeout=60)
    try:
        yield Served(server, bound.getsockname()[1], solver)
    finally:
        server.end_soon()
        thread.join(timeout=60)
        assert not thread.is_alive(), "the server does not end"

"""Runs the application on uvicorn: sockets, slow and too many connections, signals, a graceful end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gambit.cluster.serving import AnySolver
from gambit.config.options import SearchConfig
from gambit.errors import StopWish, UserError, reason_of
from gambit.serve.app import make_app
from gambit.serve.desk import SearchDesk
from gambit.serve.settings import ServeSettings

MAX_HEADER_BYTES = 32 * 1024
FAREWELL_SECONDS = 5  # for streams of the page to end


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, but not listening yet: a taken port is found before the model is loaded, and nobody waits on it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot serve at {host}:{port} ({reason_of(error)}): choose another --host or --port"
        ) from error
    return bound


def serve(
    solver: AnySolver,
    settings: ServeSettings,
    base: SearchConfig,
    bound: socket.socket,
    on_start: Callable[[DrainingServer], None] = lambda server: None,
) -> BaseException | None:
    """Until a signal ends it; gives what made the engine fail, where it did."""
    return asyncio.run(_serve(solver, settings, base, bound, on_start))


async def _serve(
    solver: AnySolver,
    settings: ServeSettings,
    base: SearchConfig,
    bound: socket.socket,
    on_start: Callable[[DrainingServer], None],
) -> BaseException | None:
    app = make_app(solver, settings, base)
    config = uvicorn.Config(
        app.front,
        http=_protocol(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=FAREWELL_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=None if settings.ssl_certfile is None else str(settings.ssl_certfile),
        ssl_keyfile=None if settings.ssl_keyfile is None else str(settings.ssl_keyfile),
    )
    server = DrainingServer(config, app.desk, settings.shutdown_timeout, on_start)
    await server.serve(sockets=[bound])
    return app.desk.engine_failure


class DrainingServer(uvicorn.Server):
    """The first signal lets running searches end, and answers new ones with 503; the second ends the process."""

    def __init__(
        self, config: uvicorn.Config, desk: SearchDesk, seconds: float, on_start: Callable[[DrainingServer], None]
    ) -> None:
        super().__init__(config)
        self.desk = desk
        self._seconds = seconds
        self._on_start = on_start
        self._ending: asyncio.Task[None] | None = None
        self._is_asked_to_end = False
        self._wish = StopWish()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start(self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._wish.is_repeated():
            os._exit(128 + sig)
        self.ask_to_end()

    def ask_to_end(self) -> None:
        """Drain, then end; from any thread."""
        self._is_asked_to_end = True

    async def on_tick(self, counter: int) -> bool:
        if (self._is_asked_to_end or self.desk.died.is_set()) and self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        await self.desk.drain(self._seconds)
        self.should_exit = True


def _protocol(settings: ServeSettings) -> type[asyncio.Protocol]:
    """uvicorn makes one per connection and passes no options of ours."""

    class _Connection(LimitedConnection):
        max_connections = settings.max_connections
        header_timeout = settings.header_timeout
        silent: ClassVar[dict[LimitedConnection, None]] = {}

    return _Connection


class LimitedConnection(H11Protocol):
    """A connection whose headers must come in time. Where there are too many, the one that was silent longest goes."""

    max_connections: int
    header_timeout: float
    silent: ClassVar[dict[LimitedConnection, None]]  # of one server: those whose headers are still to come
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) > self.max_connections:
            next(iter(self.silent)).give_up()

    def give_up(self) -> None:
        """End the connection without a word."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._await_headers()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """To what is not HTTP; a request that was under way is over then, and one answer to it is enough."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.header_timeout, self.give_up)
            self.silent[self] = None

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
            del self.silent[self]

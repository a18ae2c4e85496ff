"""The process of a server: sockets, deadlines of connections, signals, a graceful end."""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gambit.cluster.serving import AnySolver
from gambit.config.options import SearchConfig
from gambit.errors import StopWish, UserError, reason_of
from gambit.serve.app import make_app
from gambit.serve.queue import SearchDesk
from gambit.serve.settings import ServeSettings

MAX_HEADER_BYTES = 32 * 1024
LAST_STREAM_SECONDS = 5  # for streams of the page to end
OTHER_DESCRIPTORS = 256  # files and sockets of the process beside its clients' connections


def bound_socket(host: str, port: int) -> socket.socket:
    """Binds without listening, so that a taken port is found before the model is loaded, and no client waits on it."""
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


async def serve(
    solver: AnySolver,
    settings: ServeSettings,
    base: SearchConfig,
    bound: socket.socket,
    on_start: Callable[["DrainingServer"], None] = lambda server: None,
) -> BaseException | None:
    """Serves until a signal comes; returns the error that made the engine fail, if it did."""
    gateway, desk = make_app(solver, settings, base)
    config = uvicorn.Config(
        gateway,
        # uvicorn makes one object per connection, without options of ours
        http=partial(LimitedConnection, settings, _descriptors_for(settings.max_connections), {}),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.idle_timeout,  # type: ignore[arg-type] # it takes fractions as well
        timeout_graceful_shutdown=LAST_STREAM_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=None if settings.ssl_certfile is None else str(settings.ssl_certfile),
        ssl_keyfile=None if settings.ssl_keyfile is None else str(settings.ssl_keyfile),
    )
    await DrainingServer(config, desk, settings.shutdown_timeout, on_start).serve(sockets=[bound])
    return desk.engine_failure


class DrainingServer(uvicorn.Server):
    """The first signal lets running searches end, and answers new ones with 503; the second ends the process."""

    def __init__(
        self, config: uvicorn.Config, desk: SearchDesk, seconds: float, on_start: Callable[["DrainingServer"], None]
    ) -> None:
        super().__init__(config)
        self.desk = desk
        self._seconds = seconds
        self._on_start = on_start
        self._ending: asyncio.Task[None] | None = None
        self._is_ending = False
        self._wish = StopWish()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start(self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._wish.is_repeated():
            os._exit(128 + sig)
        self.end_soon()

    def end_soon(self) -> None:
        """Begins to drain and then end; any thread may call it."""
        self._is_ending = True

    async def on_tick(self, counter: int) -> bool:
        if (self._is_ending or self.desk.died.is_set()) and self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        await self.desk.drain(self._seconds)
        self.should_exit = True


def _descriptors_for(max_connections: int) -> int:
    """Returns how many connections the process can hold, after raising its own limit on open files where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(min(max_connections, wanted - OTHER_DESCRIPTORS), 1)


class LimitedConnection(H11Protocol):
    """A connection with a deadline, except while the server works on a request that has a key and is wholly there.

    Data that arrives moves no deadline, whatever the state of the request. Where there are too many connections, the
    one closes that has waited longest for its client. uvicorn has neither limit: its `limit_concurrency` would refuse
    `/health` too, and its keep-alive timer ends with the next byte.
    """

    def __init__(
        self,
        settings: ServeSettings,
        max_connections: int,
        waiting: dict["LimitedConnection", None],
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`waiting`: the connections of this server that have a deadline, the oldest first."""
        super().__init__(config, server_state, {**app_state, "admit": self.admit}, _loop)
        self._settings = settings
        self._max_connections = max_connections
        self._waiting = waiting
        self._deadline: asyncio.TimerHandle | None = None
        self._is_admitted = False

    def admit(self) -> None:
        """Gives an accepted request as long for its body as any, and no limit for its answer."""
        self._is_admitted = True
        self._set_deadline(self._settings.body_timeout + self._settings.header_timeout)  # the answer 408 comes before
        self._lift_deadline_if_whole()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        super().connection_made(transport)
        self._set_deadline(self._settings.header_timeout)
        if len(self.connections) > self._max_connections:
            next(iter(self._waiting)).give_up()

    def give_up(self) -> None:
        """Ends the connection without an answer."""
        self._lift_deadline()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._lift_deadline_if_whole()

    def _should_upgrade(self) -> bool:
        """Returns False: a request for another protocol is answered in this one, without a warning."""
        return False

    def on_response_complete(self) -> None:
        self._is_admitted = False
        super().on_response_complete()
        self._set_deadline(self.timeout_keep_alive)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP; a request that was under way is over then, and one answer to it is enough."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lift_deadline()
        super().connection_lost(exc)

    def _lift_deadline_if_whole(self) -> None:
        if self._is_admitted and self.conn.their_state in (h11.DONE, h11.MUST_CLOSE):
            self._lift_deadline()

    def _set_deadline(self, seconds: float) -> None:
        self._lift_deadline()
        if self in self.connections:  # else it was lost meanwhile
            self._deadline = self.loop.call_later(seconds, self.give_up)
            self._waiting[self] = None

    def _lift_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            del self._waiting[self]

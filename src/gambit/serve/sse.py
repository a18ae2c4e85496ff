"""Server-sent events that notice at once when the reader is gone, and answers that wait while somebody listens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gambit.serve.errors import as_api_error

T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect it
]


class GoneError(Exception):
    """The client has ended the connection: there is nobody to answer."""


def event(data: object, name: str | None = None) -> bytes:
    """One event; JSON has no raw newlines, so that it is one line."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream:
    """An ASGI response made of parts as they come. An error in the middle is an event; then the stream ends whole."""

    def __init__(self, parts: AsyncIterator[bytes], on_gone: Callable[[], None], *, has_done: bool = True) -> None:
        self._parts = parts
        self._on_gone = on_gone
        self._has_done = has_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
                self._on_gone()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as error:
            await send({"type": "http.response.body", "body": event(as_api_error(error).to_json()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE if self._has_done else b""})


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Awaitable[T], on_gone: Callable[[], None]) -> T:
    """The result of some work, unless the client goes away before it is there."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            on_gone()

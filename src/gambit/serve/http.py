"""Pieces of HTTP that all endpoints share: errors in OpenAI's shape, bodies within limits, server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gambit.cluster.serving import NoEngineError
from gambit.errors import UserError

KINDS = {
    **dict.fromkeys((400, 405, 413, 415, 422), "invalid_request_error"), 401: "authentication_error",
    403: "permission_error", 404: "not_found_error", 408: "timeout_error", 409: "conflict_error",
    429: "rate_limit_error", 503: "service_unavailable_error",
}  # fmt: skip


@dataclass(eq=False)
class ApiError(Exception):
    """An error for a client: the status of its answer, a sentence, and the parameter that is wrong."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def to_json(self) -> dict[str, object]:
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def closing(status: int, message: str) -> ApiError:
    """Returns an error after which the connection is closed, so that the rest of the request is not read."""
    return ApiError(status, message, headers={"connection": "close"})


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error that a client gets when its search has failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, NoEngineError):
        return ApiError(503, str(error), code="no_engine", headers={"retry-after": "5"})
    return ApiError(500, f"the search failed: {error}" if str(error) else f"the search failed: {type(error).__name__}")


Fields = dict[str, object]


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Returns the whole body; one that is too large or too slow ends the connection."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > max_bytes:
        raise closing(413, f"the body has {declared[:20]} bytes: at most {max_bytes} are taken (--max-body-bytes)")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise closing(413, f"the body has more than {max_bytes} bytes (--max-body-bytes)")
    except TimeoutError:
        raise closing(408, f"the body did not arrive within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise closing(400, "the connection ended before the body did") from None
    return bytes(body)


def parse_object(body: bytes) -> Fields:
    """Reads a JSON object; raises an error of status 400 for anything else, and for half of a surrogate pair."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    return value


T = TypeVar("T")
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect it
]


def event(data: object, name: str | None = None) -> bytes:
    """Returns an event, whose data are one line because JSON has no raw newlines."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def event_stream(parts: AsyncIterator[bytes], on_gone: Callable[[], None], *, has_done: bool = True) -> ASGIApp:
    """Returns an ASGI response of parts as they come. An error in the middle is sent as an event before the end."""

    async def send_all(send: Send) -> None:
        async def send_part(part: bytes, *, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": not is_last})

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            async for part in parts:
                await send_part(part)
        except Exception as error:
            await send_part(event(as_api_error(error).to_json()))
        await send_part(DONE if has_done else b"", is_last=True)

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await while_connected(receive, send_all(send), on_gone)

    return respond


async def while_connected(receive: Receive, work: Awaitable[T], on_gone: Callable[[], None]) -> T:
    """Returns the result of the work; raises `ClientDisconnect` if the client goes away before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            on_gone()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

"""The door of the server: request ids, keys, refused requests, errors in one shape, one log line per request."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gambit.errors import GambitError
from gambit.serve.errors import ApiError, as_api_error, bad_request, closing
from gambit.serve.metrics import RequestNote, RequestSpan, ServerMetrics, logger
from gambit.serve.settings import NOBODY, ApiKey, ServeSettings, is_loopback, key_of
from gambit.serve.sse import GoneError

OPEN_PATHS = ("/health", "/ping")
PAGE_PATHS = ("/", "/login", "/logout")  # and all under /page/: these ask for a session
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # it goes back in a header
SAFE_METHODS = ("GET", "HEAD")
KNOWN_PATHS = (*OPEN_PATHS, *PAGE_PATHS, "/version", "/metrics", "/v1/models", "/v1/chat/completions",
               "/v1/completions", "/v1/responses")  # fmt: skip


class Front:
    """Every request passes here before any handler sees it."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: ServerMetrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP alone, not {scope['type']}")
        headers = Headers(scope=scope)
        note = _note(scope, headers)
        span = RequestSpan(f"{note.method} {route_of(note.path)}", headers)
        reply = _Reply(send, note)
        try:
            _check_framing(headers)
            key = self._key(scope["path"], headers)
            note.key = key.name
            scope["state"].update(note=note, key=key)
            self._check_origin(scope, headers)
            if key is not NOBODY or not self._settings.needs_key:
                scope["state"]["admit"]()
            scope["app"] = self  # then the router raises what it does not find, instead of answering in its own words
            await self._app(scope, receive, reply)
        except GoneError:
            pass
        except Exception as error:
            await reply.refuse(_shown(error))
        finally:
            self._metrics.responses.labels(route_of(note.path), str(note.status)).inc()
            span.end({f"gambit.{name}": value for name, value in note.attributes().items()})
            if note.path not in OPEN_PATHS or note.status != 200:  # probes come every few seconds
                logger.info("%s", note.line(has_prompts=self._settings.log_prompts))

    def _key(self, path: str, headers: Headers) -> ApiKey:
        """Who asks. The page looks at its sessions itself."""
        if not self._settings.needs_key or path in OPEN_PATHS:
            return NOBODY
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        found = key_of(presented.strip(), self._settings.keys) if scheme.lower() == "bearer" else None
        if found is not None:
            return found
        if is_page(path):
            return NOBODY
        said = "the API key is not one of this server's" if presented else "this server asks for an API key"
        raise ApiError(401, f"{said}: send it as `Authorization: Bearer KEY`", code="invalid_api_key",
                       headers={"www-authenticate": "Bearer"})  # fmt: skip

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Other sites in a browser on this machine must not use a server that asks for no key, nor the page's forms."""
        if self._settings.needs_key and not is_page(scope["path"]):
            return
        host = _hostname(headers.get("host", ""))
        if not self._settings.needs_key and is_loopback(self._settings.host) and not is_loopback(host):
            raise ApiError(403, f"this server is for this machine alone, and was asked for as {host[:80]!r}")
        origin = headers.get("origin")
        if scope["method"] not in SAFE_METHODS and origin and origin.partition("://")[2] != headers.get("host"):
            raise ApiError(403, "requests of other sites are refused")


class _Reply:
    """Sends, and knows what was sent."""

    def __init__(self, send: Send, note: RequestNote) -> None:
        self._send = send
        self._note = note
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun, self._note.status = True, message["status"]
            added = [(b"x-request-id", self._note.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        if self._has_begun:  # too late for a status: the connection ends without an end of the body
            self._note.status = error.status
            raise error
        body = json.dumps(error.to_json()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
        await self({"type": "http.response.start", "status": error.status, "headers": _raw(headers)})
        await self({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _note(scope: Scope, headers: Headers) -> RequestNote:
    given = headers.get("x-request-id", "")
    request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
    client = scope.get("client")
    return RequestNote(request_id, scope["method"], scope["path"][:200], client[0] if client else None)


def _check_framing(headers: Headers) -> None:
    """Two ways to say where a body ends are how one request is smuggled inside another through a proxy."""
    lengths = headers.getlist("content-length")
    if ("transfer-encoding" in headers and lengths) or len(set(lengths)) > 1:
        raise closing(400, "the request says twice where its body ends")
    if len(headers.getlist("host")) > 1:
        raise closing(400, "the request names two hosts")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        raise bad_request(f"the Host {host[:80]!r} is none") from None


def _shown(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router: an unknown path, a method that a path does not have
        sentence = "there is no such path" if error.status_code == 404 else error.detail
        return ApiError(error.status_code, sentence, headers=error.headers)
    if isinstance(error, UnicodeError):
        return bad_request("the request holds text that is none")
    if isinstance(error, GambitError):
        return as_api_error(error)
    logging.getLogger("gambit.serve").error("a request failed", exc_info=error)  # not among the lines of requests
    return ApiError(500, "internal error: see the server's stderr")


def is_page(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith("/page/")


def route_of(path: str) -> str:
    """The path without ids, for metrics: what a stranger types makes no new series."""
    if path in KNOWN_PATHS:
        return path
    for known in ("/v1/models", "/v1/responses", "/page"):
        if path.startswith(f"{known}/"):
            return f"{known}/…"
    return "other"

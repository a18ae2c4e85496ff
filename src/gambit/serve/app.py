"""The application: a gateway that every request passes, the endpoints behind it, and how they are put together."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gambit.cluster.serving import AnySolver
from gambit.config.options import SearchConfig
from gambit.errors import GambitError
from gambit.serve import http
from gambit.serve.formats import CHAT, COMPLETION, CompletionFormat, KeptResponse, ResponseStore
from gambit.serve.http import (
    ApiError,
    GoneError,
    as_api_error,
    bad_request,
    closing,
    key_of_request,
    note_of_request,
    parse_object,
    read_body,
)
from gambit.serve.keys import NOBODY, ApiKey, key_of
from gambit.serve.metrics import RequestNote, RequestSpan, ServerMetrics, logger
from gambit.serve.page import LivePage
from gambit.serve.queue import SearchDesk, ServedSearch
from gambit.serve.requests import (
    AnyRequest,
    AskReader,
    ChatFields,
    CompletionFields,
    ModelIds,
    ResponseFields,
    SearchAsk,
)
from gambit.serve.settings import ServeSettings, is_loopback
from gambit.storage.identity import package_version

OPEN_PATHS = ("/health", "/ping")
PAGE_PATHS = ("/", "/login", "/logout")  # these and all under /page/ need a session
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # it goes back in a header
SAFE_METHODS = ("GET", "HEAD")
KNOWN_PATHS = (*OPEN_PATHS, *PAGE_PATHS, "/version", "/metrics", "/v1/models", "/v1/chat/completions",
               "/v1/completions", "/v1/responses")  # fmt: skip


class Gateway:
    """Checks key, origin and framing of every request, gives errors their form, and writes metrics and the log."""

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
            scope["app"] = self  # makes the router raise for unknown paths, instead of answering itself
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
        """Returns the key of the client; raises without one, except for the page, which checks its sessions itself."""
        if not self._settings.needs_key or path in OPEN_PATHS:
            return NOBODY
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        found = key_of(presented.strip(), self._settings.keys) if scheme.lower() == "bearer" else None
        if found is not None:
            return found
        if is_page(path):
            return NOBODY
        problem = "the API key is not one of this server's" if presented else "this server needs an API key"
        raise ApiError(
            401,
            f"{problem}: send it as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuses other web sites in a browser on this machine, where no key is needed, and for forms of the page."""
        if self._settings.needs_key and not is_page(scope["path"]):
            return
        host = _hostname(headers.get("host", ""))
        if not self._settings.needs_key and is_loopback(self._settings.host) and not is_loopback(host):
            raise ApiError(403, f"this server is for this machine alone, not for requests to {host[:80]!r}")
        origin = headers.get("origin")
        if scope["method"] not in SAFE_METHODS and origin and origin.partition("://")[2] != headers.get("host"):
            raise ApiError(403, "requests from other sites are refused")


class _Reply:
    """Sends the answer of a request, and remembers its status."""

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
    """Refuses two lengths of one body, with which a request can be smuggled inside another through a proxy."""
    lengths = headers.getlist("content-length")
    if ("transfer-encoding" in headers and lengths) or len(set(lengths)) > 1:
        raise closing(400, "the request has two lengths of its body")
    if len(headers.getlist("host")) > 1:
        raise closing(400, "the request names two hosts")


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        raise bad_request(f"cannot read the Host {host[:80]!r}") from None


def _shown(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router: an unknown path, a method that a path does not have
        sentence = "there is no such path" if error.status_code == 404 else error.detail
        return ApiError(error.status_code, sentence, headers=error.headers)
    if isinstance(error, UnicodeError):
        return bad_request("the request holds text that cannot be encoded")
    if isinstance(error, GambitError):
        return as_api_error(error)
    logging.getLogger("gambit.serve").error("a request failed", exc_info=error)  # not among the lines of requests
    return ApiError(500, "internal error: see the server's stderr")


def is_page(path: str) -> bool:
    return path in PAGE_PATHS or path.startswith("/page/")


def route_of(path: str) -> str:
    """Returns the path without ids, for metrics: unknown paths make no new series."""
    if path in KNOWN_PATHS:
        return path
    for known in ("/v1/models", "/v1/responses", "/page"):
        if path.startswith(f"{known}/"):
            return f"{known}/…"
    return "other"


@dataclass(frozen=True, slots=True)
class Api:
    """The endpoints of OpenAI's and vLLM's APIs."""

    desk: SearchDesk
    reader: AskReader
    ids: ModelIds
    settings: ServeSettings
    responses: ResponseStore

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completion, methods=["POST"]),
            Route("/v1/responses", self.new_response, methods=["POST"]),
            Route("/v1/responses/{id}", self.response),
            Route("/v1/responses/{id}", self.delete_response, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", self.cancel_response, methods=["POST"]),
            Route("/health", self.health),
            Route("/ping", self.ping),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
        ]

    # -- the model and the server ------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return JSONResponse(self.ids.to_json())

    async def model(self, request: Request) -> Response:
        return JSONResponse(self.ids.card(request.path_params["model"]))

    async def health(self, request: Request) -> Response:
        """Answers a balancer: 200 while searches are taken."""
        if self.desk.engine_failure is not None:
            return JSONResponse({"status": "the engine has failed"}, 503)
        if self.desk.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if not self.desk.has_engine:
            return JSONResponse({"status": "all engines are being started again"}, 503)
        return JSONResponse({"status": "ok"})

    async def ping(self, request: Request) -> Response:
        """Answers a supervisor: 200 unless the process must be restarted."""
        is_dead = self.desk.engine_failure is not None
        return JSONResponse({"status": "the engine has failed" if is_dead else "ok"}, 503 if is_dead else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version("gambit-search") or "unknown"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.desk.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    # -- completions -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> ASGIApp:
        return await self._complete(request, await self._read(ChatFields, request), CHAT)

    async def completion(self, request: Request) -> ASGIApp:
        return await self._complete(request, await self._read(CompletionFields, request), COMPLETION)

    async def _complete(self, request: Request, ask: SearchAsk, form: CompletionFormat) -> ASGIApp:
        search = self._open(request, ask)
        if ask.fields.stream:
            parts = form.stream(search, self.settings.sse_keep_alive_interval)
            return self._streamed(request, search, parts)
        answer = await http.while_connected(request, search.finished(), lambda: self.desk.abandon(search))
        return JSONResponse(form.whole(search, answer))

    async def _read(self, kind: type[AnyRequest], request: Request) -> SearchAsk:
        body = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout)
        return self.reader.read(kind, parse_object(body), key_of_request(request).limits)

    def _open(self, request: Request, ask: SearchAsk) -> ServedSearch:
        """Begins a search, after all checks that need no engine."""
        self.desk.solver.check_question(ask.last_message)
        search = self.desk.open(ask, key_of_request(request), has_reader=ask.fields.stream)
        note_of_request(request).search = search
        return search

    def _streamed(
        self, request: Request, search: ServedSearch, parts: AsyncIterator[bytes], *, has_done: bool = True
    ) -> http.EventStream:
        timed = self._timed(note_of_request(request), search, parts)
        return http.EventStream(timed, lambda: self.desk.abandon(search), has_done=has_done)

    async def _timed(
        self, note: RequestNote, search: ServedSearch, parts: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Notes when the first words of the model go out."""
        async for part in parts:
            if note.first_seconds is None and search.commentary.notes:
                note.first_seconds = time.monotonic() - note.began
                self.desk.metrics.first_thought_seconds.observe(note.first_seconds)
            yield part

    # -- responses ---------------------------------------------------------------------------------------------

    async def new_response(self, request: Request) -> ASGIApp:
        ask = await self._read(ResponseFields, request)
        fields = cast(ResponseFields, ask.fields)
        kept = KeptResponse(self._open(request, ask), fields)
        if fields.store:
            self.responses.keep(kept)
        if ask.fields.stream:
            parts = kept.stream(self.settings.sse_keep_alive_interval)
            if fields.background:  # it goes on when its client leaves
                return http.EventStream(parts, lambda: None, has_done=False)
            return self._streamed(request, kept.search, parts, has_done=False)
        if not fields.background:
            await http.while_connected(request, kept.search.finished(), lambda: self.desk.abandon(kept.search))
        return JSONResponse(kept.to_json())

    async def response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "a response cannot be streamed again: leave stream out", param="stream")
        return JSONResponse(self._kept(request).to_json())

    async def cancel_response(self, request: Request) -> Response:
        """Waits until its search is over, so that the answer is final."""
        kept = self._kept(request)
        if not kept.fields.background:
            raise ApiError(400, "only background responses can be cancelled: close the connection of the others")
        self.desk.abandon(kept.search)
        while not kept.search.is_over:
            await kept.search.bell.listen()
        return JSONResponse(kept.to_json())

    async def delete_response(self, request: Request) -> Response:
        kept = self._kept(request)
        self.desk.abandon(kept.search)
        self.responses.drop(kept)
        return JSONResponse({"id": kept.id, "object": "response", "deleted": True})

    def _kept(self, request: Request) -> KeptResponse:
        return self.responses.find(request.path_params["id"], key_of_request(request))


MOST_TRACES_AT_A_TIME = 1024  # where the engine names no limit of its own


@dataclass(frozen=True, slots=True)
class ServedApp:
    """The ASGI application, and its searches."""

    gateway: Gateway
    desk: SearchDesk


def make_app(solver: AnySolver, settings: ServeSettings, base: SearchConfig) -> ServedApp:
    """Puts the application together; called on the event loop that will run it."""
    metrics = ServerMetrics()
    max_traces = settings.max_traces or solver.most_traces or MOST_TRACES_AT_A_TIME
    desk = SearchDesk(solver, settings, metrics, max_traces)
    ids = ModelIds.of(settings.served_names, int(time.time()))
    metrics.watch(desk, settings.served_names[0])
    reader = AskReader(ids, base, max_traces, solver.capacity_of)
    api = Api(desk, reader, ids, settings, ResponseStore(settings.response_seconds, settings.max_responses))
    page = LivePage(desk, reader, ids, settings)
    router = Router([*api.routes(), *page.routes()], redirect_slashes=False)
    return ServedApp(Gateway(router, settings, metrics), desk)

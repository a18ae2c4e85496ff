"""The application: a gateway that every request passes, the endpoints behind it, and how they are put together."""

import logging
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gambit.cluster.serving import AnySolver
from gambit.config.options import SearchConfig
from gambit.errors import GambitError
from gambit.serve import http
from gambit.serve.formats import FORMATS, RESPONSES, ResponseStore
from gambit.serve.http import ApiError, as_api_error, bad_request, closing, parse_object, read_body
from gambit.serve.metrics import GONE, RequestNote, ServerMetrics, logger
from gambit.serve.page import LivePage
from gambit.serve.queue import SearchDesk
from gambit.serve.requests import RequestReader, ResponseFields
from gambit.serve.search import ServedSearch
from gambit.serve.settings import NOBODY, ApiKey, ServeSettings, is_loopback, key_of
from gambit.storage.files import package_version

OPEN_PATHS = ("/health", "/ping")
PAGE_PATHS = ("/", "/login", "/logout")  # these and all under /page/ need a session
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # it goes back in a header
SAFE_METHODS = ("GET", "HEAD")
KNOWN_PATHS = (*OPEN_PATHS, *PAGE_PATHS, "/version", "/metrics", "/v1/models", *FORMATS)


class Gateway:
    """Checks key, origin and framing of every request, shapes errors, and writes metrics and the log."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: ServerMetrics) -> None:
        self._app = app
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        note = _note(scope, headers)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"], added["x-content-type-options"] = note.request_id, "nosniff"
            await send(message)

        try:
            _check_framing(headers)
            key = self._key(scope["path"], headers)
            note.key = key.name
            scope["state"].update(note=note, key=key)
            self._check_origin(scope, headers, key)
            if key is not NOBODY or not self._settings.needs_key:
                scope["state"]["admit"]()
            scope["app"] = self  # makes the router raise for unknown paths, instead of answering itself
            await self._app(scope, receive, reply)
        except ClientDisconnect:
            pass
        except Exception as error:
            shown = _shown(error)
            if note.status != GONE:  # too late for a status: the connection ends without an end of the body
                note.status = shown.status
                raise shown from error
            await JSONResponse(shown.to_json(), shown.status, shown.headers)(scope, receive, reply)
        finally:
            self._metrics.responses.labels(route_of(note.path), str(note.status)).inc()
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
        problem += ": send it as `Authorization: Bearer KEY`"
        raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_origin(self, scope: Scope, headers: Headers, key: ApiKey) -> None:
        """Refuses other web sites in a browser, which could use a server without keys or a session of the page.

        A browser names the origin of every form and script that sends something. Cookies go to this site alone, too.
        """
        if self._settings.needs_key and not is_page(scope["path"]):
            return
        host = _hostname(headers.get("host", ""))
        if not self._settings.needs_key and is_loopback(self._settings.host) and not is_loopback(host):
            raise ApiError(403, f"this server is for this machine alone, not for requests to {host[:80]!r}")
        if scope["method"] in SAFE_METHODS:
            return
        origin = headers.get("origin")
        if origin is None and is_page(scope["path"]) and key is NOBODY:
            raise ApiError(403, "the request names no Origin: send it from this server's page, or with an API key")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            raise ApiError(403, "requests from other sites are refused")


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
        return ApiError(error.status_code, sentence, headers=error.headers or {})
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
    reader: RequestReader
    settings: ServeSettings
    responses: ResponseStore

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            *(Route(path, self.answer, methods=["POST"]) for path in FORMATS),
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
        return JSONResponse({"object": "list", "data": [self.reader.card(model) for model in self.reader.ids]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self.reader.card(request.path_params["model"]))

    async def health(self, request: Request) -> Response:
        """Answers a balancer: 200 while searches are taken."""
        if self.desk.engine_failure is None and self.desk.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if self.desk.engine_failure is None and not self.desk.has_engine:
            return JSONResponse({"status": "all engines are being started again"}, 503)
        return await self.ping(request)

    async def ping(self, request: Request) -> Response:
        """Answers a supervisor: 200 unless the process must be restarted."""
        if self.desk.engine_failure is not None:
            return JSONResponse({"status": "the engine has failed"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": package_version("gambit-search") or "unknown"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.desk.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    # -- searches ----------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> ASGIApp:
        """Answers a question in the format of its path: whole, as a stream, or in the background."""
        kind, form = FORMATS[request.url.path]
        body = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout)
        checked = await self.desk.held(self.reader.read(kind, parse_object(body), request.state.key))
        fields = checked.fields
        search = self.desk.open(checked, request.state.key, has_reader=fields.stream)
        request.state.note.search = search
        is_background = isinstance(fields, ResponseFields) and fields.background
        if isinstance(fields, ResponseFields) and fields.store:
            self.responses.keep(search)

        def leave() -> None:
            if not is_background:  # such a search goes on when its client leaves
                self.desk.abandon(search)

        if fields.stream:
            parts = form.stream(search, self.settings.sse_keep_alive_interval)
            return http.event_stream(parts, leave, has_done=form.has_done)
        if not is_background:
            await http.while_connected(request.receive, search.finished(), leave)
        return JSONResponse(form.whole(search))

    # -- responses that are kept -------------------------------------------------------------------------------

    async def response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "a response cannot be streamed again: leave stream out", param="stream")
        return JSONResponse(RESPONSES.whole(self._kept(request)))

    async def cancel_response(self, request: Request) -> Response:
        """Waits until its search is over, so that the answer is final."""
        search = self._kept(request)
        assert isinstance(search.request.fields, ResponseFields)
        if not search.request.fields.background:
            raise ApiError(400, "only background responses can be cancelled: close the connection of the others")
        self.desk.abandon(search)
        with suppress(ApiError):
            await search.finished()
        return JSONResponse(RESPONSES.whole(search))

    async def delete_response(self, request: Request) -> Response:
        search = self._kept(request)
        self.desk.abandon(search)
        self.responses.drop(search)
        return JSONResponse({"id": search.id_as("resp_"), "object": "response", "deleted": True})

    def _kept(self, request: Request) -> ServedSearch:
        return self.responses.find(request.path_params["id"], request.state.key)


MOST_TRACES_AT_A_TIME = 1024  # where the engine names no limit of its own


def make_app(solver: AnySolver, settings: ServeSettings, base: SearchConfig) -> tuple[Gateway, SearchDesk]:
    """Returns the ASGI application and its searches; called on the event loop that will run it."""
    metrics = ServerMetrics()
    max_traces = settings.max_traces or solver.most_traces or MOST_TRACES_AT_A_TIME
    desk = SearchDesk(solver, settings, metrics, max_traces)
    metrics.watch(desk, settings.served_names[0])
    reader = RequestReader(settings.served_names, base, max_traces, solver.capacity_of, adapters=settings.adapters)
    api = Api(desk, reader, settings, ResponseStore(settings.response_seconds, settings.max_responses))
    page = LivePage(desk, reader, settings)
    router = Router([*api.routes(), *page.routes()], redirect_slashes=False)
    return Gateway(router, settings, metrics), desk

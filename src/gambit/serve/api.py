"""The endpoints that clients of OpenAI's API and of vLLM know."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gambit.serve import sse
from gambit.serve.body import parse_object, read_body
from gambit.serve.chat import CHAT, COMPLETION, CompletionFormat
from gambit.serve.desk import SearchDesk, ServedSearch
from gambit.serve.errors import ApiError
from gambit.serve.metrics import RequestNote
from gambit.serve.model_ids import ModelIds
from gambit.serve.requests import AnyRequest, AskReader, ChatFields, CompletionFields, ResponseFields, SearchAsk
from gambit.serve.responses import KeptResponse, ResponseStore
from gambit.serve.settings import ApiKey, ServeSettings
from gambit.storage.versions import package_version


@dataclass(frozen=True, slots=True)
class Api:
    """The handlers, with what they need."""

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
        """Whether searches are taken: what a balancer asks."""
        if self.desk.engine_failure is not None:
            return JSONResponse({"status": "the engine has failed"}, 503)
        if self.desk.is_draining:
            return JSONResponse({"status": "shutting down"}, 503)
        if not self.desk.has_engine:
            return JSONResponse({"status": "all engines are being started again"}, 503)
        return JSONResponse({"status": "ok"})

    async def ping(self, request: Request) -> Response:
        """Whether the process does its work: who fails here is to be restarted."""
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
            parts = form.stream(search, self.settings.keep_alive_seconds)
            return self._streamed(request, search, parts)
        answer = await sse.while_connected(request, search.finished(), lambda: self.desk.abandon(search))
        return JSONResponse(form.whole(search, answer))

    async def _read(self, kind: type[AnyRequest], request: Request) -> SearchAsk:
        body = await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout)
        return self.reader.read(kind, parse_object(body), key_of_request(request).limits)

    def _open(self, request: Request, ask: SearchAsk) -> ServedSearch:
        """Begin a search, after everything that can be refused without the engine."""
        self.desk.solver.check_question(ask.last_message)
        search = self.desk.open(ask, key_of_request(request), is_told=ask.fields.stream)
        note_of_request(request).search = search
        return search

    def _streamed(
        self, request: Request, search: ServedSearch, parts: AsyncIterator[bytes], *, has_done: bool = True
    ) -> sse.EventStream:
        timed = self._timed(note_of_request(request), search, parts)
        return sse.EventStream(timed, lambda: self.desk.abandon(search), has_done=has_done)

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
            parts = kept.stream(self.settings.keep_alive_seconds)
            if fields.background:  # goes on when its reader leaves
                return sse.EventStream(parts, lambda: None, has_done=False)
            return self._streamed(request, kept.search, parts, has_done=False)
        if not fields.background:
            await sse.while_connected(request, kept.search.finished(), lambda: self.desk.abandon(kept.search))
        return JSONResponse(kept.to_json())

    async def response(self, request: Request) -> Response:
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "a response cannot be streamed again: ask for it without stream", param="stream")
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


def key_of_request(request: Request) -> ApiKey:
    key: ApiKey = request.state.key
    return key


def note_of_request(request: Request) -> RequestNote:
    note: RequestNote = request.state.note
    return note

"""The page at `/`: running and recent searches live over server-sent events, new questions, and a login."""

import asyncio
import dataclasses
import html
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gambit import events as ev
from gambit.answers import canonical
from gambit.results.record import SearchRecord
from gambit.serve.http import KEEP_ALIVE, ApiError, bad_request, event, event_stream, parse_object, read_body
from gambit.serve.queue import SearchDesk
from gambit.serve.requests import ChatFields, RequestReader
from gambit.serve.search import SearchStatus, ServedSearch, heard_within
from gambit.serve.settings import NOBODY, ApiKey, ServeSettings, example_question, key_of
from gambit.tree import TraceState
from gambit.view import data
from gambit.view.history import History
from gambit.view.page import SCRIPTS, asset, filled, inert_json
from gambit.view.text import NoText, read_tokens

SESSION_COOKIE = "gambit_session"
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 1000
SECONDS_BETWEEN = 0.4  # snapshots of one search
SNAPSHOT_SHARE = 0.1  # at most, of a thread's time, goes into making them
LIST_SECONDS = 1.0
LOGIN_SECONDS = 0.5  # until the answer to a wrong key
MAX_FORM_BYTES = 8192
QUESTION_LENGTH = 200
RUNNING_NOTICE = "The search is running; the texts of its traces come with its end."


@dataclass(frozen=True, slots=True)
class LivePage:
    """The page's own endpoints, which need a session, or a key as the API does.

    Other sites cannot send what a session may do: its cookie stays on this site, and the gateway checks the origin.
    """

    desk: SearchDesk
    reader: RequestReader
    settings: ServeSettings
    sessions: OrderedDict[str, tuple[ApiKey, float]] = field(default_factory=OrderedDict)  # by cookie, with their ends
    painters: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "gambit-page"))

    def routes(self) -> list[Route]:
        return [
            Route("/", self.index),
            Route("/login", self.login, methods=["POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Route("/page/events", self.events),
            Route("/page/searches", self.searches),
            Route("/page/ask", self.ask, methods=["POST"]),
            Route("/page/searches/{id}/live", self.live),
            Route("/page/searches/{id}/log", self.log),
            Route("/page/searches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    # -- access ---------------------------------------------------------------------------------------------

    def _viewer(self, request: Request) -> ApiKey | None:
        """Returns the key of the request or of its session."""
        if not self.settings.needs_key or request.state.key is not NOBODY:
            key: ApiKey = request.state.key
            return key
        session, ends = self.sessions.get(request.cookies.get(SESSION_COOKIE, ""), (None, 0.0))
        return session if ends > time.monotonic() else None

    def _known_viewer(self, request: Request) -> ApiKey:
        viewer = self._viewer(request)
        if viewer is None:
            raise ApiError(401, "log in first, at /", code="no_session")
        request.state.note.key = viewer.name
        request.state.admit()
        return viewer

    # -- pages -------------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> Response:
        return self._login_page() if self._viewer(request) is None else self._live_page()

    def _login_page(self, *, is_wrong: bool = False) -> Response:
        return _page("login.html", {"HIDDEN": "" if is_wrong else " hidden"}, status=401 if is_wrong else 200)

    def _live_page(self) -> Response:
        models = "".join(f"<option>{html.escape(model)}</option>" for model in self.reader.ids)
        script = "\n".join([*map(asset, SCRIPTS), _own_asset("live.js")])
        return _page("live.html", {
            "EXAMPLE": html.escape(example_question(self.reader.names[0])),
            "TITLE": html.escape(f"{self.reader.names[0]} · Gambit"), "MODELS": models, "SCRIPT": script,
            "STAGE": asset("stage.html"), "LOGOUT_HIDDEN": "" if self.settings.needs_key else " hidden",
        })  # fmt: skip

    async def login(self, request: Request) -> Response:
        """Begins a session, whose cookie neither scripts nor other sites can use."""
        body = await read_body(request, MAX_FORM_BYTES, self.settings.body_timeout)
        form = parse_qs(body.decode("utf-8", "replace"))
        key = key_of(form.get("key", [""])[0].strip(), self.settings.keys)
        if key is None:
            await asyncio.sleep(LOGIN_SECONDS)
            return self._login_page(is_wrong=True)
        while len(self.sessions) >= MOST_SESSIONS:
            self.sessions.popitem(last=False)
        cookie = secrets.token_urlsafe(32)
        self.sessions[cookie] = key, time.monotonic() + SESSION_SECONDS
        response = RedirectResponse("/", 303)
        is_https = request.url.scheme == "https"
        response.set_cookie(
            SESSION_COOKIE, cookie, max_age=SESSION_SECONDS, httponly=True, samesite="strict", secure=is_https
        )
        return response

    async def logout(self, request: Request) -> Response:
        self.sessions.pop(request.cookies.get(SESSION_COOKIE, ""), None)
        response = RedirectResponse("/", 303)
        response.delete_cookie(SESSION_COOKIE)
        return response

    # -- searches ----------------------------------------------------------------------------------------------

    async def ask(self, request: Request) -> Response:
        viewer = self._known_viewer(request)
        fields = parse_object(await read_body(request, self.settings.max_body_bytes, self.settings.body_timeout))
        question = fields.get("question")
        if not isinstance(question, str) or not question.strip():
            raise bad_request("the question is empty", "question")
        messages = [{"role": "user", "content": question}]
        question = self.reader.read(ChatFields, {"model": fields.get("model"), "messages": messages}, viewer)
        checked = await self.desk.held(question)
        request.state.note.search = search = self.desk.open(checked, viewer)
        return JSONResponse({"id": search.id})

    async def cancel(self, request: Request) -> Response:
        """Ends a search with the best vote so far."""
        search = self._found(request)
        self.desk.stop(search)
        return JSONResponse({"id": search.id})

    def _found(self, request: Request) -> ServedSearch:
        return self.desk.find(request.path_params["id"], self._known_viewer(request))

    async def searches(self, request: Request) -> Response:
        return JSONResponse([_row(search) for search in self.desk.visible(self._known_viewer(request))])

    async def log(self, request: Request) -> Response:
        """Returns the event log so far, for `gambit view` and `gambit replay`."""
        search = self._found(request)
        text = await asyncio.to_thread(lambda: "".join(f"{line}\n" for line in search.log.lines()))
        headers = {"content-disposition": f'attachment; filename="{search.id}.events.jsonl"'}
        return Response(text, headers=headers, media_type="application/x-ndjson")

    async def events(self, request: Request) -> ASGIApp:
        """Streams the list of searches whenever it changes."""
        return event_stream(self._lists(self._known_viewer(request)), lambda: None, has_done=False)

    async def _lists(self, viewer: ApiKey) -> AsyncIterator[bytes]:
        sent = None
        while not self.desk.is_draining:
            heard = self.desk.changed.listen()
            rows = [_row(search) for search in self.desk.visible(viewer)]
            if rows != sent:
                sent = rows
                yield event(rows, "searches")
            is_moving = any(row["status"] in ("queued", "running") for row in rows)
            if not await heard_within(heard, LIST_SECONDS if is_moving else self.settings.sse_keep_alive_interval):
                yield KEEP_ALIVE

    async def live(self, request: Request) -> ASGIApp:
        """Streams one search as it grows."""
        return event_stream(self._snapshots(self._found(request)), lambda: None, has_done=False)

    async def _snapshots(self, search: ServedSearch) -> AsyncIterator[bytes]:
        history, at = History(), 0
        while not self.desk.is_draining:
            heard = search.log_bell.listen()
            is_last = search.is_over and search.pending is None
            lines = search.log.lines(at)
            at += len(lines)
            loop = asyncio.get_running_loop()  # on threads of their own: answers do not wait behind them
            snapshot, cost = await loop.run_in_executor(self.painters, self._snapshot, search, history, lines, is_last)
            yield snapshot
            if is_last:
                yield event({}, "end")
                return
            await asyncio.sleep(max(SECONDS_BETWEEN, cost / SNAPSHOT_SHARE))
            while not heard.done() and not await heard_within(heard, self.settings.sse_keep_alive_interval):
                yield KEEP_ALIVE
                heard = search.log_bell.listen()

    def _snapshot(
        self, search: ServedSearch, history: History, lines: Sequence[str], is_last: bool
    ) -> tuple[bytes, float]:
        """Returns the event and the processor seconds that it took; on a busy machine the clock would count more."""
        began = time.thread_time()
        for line in lines:
            history.add(ev.from_json(line))
        content, texts = self._content(history, has_texts=is_last) if history.has_begun else ("null", "")
        rest = {"status": str(search.status), "question": search.request.last_message, "texts": texts,
                "error": None if search.error is None else search.error.message}  # fmt: skip
        snapshot = f'event: snapshot\ndata: {json.dumps(rest)[:-1]},"data":{content}}}\n\n'.encode()
        return snapshot, time.thread_time() - began

    def _content(self, history: History, *, has_texts: bool) -> tuple[str, str]:
        if not has_texts:
            content, texts = data.build(history, NoText(), lambda first, second: canonical(first) == canonical(second))
            facts = [*(fact for fact in content.run.facts if fact[0] in ("policy", "pool", "model", "scorer")),
                     *_progress(history.record)]  # fmt: skip
            notices = [] if history.record.stopped else [RUNNING_NOTICE]
            run = dataclasses.replace(content.run, notices=notices, facts=facts)
            return inert_json(dataclasses.replace(content, run=run)), texts
        record, solver = history.record, self.desk.solver
        tokens = chain(record.started.prompt_tokens, *(trace.own_tokens for trace in record.tree.traces))
        text = read_tokens(tokens, solver.tokenizer)
        content, texts = data.build(history, text, solver.equivalent)
        return inert_json(content), texts


def _progress(record: SearchRecord) -> list[tuple[str, str]]:
    sample, tree = record.sample, record.tree
    if sample is None:
        return []
    speed = sample.generated / sample.seconds_total if sample.seconds_total else 0.0
    return [
        ("traces", f"{sample.running:,} running, {sample.waiting:,} waiting, {sample.completed:,} "
                   f"completed, {len(tree.traces):,} in all; planned: at least {record.started.num_traces:,}"),
        ("tokens", f"{sample.generated:,}, {speed:,.0f} a second"),
    ]  # fmt: skip


def _row(search: ServedSearch) -> dict[str, object]:
    result = None if search.answer is None else search.answer.result
    pending = search.pending
    running = pending.record.tree if search.status is SearchStatus.RUNNING and pending and pending.has_begun else None
    num_completed = result.counts.completed if result else running.count(TraceState.FINISHED) if running else 0
    return {
        "id": search.id, "question": search.request.last_message[:QUESTION_LENGTH], "status": str(search.status),
        "policy": search.request.config.policy_name,
        "num_traces": search.request.config.num_traces or search.num_traces, "num_completed": num_completed,
        "answer": None if result is None else result.answer, "created": search.created,
    }  # fmt: skip


def _page(name: str, parts: dict[str, str], status: int = 200) -> Response:
    """Returns a page of this server, with a policy that allows no scripts but its own."""
    nonce = secrets.token_urlsafe(16)
    style = asset("page.css") + _own_asset("live.css")
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-store", "referrer-policy": "same-origin"}
    return HTMLResponse(filled(_own_asset(name), {"NONCE": nonce, "STYLE": style, **parts}), status, headers)


def _own_asset(name: str) -> str:
    return (files("gambit.serve") / "assets" / name).read_text(encoding="utf-8")

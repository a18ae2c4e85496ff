"""Searches of a server: the queue before the engine, their way through it, and the recent ones for the page."""

import asyncio
import itertools
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from gambit import events as ev
from gambit.answers import AnswerKind
from gambit.answers.schema import ANY_OBJECT
from gambit.async_solver import result_of
from gambit.cluster.serving import AnySolver, NoEngineError, ReplicaSolver, submit_here
from gambit.config.options import SearchConfig
from gambit.errors import UserError
from gambit.results.result import SearchResult
from gambit.serve.http import ApiError, as_api_error, bad_request
from gambit.serve.metrics import ServerMetrics
from gambit.serve.requests import CheckedRequest
from gambit.serve.search import Bell, SearchStatus, ServedSearch, answer_of
from gambit.serve.settings import ApiKey, ServeSettings
from gambit.types import Problem

MOST_RETRY_SECONDS = 60


@dataclass(slots=True, eq=False)
class QueueTicket:
    """A search in its key's line, then among the running ones."""

    key: ApiKey
    num_traces: int
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionQueue:
    """Admits searches while fewer than `max_running` run, with `max_traces` traces in all; the rest wait.

    The key with the fewest running traces has the next turn. A search that alone is larger than `max_traces` runs
    alone. None overtakes the one whose turn it is, so that small searches cannot hold up a large one for ever.
    """

    def __init__(self, max_running: int, max_traces: int, max_waiting: int) -> None:
        self.running: set[QueueTicket] = set()
        self._waiting: list[QueueTicket] = []  # the oldest first
        self._turns = itertools.count(1)
        self._last_turns: dict[str, int] = {}  # by key
        self._max_running = max_running
        self._max_traces = max_traces
        self._max_waiting = max_waiting
        self._seconds: deque[float] = deque([1.0], maxlen=32)  # that recent searches took

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_traces(self) -> int:
        return sum(ticket.num_traces for ticket in self.running)

    def join(self, key: ApiKey, num_traces: int) -> QueueTicket:
        """Adds a search, whose turn can be awaited, and which must leave; raises an error of status 429 if full."""
        ticket = QueueTicket(key, num_traces)
        self._waiting.append(ticket)
        self._admit()
        if ticket in self._waiting and self._is_overfull(key):
            self.leave(ticket)
            raise self._too_many()
        return ticket

    def leave(self, ticket: QueueTicket, seconds: float | None = None) -> None:
        """Removes a search that has ended or gives up its turn; a second call does nothing."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self.running.discard(ticket)
        if seconds is not None:
            self._seconds.append(seconds)
        self._admit()

    def _is_overfull(self, key: ApiKey) -> bool:
        own = sum(ticket.key.name == key.name for ticket in self._waiting)
        return self.num_waiting > self._max_waiting or (key.max_waiting is not None and own > key.max_waiting)

    def _too_many(self) -> ApiError:
        mean = sum(self._seconds) / len(self._seconds)
        wait = math.ceil(mean * (self.num_waiting + 1) / max(len(self.running), 1))
        seconds = min(max(wait, 1), MOST_RETRY_SECONDS)
        sentence = f"{len(self.running)} searches run and {self.num_waiting} wait: try again in {seconds} s"
        return ApiError(429, sentence, code="queue_full", headers={"retry-after": str(seconds)})

    def _admit(self) -> None:
        while (ticket := self._next()) is not None and self._fits(ticket):
            self._waiting.remove(ticket)
            self._last_turns[ticket.key.name] = next(self._turns)
            if not ticket.turn.done():  # else it was cancelled while it waited
                self.running.add(ticket)
                ticket.turn.set_result(None)

    def _next(self) -> QueueTicket | None:
        """Returns the oldest of the key with the fewest running traces, on a tie of the one that waited longest."""
        searches = Counter(ticket.key.name for ticket in self.running)
        traces = Counter[str]()
        for ticket in self.running:
            traces[ticket.key.name] += ticket.num_traces
        oldest: dict[str, QueueTicket] = {}  # by key
        for ticket in self._waiting:
            oldest.setdefault(ticket.key.name, ticket)
        free = [ticket for name, ticket in oldest.items() if searches[name] < (ticket.key.max_running or math.inf)]
        return min(free, key=lambda each: (traces[each.key.name], self._last_turns.get(each.key.name, 0)), default=None)

    def _fits(self, ticket: QueueTicket) -> bool:
        if len(self.running) >= self._max_running:
            return False
        return not self.running or self.num_traces + ticket.num_traces <= self._max_traces


LAST_SECONDS = 10.0  # for votes and last messages after the deadline of a shutdown


class SearchDesk:
    """All searches of a server. Its methods are called on the event loop."""

    def __init__(self, solver: AnySolver, settings: ServeSettings, metrics: ServerMetrics, max_traces: int) -> None:
        self.solver = solver
        self.metrics = metrics
        self.queue = AdmissionQueue(settings.max_running, max_traces, settings.max_waiting)
        self.searches: OrderedDict[str, ServedSearch] = OrderedDict()  # the oldest first
        self.changed = Bell(asyncio.get_running_loop())  # a search came, began or ended
        self.engine_failure: BaseException | None = None
        self.died = asyncio.Event()
        self.is_draining = False
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[ServedSearch, asyncio.Task[None]] = {}
        self._probing: asyncio.Task[None] | None = None
        self._kv_usage = 0.0
        self._checks = ThreadPoolExecutor(1, "gambit-schemas")
        self._submit = solver.submit if isinstance(solver, ReplicaSolver) else partial(submit_here, solver)
        if isinstance(solver, ReplicaSolver):
            solver.listen(self.changed.ring_from_thread, lambda error: self._from_thread(partial(self._die, error)))

    @property
    def has_engine(self) -> bool:
        """Returns whether an engine takes searches; under Ray, all of them may be restarting."""
        return self.num_engines > 0

    @property
    def num_engines(self) -> int:
        if isinstance(self.solver, ReplicaSolver):
            return sum(replica.is_ready for replica in self.solver.replicas)
        return int(self.engine_failure is None)

    @property
    def num_open(self) -> int:
        """Counts searches that are not over, and those that have not left the engine yet."""
        return len(self._tasks) + len(self.queue.running)

    def open(self, request: CheckedRequest, key: ApiKey, *, has_reader: bool = False) -> ServedSearch:
        """Begins a search; raises where the line is full, the server shuts down, or no engine is there."""
        self.solver.check_question(request.last_message)
        self._check_open()
        num_traces = self.solver.capacity_of(request.config)
        ticket = self.queue.join(key, num_traces)
        search = ServedSearch(request, key, Bell(self._loop), Bell(self._loop), num_traces, has_reader)
        self.searches[search.id] = search
        task = self._tasks[search] = self._loop.create_task(self._drive(search, ticket))
        task.add_done_callback(lambda done: self._settle(search, ticket, done))
        self.changed.ring()
        return search

    async def held(self, request: CheckedRequest) -> CheckedRequest:
        """Returns the request with the schema of its answers checked; raises an error of status 400 for a wrong one.

        Where any JSON object will do, an engine that can holds them to that.
        """
        self._check_open()
        config = request.config
        is_open = config.json_schema is None and config.answer is AnswerKind.JSON and request.tools is None
        if (schema := ANY_OBJECT if is_open else config.json_schema) is None:
            return request
        try:
            await self._loop.run_in_executor(self._checks, self.solver.check_schema, schema)
        except UserError as error:
            if is_open:
                return request
            raise bad_request(f"{request.schema_place}: {error}", request.schema_place) from error
        return replace(request, config=config.model_copy(update={"json_schema": schema}))

    def _check_open(self) -> None:
        if self.engine_failure is not None:
            raise ApiError(503, f"the engine has failed: {self.engine_failure}", code="engine_dead")
        if self.is_draining:
            headers = {"retry-after": "5", "connection": "close"}
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=headers)
        if not self.has_engine:
            raise as_api_error(NoEngineError("all engines have died and are being started again"))

    def stop(self, search: ServedSearch) -> None:
        """Ends a search with the best vote so far; one that has not begun is cancelled."""
        if search.pending is None:
            self.abandon(search)
        else:
            search.pending.cancel()

    def abandon(self, search: ServedSearch) -> None:
        """Cancels a search, which leaves the engine within two steps."""
        if (task := self._tasks.get(search)) is not None:
            task.cancel()

    def kv_usage(self) -> float:
        """Returns the share of the KV cache in use, as of the last sample of a running search."""
        return self._kv_usage if self.queue.running else 0.0

    def visible(self, key: ApiKey) -> list[ServedSearch]:
        """Returns the searches of one key, the newest first."""
        return [search for search in reversed(self.searches.values()) if search.key.name == key.name]

    def find(self, search_id: str, key: ApiKey) -> ServedSearch:
        search = self.searches.get(search_id)
        if search is None or search.key.name != key.name:
            raise ApiError(404, f"no search {search_id[:80]!r}: it was never there, is another key's, or is forgotten")
        return search

    # -- one search --------------------------------------------------------------------------------------------

    async def _drive(self, search: ServedSearch, ticket: QueueTicket) -> None:
        config = await self._turn(search, ticket)
        search.status, search.began = SearchStatus.RUNNING, time.monotonic()
        self.changed.ring()
        try:
            result = await self._search(search, config)
        except NoEngineError:  # its engine had just died: one other engine is tried
            await self._engine_is_there()
            result = await self._search(search, config)
        assert search.pending is not None
        search.answer = await asyncio.to_thread(answer_of, search.request, search.pending, result, self.solver)

    async def _search(self, search: ServedSearch, config: SearchConfig) -> SearchResult:
        folder = None if self._settings.out_dir is None else self._settings.out_dir / search.id
        problem = Problem(search.request.question, id=search.id, tools=search.request.tools)
        on_note = partial(self._on_note, search) if search.has_reader else None
        search.pending = self._submit(problem, config, partial(self._on_event, search), on_note, folder)
        return await result_of(search.pending)

    async def _turn(self, search: ServedSearch, ticket: QueueTicket) -> SearchConfig:
        """Waits in the line; the search may use the rest of the request's time."""
        config, limit = search.request.config, self._settings.request_timeout
        try:
            async with asyncio.timeout(limit):
                await ticket.turn
                await self._engine_is_there()
        except TimeoutError:
            raise ApiError(503, f"no turn came within the {limit:g} seconds of a request (--request-timeout)",
                           code="timeout_in_queue", headers={"retry-after": "5"}) from None  # fmt: skip
        if limit is None:
            return config
        left = max(limit - search.queue_seconds, 0.001)
        return config.model_copy(update={"budget_seconds": min(left, config.budget_seconds or left)})

    async def _engine_is_there(self) -> None:
        """Waits for an engine that is being restarted, so that searches that have queued are not refused."""
        while True:
            heard = self.changed.listen()
            if self.has_engine or self.engine_failure is not None:
                return
            await heard

    def _on_event(self, search: ServedSearch, event: ev.Event) -> None:
        """Records an event; called on the engine's thread."""
        search.log.write(event)
        if isinstance(event, ev.Sample):
            self._kv_usage = event.kv_used_tokens / max(event.kv_capacity_tokens, 1)
        search.log_bell.ring_from_thread()

    def _on_note(self, search: ServedSearch, note: str) -> None:
        search.notes.append(note)
        search.bell.ring_from_thread()

    # -- its end -----------------------------------------------------------------------------------------------

    def _settle(self, search: ServedSearch, ticket: QueueTicket, task: asyncio.Task[None]) -> None:
        del self._tasks[search]
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            search.status = SearchStatus.CANCELLED
        elif error is not None:
            search.status, search.error = SearchStatus.FAILED, as_api_error(error)
            self._look_after_engine(search, error)
        else:
            search.status = SearchStatus.COMPLETED
        search.ended = time.monotonic()
        self.metrics.search_ended(search)
        self._when_off_the_engine(search, partial(self._release, search, ticket))
        search.bell.ring()
        self.changed.ring()

    def _when_off_the_engine(self, search: ServedSearch, then: Callable[[], None]) -> None:
        """Calls a function once the engine has freed the KV cache of a search, which holds its place until then."""
        if search.pending is None or search.pending.ticket.result.done():
            then()
        else:
            search.pending.cancel()
            search.pending.ticket.result.add_done_callback(lambda _: self._from_thread(then))

    def _release(self, search: ServedSearch, ticket: QueueTicket) -> None:
        self.queue.leave(ticket, None if search.began is None else time.monotonic() - search.began)
        search.pending = None  # its tree may be large, and the answer holds what is needed of it
        self._loop.run_in_executor(None, search.log.seal)
        self._forget_oldest()
        search.log_bell.ring()
        self.changed.ring()

    def _forget_oldest(self) -> None:
        over = [search for search in self.searches.values() if search.is_over]
        size = sum(search.log.num_bytes for search in over)
        while over and (len(over) > self._settings.keep_searches or size > self._settings.keep_log_bytes):
            oldest = over.pop(0)
            size -= oldest.log.num_bytes
            del self.searches[oldest.id]

    def _look_after_engine(self, search: ServedSearch, error: BaseException) -> None:
        """Probes the engine after an error that all running searches got: the next ones may do well."""
        pending = search.pending
        if pending is None or pending.ticket.failed_alone or isinstance(error, ApiError):
            return
        if pending.ticket.result.done() and pending.ticket.result.exception() is None:
            return  # it failed after it had left the engine
        if self._probing is None or self._probing.done():
            self._probing = self._loop.create_task(self._probe(search, error))

    async def _probe(self, search: ServedSearch, error: BaseException) -> None:
        """Generates one token; an engine that cannot do that is dead."""
        probe = search.request.config.model_copy(update={"policy": "single", "policy_options": {}, "max_new_tokens": 1})
        try:
            await result_of(self._submit(Problem(search.request.question, id="probe"), probe, lambda event: None, None))
        except Exception:
            self._die(error)

    def _from_thread(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function)

    def _die(self, error: BaseException) -> None:
        self.engine_failure = error
        self.died.set()

    # -- going down --------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Lets all searches end; at the deadline running ones give their best vote and waiting ones are refused."""
        self.is_draining = True
        self.changed.ring()
        await self._until_idle(seconds)
        for search in list(self._tasks):
            self.stop(search)
        await self._until_idle(LAST_SECONDS)
        for search in list(self._tasks):
            self.abandon(search)

    async def _until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.num_open and not self.died.is_set():
                    await self.changed.listen()

"""A search of a client: its log and notes while it runs, and its answer, in no format yet."""

import asyncio
import dataclasses
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Self

from gambit import events as ev
from gambit.answers import AnswerKind
from gambit.answers.schema import ANY_OBJECT
from gambit.answers.structured import CALL, answered_calls, canonical_json
from gambit.cluster.serving import AnySearch, AnySolver
from gambit.events import Chain
from gambit.results.result import SearchResult
from gambit.serve.http import ApiError
from gambit.serve.requests import CheckedRequest
from gambit.serve.settings import ApiKey
from gambit.text.boundary import THINK_END, THINK_START
from gambit.tree import Trace, TraceTree
from gambit.types import EndReason, StopReason

CUT_SHORT = (StopReason.BUDGET_TOKENS, StopReason.BUDGET_SECONDS, StopReason.INTERRUPTED, StopReason.FAILED)
NO_ANSWER = "no answer could be read from any trace: this is the text of the one with the best score"
NO_END = "no trace came to its end in time: this is the text of the one with the best score so far"
NO_JSON_OBJECT = "no trace ended with a JSON object: tell the model to write one, or raise the limits of the search"
NONE_FITS = "no trace ended with JSON that fits the schema: raise the limits of the search"
NO_TEXT = "the winning trace has its answer inside its thinking and nothing after it"


class Bell:
    """Wakes coroutines that listen on the event loop; any thread may ring."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def listen(self) -> asyncio.Future[None]:
        """Returns a future of the next ring. Listening before looking at the state misses nothing."""
        heard: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(heard)
        return heard

    def ring(self) -> None:
        """Wakes all listeners; called on the loop's own thread."""
        waiting, self._waiting = self._waiting, []
        for heard in waiting:
            if not heard.done():
                heard.set_result(None)

    def ring_from_thread(self) -> None:
        if self._waiting:
            with suppress(RuntimeError):  # the loop has ended, and with it all listeners
                self._loop.call_soon_threadsafe(self.ring)


async def heard_within(heard: asyncio.Future[None], seconds: float) -> bool:
    done, _ = await asyncio.wait({heard}, timeout=seconds)
    heard.cancel()
    return bool(done)


class MemoryLog:
    """An event log in memory, line by line as on disk; compressed once the search has ended."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._lines: list[str] = []
        self._packed: bytes | None = None
        self._num_characters = 0

    def write(self, event: ev.Event) -> None:
        line = self._chain.link(ev.to_json(event))
        self._num_characters += len(line)
        self._lines.append(line)

    def lines(self, start: int = 0) -> Sequence[str]:
        """Returns the lines from one on, as many as there are by now; sealing may go on beside it."""
        lines, packed = self._lines, self._packed  # in this order: sealing sets the second before the first
        if packed is None:
            return lines[start:]
        return zlib.decompress(packed).decode().split("\n")[start:]

    def seal(self) -> None:
        """Compresses the log of a search that is over."""
        if self._packed is None and self._lines:
            self._packed = zlib.compress("\n".join(self._lines).encode(), 1)
            self._lines = []

    @property
    def num_bytes(self) -> int:
        return self._num_characters if self._packed is None else len(self._packed)


# -- its answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call of a tool, with an id under which its result may come back."""

    name: str
    arguments: str  # as JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @classmethod
    def all_in(cls, answer: str | None) -> tuple[Self, ...]:
        """Returns the calls that an answer stands for."""
        return tuple(cls(str(call["name"]), canonical_json(call["arguments"])) for call in answered_calls(answer))


@dataclass(frozen=True, slots=True)
class AnswerChoice:
    """One of the answers, with the thinking of its trace and the text after it."""

    reasoning: str | None
    content: str
    is_whole: bool  # else it was cut short
    trace: int | None
    calls: tuple[MadeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """The answers of a search, with its token counts as in the event log: every generated token of every trace."""

    choices: tuple[AnswerChoice, ...]
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    gambit: Mapping[str, object]  # the field of that name
    result: SearchResult


def answer_of(request: CheckedRequest, pending: AnySearch, result: SearchResult, solver: AnySolver) -> SearchAnswer:
    """Returns the best-voted answers, or the text of the trace with the best score where no answer can be read."""
    record, warnings = pending.record, [*request.warnings, *pending.notes]
    votes = result.votes[: request.fields.n]
    picked: list[tuple[Trace, str | None]] = [
        (trace, entry.answer) for trace, entry in zip(record.winners(votes), votes, strict=True)
    ]
    if not picked and request.config.answer is AnswerKind.JSON:
        schema = request.config.json_schema
        raise ApiError(422, NO_JSON_OBJECT if schema in (None, ANY_OBJECT) else NONE_FITS, code="no_json")
    if not picked:
        spoken = [trace for trace in record.tree.traces if trace.num_tokens]
        picked = [(max(spoken, key=partial(_standing, record.tree)), None)] if spoken else []
        has_end = any(trace.end_reason is not None for trace, _ in picked)
        warnings.append(NO_ANSWER if has_end else NO_END)
    elif len(picked) < request.fields.n:
        warnings.append(f"n = {request.fields.n}: the traces gave {len(picked)} different answers")
    is_cut, num_after, choices = result.stop_reason in CUT_SHORT, 0, []
    for trace, answer in picked:
        tokens = record.tree.tokens_of(trace.id)
        num_after += _num_after_thinking(tokens, solver.think_end, thinks=pending.thinks)
        reasoning, content = _parted(solver.text_of(tokens), thinks=pending.thinks)
        calls = MadeCall.all_in(answer) if request.tools is not None else ()
        if calls:
            content = content.partition(CALL)[0].strip()
        elif answer is not None and request.config.answer is AnswerKind.JSON:
            content = answer
        elif not content and answer is not None:
            warnings.append(NO_TEXT)
            content = f"\\boxed{{{answer}}}" if request.config.answer is AnswerKind.BOXED else answer
        content, is_stopped = _cut_at(content, request.fields.stop)
        is_whole = is_stopped or (trace.end_reason is EndReason.STOP and not is_cut)
        choices.append(AnswerChoice(reasoning, content, is_whole, trace.id, calls))
    generated = result.tokens.generated
    choices = choices or [AnswerChoice(None, "", is_whole=False, trace=None)]
    return SearchAnswer(tuple(choices), len(record.started.prompt_tokens), generated, max(generated - num_after, 0),
                        _search_fields(result, warnings), result)  # fmt: skip


def _standing(tree: TraceTree, trace: Trace) -> tuple[bool, bool, float, int]:
    """Returns what traces are compared by where no vote counts: completed ones first, then by score."""
    score = tree.score_of(trace)
    is_stopped = trace.end_reason is EndReason.STOP
    return is_stopped, trace.end_reason is not None, -1.0 if score is None else score, -trace.id


def _parted(text: str, *, thinks: bool) -> tuple[str | None, str]:
    """Returns a trace's thinking, without its tags, and the text after it."""
    before, tag, after = text.partition(THINK_END)
    if not tag and not thinks:
        return None, text.strip()
    return before.strip().removeprefix(THINK_START).strip(), after.strip()


def _num_after_thinking(tokens: Sequence[int], think_end: int | None, *, thinks: bool) -> int:
    if think_end is not None and think_end in tokens:
        return len(tokens) - tokens.index(think_end) - 1
    return 0 if thinks else len(tokens)


def _cut_at(content: str, stops: Sequence[str]) -> tuple[str, bool]:
    places = [place for place in (content.find(stop) for stop in stops) if place >= 0]
    return (content[: min(places)], True) if places else (content, False)


def _search_fields(result: SearchResult, warnings: Sequence[str]) -> dict[str, object]:
    """Returns the results of the search for which OpenAI's formats have no fields."""
    votes = [
        {"answer": entry.answer, "weight": entry.weight, "traces": entry.traces, "roots": entry.roots}
        for entry in result.votes
    ]
    return {
        "search_id": result.problem_id, "answer": result.answer, "votes": votes, "margin": result.margin,
        "abstained": result.num_abstained, "policy": result.policy, "seed": result.seed,
        "counts": dataclasses.asdict(result.counts), "tokens": dataclasses.asdict(result.tokens),
        "sharing": dataclasses.asdict(result.sharing), "seconds": dataclasses.asdict(result.seconds),
        "stop_reason": str(result.stop_reason), "warnings": list(dict.fromkeys([*warnings, *result.warnings])),
    }  # fmt: skip


# -- from the queue to its end ----------------------------------------------------------------------------------------


class SearchStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class ServedSearch:
    """One search of a client, from the queue to its answer."""

    request: CheckedRequest
    key: ApiKey
    bell: Bell  # rings for new notes and when the search is over
    log_bell: Bell  # rings when the log has grown
    num_traces: int
    has_reader: bool  # a stream that shows its notes
    id: str = field(default_factory=lambda: f"search-{secrets.token_hex(12)}")
    status: SearchStatus = SearchStatus.QUEUED
    answer: SearchAnswer | None = None
    error: ApiError | None = None
    pending: AnySearch | None = None
    log: MemoryLog = field(default_factory=MemoryLog)
    notes: list[str] = field(default_factory=list)  # about its progress, as its engine wrote them
    created: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.monotonic)
    began: float | None = None
    first_seconds: float | None = None  # from arrival to the first words of a stream
    ended: float | None = None

    def id_as(self, prefix: str) -> str:
        """Returns its id with another prefix: ids of OpenAI's formats show what they belong to."""
        return self.id.replace("search-", prefix, 1)

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def queue_seconds(self) -> float:
        return (self.began or self.ended or time.monotonic()) - self.arrived

    def outcome(self) -> SearchAnswer:
        """Returns the answer of a search that is over, or raises its error."""
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise ApiError(503, "the search was cancelled", code="cancelled")
        return self.answer

    async def finished(self) -> SearchAnswer:
        while not self.is_over:
            await self.bell.listen()
        return self.outcome()

    async def followed(self, seconds: float) -> AsyncIterator[str | None]:
        """Yields notes until the search is over, and None after so many seconds without one."""
        num_sent = 0
        while True:
            heard = self.bell.listen()
            if self.notes and self.first_seconds is None:
                self.first_seconds = time.monotonic() - self.arrived
            while num_sent < len(self.notes):
                yield self.notes[num_sent]
                num_sent += 1
            if self.is_over:
                return
            if not await heard_within(heard, seconds):
                yield None

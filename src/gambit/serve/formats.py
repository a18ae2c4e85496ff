"""The formats of OpenAI's API: chat completions, completions and responses, each whole or as a stream."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gambit.serve import http
from gambit.serve.answers import AnswerChoice, SearchAnswer
from gambit.serve.http import ApiError
from gambit.serve.keys import ApiKey
from gambit.serve.queue import SearchStatus, ServedSearch
from gambit.serve.requests import ResponseFields

CHUNK_LENGTH = 2000  # characters of one delta
WINNER = "\n[trace {trace} won the vote]\n"


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Chat completions or completions: their envelopes are alike, their choices differ."""

    prefix: str
    kind: str
    chunk_kind: str
    is_chat: bool

    def whole(self, search: ServedSearch, answer: SearchAnswer) -> dict[str, object]:
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        return {**self._envelope(search, self.kind), "choices": choices, "usage": answer.usage.to_json(),
                "gambit": answer.gambit}  # fmt: skip

    def _envelope(self, search: ServedSearch, kind: str) -> dict[str, object]:
        completion_id = search.id.replace("search-", self.prefix, 1)
        return {"id": completion_id, "object": kind, "created": int(search.created), "model": search.ask.model}

    def _choice(self, index: int, choice: AnswerChoice) -> dict[str, object]:
        rest = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        if not self.is_chat:
            return {**rest, "text": choice.content}
        message = {"role": "assistant", "content": choice.content, "refusal": None, **reasoning(choice.reasoning)}
        return {**rest, "message": message}

    # -- a stream ----------------------------------------------------------------------------------------------

    async def stream(self, search: ServedSearch, keep_alive: float) -> AsyncIterator[bytes]:
        """Yields the role, notes of the search, the winner's thinking and answer, the end, and usage if requested."""
        if self.is_chat:
            yield self._chunk(search, self._delta(0, {"role": "assistant", "content": ""}))
        async for note in search.notes(keep_alive):
            if note is None or not self.is_chat:
                yield http.KEEP_ALIVE
            else:
                yield self._chunk(search, self._delta(0, reasoning(note)))
        answer = search.outcome()
        for index, choice in enumerate(answer.choices):
            for delta in self._deltas(choice):
                yield self._chunk(search, self._delta(index, delta))
        yield self._finish(search, answer)
        if search.ask.has_usage_chunk:
            yield self._chunk(search, usage=answer.usage.to_json())

    def _deltas(self, choice: AnswerChoice) -> list[Mapping[str, object]]:
        if not self.is_chat:
            return [{"text": piece} for piece in pieces(choice.content)]
        thinking = (choice.reasoning or "") and WINNER.format(trace=choice.trace) + (choice.reasoning or "")
        return [*map(reasoning, pieces(thinking)), *({"content": piece} for piece in pieces(choice.content))]

    def _delta(self, index: int, delta: Mapping[str, object], finish_reason: str | None = None) -> dict[str, object]:
        rest = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        return {**rest, "delta": delta} if self.is_chat else {**rest, "text": "", **delta}

    def _chunk(self, search: ServedSearch, *choices: dict[str, object], **more: object) -> bytes:
        return http.event({**self._envelope(search, self.chunk_kind), "choices": choices, **more})

    def _finish(self, search: ServedSearch, answer: SearchAnswer) -> bytes:
        choices = [self._delta(index, {}, choice.finish_reason) for index, choice in enumerate(answer.choices)]
        return self._chunk(search, *choices, gambit=answer.gambit)


CHAT = CompletionFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = CompletionFormat("cmpl-", "text_completion", "text_completion", is_chat=False)


def reasoning(text: str | None) -> dict[str, object]:
    """Returns thinking under both names that clients know."""
    return {} if text is None else {"reasoning": text, "reasoning_content": text}


def pieces(text: str) -> list[str]:
    return [text[start : start + CHUNK_LENGTH] for start in range(0, len(text), CHUNK_LENGTH)]


STATUS = {
    SearchStatus.QUEUED: "queued",
    SearchStatus.RUNNING: "in_progress",
    SearchStatus.COMPLETED: "completed",
    SearchStatus.FAILED: "failed",
    SearchStatus.CANCELLED: "cancelled",
}


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A response that can be fetched again."""

    search: ServedSearch
    fields: ResponseFields

    @property
    def id(self) -> str:
        return self.search.id.replace("search-", "resp_", 1)

    @property
    def status(self) -> str:
        answer = self.search.answer
        if answer is not None and any(choice.finish_reason == "length" for choice in answer.choices):
            return "incomplete"
        return STATUS[self.search.status]

    def to_json(self) -> dict[str, object]:
        search, fields, answer = self.search, self.fields, self.search.answer
        error = None if search.error is None else {"code": "server_error", "message": search.error.message}
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        choices = () if answer is None else answer.choices[:1]
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(search.created),
            "status": self.status,
            "background": fields.background,
            "error": error,
            "incomplete_details": incomplete,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": search.ask.model,
            "output": [item for choice in choices for item in self._items(choice)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": fields.store,
            "temperature": search.ask.config.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": search.ask.config.top_p,
            "truncation": "disabled",
            "usage": None if answer is None else self._usage(),
            "user": search.ask.user,
            "gambit": None if answer is None else answer.gambit,
        }

    def _usage(self) -> dict[str, object]:
        assert self.search.answer is not None
        usage = self.search.answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _items(self, choice: AnswerChoice) -> Iterator[dict[str, object]]:
        if choice.reasoning:
            yield self.reasoning_item(choice.reasoning)
        yield self.message_item(choice.content, "completed" if choice.finish_reason == "stop" else "incomplete")

    def reasoning_item(self, text: str | None) -> dict[str, object]:
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {"id": self.id.replace("resp_", "rs_", 1), "type": "reasoning", "summary": [], "content": content,
                "status": "in_progress" if text is None else "completed"}  # fmt: skip

    def message_item(self, text: str | None, status: str) -> dict[str, object]:
        content = [] if text is None else [text_part(text)]
        return {"id": self.id.replace("resp_", "msg_", 1), "type": "message", "role": "assistant", "status": status,
                "content": content}  # fmt: skip

    # -- a stream ----------------------------------------------------------------------------------------------

    async def stream(self, keep_alive: float) -> AsyncIterator[bytes]:
        """Yields numbered events with types: created, the reasoning as it comes, the message, the end."""
        made = _Numbered()
        yield made("response.created", response=self.to_json())
        yield made("response.in_progress", response=self.to_json())
        yield made("response.output_item.added", output_index=0, item=self.reasoning_item(None))
        place = {"item_id": self.reasoning_item(None)["id"], "output_index": 0, "content_index": 0}
        notes = ""
        async for note in self.search.notes(keep_alive):
            if note is None:
                yield http.KEEP_ALIVE
                continue
            notes += note
            yield made("response.reasoning_text.delta", **place, delta=note)
        if self.search.answer is None:
            yield self._broken(made)
            return
        choice = self.search.answer.choices[0]
        thinking = WINNER.format(trace=choice.trace) + choice.reasoning if choice.reasoning else ""
        for piece in pieces(thinking):
            yield made("response.reasoning_text.delta", **place, delta=piece)
        yield made("response.reasoning_text.done", **place, text=notes + thinking)
        yield made("response.output_item.done", output_index=0, item=self.reasoning_item(notes + thinking))
        for part in self._message(choice, made):
            yield part
        end = "response.incomplete" if self.status == "incomplete" else "response.completed"
        yield made(end, response=self.to_json())

    def _broken(self, made: _Numbered) -> bytes:
        return made("response.failed", response={**self.to_json(), "status": "failed"})

    def _message(self, choice: AnswerChoice, made: _Numbered) -> Iterator[bytes]:
        item = self.message_item(None, "in_progress")
        place = {"item_id": item["id"], "output_index": 1, "content_index": 0}
        yield made("response.output_item.added", output_index=1, item=item)
        yield made("response.content_part.added", **place, part=text_part(""))
        for piece in pieces(choice.content):
            yield made("response.output_text.delta", **place, delta=piece, logprobs=[])
        yield made("response.output_text.done", **place, text=choice.content, logprobs=[])
        yield made("response.content_part.done", **place, part=text_part(choice.content))
        yield made("response.output_item.done", output_index=1, item=self.message_item(choice.content, "completed"))


def text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Numbered:
    """Makes the events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self._number = -1

    def __call__(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return http.event({"type": kind, "sequence_number": self._number, **fields}, kind)


@dataclass(slots=True)
class ResponseStore:
    """Responses by id, for a set time after their end; each can be seen with its own key alone."""

    seconds: float
    most: int
    clock: Callable[[], float] = time.monotonic
    _kept: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)

    def keep(self, response: KeptResponse) -> None:
        self._forget()
        self._kept[response.id] = response

    def find(self, response_id: str, key: ApiKey) -> KeptResponse:
        self._forget()
        found = self._kept.get(response_id)
        if found is None or found.search.key.name != key.name:
            raise ApiError(404, f"no response {response_id[:80]!r}: it was never there, is another key's, or its time "
                                f"of {self.seconds:g} s is over", code="not_found")  # fmt: skip
        return found

    def drop(self, response: KeptResponse) -> None:
        del self._kept[response.id]

    def _forget(self) -> None:
        now = self.clock()
        over = [each for each in self._kept.values() if each.search.ended is not None]
        late = [each for each in over if each.search.ended is not None and now - each.search.ended > self.seconds]
        surplus = over[: max(len(self._kept) + 1 - self.most, 0)]
        for each in dict.fromkeys([*late, *surplus]):
            del self._kept[each.id]

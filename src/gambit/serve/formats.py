"""The formats of OpenAI's API: chat completions, completions and responses, each whole or as a stream."""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from gambit.serve.http import KEEP_ALIVE, ApiError, event
from gambit.serve.messages import CHOICES
from gambit.serve.requests import AnyRequest, ChatFields, CompletionFields, ResponseFields
from gambit.serve.search import AnswerChoice, MadeCall, SearchAnswer, SearchStatus, ServedSearch
from gambit.serve.settings import ApiKey

CHUNK_LENGTH = 2000  # characters of one delta
Json = dict[str, object]


def pieces(text: str) -> list[str]:
    return [text[start : start + CHUNK_LENGTH] for start in range(0, len(text), CHUNK_LENGTH)]


def _won(choice: AnswerChoice) -> str:
    """Returns the thinking of the winner as it follows the notes of a stream."""
    return f"\n[trace {choice.trace} won the vote]\n{choice.reasoning}" if choice.reasoning else ""


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """Chat completions or completions: their envelopes are alike, their choices differ."""

    prefix: str
    kind: str
    chunk_kind: str
    is_chat: bool
    has_done = True  # `[DONE]` ends a stream

    def whole(self, search: ServedSearch) -> Json:
        answer = search.outcome()
        choices = []
        for index, choice in enumerate(answer.choices):
            content = choice.content or (None if choice.calls else "")
            message = {"role": "assistant", "content": content, "refusal": None, **_reasoning(choice.reasoning)}
            if choice.calls:
                message["tool_calls"] = [_call(call) for call in choice.calls]
            shown = {"message": message} if self.is_chat else {"text": choice.content}
            choices.append({"index": index, "finish_reason": _finish(choice), "logprobs": None, **shown})
        return {**self._envelope(search, self.kind), "choices": choices, "usage": _usage(answer),
                "gambit": answer.gambit}  # fmt: skip

    def _envelope(self, search: ServedSearch, kind: str) -> Json:
        model = search.request.fields.model
        return {"id": search.id_as(self.prefix), "object": kind, "created": int(search.created), "model": model}

    async def stream(self, search: ServedSearch, keep_alive: float) -> AsyncIterator[bytes]:
        """Yields the role, notes of the search, the winner's thinking and answer, the end, and usage if requested."""
        if self.is_chat:
            yield self._chunk(search, self._delta(0, {"role": "assistant", "content": ""}))
        async for note in search.followed(keep_alive):
            if note is None or not self.is_chat:
                yield KEEP_ALIVE
            else:
                yield self._chunk(search, self._delta(0, _reasoning(note)))
        answer = search.outcome()
        for index, choice in enumerate(answer.choices):
            for delta in self._deltas(choice):
                yield self._chunk(search, self._delta(index, delta))
        ends = [self._delta(index, {}, _finish(choice)) for index, choice in enumerate(answer.choices)]
        yield self._chunk(search, *ends, gambit=answer.gambit)
        if (options := search.request.fields.stream_options) is not None and options.include_usage:
            yield self._chunk(search, usage=_usage(answer))

    def _deltas(self, choice: AnswerChoice) -> list[Json]:
        if not self.is_chat:
            return [{"text": piece} for piece in pieces(choice.content)]
        thoughts = [_reasoning(piece) for piece in pieces(_won(choice))]
        words: list[Json] = [{"content": piece} for piece in pieces(choice.content)]
        calls: list[Json] = [{"tool_calls": [{"index": at, **_call(call)}]} for at, call in enumerate(choice.calls)]
        return thoughts + words + calls

    def _delta(self, index: int, delta: Json, finish_reason: str | None = None) -> Json:
        rest = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        return {**rest, "delta": delta} if self.is_chat else {**rest, "text": "", **delta}

    def _chunk(self, search: ServedSearch, *choices: Json, **more: object) -> bytes:
        return event({**self._envelope(search, self.chunk_kind), "choices": choices, **more})


def _finish(choice: AnswerChoice) -> str:
    return "length" if not choice.is_whole else "tool_calls" if choice.calls else "stop"


def _call(call: MadeCall) -> Json:
    """Returns a call as chat completions write it; a stream has each in one piece."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str | None) -> Json:
    """Returns thinking under both names that clients know."""
    return {} if text is None else {"reasoning": text, "reasoning_content": text}


def _usage(answer: SearchAnswer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
    }


# -- responses -------------------------------------------------------------------------------------------------------


class ResponseFormat:
    """Responses, whose streams are numbered events with types."""

    has_done = False

    def whole(self, search: ServedSearch) -> Json:
        """Returns the response as it is by now."""
        fields, answer, status = search.request.fields, search.answer, _status(search)
        assert isinstance(fields, ResponseFields)
        choice = fields.tool_choice
        return {
            "id": search.id_as("resp_"), "object": "response", "created_at": int(search.created), "status": status,
            "background": fields.background,
            "error": None if search.error is None else {"code": "server_error", "message": search.error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions, "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata, "model": search.request.fields.model,
            "output": [] if answer is None else list(_items(search, answer.choices[0])),
            "parallel_tool_calls": fields.parallel_tool_calls, "previous_response_id": None,
            "reasoning": {"effort": search.request.config.effort, "summary": None}, "store": fields.store,
            "temperature": search.request.config.temperature, "text": {"format": fields.response_format.flat()},
            "tool_choice": choice if choice in CHOICES else {"type": "function", "name": choice},
            "tools": [{"type": tool.type, **tool.function.model_dump()} for tool in fields.tools],
            "top_p": search.request.config.top_p, "truncation": "disabled",
            "usage": None if answer is None else {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
            "user": search.request.user,
            "gambit": None if answer is None else answer.gambit,
        }  # fmt: skip

    async def stream(self, search: ServedSearch, keep_alive: float) -> AsyncIterator[bytes]:
        """Yields numbered events: created, the reasoning as it comes, the message, the end."""
        numbers = count()

        def made(kind: str, **fields: object) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        yield made("response.created", response=self.whole(search))
        yield made("response.in_progress", response=self.whole(search))
        begun = _reasoning_item(search, None)
        yield made("response.output_item.added", output_index=0, item=begun)
        place = {"item_id": begun["id"], "output_index": 0, "content_index": 0}
        thinking = ""
        async for note in search.followed(keep_alive):
            thinking += note or ""
            yield KEEP_ALIVE if note is None else made("response.reasoning_text.delta", **place, delta=note)
        if search.answer is None:
            yield made("response.failed", response={**self.whole(search), "status": "failed"})
            return
        choice = search.answer.choices[0]
        for piece in pieces(_won(choice)):
            yield made("response.reasoning_text.delta", **place, delta=piece)
        thinking += _won(choice)
        yield made("response.reasoning_text.done", **place, text=thinking)
        yield made("response.output_item.done", output_index=0, item=_reasoning_item(search, thinking))
        items = [_message_events(search, choice.content)] if choice.content or not choice.calls else []
        for index, item in enumerate([*items, *map(_call_events, choice.calls)], start=1):
            for kind, more in item:
                yield made(kind, output_index=index, **more)
        yield made(f"response.{_status(search)}", response=self.whole(search))


def _message_events(search: ServedSearch, content: str) -> Iterator[tuple[str, Json]]:
    begun, ended = _message_item(search, None, "in_progress"), _message_item(search, content, "completed")
    place = {"item_id": begun["id"], "content_index": 0}
    yield "response.output_item.added", {"item": begun}
    yield "response.content_part.added", {**place, "part": _text_part("")}
    for piece in pieces(content):
        yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**place, "text": content, "logprobs": []}
    yield "response.content_part.done", {**place, "part": _text_part(content)}
    yield "response.output_item.done", {"item": ended}


def _call_events(call: MadeCall) -> Iterator[tuple[str, Json]]:
    begun, ended = _call_item(call, "", "in_progress"), _call_item(call, call.arguments, "completed")
    yield "response.output_item.added", {"item": begun}
    yield "response.function_call_arguments.delta", {"item_id": begun["id"], "delta": call.arguments}
    done = {"item_id": begun["id"], "name": call.name, "arguments": call.arguments}
    yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {"item": ended}


def _status(search: ServedSearch) -> str:
    if search.answer is not None:
        return "completed" if all(choice.is_whole for choice in search.answer.choices) else "incomplete"
    return "in_progress" if search.status is SearchStatus.RUNNING else str(search.status)


def _items(search: ServedSearch, choice: AnswerChoice) -> Iterator[Json]:
    if choice.reasoning:
        yield _reasoning_item(search, choice.reasoning)
    status = "completed" if choice.is_whole else "incomplete"
    if choice.content or not choice.calls:
        yield _message_item(search, choice.content, status)
    for call in choice.calls:
        yield _call_item(call, call.arguments, status)


def _reasoning_item(search: ServedSearch, text: str | None) -> Json:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": search.id_as("rs_"), "type": "reasoning", "summary": [], "content": content,
            "status": "in_progress" if text is None else "completed"}  # fmt: skip


def _message_item(search: ServedSearch, text: str | None, status: str) -> Json:
    content = [] if text is None else [_text_part(text)]
    return {"id": search.id_as("msg_"), "type": "message", "role": "assistant", "status": status,
            "content": content}  # fmt: skip


def _call_item(call: MadeCall, arguments: str, status: str) -> Json:
    return {"id": call.id.replace("call_", "fc_", 1), "type": "function_call", "call_id": call.id, "name": call.name,
            "arguments": arguments, "status": status}  # fmt: skip


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# -- all of them -----------------------------------------------------------------------------------------------------

RESPONSES = ResponseFormat()
FORMATS: Mapping[str, tuple[type[AnyRequest], CompletionFormat | ResponseFormat]] = {
    "/v1/chat/completions": (
        ChatFields, CompletionFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
    ),
    "/v1/completions": (
        CompletionFields, CompletionFormat("cmpl-", "text_completion", "text_completion", is_chat=False)
    ),
    "/v1/responses": (ResponseFields, RESPONSES),
}  # fmt: skip


@dataclass(slots=True)
class ResponseStore:
    """Searches by the ids of their responses, for a set time after their end; each key sees its own alone."""

    seconds: float
    most: int
    clock: Callable[[], float] = time.monotonic
    _kept: OrderedDict[str, ServedSearch] = field(default_factory=OrderedDict)

    def keep(self, search: ServedSearch) -> None:
        self._forget()
        self._kept[search.id_as("resp_")] = search

    def find(self, response_id: str, key: ApiKey) -> ServedSearch:
        self._forget()
        found = self._kept.get(response_id)
        if found is None or found.key.name != key.name:
            raise ApiError(404, f"no response {response_id[:80]!r}: it was never there, is another key's, or its time "
                                f"of {self.seconds:g} s is over", code="not_found")  # fmt: skip
        return found

    def drop(self, search: ServedSearch) -> None:
        del self._kept[search.id_as("resp_")]

    def _forget(self) -> None:
        now = self.clock()
        over = [(name, search.ended) for name, search in self._kept.items() if search.ended is not None]
        surplus = max(len(self._kept) + 1 - self.most, 0)
        for place, (name, ended) in enumerate(over):
            if place < surplus or now - ended > self.seconds:
                del self._kept[name]

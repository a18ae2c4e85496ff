"""`/v1/chat/completions` and `/v1/completions`: a search's answer in their two formats, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from gambit.serve import sse
from gambit.serve.answers import AnswerChoice, SearchAnswer
from gambit.serve.desk import ServedSearch

CHUNK_LENGTH = 2000  # characters of one delta
WINNER = "\n[trace {trace} won the vote]\n"


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """One of the two formats: their envelopes are alike, their choices differ."""

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
        """The role, what is going on, the winner's thinking, its answer, the end; usage where it is asked for."""
        if self.is_chat:
            yield self._chunk(search, self._delta(0, {"role": "assistant", "content": ""}))
        async for note in search.notes(keep_alive):
            if note is None or not self.is_chat:
                yield sse.KEEP_ALIVE
            else:
                yield self._chunk(search, self._delta(0, reasoning(note)))
        answer = search.outcome()
        for index, choice in enumerate(answer.choices):
            for delta in self._deltas(choice):
                yield self._chunk(search, self._delta(index, delta))
        yield self._finish(search, answer)
        if search.ask.has_usage_chunk:
            yield sse.event({**self._envelope(search, self.chunk_kind), "choices": [], "usage": answer.usage.to_json()})

    def _deltas(self, choice: AnswerChoice) -> list[Mapping[str, object]]:
        if not self.is_chat:
            return [{"text": piece} for piece in pieces(choice.content)]
        thinking = (choice.reasoning or "") and WINNER.format(trace=choice.trace) + (choice.reasoning or "")
        return [*map(reasoning, pieces(thinking)), *({"content": piece} for piece in pieces(choice.content))]

    def _delta(self, index: int, delta: Mapping[str, object], finish_reason: str | None = None) -> dict[str, object]:
        rest = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        return {**rest, "delta": delta} if self.is_chat else {**rest, "text": "", **delta}

    def _chunk(self, search: ServedSearch, *choices: dict[str, object]) -> bytes:
        return sse.event({**self._envelope(search, self.chunk_kind), "choices": choices})

    def _finish(self, search: ServedSearch, answer: SearchAnswer) -> bytes:
        choices = [self._delta(index, {}, choice.finish_reason) for index, choice in enumerate(answer.choices)]
        envelope = self._envelope(search, self.chunk_kind)
        return sse.event({**envelope, "choices": choices, "gambit": answer.gambit})


CHAT = CompletionFormat("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
COMPLETION = CompletionFormat("cmpl-", "text_completion", "text_completion", is_chat=False)


def reasoning(text: str | None) -> dict[str, object]:
    """Under both names that clients look for."""
    return {} if text is None else {"reasoning": text, "reasoning_content": text}


def pieces(text: str) -> list[str]:
    return [text[start : start + CHUNK_LENGTH] for start in range(0, len(text), CHUNK_LENGTH)]

"""One line of JSON for each request: ids, times, counts; what was asked and answered only where that is wanted."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gambit.serve.desk import ServedSearch

logger = logging.getLogger("gambit.serve.requests")
GONE = 499  # nginx's number for a client that did not wait


@dataclass(slots=True)
class RequestNote:
    """What is known of a request; handlers add to it."""

    request_id: str
    method: str
    path: str
    client: str | None
    began: float = field(default_factory=time.monotonic)
    key: str | None = None
    status: int = GONE
    search: ServedSearch | None = None
    first_seconds: float | None = None  # until the first words of a stream

    def attributes(self) -> dict[str, object]:
        """Plain values, for the line and for the span."""
        found: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(time.monotonic() - self.began, 6),
            "key": self.key,
            "client": self.client,
        }
        return found | ({} if self.search is None else self._of_search(self.search))

    def _of_search(self, search: ServedSearch) -> dict[str, object]:
        found: dict[str, object] = {
            "search_id": search.id,
            "model": search.ask.model,
            "policy": search.ask.config.policy,
            "user": search.ask.user,
            "queue_seconds": round(search.queue_seconds, 6),
            "first_seconds": None if self.first_seconds is None else round(self.first_seconds, 6),
            "search_status": str(search.status),
        }
        if search.answer is not None:
            usage, result = search.answer.usage, search.answer.result
            found |= {"prompt_tokens": usage.prompt_tokens, "generated_tokens": usage.completion_tokens,
                      "stop_reason": str(result.stop_reason), "margin": result.margin}  # fmt: skip
        return found

    def line(self, *, has_prompts: bool) -> str:
        found = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **self.attributes()}
        if has_prompts and self.search is not None:
            found["question"] = self.search.ask.question
            found["answer"] = None if self.search.answer is None else self.search.answer.result.answer
        return json.dumps({name: value for name, value in found.items() if value is not None}, ensure_ascii=False)

"""Reports about requests: Prometheus metrics, and a log line for each request."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)

from gambit.serve.search import ServedSearch

if TYPE_CHECKING:
    from gambit.serve.queue import SearchDesk

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
GONE = 499  # nginx's status for a client that did not wait
logger = logging.getLogger("gambit.serve.requests")


class ServerMetrics:
    """Metrics of one server; the event loop alone changes them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # a series more for each counter, which nothing reads
        self.registry = CollectorRegistry()
        self.responses = self._counter("http_responses", "Answers by path and status.", "path", "status")
        self._searches = self._counter("searches", "Searches by policy and by how they ended.", "policy", "status")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated_tokens = self._counter("generated_tokens", "Generated tokens of all traces.")
        self._search_seconds = self._histogram("search_seconds", "From arrival to the answer.")
        self._queue_seconds = self._histogram("queue_seconds", "From arrival to the engine.")
        self._first_thought_seconds = self._histogram(
            "first_thought_seconds", "From arrival to a stream's first words."
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"gambit_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"gambit_{name}", about, buckets=SECONDS, registry=self.registry)

    def watch(self, desk: "SearchDesk", model: str) -> None:
        """Adds gauges, which are read when the metrics are."""
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "searches_running": ("Searches on the engine.", lambda: len(desk.queue.running)),
            "searches_waiting": ("Searches in the queue.", lambda: desk.queue.num_waiting),
            "traces_admitted": ("Pool places of the running searches.", lambda: desk.queue.num_traces),
            "kv_cache_used_ratio": ("Share of the KV cache in use, 0 to 1.", desk.kv_usage),
            "engine_healthy": ("1 while the engine works, else 0.", lambda: desk.engine_failure is None),
            "engines_ready": ("Engines that take searches.", lambda: desk.num_engines),
        }
        for name, (about, read) in gauges.items():
            Gauge(f"gambit_{name}", about, registry=self.registry).set_function(read)
        Info("gambit", "The served model.", registry=self.registry).info({"model": model})

    def search_ended(self, search: ServedSearch) -> None:
        self._searches.labels(search.request.config.policy_name, str(search.status)).inc()
        self._queue_seconds.observe(search.queue_seconds)
        if search.first_seconds is not None:
            self._first_thought_seconds.observe(search.first_seconds)
        if search.answer is not None and search.ended is not None:
            self._search_seconds.observe(search.ended - search.arrived)
            self._prompt_tokens.inc(search.answer.prompt_tokens)
            self._generated_tokens.inc(search.answer.completion_tokens)

    def text(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass(slots=True)
class RequestNote:
    """Facts about a request, to which its handlers add."""

    request_id: str
    method: str
    path: str
    client: str | None
    began: float = field(default_factory=time.monotonic)
    key: str | None = None
    status: int = GONE
    search: ServedSearch | None = None

    def _attributes(self) -> dict[str, object]:
        found: dict[str, object] = {
            "request_id": self.request_id, "method": self.method, "path": self.path, "status": self.status,
            "seconds": round(time.monotonic() - self.began, 6), "key": self.key, "client": self.client,
        }  # fmt: skip
        if (search := self.search) is None:
            return found
        found |= {
            "search_id": search.id, "model": search.request.fields.model, "policy": search.request.config.policy_name,
            "user": search.request.user, "queue_seconds": round(search.queue_seconds, 6),
            "first_seconds": None if search.first_seconds is None else round(search.first_seconds, 6),
            "search_status": str(search.status),
        }  # fmt: skip
        if (answer := search.answer) is not None:
            found |= {"prompt_tokens": answer.prompt_tokens, "generated_tokens": answer.completion_tokens,
                      "stop_reason": str(answer.result.stop_reason), "margin": answer.result.margin}  # fmt: skip
        return found

    def line(self, *, has_prompts: bool) -> str:
        found = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **self._attributes()}
        if has_prompts and self.search is not None:
            found["question"] = self.search.request.question
            found["answer"] = None if self.search.answer is None else self.search.answer.result.answer
        return json.dumps({name: value for name, value in found.items() if value is not None}, ensure_ascii=False)
